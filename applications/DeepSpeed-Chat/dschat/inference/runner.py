# SPDX-License-Identifier: Apache-2.0
"""The batch runner of every command: what a batch becomes is a function, and what it gave an interruption leaves."""

import json
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from dschat.common.fingerprints import content_hash, folder_stamp
from dschat.common.journal import Journal
from dschat.common.progress import progress
from dschat.data.examples import PromptExample, prompt_examples
from dschat.data.hub import find_known
from dschat.data.rows import Row, in_words
from dschat.data.sources import load_source
from dschat.errors import UserError
from dschat.inference.options import UNSHUFFLED, ProgramOptions, ScoredOptions

logger = logging.getLogger(__name__)

# Flags that the responses to a selection depend on.
RECORDED = (
    *("dataset", "rollout_engine", "batch_size", "top_k", "top_p", "max_new_tokens", "max_prompt_len"),
    *("seed", "prompt_key", "chosen_key", "rejected_key", "response_key", "messages_key"),
)
LARGER = "--dtype bf16 or a larger GPU"  # what helps where models do not fit
PROTOCOL_SEED = 1234  # of the shuffle and of a split that has to be made; --seed changes the draws only

Entry = dict[str, Any]  # of the journal: the row's number, "row" as it will stand in the file, and what it took
BatchFunction = Callable[[list[int]], list[Entry]]  # numbers of the rows of a batch → their entries
PromptFunction = Callable[[list[PromptExample], list[Row]], list[Entry]]  # the same for prompts and their rows


def run_batches(
    journal: Journal,
    batches: Sequence[list[int]],
    prepare: Callable[[], BatchFunction],
    shown: Callable[[list[Entry]], Mapping[str, str]] | None = None,
    part: tuple[str, Any] | None = None,
    title: str = "",
    unit: str = "prompt",
) -> list[Entry]:
    """Does what the journal does not hold yet; all entries by number.

    A batch that a kill left incomplete is done again as a whole: with --rollout_engine generate, and by rounding in
    bf16, its draws depend on all of its rows.

    Args:
        journal: keeps the entries.
        batches: numbers of the rows in each batch.
        prepare: opens the models, if there is anything left to do.
        shown: name → number beside the progress, of the entries so far.
        part: of a run with several, the one to do now: the name of a column, and what its entries hold there.
        title: before the progress.
        unit: what a row is called there.
    """
    kept = [entry for entry in journal.rows if part is None or entry.get(part[0]) == part[1]]
    done = {entry["number"]: entry for entry in kept}
    pending = [batch for batch in batches if any(number not in done for number in batch)]
    if pending:
        function, total = prepare(), sum(map(len, batches))
        with progress(total, title, total - sum(map(len, pending)), unit=unit) as bar:
            for batch in pending:
                new = [entry for entry in function(batch) if entry["number"] not in done]
                journal.append(new)
                done.update((entry["number"], entry) for entry in new)
                bar.update(len(batch))
                if shown is not None:
                    bar.set_postfix(shown(list(done.values())))
    return [done[number] for number in sorted(done)]


def in_batches(numbers: Sequence[int], size: int, lengths: Sequence[int] | None = None) -> list[list[int]]:
    """Numbers of the rows in each batch; by length the longest first: what does not fit into memory fails at once."""
    if lengths is not None:
        numbers = [number for _, number in sorted(zip(lengths, numbers, strict=True), key=lambda pair: -pair[0])]
    return [list(numbers[start : start + size]) for start in range(0, len(numbers), size)]


@contextmanager
def enough_memory(problem: str, remedy: str) -> Iterator[None]:
    """Inside, a full GPU is reported like a wrong flag."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise UserError(f"{problem}. Give {remedy}.") from error


def refuse_finished(path: Path, overwrite: bool) -> None:
    """Raises UserError where a file of results is there and is to stay."""
    if path.exists() and not overwrite:
        raise UserError(
            f"{path} exists, finished. Remove it or give --overwrite to make it again, or --name for a file beside it."
        )


def settings_of(options: object, names: Iterable[str]) -> dict[str, Any]:
    """Flags that rows depend on, by name; an interrupted run goes on only with the same."""
    return {name.replace("_", "-"): getattr(options, name) for name in names}


def computed_on(device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Where and in what models compute, for the settings of a run."""
    return {"device": device.type, "dtype": str(dtype).removeprefix("torch.")}


def prompt_settings(
    options: ScoredOptions | ProgramOptions,
    path: str | None,
    selection: "Selection",
    device: torch.device,
    dtype: torch.dtype,
) -> dict[str, Any]:
    """What rows depend on that answer a selection with the policy at a path, if there is one."""
    settings = settings_of(options, RECORDED) | {"num-samples": options.samples} | computed_on(device, dtype)
    return settings | {
        "model": None if path is None else folder_stamp(path),
        "data-path": f"{options.data_path or options.dataset} (rows {selection.digest})",
    }


def digest_of(rows: Sequence[Row]) -> str:
    """12 hexadecimal digits that follow from the texts of rows."""
    texts = [[row.prompt, row.messages, row.chosen, row.rejected] for row in rows]
    return content_hash(json.dumps(texts, default=str))[:12]


@dataclass(frozen=True)
class Selection:
    """The prompts of a run, in the order of the file."""

    examples: list[PromptExample]  # prompts as token ids; `index` is the number in the data set's order
    rows: list[Row]  # of the examples
    dropped: int  # rows left out, whose prompt was too long or empty
    digest: str  # of all rows, also of those left out

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt."""
        return max(map(len, self.examples))

    def batches(self, size: int, lengths: Sequence[int] | None = None) -> list[list[int]]:
        """Batches by the tokens that are computed for each prompt: its own, unless others are given."""
        numbers = [example.index for example in self.examples]
        return in_batches(numbers, size, lengths or [len(example) for example in self.examples])

    def of_batch(self, function: PromptFunction) -> BatchFunction:
        """A function of prompts and rows as one of their numbers; raises UserError where memory does not suffice."""
        places = {example.index: place for place, example in enumerate(self.examples)}

        def of_numbers(numbers: list[int]) -> list[Entry]:
            examples = [self.examples[places[number]] for number in numbers]
            problem = (
                f"--batch_size: the GPU's memory does not suffice for {len(examples)} prompts of up to "
                f"{max(map(len, examples))} tokens"
            )
            with enough_memory(problem, "a smaller --batch_size, or --max_new_tokens"):
                return function(examples, [self.rows[places[number]] for number in numbers])

        return of_numbers


def select_prompts(options: ScoredOptions | ProgramOptions, tokenizer: PreTrainedTokenizerBase) -> Selection:
    """Reads the data set and takes the prompts of the protocol.

    The held-out rows, shuffled as `datasets` shuffles them with seed 1234, first `options.samples` (webgpt: not
    shuffled). Prompts that are too long are left out afterwards, so that a limit never brings other prompts in. Raises
    UserError where the data set cannot be read or no prompt is left.
    """
    known = find_known(options.dataset)  # read by hub id: results lie in folders that are called like `dataset`
    path = options.data_path or (known.hub_id if known else options.dataset)
    held_out = load_source(path, options.keys, PROTOCOL_SEED).eval
    order = range(len(held_out)) if options.dataset == UNSHUFFLED else shuffled(len(held_out))
    rows = [held_out[number] for number in order][: options.samples]
    limit = options.max_prompt_len or sys.maxsize
    examples, dropped = prompt_examples(rows, tokenizer, limit, held_out=True)
    reasons = in_words(dropped)
    if not examples:
        raise UserError(
            f"{path}: none of the {len(rows)} prompts is left ({reasons}). Give a larger --max_prompt_len, or other "
            "data with --data_path."
        )
    if dropped:
        logger.warning("%s: %d of %d prompts left out (%s)", path, dropped.total(), len(rows), reasons)
    return Selection(examples, [rows[example.index] for example in examples], dropped.total(), digest_of(rows))


def shuffled(count: int) -> list[int]:
    """The numbers 0 to count - 1 in the order in which `datasets.Dataset.shuffle(seed=1234)` puts count rows."""
    from datasets import Dataset

    return Dataset.from_dict({"number": range(count)}).shuffle(seed=PROTOCOL_SEED)[:]["number"]
