# SPDX-License-Identifier: Apache-2.0
"""Batches of prompts → entries of a journal, which an interruption does not lose."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from dschat.common.fingerprints import folder_stamp
from dschat.common.journal import Journal
from dschat.common.progress import progress
from dschat.data.examples import PromptExample
from dschat.data.rows import Row
from dschat.errors import UserError
from dschat.inference.options import BestOfOptions, ProgramOptions, ScoredOptions, TemperatureOptions
from dschat.inference.prompts import Selection
from dschat.inference.values import flag_of

# Flags that the rows depend on and that the journal records as they were given; `settings_of` adds the others.
RECORDED = (
    *("dataset", "rollout_engine", "batch_size", "top_k", "top_p", "max_new_tokens", "max_prompt_len"),
    *("seed", "prompt_key", "chosen_key", "rejected_key", "response_key", "messages_key"),
)

LARGER = "--dtype bf16 or a larger GPU"  # what helps where models do not fit

Entry = dict[str, Any]  # of the journal: number of the row, "row" as it will stand in the file, and what it took
Work = Callable[[list[PromptExample], list[Row]], list[Entry]]  # on the prompts of a batch and their rows


def refuse_finished(path: Path, overwrite: bool) -> None:
    """Raises UserError where a file of results is there and is to stay."""
    if path.exists() and not overwrite:
        raise UserError(
            f"{path} exists, finished. Remove it or give --overwrite to make it again, or --name for a file beside it."
        )


def batches_of(lengths: Sequence[int], size: int) -> list[list[int]]:
    """Places of the examples in each batch, longest first: what does not fit into memory fails at once."""
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    return [order[start : start + size] for start in range(0, len(order), size)]


def do_batches(
    journal: Journal,
    selection: Selection,
    batches: list[list[int]],
    prepare: Callable[[], Work],
    shown: Callable[[list[Entry]], Mapping[str, str]],
    part: tuple[str, Any] | None = None,
    title: str = "",
) -> list[Entry]:
    """Does what the journal does not hold yet; all entries in the order of the data set.

    Args:
        journal: keeps the entries.
        selection: the prompts.
        batches: places of the prompts in each batch.
        prepare: opens the models, if there is anything left to do.
        shown: name → number beside the progress, of the entries so far.
        part: of a run with several, the one to do now: the name of a column, and what its entries hold there.
        title: before the progress.

    A batch that a kill left incomplete is done again as a whole: with --rollout-engine generate, and by rounding in
    bf16, its draws depend on all of its rows.
    """
    kept = [entry for entry in journal.rows if part is None or entry.get(part[0]) == part[1]]
    done = {entry["number"]: entry for entry in kept}
    pending = [k for k, batch in enumerate(batches) if any(selection.examples[i].index not in done for i in batch)]
    if not pending:
        return [done[number] for number in sorted(done)]
    work = prepare()
    total = len(selection.examples)
    begun = total - sum(len(batches[k]) for k in pending)
    with progress(total, title, begun, unit="prompt") as bar:
        for k in pending:
            examples = [selection.examples[i] for i in batches[k]]
            problem = (
                f"--batch-size: the GPU's memory does not suffice for {len(examples)} prompts of up to "
                f"{max(map(len, examples))} tokens"
            )
            with enough_memory(problem, "a smaller --batch-size, or --max-new-tokens"):
                entries = work(examples, [selection.rows[i] for i in batches[k]])
            new = [entry for entry in entries if entry["number"] not in done]
            journal.append(new)
            done.update((entry["number"], entry) for entry in new)
            bar.update(len(examples))
            bar.set_postfix(shown(list(done.values())))
    return [done[number] for number in sorted(done)]


@contextmanager
def enough_memory(problem: str, remedy: str) -> Iterator[None]:
    """Inside, a full GPU is reported like a wrong flag."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise UserError(f"{problem}. Give {remedy}.") from error


def settings_of(
    options: ScoredOptions | ProgramOptions,
    path: str | None,
    selection: Selection,
    device: torch.device,
    dtype: torch.dtype,
) -> dict[str, Any]:
    """What the rows depend on, by flag; an interrupted run goes on only with the same."""
    settings = {flag_of(name).removeprefix("--"): getattr(options, name) for name in RECORDED}
    if isinstance(options, TemperatureOptions):
        settings |= {"num-return": options.num_return, "temperature": options.temperature_value}
    if isinstance(options, BestOfOptions):
        names = ("best_of", "temperatures", "single_temperatures")
        settings |= {flag_of(name).removeprefix("--"): list(getattr(options, name)) for name in names}
    if isinstance(options, ScoredOptions):
        settings |= {"reward-model": folder_stamp(options.reward_model), "rm-template": options.rm_template}
    return settings | {
        "num-samples": options.samples,
        "device": device.type,
        "dtype": str(dtype).removeprefix("torch."),
        "model": None if path is None else folder_stamp(path),
        "data-path": f"{options.data_path or options.dataset} (rows {selection.digest})",
    }
