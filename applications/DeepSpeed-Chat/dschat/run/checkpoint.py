# SPDX-License-Identifier: Apache-2.0
"""Training checkpoints: everything that a run needs to go on exactly where it was.

    output_dir/                      the final models, by run/model_folders.py; run.json, train_config.json and
                                     metrics.jsonl by run/output.py
    output_dir/models/step-N/        the models after N updates (--save_models), by run/model_folders.py
    output_dir/checkpoints/step-N/   the run after N updates (--save_steps), written here
    output_dir/samples/              responses of step 3's evaluations, by training/evaluation.py
    output_dir/reference/            DPO's and REFUEL's log-probs before training, by training/reference.py
    output_dir/nonfinite/            batches with numbers that are not finite, by training/nonfinite.py
    output_dir/tensorboard/, wandb/  with --report_to, by run/trackers.py

A checkpoint holds, and `Checkpoints.save` writes:

    NAME/                 per trained model DeepSpeed's files: weights, optimiser, schedule, loss scale, by every rank
    state.json            counters and coefficients
    metrics.jsonl         the rows until then
    average-N.safetensors per rank: its parts of the moving average of --enable_ema
    rank-N.safetensors    per rank: global random states, and the rollout that is in use
    manifest.json         what the run is made of, and the size and SHA-256 of every file, its own too; written last

The folder is written beside its place and renamed. DeepSpeed's files are pickles: they are opened only after their
hashes were found equal.
"""

import json
import logging
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from dschat.base.atomic import WRITING, flush, recover, remove, write_file
from dschat.base.errors import ServerLost, UserError
from dschat.base.fingerprints import content_hash, file_hash
from dschat.base.glossary import BEST
from dschat.base.jsonl import read_object
from dschat.models.engines import Trained
from dschat.run.distributed import barrier, broadcast_object, gather_objects, is_main, own_part, rank, world_size
from dschat.run.identity import Identity, differences
from dschat.run.metrics import rows_problem
from dschat.run.output import RunOutput
from dschat.run.state import Json, Progress, set_random_states
from dschat.run.stop import Stopped, stop_signals
from dschat.settings.common import CommonConfig

logger = logging.getLogger(__name__)

STATE, METRICS = "state.json", "metrics.jsonl"
LATEST = "latest"
MANIFEST = "manifest.json"


class File(NamedTuple):
    """What a manifest says of a file."""

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
        """Takes what a checkpoint is made of: engines by name, as in "actor", and this rank's parts of the average."""
        self._engines, self._config, self._run, self._identity = engines, config, run, identity
        self._average = average
        self._place = Path(config.output.output_dir)
        self._folder = self._place / "checkpoints"
        self._last: Progress | None = None  # what was saved last

    @property
    def engines(self) -> Mapping[str, Trained]:
        """What the run trains, by name."""
        return self._engines

    # -- writing

    def save(self, progress: Progress) -> None:
        """Writes step-N for the progress's N updates, and removes checkpoints beyond --save_total_limit. Raises
        UserError where it cannot be written; earlier checkpoints stay.
        """
        name = f"step-{progress.update}"
        try:
            with self._run.writing(self._folder):
                barrier()  # the folder is there
                inside = self._place / WRITING / name
                self._write(inside, progress)
        except (torch.OutOfMemoryError, torch.distributed.DistError):
            raise
        except (OSError, RuntimeError, SafetensorError) as error:  # torch's of a full disk are plain RuntimeErrors
            raise UserError(
                f"{self._folder / name} could not be written: {error}. {self._kept()} {self._config.full_disk_remedy}"
            ) from error
        barrier()
        self._last = progress
        if is_main():
            self._run.forget_earlier_run()
            self._remove_old()

    def _write(self, inside: Path, progress: Progress) -> None:
        inside.mkdir(exist_ok=True)
        for name, engine in self._engines.items():
            engine.save_checkpoint(inside / name)
        states = {f"random.{name}": state for name, state in progress.random.items()}
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in progress.tensors.items()}
        save_file(states | tensors, inside / f"rank-{rank()}.safetensors")
        if self._average is not None:
            parts = {name: part.cpu().contiguous() for name, part in self._average.items()}
            save_file(parts, inside / _average_file(rank()))
        if is_main():
            state = {"numbers": progress.numbers, "run": self._run.state_dict()}
            (inside / STATE).write_text(json.dumps(state), encoding="utf-8")
            (inside / METRICS).write_text(self._run.metrics.text(), encoding="utf-8")
        barrier()
        files = hash_together(inside)
        if is_main():
            manifest: Json = {
                "step": self._run.record.step,
                "update": progress.update,
                "world_size": world_size(),
                "identity": self._identity,
                "files": {file: found._asdict() for file, found in files.items()},
            }
            write_file(inside / MANIFEST, json.dumps(manifest | {"sha256": digest(manifest)}, indent=1))

    def _remove_old(self) -> None:
        """Keeps the newest --save_total_limit checkpoints, and the one with the best evaluation.

        Those with more updates than the run has now go, too: they are damaged, or the run went back before them.
        """
        assert self._last is not None
        found, limit = self._newest_first(), self._config.output.save_total_limit
        while _update_of(found[0]) > self._last.update:
            logger.warning("removing %s: the run went on from an earlier checkpoint", found[0])
            shutil.rmtree(found.pop(0))
        if not limit:
            return
        best = self._best({_update_of(folder) for folder in found})
        for folder in found[limit:]:
            if _update_of(folder) != best:
                shutil.rmtree(folder)

    def _best(self, updates: set[int]) -> int | None:
        """The update with the best evaluation, of some; None where none of them was evaluated."""
        key, larger = BEST[self._run.record.step]
        rows = self._run.metrics.rows()
        marks = {int(row["update"] or 0): mark for row in rows if (mark := row.get(key)) is not None}
        return max(updates & marks.keys(), key=lambda n: marks[n] if larger else -marks[n], default=None)

    @contextmanager
    def stopping(self, progress: Callable[[], Progress]) -> Iterator[None]:
        """Inside, a checkpoint is written before the run ends by SIGTERM, Ctrl-C or a lost server.

        Signals take effect where `raise_if_stopped` is called. `ServerLost` must be raised by every rank.
        """
        with stop_signals():
            try:
                yield
            except (Stopped, ServerLost):
                now = progress()
                if self._last is None or (now.update, now.numbers) != (self._last.update, self._last.numbers):
                    self.save(now)
                raise

    # -- reading

    def load(self) -> Progress | None:
        """Restores what --resume_from_checkpoint names; None without the flag, or where nothing was saved yet.

        Raises UserError where the checkpoint is damaged or belongs to another run; it lists the differences.
        """
        wanted = self._config.output.resume_from_checkpoint
        if wanted is None:
            return None
        folder, manifest = self._choose(wanted)
        if folder is None:
            logger.info("%s: no checkpoint yet, the run starts from the beginning", self._folder)
            self._run.start_over()
            return None
        state = json.loads((folder / STATE).read_text(encoding="utf-8"))
        self._check(folder, manifest, in_rollout="current" in state["numbers"])
        resized = manifest["world_size"] != world_size()
        scratch = self._folder / ".resharded"
        for name, engine in self._engines.items():
            engine.load_checkpoint(folder / name, scratch / name if resized else None)
        barrier()  # nobody reads it any more
        if is_main():
            remove(scratch)
        metrics = (folder / METRICS).read_text(encoding="utf-8")
        tensors = load_file(folder / f"rank-{rank() % manifest['world_size']}.safetensors")
        random = {name.removeprefix("random."): x for name, x in tensors.items() if name.startswith("random.")}
        set_random_states(random)
        if self._average is not None:
            _load_average(self._average, folder, manifest["world_size"])
        self._run.load_state_dict(state["run"], metrics, manifest["update"])
        own = {name: tensor for name, tensor in tensors.items() if not name.startswith("random.")}
        logger.info("going on from %s", folder)
        self._last = Progress(manifest["update"], state["numbers"], random, own)
        return self._last

    def _choose(self, wanted: str) -> tuple[Path | None, Json]:
        """The newest whole checkpoint, or the one that is named; None where there is none at all."""
        if is_main():
            recover(self._folder)
        candidates = broadcast_object(self._newest_first() if wanted == LATEST else [Path(wanted)])
        own = self._folder.resolve() in candidates[0].resolve().parents if candidates else True
        if not own and broadcast_object((self._place / "run.json").exists()):
            raise UserError(
                f"--resume_from_checkpoint {wanted} is not of the run in --output_dir {self._place}, which would be "
                "lost. Give that checkpoint's own --output_dir, or a new one."
            )
        problem = None
        for folder in candidates:
            manifest, problem = self._read(folder)
            if problem is None:
                return folder, manifest
            if wanted != LATEST:
                others = [other for other in self._newest_first() if other.resolve() != folder.resolve()]
                rest = f" Others are {', '.join(map(str, others))}." if others else ""
                raise UserError(f"--resume_from_checkpoint {wanted}: {problem}.{rest}")
            if is_main():
                logger.warning("%s is not used: %s", folder, problem)
        if problem is not None:
            raise UserError(
                f"--resume_from_checkpoint: no checkpoint in {self._folder} is whole; of {folder}: {problem}. Give "
                "another --output_dir, or --overwrite_output_dir alone to begin anew."
            )
        return None, {}

    def _read(self, folder: Path) -> tuple[Json, str | None]:
        """A checkpoint's manifest, and what is wrong with the checkpoint; the same on every rank."""
        manifest = broadcast_object(read_manifest(folder) if is_main() else {})
        if not manifest:
            return {}, f"it has no {MANIFEST} that can be read, so it is no checkpoint or was not written to its end"
        if manifest.pop("sha256") != digest(manifest):
            return {}, f"its file {MANIFEST} is damaged"
        files = {name: File(**found) for name, found in manifest["files"].items()}
        found = hash_together(folder)
        for name, expected in files.items():
            if name not in found:
                return {}, f"its file {name} is missing"
            if found[name] != expected:
                return {}, f"its file {name} is damaged"
        if self._differences(manifest):
            return manifest, None  # `_check` says so
        problem = rows_problem(folder / METRICS, manifest["update"], self._run.plan.updates_per_rollout)
        return manifest, problem and f"its file {METRICS} is damaged: {problem}"

    def _check(self, folder: Path, manifest: Json, in_rollout: bool) -> None:
        size, here, found = manifest["world_size"], world_size(), self._differences(manifest)
        if size != here and in_rollout:
            found.append(f"it was written inside a rollout of {size} processes, here are {here}")
        if size != here and any("/offloaded_tensors/" in name for name in manifest["files"]):
            found.append(f"{size} processes offloaded their optimisers' states to NVMe in it, here are {here}")
        if manifest["step"] != self._run.record.step:
            found = [f"it is of the {manifest['step']} step"]
        if found:
            raise UserError(
                f"--resume_from_checkpoint: {folder} is of another run: {'; '.join(found)}. Give the flags and files "
                "of that run, or another --output_dir."
            )
        if size != here:
            told = "%s was written by %d processes, now there are %d: the run goes on, but not to the last bit"
            logger.warning(told, folder, size, here)

    def _differences(self, manifest: Json) -> list[str]:
        other_size = manifest["world_size"] != world_size()
        return differences(manifest["identity"], self._identity, other_size)

    def _newest_first(self) -> list[Path]:
        folders = [folder for folder in self._folder.glob("step-*") if folder.name[5:].isdigit()]
        return sorted(folders, key=_update_of, reverse=True)

    def _kept(self) -> str:
        found = self._newest_first()
        return f"The one before, {found[0]}, stays." if found else "There is no earlier one."


def _average_file(number: int) -> str:
    return f"average-{number}.safetensors"


def _load_average(average: Mapping[str, Tensor], folder: Path, ranks: int) -> None:
    resized = ranks != world_size()
    with ExitStack() as opened:
        numbers = range(ranks) if resized else [rank()]
        files = [opened.enter_context(safe_open(folder / _average_file(n), "pt")) for n in numbers]
        for name, part in average.items():
            flat = torch.cat([file.get_tensor(name) for file in files])
            part.copy_(own_part(flat) if resized else flat)


def _update_of(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))


def read_manifest(folder: Path) -> Json:
    """A checkpoint's manifest; {} where there is none that can be read."""
    found = read_object(folder / MANIFEST)
    return found if "sha256" in found else {}


def digest(manifest: Json) -> str:
    """SHA-256 of a manifest without its own."""
    return content_hash(json.dumps(manifest, sort_keys=True))


def hash_together(folder: Path) -> dict[str, File]:
    """Size and SHA-256 of every file below a folder but the manifest, each rank its share; and flushes them."""
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    names = broadcast_object([name for name in names if name != MANIFEST])
    own: dict[str, File] = {}
    for name in names[rank() :: world_size()]:
        with suppress(OSError):  # it counts as missing
            flush(folder / name)
            own[name] = File((folder / name).stat().st_size, file_hash(folder / name))
    barrier()  # sizes differ: the time-out of other collectives shall not count
    return {name: found for part in gather_objects(own) for name, found in part.items()}
