# SPDX-License-Identifier: Apache-2.0
"""The run: batches of prompts → responses and rewards → a file, which an interruption does not lose."""

import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from dschat.common.journal import Journal
from dschat.common.statistics import mean_estimate
from dschat.data.encoding import encode_responses
from dschat.data.examples import PromptExample
from dschat.data.formats.rows import Row
from dschat.errors import UserError
from dschat.inference.devices import choose_device, choose_dtype
from dschat.inference.options import InferenceOptions, flag_of
from dschat.inference.policy import Policy, load_policy, locate_policy
from dschat.inference.prompts import Selection, select_prompts
from dschat.models.tokenizer import load_tokenizer
from dschat.scoring.reward_reader import RewardReader, load_reward_model, load_reward_tokenizer
from dschat.scoring.source import ResponseTexts

# Flags that the rows depend on and that the journal records as they were given; `_settings` adds the others.
RECORDED = (
    *(
        "dataset",
        "rollout_engine",
        "batch_size",
        "num_return",
        "top_k",
        "top_p",
        "max_new_tokens",
        "max_prompt_len",
        "seed",
    ),
    *("rm_template", "prompt_key", "chosen_key", "rejected_key", "response_key", "messages_key"),
)

Entry = dict[str, Any]  # of the journal: number of the row, "row" as it will stand in the file, "tokens"
Work = Callable[[list[PromptExample], list[Row]], list[Entry]]  # on the prompts of a batch and their rows


def run_inference(options: InferenceOptions) -> str:
    """Generates and scores, or with `ref_scores` only scores; writes `options.result_path` and returns the last line.

    Raises UserError for bad models or data, a finished file, or an interrupted run with other settings.
    """
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

    def prepare() -> Work:
        reader = load_reward_model(options.reward_model, reward_tokenizer, options.rm_template, device, dtype)
        if options.ref_scores or policy_path is None:
            return partial(score_references, reader)
        policy = load_policy(policy_path, tokenizer, options, device, dtype)
        policy.check_lengths(max(map(len, selection.examples)))
        return partial(respond_and_score, policy, reader, options.num_return)

    batches = _batches(selection, options, tokenizer)
    settings = _settings(options, policy_path, selection, device, dtype)
    with closing(Journal(path, settings, options.overwrite)) as journal:
        entries = _do_batches(journal, selection, batches, prepare)
        journal.finish(entry["row"] for entry in entries)
    left_out = f" ({selection.dropped} prompts left out)" if selection.dropped else ""
    return f"mean {_means(entries)}, {len(entries)} rows{left_out}: {path}"


def respond_and_score(
    policy: Policy, reader: RewardReader, num_return: int, examples: list[PromptExample], rows: list[Row]
) -> list[Entry]:
    """Draws responses and keeps the best of each prompt, the first of equals."""
    draws = []
    for responses in policy.respond(examples, num_return):
        rewards = _rewards(reader, examples, [response.text for response in responses], rows)
        draws.append(list(zip(rewards, responses, strict=True)))
    entries = []
    for example, candidates in zip(examples, zip(*draws, strict=True), strict=True):
        reward, response = max(candidates, key=lambda candidate: candidate[0])
        row: dict[str, Any] = {"prompt": example.prompt_text, "response": response.text, "reward": reward}
        row["finished"] = response.finished
        if num_return > 1:
            row["rewards"] = [candidate[0] for candidate in candidates]
        entries.append({"number": example.index, "row": row, "tokens": response.tokens})
    return entries


def score_references(reader: RewardReader, examples: list[PromptExample], rows: list[Row]) -> list[Entry]:
    """Scores the data set's own responses."""
    chosen, rejected = _references(rows)
    scores = (_rewards(reader, examples, texts, rows) for texts in (chosen, rejected))
    entries = []
    for example, better, worse, *rewards in zip(examples, chosen, rejected, *scores, strict=True):
        row = {"prompt": example.prompt_text, "response": better, "reward": rewards[0]}
        row |= {"rejected_response": worse, "rejected_reward": rewards[1]}
        entries.append({"number": example.index, "row": row, "tokens": None})
    return entries


def _rewards(
    reader: RewardReader, examples: list[PromptExample], responses: list[str], rows: list[Row]
) -> list[float]:
    return reader(None, ResponseTexts([example.prompt_text for example in examples], responses, rows)).tolist()


def _references(rows: list[Row]) -> tuple[list[str], list[str]]:
    """The data set's chosen and rejected responses."""
    for row in rows:
        if row.chosen is None or row.rejected is None:
            missing = "chosen" if row.chosen is None else "rejected"
            raise UserError(f"--ref-scores: {row.origin} has no {missing} response; use a data set that has both.")
    return [row.chosen or "" for row in rows], [row.rejected or "" for row in rows]


def _batches(selection: Selection, options: InferenceOptions, tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Places of the examples in each batch, longest first: what does not fit into memory fails at once."""
    lengths = [len(example) for example in selection.examples]
    if options.ref_scores:
        texts = _references(selection.rows)
        longer = map(max, *(map(len, encode_responses(tokenizer, some)) for some in texts))
        lengths = [length + more for length, more in zip(lengths, longer, strict=True)]
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    return [order[start : start + options.batch_size] for start in range(0, len(order), options.batch_size)]


def _do_batches(
    journal: Journal, selection: Selection, batches: list[list[int]], prepare: Callable[[], Work]
) -> list[Entry]:
    """Does what the journal does not hold yet; all entries in the order of the data set.

    A batch that a kill left incomplete is done again as a whole: with --rollout-engine generate, and by rounding in
    bf16, its draws depend on all of its rows.
    """
    done = {entry["number"]: entry for entry in journal.rows}
    pending = [k for k, batch in enumerate(batches) if any(selection.examples[i].index not in done for i in batch)]
    if pending:
        with _enough_memory(
            "--model, --reward-model: the GPU's memory does not hold both", "--dtype bf16 or a larger GPU"
        ):
            work = prepare()
    total = len(selection.examples)
    with tqdm(total=total, initial=total - sum(len(batches[k]) for k in pending), unit="prompt") as bar:
        for k in pending:
            examples = [selection.examples[i] for i in batches[k]]
            problem = (
                f"--batch-size: the GPU's memory does not suffice for {len(examples)} prompts of up to "
                f"{max(map(len, examples))} tokens"
            )
            with _enough_memory(problem, "a smaller --batch-size, or --max-new-tokens"):
                entries = work(examples, [selection.rows[i] for i in batches[k]])
            new = [entry for entry in entries if entry["number"] not in done]
            journal.append(new)
            done.update((entry["number"], entry) for entry in new)
            bar.update(len(examples))
            bar.set_postfix(reward=f"{fmean(entry['row']['reward'] for entry in done.values()):.3f}")
    return [done[number] for number in sorted(done)]


@contextmanager
def _enough_memory(problem: str, remedy: str) -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise UserError(f"{problem}. Give {remedy}.") from error


def _means(entries: list[Entry]) -> str:
    """The means over the rows of the file."""
    rows = [entry["row"] for entry in entries]
    reward = f"reward {mean_estimate([row['reward'] for row in rows]).text(4)}"
    if "rejected_reward" in rows[0]:
        rejected = mean_estimate([row["rejected_reward"] for row in rows]).text(4)
        higher = fmean(row["reward"] > row["rejected_reward"] for row in rows)
        return f"{reward}, rejected {rejected}, chosen above rejected {higher:.1%}"
    length = fmean(entry["tokens"] for entry in entries)
    return f"{reward}, length {length:.1f} tokens, EOS rate {fmean(row['finished'] for row in rows):.1%}"


def _settings(
    options: InferenceOptions, policy_path: str | None, selection: Selection, device: torch.device, dtype: torch.dtype
) -> dict[str, Any]:
    """What the rows depend on, by flag; an interrupted run goes on only with the same."""
    settings = {flag_of(name).removeprefix("--"): getattr(options, name) for name in RECORDED}
    return settings | {
        "temperature": options.temperature_value,
        "num-samples": options.samples,
        "device": device.type,
        "dtype": str(dtype).removeprefix("torch."),
        "model": None if policy_path is None else _fingerprint(policy_path),
        "reward-model": _fingerprint(options.reward_model),
        "data-path": f"{options.data_path or options.dataset} (rows {selection.digest})",
    }


def _fingerprint(path: str) -> str:
    """A model's place and, of a folder, 12 hexadecimal digits that change when its files are written again."""
    folder = Path(path)
    if not folder.is_dir():
        return path
    stats = sorted((file.name, file.stat()) for file in folder.iterdir() if file.is_file())
    listing = repr([(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats])
    return f"{os.path.abspath(path)} (files {hashlib.sha256(listing.encode()).hexdigest()[:12]})"
