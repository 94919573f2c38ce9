# SPDX-License-Identifier: Apache-2.0
"""The data sets that REFUEL's commands make: the flags, how each was made, and where it is handed over."""

import json
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from dschat.common.atomic import writing
from dschat.common.fingerprints import content_hash, contents_hash, file_hash
from dschat.common.journal import Journal, first_change
from dschat.common.jsonl import parse_json, write_rows
from dschat.config.commands import PushOptions
from dschat.config.common import LogprobFlags, OptimisationFlags
from dschat.config.common import OutputFlags as TrainingOutput
from dschat.config.refuel import DialogueFlags
from dschat.config.rollouts import RolloutFlags
from dschat.config.rules import AT_LEAST_0, AT_LEAST_1, REQUIRED, engine_name, flag, like
from dschat.data.hub import push
from dschat.data.options import PrepareOptions
from dschat.data.sources import is_folder
from dschat.errors import UserError
from dschat.evaluation.options import AskingOptions
from dschat.inference.options import (
    MODEL_HELP,
    TEMPERATURE,
    CheckedFlags,
    ComputeFlags,
    Engine,
    InferenceOptions,
    PolicyOptions,
    PromptFlags,
    ScoredOptions,
)

if TYPE_CHECKING:
    from dschat.inference.runner import BatchFunction, Entry

ULTRAINTERACT = "openbmb/UltraInteract_pair"
LLAMA_USER = "meta-llama/Meta-Llama-3.1-70B-Instruct"
OUTPUT = "--output_repo"
ROWS = "train.jsonl"
RECORD = "made.json"  # beside the rows: how they were made; a data set without it is not finished


@dataclass(kw_only=True)
class OutputFlags(CheckedFlags):
    """Where a command that makes REFUEL's data puts them."""

    output_repo: str = flag("gets the data set: a folder, or owner/name on the Hugging Face hub")
    output_dir: Path | None = like(
        TrainingOutput,
        "output_dir",
        None,
        "folder for unfinished rows, and for the data set before it is pushed (--output_repo where that is a folder, "
        "else its name)",
    )
    public: bool = like(PushOptions, "public", help="let everybody see a data set that is pushed")
    overwrite: bool = like(PolicyOptions, "overwrite")

    def __post_init__(self) -> None:
        """The place has a name."""
        super().__post_init__()
        if not self.output_repo.strip("/"):
            raise UserError("--output_repo is empty: give a folder, or owner/name on the hub.")


@dataclass(kw_only=True)
class GenerateOptions(OutputFlags, ComputeFlags):
    """Roll out dialogues of a policy with a simulated user, and each of them once more from one of its turns on.

    Writes train.jsonl: trajectory, trajectory_sampled_h_from_sampled_len, sampled_len_from_5,
    sampled_h_from_sampled_len. Killed and started again with the same flags, it goes on where it stood. The key of a
    server comes from OPENAI_API_KEY.
    """

    model: str = like(InferenceOptions, "model", REQUIRED, MODEL_HELP)
    prompts: str = flag(
        "first messages of users: a file, folder or data set of the hub, with a column messages, trajectory or prompt",
        ULTRAINTERACT,
    )
    num_data: int = flag("dialogues, 0 = one for each first message", 0, AT_LEAST_0)
    num_turns: int = flag("turns of a dialogue", 5, AT_LEAST_1)
    temperature: float = like(LogprobFlags, "temperature", 0.8, "of policy and user, 0 = greedy", TEMPERATURE)
    top_p: float = like(RolloutFlags, "top_p")
    max_new_tokens: int = like(
        PromptFlags, "max_new_tokens", 1024, "longest reply and longest message of the user, in tokens"
    )
    seed: int = like(OptimisationFlags, "seed", 0, "of the draws, and of the turns that are compared")
    batch_size: int = like(PromptFlags, "batch_size", 64, "dialogues at once; a kill loses so many at most")
    rollout_engine: Annotated[Engine, engine_name] = like(PromptFlags, "rollout_engine")
    user_model: str = flag(
        "who plays the user: with --user_server the name of its model, else a folder or hub id", LLAMA_USER
    )
    user_server: str | None = flag("address of an OpenAI-compatible server that has --user_model", None)
    user_function: str | None = flag("module.py:function in the user's place: dialogues → next messages", None)
    concurrency: int = like(AskingOptions, "concurrency", 32, "requests to the server at the same time")
    timeout: float = like(AskingOptions, "timeout", 600.0, "seconds to wait for an answer of the server")
    max_tries: int = like(AskingOptions, "max_tries")

    top_k = 0  # all

    def __post_init__(self) -> None:
        """One plays the user."""
        super().__post_init__()
        if self.user_server and self.user_function:
            raise UserError("--user_server and --user_function both play the user: drop one of them.")


@dataclass(kw_only=True)
class RankOptions(OutputFlags, ComputeFlags):
    """Score the dialogues of `dschat refuel-data generate` with a reward model, as they stand at the end of each turn.

    Writes train.jsonl: the columns it read, and the rewards of both dialogues; what could not be scored is -99999.
    Killed and started again with the same flags, it goes on where it stood.
    """

    prompts: str = like(
        GenerateOptions, "prompts", REQUIRED, "what `refuel-data generate` wrote: a folder, or owner/name"
    )
    reward_model: str | None = like(ScoredOptions, "reward_model", None)
    reward_function: str | None = like(
        DialogueFlags,
        "reward_function",
        help="module.py:function in its place: dialogues → numbers, None for failures",
    )
    max_length: int = like(
        PrepareOptions,
        "max_length",
        4096,
        "longest dialogue in the reward model's tokens; longer ones fail",
        AT_LEAST_1,
    )
    batch_size: int = like(PromptFlags, "batch_size", 8, "dialogues that the reward model reads at once")

    def __post_init__(self) -> None:
        """One of the two scores."""
        super().__post_init__()
        if (self.reward_model is None) == (self.reward_function is None):
            raise UserError("give either --reward_model or --reward_function: one of them scores the dialogues.")


@dataclass(kw_only=True)
class MaskOptions(OutputFlags):
    """Make pairs of tokens and masks from the scored dialogues of `dschat refuel-data rank`, for `dschat refuel`.

    Writes train.parquet and test.parquet: chosen, reject, and of each _token, _mask and _reward.
    """

    input_repo: str = flag("what `refuel-data rank` wrote: a folder, or owner/name on the hub")
    model: str = like(
        InferenceOptions,
        "model",
        "meta-llama/Meta-Llama-3-8B-Instruct",
        "folder or hub id of the policy, for its tokenizer",
        aliases=["--tokenizer"],
    )
    total_length: int = flag("most tokens of a dialogue; all rows are padded to it", 2048, AT_LEAST_1)
    test_rows: int = flag("pairs held out, one in ten at most", 500, AT_LEAST_0)
    # Draws no tokens, so that it may be any whole number from 0.
    seed: int = like(OptimisationFlags, "seed", 0, "of the choice of pairs that are held out", AT_LEAST_0)


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
