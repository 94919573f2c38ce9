# SPDX-License-Identifier: Apache-2.0
"""The data sets that REFUEL's commands make: the flags, how each was made, and where it is handed over."""

import json
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dschat.common.atomic import writing
from dschat.common.fingerprints import content_hash, contents_hash, file_hash
from dschat.common.journal import Journal, first_change
from dschat.common.jsonl import parse_json, write_rows
from dschat.common.script import flag
from dschat.data.hub import push
from dschat.data.sources import is_folder
from dschat.errors import UserError
from dschat.inference.options import AT_LEAST_0, MODEL_HELP, CheckedFlags, ComputeFlags, Rule

if TYPE_CHECKING:
    from dschat.inference.runner import BatchFunction, Entry

ULTRAINTERACT = "openbmb/UltraInteract_pair"
LLAMA_USER = "meta-llama/Meta-Llama-3.1-70B-Instruct"
OUTPUT = "--output-repo"
ROWS = "train.jsonl"
RECORD = "made.json"  # beside the rows: how they were made; a data set without it is not finished


@dataclass(frozen=True, kw_only=True)
class OutputFlags(CheckedFlags):
    """Where a command that makes REFUEL's data puts them."""

    output_repo: str = flag("gets the data set: a folder, or owner/name on the Hugging Face hub")
    output_dir: Path | None = flag(
        "folder for unfinished rows, and for the data set before it is pushed (--output-repo where that is a folder, "
        "else its name)",
        None,
    )
    public: bool = flag("let everybody see a data set that is pushed", False)
    overwrite: bool = flag("start anew, dropping a finished data set or a run begun without this flag", False)

    def __post_init__(self) -> None:
        """The place has a name."""
        super().__post_init__()
        if not self.output_repo.strip("/"):
            raise UserError("--output-repo is empty: give a folder, or owner/name on the hub.")


@dataclass(frozen=True, kw_only=True)
class GenerateOptions(OutputFlags, ComputeFlags):
    """What generate.py is told."""

    model: str = flag(MODEL_HELP)
    prompts: str = flag(
        "first messages of users: a file, folder or data set of the hub, with a column messages, trajectory or prompt "
        "(%(default)s)",
        ULTRAINTERACT,
    )
    num_data: int = flag("dialogues, 0 = one for each first message (%(default)s)", 0)
    num_turns: int = flag("turns of a dialogue (%(default)s)", 5)
    temperature: float = flag("of policy and user, 0 = greedy (%(default)s)", 0.8)
    top_p: float = flag("draw from the likeliest tokens of this share, 1 = all (%(default)s)", 1.0)
    max_new_tokens: int = flag("longest reply and longest message of the user, in tokens (%(default)s)", 1024)
    seed: int = flag("of the draws, and of the turns that are compared (%(default)s)", 0)
    batch_size: int = flag("dialogues at once; a kill loses so many at most (%(default)s)", 64)
    rollout_engine: str = flag("what draws: continuous or generate (%(default)s)", "continuous")
    user_model: str = flag(
        "who plays the user: with --user-server the name of its model, else a folder or hub id (%(default)s)",
        LLAMA_USER,
    )
    user_server: str | None = flag("address of an OpenAI-compatible server that has --user-model", None)
    user_function: str | None = flag("module.py:function in the user's place: dialogues → next messages", None)
    concurrency: int = flag("requests to the server at the same time (%(default)s)", 32)
    timeout: float = flag("seconds to wait for an answer of the server (%(default)s)", 600.0)
    max_tries: int = flag("times to send a request (%(default)s)", 8)

    top_k = 0  # all

    def __post_init__(self) -> None:
        """One plays the user."""
        super().__post_init__()
        if self.user_server and self.user_function:
            raise UserError("--user-server and --user-function both play the user: drop one of them.")


@dataclass(frozen=True, kw_only=True)
class RankOptions(OutputFlags, ComputeFlags):
    """What rank.py is told."""

    prompts: str = flag("what generate.py wrote: a folder, or owner/name on the hub")
    reward_model: str | None = flag("folder or hub id of a sequence classifier with one label", None)
    reward_function: str | None = flag("module.py:function in its place: dialogues → numbers, None for failures", None)
    max_length: int = flag("longest dialogue in the reward model's tokens; longer ones fail (%(default)s)", 4096)
    batch_size: int = flag("dialogues that the reward model reads at once (%(default)s)", 8)

    def __post_init__(self) -> None:
        """One of the two scores."""
        super().__post_init__()
        if (self.reward_model is None) == (self.reward_function is None):
            raise UserError("give either --reward-model or --reward-function: one of them scores the dialogues.")


@dataclass(frozen=True, kw_only=True)
class MaskOptions(OutputFlags):
    """What tokenize_masks.py is told."""

    input_repo: str = flag("what rank.py wrote: a folder, or owner/name on the hub")
    model: str = flag("folder or hub id of the policy, for its tokenizer (%(default)s)",
                      "meta-llama/Meta-Llama-3-8B-Instruct", also="tokenizer")  # fmt: skip
    total_length: int = flag("most tokens of a dialogue; all rows are padded to it (%(default)s)", 2048)
    test_rows: int = flag("pairs held out, one in ten at most (%(default)s)", 500)
    seed: int = flag("of the choice of pairs that are held out (%(default)s)", 0)

    def check_values(self, rules: dict[str, Rule]) -> None:
        """As the others, but the seed, which draws no tokens, may be any whole number from 0."""
        super().check_values(rules | {"seed": AT_LEAST_0})


@dataclass(frozen=True)
class Place:
    """Where a data set is made, and where it is handed over: what the flags say."""

    options: OutputFlags

    @property
    def repo(self) -> str:
        """Gets the data set: a folder, or owner/name on the hub."""
        return self.options.output_repo.rstrip("/") or "/"

    @property
    def folder(self) -> Path:
        """Of the rows while they are made."""
        own = self.repo if is_folder(self.repo) else self.repo.rpartition("/")[2]
        return self.options.output_dir or Path(own)

    def finished(self, files: Sequence[str], settings: Mapping[str, Any]) -> str | None:
        """What was written, where an earlier run of the same settings finished it; hands it over again.

        Raises:
            UserError: it was made with other settings.
        """
        record = self.folder / RECORD
        if self.options.overwrite or not record.exists() or not (self.folder / files[0]).exists():
            return None
        made = parse_json(record.read_bytes(), str(record))
        if changed := first_change(made.get("settings", {}), json.loads(json.dumps(dict(settings)))):
            remedy = "give another folder, or --overwrite to make it anew."
            raise UserError(f"{self.folder} holds a data set that was made with {changed}: {remedy}")
        present = [name for name in files if (self.folder / name).exists()]
        return f"{made['summary']}; finished before: {self.hand_over(present)}"

    def record(self, settings: Mapping[str, Any], summary: str) -> None:
        """Writes how the rows are made, and what they are."""
        write_rows(self.folder / RECORD, [{"settings": dict(settings), "summary": summary}])

    def hand_over(self, files: Sequence[str]) -> str:
        """Copies or pushes finished files; where they are now. Raises UserError where that is not possible."""
        if not is_folder(self.repo):
            return push(self.folder, files, self.repo, self.options.public, OUTPUT)
        target = Path(self.repo)
        if target.resolve() != self.folder.resolve():
            try:
                target.mkdir(parents=True, exist_ok=True)
                for name in files:
                    with writing(target / name) as beside:
                        shutil.copyfile(self.folder / name, beside)
            except OSError as error:
                raise UserError(
                    f"{OUTPUT} {target}: cannot be written: {error}; the rows are in {self.folder}"
                ) from error
        return str(target)


def make_rows(
    options: OutputFlags,
    settings: Mapping[str, Any],
    batches: Sequence[list[int]],
    prepare: "Callable[[], BatchFunction]",
    conclude: "Callable[[Sequence[Entry]], tuple[Iterable[Mapping[str, Any]], str]]",
) -> str:
    """Makes train.jsonl batch by batch and hands it over, or what was finished before; the line that sums it up.

    Args:
        options: where.
        settings: what the rows depend on, by flag.
        batches: numbers of the dialogues in each.
        prepare: opens the models, see `run_batches`.
        conclude: makes of all entries the rows of the file, and a summary.

    Raises:
        UserError: the data set is there, or begun, with other settings.
    """
    from dschat.inference.runner import run_batches  # imports torch, which --help does not need

    place = Place(options)
    done = place.finished([ROWS], settings)
    if done is not None:
        return done
    with closing(Journal(place.folder / ROWS, settings, options.overwrite)) as journal:
        rows, summary = conclude(run_batches(journal, batches, prepare, unit="dialogue"))
        place.record(settings, summary)
        journal.finish(rows)
    return f"{summary}: {place.hand_over([ROWS])}"


def digest(rows: Iterable[object]) -> str:
    """12 hexadecimal digits that follow from the content of rows."""
    return contents_hash(f"{json.dumps(row, sort_keys=True)}\n" for row in rows)[:12]


def described_function(spec: str) -> str:
    """A function by name, and the content of its file."""
    path = Path(spec.rpartition(":")[0])
    return f"{spec} (file {(file_hash(path) if path.is_file() else content_hash(b''))[:12]})"
