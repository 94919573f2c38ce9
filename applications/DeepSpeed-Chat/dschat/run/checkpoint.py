# SPDX-License-Identifier: Apache-2.0
"""Training checkpoints: everything that a run needs to resume exactly.

    output_dir/                      the final models, by run/model_folders.py; run.json, train_config.json and
                                     metrics.jsonl by run/output.py
    output_dir/models/step-N/        the models after N updates (--save_models), by run/model_folders.py
    output_dir/checkpoints/step-N/   the run after N updates (--save_steps, --save_minutes), written here
    output_dir/samples/              responses of step 3's evaluations, by training/ppo/evaluation.py
    output_dir/reference/            DPO's and REFUEL's log-probs before training, by training/reference.py
    output_dir/nonfinite/            batches with numbers that are not finite, by training/nonfinite.py
    output_dir/tensorboard/, wandb/  with --report_to, by run/trackers.py

A checkpoint holds, and `Checkpoints.save` writes:

    NAME/                 per trained model DeepSpeed's files: weights, optimiser, schedule, loss scale, by every rank
    state.json            counters and coefficients, and numbers of the current rollout
    metrics.jsonl         the rows until then
    average-N.safetensors per rank: its parts of the moving average of --enable_ema
    rank-N.safetensors    per rank: global random states, and the current rollout
    manifest.json         identity of the run, size and SHA-256 of every other file, and its own SHA-256; written last

The folder is written under another name and renamed. DeepSpeed's files are pickles (`*.pt`), which it finds by
patterns: they are opened only after their hashes were verified, and one that the manifest does not list is damage.

A state goes into a checkpoint in these steps, and comes back in the reverse order:

1. training/loop.py: `Loop.state_dict` counts updates and takes the algorithm's state; `Loop.fit` loads and saves it.
2. training/iteration.py: `state_with` adds the iteration that is under way, for the algorithm's `state_dict`.
3. Here: `Checkpoints.save` writes and `Checkpoints.load` verifies and reads the folder.
4. engine/engine.py: `Engine.save_checkpoint` and `load_checkpoint` call DeepSpeed for weights and optimisers.
"""

import json
import logging
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from dschat.base.atomic import WRITING, flush, recover, remove, write_file
from dschat.base.errors import ServerLost, UserError, is_lost_peer
from dschat.base.fingerprints import content_hash, file_hash
from dschat.base.jsonl import read_object
from dschat.base.steps import STEPS
from dschat.models.engines import Trained
from dschat.models.tensor_files import save_tensors
from dschat.run.distributed import (
    barrier,
    broadcast_object,
    gather_objects,
    is_main,
    largest_over_ranks,
    own_part,
    rank,
    world_size,
)
from dschat.run.identity import GLOBAL_SIZES, Identity, differences
from dschat.run.output import RunOutput
from dschat.run.state import Json, Progress, has_steps, set_random_states
from dschat.run.stop import Stopped, stop_signals
from dschat.settings.common import LATEST, CommonConfig
from dschat.settings.flags import SHARE, flags_on_resume

logger = logging.getLogger(__name__)

STATE = "state.json"
METRICS = "metrics.jsonl"
RANDOM_PREFIX = "random."  # prefix of the names of random states in rank-N.safetensors
MANIFEST = "manifest.json"


class File(NamedTuple):
    """Size and hash of a file, in a manifest."""

    size: int
    sha256: str


class Checkpoints:
    """Writes and reads a run's checkpoints. Every rank must call its methods."""

    def __init__(
        self,
        engines: Mapping[str, Trained],
        config: CommonConfig,
        run: RunOutput,
        identity: Identity,
        average: dict[str, Tensor] | None = None,
    ) -> None:
        """Prepares the checkpoints of a run.

        Args:
            engines: engines of the trained models by name, as in "actor".
            config: flags of the run.
            run: its output folder.
            identity: what a run that resumes must have in common.
            average: this rank's parts of the moving average, with --enable_ema.
        """
        self._engines = engines
        self._config = config
        self._run = run
        self._identity = identity
        self._average = average
        self._output_dir = Path(config.output.output_dir)
        self._folder = self._output_dir / "checkpoints"
        self._last: Progress | None = None  # the last that was saved or loaded
        self._has_saved = False
        self._is_fork = False  # the run goes on from a checkpoint of another folder
        self._saved_at = time.monotonic()  # end of the last save, or start of the run

    @property
    def engines(self) -> Mapping[str, Trained]:
        """The trained models by name."""
        return self._engines

    # -- writing

    def is_overdue(self) -> bool:
        """Whether --save_minutes have passed since the last save, on the main process's clock."""
        minutes = self._config.output.save_minutes
        if not minutes:
            return False
        has_passed = is_main() and time.monotonic() - self._saved_at >= 60 * minutes
        return bool(largest_over_ranks(int(has_passed)))

    def save(self, progress: Progress) -> None:
        """Writes step-N after N updates, and removes checkpoints beyond --save_total_limit.

        Raises:
            UserError: it cannot be written; earlier checkpoints remain.
        """
        name = f"step-{progress.update}"
        try:
            with self._run.writing(self._folder):
                barrier()  # the main process has created the folder
                self._write(self._output_dir / WRITING / name, progress)
        except (torch.OutOfMemoryError, torch.distributed.DistError):
            raise
        except (OSError, RuntimeError, SafetensorError) as error:  # torch raises RuntimeError for a full disk
            if is_lost_peer(error):
                raise
            earlier = self._newest_first()
            remaining = f"The one before, {earlier[0]}, stays." if earlier else "There is no earlier one."
            raise UserError(
                f"{self._folder / name} could not be written: {error}. {remaining} {self._config.full_disk_remedy}"
            ) from error
        barrier()
        self._last = progress
        self._has_saved = True
        self._saved_at = time.monotonic()
        if is_main():
            self._remove_old()

    def _write(self, folder: Path, progress: Progress) -> None:
        folder.mkdir(exist_ok=True)
        for name, engine in self._engines.items():
            engine.save_checkpoint(folder / name)
        random_states = {f"{RANDOM_PREFIX}{name}": state for name, state in progress.random.items()}
        save_tensors(random_states | _separate_copies(progress.tensors), folder / f"rank-{rank()}.safetensors")
        if self._average is not None:
            parts = {name: part.cpu().contiguous() for name, part in self._average.items()}
            save_tensors(parts, folder / _average_file(rank()))
        if is_main():
            state = {"numbers": progress.numbers, "rollout": progress.rollout, "run": self._run.state_dict()}
            (folder / STATE).write_text(json.dumps(state), encoding="utf-8")
            (folder / METRICS).write_text(self._run.metrics.text(), encoding="utf-8")
        barrier()
        files, problems = hash_together(folder)
        for name, reason in problems.items():
            raise OSError(f"its file {name}: {reason}")
        if is_main():
            manifest: Json = {
                "step": self._run.record.step,
                "update": progress.update,
                "world_size": world_size(),
                "identity": self._identity,
                "files": {name: file._asdict() for name, file in files.items()},
            }
            write_file(folder / MANIFEST, json.dumps(manifest | {"sha256": digest(manifest)}, indent=1))

    def _remove_old(self) -> None:
        """Keeps the newest --save_total_limit checkpoints, and the one with the best evaluation.

        Checkpoints with more updates than the run has are also removed: they are damaged, or the run resumed from an
        earlier one.
        """
        assert self._last is not None
        limit = self._config.output.save_total_limit
        folders = []
        for folder in self._newest_first():
            if _update_of(folder) <= self._last.update:
                folders.append(folder)
            elif self._remove(folder):
                logger.warning("removed %s: the run went on from an earlier checkpoint", folder)
        if not limit:
            return
        best = self._best(folders)
        for folder in folders[limit:]:
            if best is None or folder != best[0]:
                self._remove(folder)

    def name_best(self) -> None:
        """Logs the checkpoint with the best evaluation, if there is one, and how to have its models."""
        if not is_main():  # which alone has the metrics
            return
        best = self._best(self._newest_first())
        if best is not None:
            name = STEPS[self._run.record.step].best
            folder, value = best
            logger.info(
                "the best checkpoint is %s with %s %.4g: `dschat export %s FOLDER` writes its models",
                folder,
                name,
                value,
                folder,
            )

    def _remove(self, folder: Path) -> bool:
        """Removes a checkpoint as far as possible, and returns whether it is gone; a warning names one that is not."""
        remove(folder)
        if folder.exists():
            logger.warning("%s is not needed any more but cannot be removed: remove it yourself", folder)
        return not folder.exists()

    def _best(self, folders: Sequence[Path]) -> tuple[Path, float] | None:
        """The checkpoint with the best evaluation, and the metric that says so; None if none was evaluated."""
        step = STEPS[self._run.record.step]
        values: dict[int, float] = {}
        for row in self._run.metrics.rows():
            value = row.get(step.best)
            if value is not None:
                values[int(row["update"] or 0)] = value
        evaluated = [(folder, values[_update_of(folder)]) for folder in folders if _update_of(folder) in values]
        sign = 1 if step.larger_is_better else -1
        return max(evaluated, key=lambda checkpoint: sign * checkpoint[1], default=None)

    @contextmanager
    def stopping(self, progress: Callable[[], Progress]) -> Iterator[None]:
        """Inside, a checkpoint is written before the run ends by a signal, --max_time or a lost server.

        Both stops take effect where `raise_if_stopped` is called. `ServerLost` must be raised by every rank.
        """
        with stop_signals():
            try:
                yield
            except (Stopped, ServerLost):
                current = progress()
                if self._adds_to_last(current):
                    self.save(current)
                raise

    def _adds_to_last(self, current: Progress) -> bool:
        """Whether a state is worth a checkpoint beside the last one that was saved or loaded.

        One between the critic's updates would replace the one from before its rollout, which any number of processes
        can continue; the same number comes to the same results from there. A process that has saved nothing yet saves
        it, so that runs in short pieces make progress.
        """
        last = self._last
        if last is None or (self._is_fork and not self._has_saved):
            return True
        enters_rollout = current.is_inside_rollout and not last.is_inside_rollout
        if enters_rollout and current.update == last.update and self._has_saved:
            return False
        return not current.equals_but_for_tensors(last)

    # -- reading

    def load(self) -> Progress | None:
        """Restores the checkpoint of --resume_from_checkpoint; None without the flag, or if nothing was saved yet.

        Raises:
            UserError: the checkpoint is damaged, or belongs to another run; the message lists the differences.
        """
        requested = self._config.output.resume_from_checkpoint
        if requested is None:
            return None
        folder, manifest = self._choose(requested)
        if folder is None:
            self._run.start_over()
            logger.info("%s: no checkpoint yet, the run starts from the beginning", self._folder)
            return None
        state = json.loads((folder / STATE).read_text(encoding="utf-8"))
        self._check(folder, manifest)
        self._is_fork = not self._is_own(folder)

        # Models and optimisers.
        saved_ranks = manifest["world_size"]
        is_resized = saved_ranks != world_size()
        for name, engine in self._engines.items():
            engine.load_checkpoint(folder / name, is_resized)
        if self._average is not None:
            _load_average(self._average, folder, saved_ranks)

        # Random states and tensors of this rank.
        random_states: dict[str, Tensor] = {}
        tensors: dict[str, Tensor] = {}
        for name, tensor in load_file(folder / f"rank-{rank() % saved_ranks}.safetensors").items():
            if name.startswith(RANDOM_PREFIX):
                random_states[name.removeprefix(RANDOM_PREFIX)] = tensor
            else:
                tensors[name] = tensor
        set_random_states(random_states)

        # Each process of another number has other prompts.
        rollout: Json = state["rollout"]
        if is_resized and rollout:
            logger.warning("the rollout that %d processes had sampled is dropped and sampled again", saved_ranks)
            rollout = {}
            tensors = {}

        metrics = (folder / METRICS).read_text(encoding="utf-8")
        self._run.load_state_dict(state["run"], metrics, manifest["update"])
        logger.info("going on from %s", folder)
        max_steps = self._config.optimisation.max_steps
        if max_steps is not None and manifest["update"] >= max_steps:
            logger.warning(
                "the run has made %d updates already, so --max_steps %d leaves nothing to train",
                manifest["update"],
                max_steps,
            )
        self._last = Progress(manifest["update"], state["numbers"], random_states, tensors, rollout)
        return self._last

    def _choose(self, requested: str) -> tuple[Path | None, Json]:
        """The newest checkpoint that can be used, or the requested one, and its manifest; None if there is none."""
        if is_main():
            recover(self._folder)
            for unfinished in (self._output_dir / WRITING).glob("step-*"):
                logger.warning("the save of %s was cut short when its process was ended", unfinished.name)
        candidates = broadcast_object(self._newest_first() if requested == LATEST else [Path(requested)])
        is_foreign = bool(candidates) and not self._is_own(candidates[0])
        if is_foreign and broadcast_object((self._output_dir / "run.json").exists()):
            raise UserError(
                f"--resume_from_checkpoint {requested} is not of the run in --output_dir {self._output_dir}, which "
                "would be lost. Give that checkpoint's own --output_dir, or a new one; --resume_from_checkpoint alone"
                " goes on from the newest checkpoint of --output_dir."
            )
        if requested == LATEST:
            self._run.check_unfinished(_update_of(candidates[0]) if candidates else 0)
        problem = None
        for folder in candidates:
            manifest, problem = self._read(folder)
            if problem is None:
                if is_main() and folder != candidates[0]:
                    newest = candidates[0]
                    given_up = _update_of(newest) - _update_of(folder)
                    logger.warning("%d updates are given up: from %s to %s", given_up, folder.name, newest.name)
                return folder, manifest
            if requested != LATEST:
                raise UserError(
                    f"--resume_from_checkpoint {requested}: {problem}. Give another OUTPUT_DIR/checkpoints/step-N,"
                    f" or {LATEST} for the newest one that can be used."
                )
            if is_main():
                logger.warning("%s is not used: %s", folder, problem)
        if problem is not None:
            raise UserError(
                f"--resume_from_checkpoint: no checkpoint in {self._folder} can be used; {folder}: {problem}. To start"
                " again, give another --output_dir, or --overwrite_output_dir without --resume_from_checkpoint."
            )
        return None, {}

    def _is_own(self, folder: Path) -> bool:
        """Whether a checkpoint is in the run's folder, possibly as a link to another disk, or by way of a link."""
        return self._folder.resolve() in (folder.parent.resolve(), folder.resolve().parent)

    def _read(self, folder: Path) -> tuple[Json, str | None]:
        """A checkpoint's manifest, and what is wrong with the checkpoint; the same on every rank."""
        manifest, problem = broadcast_object(self._read_manifest(folder) if is_main() else ({}, None))
        if problem is not None:
            return {}, problem
        files, problems = hash_together(folder)
        for name, reason in problems.items():
            return {}, f"its file {name} cannot be read: {reason}"
        for name, expected in manifest["files"].items():
            if name not in files:
                return {}, f"its file {name} is missing"
            if files[name] != File(**expected):
                return {}, f"its file {name} is damaged"
        for name in sorted(files.keys() - manifest["files"].keys()):
            if name.endswith(".pt"):
                return {}, f"its file {name} was not written by the run"
        return manifest, None

    def _read_manifest(self, folder: Path) -> tuple[Json, str | None]:
        """A checkpoint's manifest, and what it says is wrong with the checkpoint."""
        manifest = read_manifest(folder)
        if not manifest:
            return {}, f"it has no readable {MANIFEST}, so it is not a checkpoint or was not written completely"
        if manifest.pop("sha256") != digest(manifest):
            return {}, f"its file {MANIFEST} is damaged"
        return manifest, self._rollout_problem(manifest, folder)

    def _check(self, folder: Path, manifest: Json) -> None:
        """Raises UserError if this run cannot resume from a checkpoint."""
        saved_ranks = manifest["world_size"]
        ranks = world_size()
        problems = self._differences(manifest)
        if saved_ranks != ranks and any("/offloaded_tensors/" in name for name in manifest["files"]):
            problems.append(
                f"{saved_ranks} processes offloaded their optimisers' states to NVMe in it, here are {ranks}"
            )
        if manifest["step"] != self._run.record.step:
            problems = [f"it is of the {manifest['step']} step"]
        if problems:
            raise UserError(
                f"--resume_from_checkpoint: {folder} belongs to another run: {'; '.join(problems)}. Give the flags"
                " and files of that run, or another --output_dir."
            )
        if saved_ranks != ranks:
            logger.warning(
                "%s was written by %d processes, now there are %d: the run continues, but not to the last bit",
                folder,
                saved_ranks,
                ranks,
            )

    def _differences(self, manifest: Json) -> list[str]:
        is_resized = manifest["world_size"] != world_size()
        # With another number of processes, a process's share of a batch may differ; global sizes may not.
        shares = flags_on_resume(type(self._config), SHARE) if is_resized else frozenset[str]()
        problems = differences(manifest["identity"], self._identity, shares)
        is_over = self._config.optimisation.max_steps == manifest["update"]  # no update is left, as in exports
        if is_resized and is_over:
            problems = [problem for problem in problems if not problem.startswith(GLOBAL_SIZES)]
        return problems

    def _rollout_problem(self, manifest: Json, folder: Path) -> str | None:
        """Why a checkpoint cannot be used, if another number of processes has trained on a part of its rollout.

        The rest of the rollout cannot be sampled again: its responses are those of the weights before the updates.
        None if the checkpoint belongs to another run.
        """
        saved_ranks = manifest["world_size"]
        if saved_ranks == world_size() or self._differences(manifest):
            return None
        if not has_steps(read_object(folder / STATE).get("rollout", {})):
            return None
        updates = self._run.plan.updates_per_iteration
        done = manifest["update"] % updates
        where = f"after {done} of its {updates} updates" if done else "between the critic's updates"
        return (
            f"it was written inside a rollout, {where}, by {saved_ranks} processes, and here are {world_size()}: only"
            f" {saved_ranks} can continue it"
        )

    def _newest_first(self) -> list[Path]:
        folders = []
        for folder in self._folder.glob("step-*"):
            if folder.name[5:].isdecimal() and folder.is_dir():
                folders.append(folder)
        return sorted(folders, key=_update_of, reverse=True)


def _separate_copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors on the CPU, none of which shares memory with another one: safetensors refuses those."""
    copies: dict[str, Tensor] = {}
    storages: set[int] = set()
    for name, tensor in tensors.items():
        copy = tensor.detach().cpu().contiguous()
        if copy.untyped_storage().data_ptr() in storages:
            copy = copy.clone()
        storages.add(copy.untyped_storage().data_ptr())
        copies[name] = copy
    return copies


def _average_file(number: int) -> str:
    return f"average-{number}.safetensors"


def _load_average(average: Mapping[str, Tensor], folder: Path, saved_ranks: int) -> None:
    """Copies this rank's parts of the moving average of a checkpoint into `average`."""
    is_resized = saved_ranks != world_size()
    with ExitStack() as stack:
        needed_ranks = range(saved_ranks) if is_resized else [rank()]
        files = []
        for number in needed_ranks:
            files.append(stack.enter_context(safe_open(folder / _average_file(number), "pt")))
        for name, part in average.items():
            flat = torch.cat([file.get_tensor(name) for file in files])
            part.copy_(own_part(flat) if is_resized else flat)


def _update_of(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))


def read_manifest(folder: Path) -> Json:
    """A checkpoint's manifest; {} if there is none, or it cannot be read."""
    manifest = read_object(folder / MANIFEST)
    return manifest if "sha256" in manifest else {}


def digest(manifest: Json) -> str:
    """SHA-256 of a manifest without its entry "sha256"."""
    return content_hash(json.dumps(manifest, sort_keys=True))


def hash_together(folder: Path) -> tuple[dict[str, File], dict[str, str]]:
    """Flushes and hashes every file in a folder but the manifest. Each rank does the files that it wrote.

    Returns:
        Size and hash of each file by its name, and of files that could not be flushed or read the reason by name; the
        same on every rank. Names are paths relative to the folder.
    """
    names = []
    for path in folder.rglob("*"):
        if path.is_file() and path != folder / MANIFEST:
            names.append(str(path.relative_to(folder)))
    names = broadcast_object(sorted(names))
    local_names = [name for name in names if writer_of(name) % world_size() == rank()]
    with ThreadPoolExecutor() as pool:
        local_results = list(pool.map(_flush_and_hash, [folder / name for name in local_names]))
    barrier()  # file sizes differ, so ranks may wait beyond the time-out of other collectives
    files: dict[str, File] = {}
    problems: dict[str, str] = {}
    for rank_names, rank_results in gather_objects((local_names, local_results)):
        for name, result in zip(rank_names, rank_results, strict=True):
            if isinstance(result, File):
                files[name] = result
            else:
                problems[name] = result
    return files, problems


def writer_of(name: str) -> int:
    """The rank that wrote a file of a checkpoint, and probably has it in its page cache.

    It is the first rank in the name, where DeepSpeed's zero_pp_rank_3_mp_rank_00_optim_states.pt has two.
    """
    number = re.search(r"(?:rank[-_]?|average-)(\d+)", name)
    return int(number[1]) if number else 0


def _flush_and_hash(file: Path) -> File | str:
    """Size and hash of a file, or why it could not be flushed or read."""
    try:
        flush(file)
        return File(file.stat().st_size, file_hash(file))
    except OSError as error:
        return error.strerror or str(error)
