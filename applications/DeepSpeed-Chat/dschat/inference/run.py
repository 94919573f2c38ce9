# SPDX-License-Identifier: Apache-2.0
"""The run: batches of prompts → responses and rewards → a file, which an interruption does not lose."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from dschat.common.journal import Journal
from dschat.data.encoding import encode_responses
from dschat.data.examples import PromptExample
from dschat.data.formats.rows import Row
from dschat.errors import UserError
from dschat.inference.devices import choose_device, choose_dtype
from dschat.inference.options import InferenceOptions, flag_of
from dschat.inference.policy import Policy, load_policy, locate_policy
from dschat.inference.prompts import Selection, select_prompts
from dschat.inference.summary import Summary, summarise
from dschat.models.tokenizer import load_tokenizer
from dschat.scoring.reward_reader import RewardReader, load_reward_model, load_reward_tokenizer
from dschat.scoring.source import ResponseTexts

logger = logging.getLogger(__name__)

Entry = dict[str, Any]  # of the journal: number of the row, "row" as it will stand in the file, "tokens"
Work = Callable[
    [int, list[PromptExample], list[Row]], list[Entry]
]  # number of a batch, its prompts and rows → entries

# What cannot change the content of the file, or is named with what it stands for.
UNRECORDED = (
    *("proj_path", "name", "overwrite", "ref_scores"),
    *("gpu", "model", "reward_model", "data_path", "device", "dtype"),
)


def run_inference(options: InferenceOptions) -> Summary:
    """Generates and scores, or with `ref_scores` only scores, and writes `options.result_path`.

    Raises:
        UserError: bad flags, models or data; a finished file; an interrupted run with other settings.
    """
    options.check()
    path = options.result_path
    if path.exists() and not options.overwrite:  # before the data set is read
        raise UserError(
            f"{path} exists, finished. Remove it or give --overwrite to make it again, or --name for a file beside it."
        )
    device = choose_device(options.gpu, options.device)
    dtype = choose_dtype(options.dtype, device)
    reward_tokenizer = load_reward_tokenizer(options.reward_model, options.rm_template)
    policy_path = None if options.model is None else locate_policy(options.model)
    tokenizer = load_tokenizer(policy_path, "--model", may_add_pad=True) if policy_path else reward_tokenizer
    selection = select_prompts(options, tokenizer)
    if options.ref_scores:
        _require_pairs(selection)
    journal = Journal(path, _settings(options, policy_path, selection, device, dtype), options.overwrite)
    try:

        def prepare() -> Work:
            reader = load_reward_model(options.reward_model, reward_tokenizer, options.rm_template, device, dtype)
            if options.ref_scores or policy_path is None:
                return _ReferenceWork(reader)
            policy = load_policy(policy_path, tokenizer, options, device, dtype)
            policy.check_lengths(max(map(len, selection.examples)))
            return _PolicyWork(policy, reader, options.num_return)

        entries = _do_batches(journal, selection, _batches(selection, options, tokenizer), prepare)
        journal.finish(entry["row"] for entry in entries)
    finally:
        journal.close()
    return summarise(path, entries, selection.dropped)


def _do_batches(
    journal: Journal, selection: Selection, batches: list[list[int]], prepare: Callable[[], Work]
) -> list[Entry]:
    """Does what the journal does not hold yet; all entries in the order of the data set.

    A batch that a kill left incomplete is done again as a whole: its draws depend on all of its rows.
    """
    done = {entry["number"]: entry for entry in journal.rows}
    numbers = [[selection.examples[i].index for i in batch] for batch in batches]
    pending = [k for k, batch in enumerate(numbers) if not done.keys() >= set(batch)]
    if not pending:
        return [done[number] for number in sorted(done)]
    with _enough_memory(
        "--model, --reward-model: the GPU's memory does not hold both. Give --dtype bf16 or a larger GPU."
    ):
        work = prepare()
    total = len(selection.examples)
    with tqdm(total=total, initial=total - sum(len(batches[k]) for k in pending), unit="prompt") as bar:
        for k in pending:
            examples = [selection.examples[i] for i in batches[k]]
            with _enough_memory(
                f"--batch-size: the GPU's memory does not suffice for {len(examples)} prompts of up to "
                f"{max(map(len, examples))} tokens. Give a smaller --batch-size, or --max-new-tokens."
            ):
                entries = work(k, examples, [selection.rows[number] for number in numbers[k]])
            new = [entry for entry in entries if entry["number"] not in done]
            journal.append(new)
            done.update((entry["number"], entry) for entry in new)
            bar.update(len(examples))
            bar.set_postfix(reward=f"{sum(entry['row']['reward'] for entry in done.values()) / len(done):.3f}")
    return [done[number] for number in sorted(done)]


@contextmanager
def _enough_memory(otherwise: str) -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise UserError(otherwise) from error


class _PolicyWork:
    """Draws responses and keeps the best of each prompt."""

    def __init__(self, policy: Policy, reader: RewardReader, num_return: int) -> None:
        self._policy, self._reader, self._num_return = policy, reader, num_return

    def __call__(self, batch: int, examples: list[PromptExample], rows: list[Row]) -> list[Entry]:
        draws = []
        for draw in range(self._num_return):
            responses = self._policy.respond(examples, batch, draw)
            rewards = _rewards(self._reader, examples, [response.text for response in responses], rows)
            draws.append(list(zip(rewards, responses, strict=True)))
        entries = []
        for example, candidates in zip(examples, zip(*draws, strict=True), strict=True):
            reward, response = max(candidates, key=lambda candidate: candidate[0])  # the first of equals
            row: dict[str, Any] = {"prompt": example.prompt_text, "response": response.text, "reward": reward}
            row["finished"] = response.finished
            if self._num_return > 1:
                row["rewards"] = [candidate[0] for candidate in candidates]
            entries.append({"number": example.index, "row": row, "tokens": response.tokens})
        return entries


class _ReferenceWork:
    """Scores the data set's own responses."""

    def __init__(self, reader: RewardReader) -> None:
        self._reader = reader

    def __call__(self, batch: int, examples: list[PromptExample], rows: list[Row]) -> list[Entry]:
        chosen, rejected = [row.chosen or "" for row in rows], [row.rejected or "" for row in rows]
        scores = zip(*(_rewards(self._reader, examples, texts, rows) for texts in (chosen, rejected)), strict=True)
        entries = []
        for example, better, worse, (reward, rejected_reward) in zip(examples, chosen, rejected, scores, strict=True):
            row = {"prompt": example.prompt_text, "response": better, "reward": reward}
            row |= {"rejected_response": worse, "rejected_reward": rejected_reward}
            entries.append({"number": example.index, "row": row, "tokens": None})
        return entries


def _rewards(
    reader: RewardReader, examples: list[PromptExample], responses: list[str], rows: list[Row]
) -> list[float]:
    return reader(None, ResponseTexts([example.prompt_text for example in examples], responses, rows)).tolist()


def _batches(selection: Selection, options: InferenceOptions, tokenizer: Any) -> list[list[int]]:
    """Numbers of the examples in each batch, longest first: what does not fit into memory fails at once."""
    lengths = [len(example) for example in selection.examples]
    if options.ref_scores:
        rows = [selection.rows[example.index] for example in selection.examples]
        pairs = [[row.chosen or "" for row in rows], [row.rejected or "" for row in rows]]
        longer = map(max, *(map(len, encode_responses(tokenizer, texts)) for texts in pairs))
        lengths = [length + more for length, more in zip(lengths, longer, strict=True)]
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    return [order[start : start + options.batch_size] for start in range(0, len(order), options.batch_size)]


def _require_pairs(selection: Selection) -> None:
    for row in selection.rows:
        if row.chosen is None or row.rejected is None:
            missing = "chosen" if row.chosen is None else "rejected"
            raise UserError(f"--ref-scores: {row.origin} has no {missing} response; use a data set that has both.")


def _settings(
    options: InferenceOptions, policy_path: str | None, selection: Selection, device: torch.device, dtype: torch.dtype
) -> dict[str, Any]:
    """What the rows depend on, by flag; an interrupted run goes on only with the same."""
    names = [field.name for field in fields(options) if field.name not in UNRECORDED]
    settings = {flag_of(name).removeprefix("--"): getattr(options, name) for name in names}
    settings |= {"temperature": options.temperature_value, "num-samples": options.samples}
    settings |= {"device": device.type, "dtype": str(dtype).removeprefix("torch.")}
    settings["model"] = None if policy_path is None else _fingerprint(policy_path)
    settings["reward-model"] = _fingerprint(options.reward_model)
    settings["data-path"] = f"{options.data_path or options.dataset} (rows {selection.digest})"
    return settings


def _fingerprint(path: str) -> str:
    """A model's place and, of a folder, 12 hexadecimal digits that change when its files are written again."""
    folder = Path(path)
    if not folder.is_dir():
        return path
    stats = sorted((file.name, file.stat()) for file in folder.iterdir() if file.is_file())
    listing = repr([(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats])
    return f"{os.path.abspath(path)} (files {hashlib.sha256(listing.encode()).hexdigest()[:12]})"
