# SPDX-License-Identifier: Apache-2.0
"""The run: batches of prompts → responses and rewards → a file, which an interruption does not lose."""

from contextlib import closing
from dataclasses import dataclass
from functools import partial
from statistics import fmean

import torch
from transformers import PreTrainedTokenizerBase

from dschat.common.journal import Journal
from dschat.common.statistics import mean_estimate
from dschat.data.encoding import encode_responses
from dschat.data.examples import PromptExample
from dschat.data.rows import Row
from dschat.errors import UserError
from dschat.inference.batches import (
    LARGER,
    Entry,
    Work,
    batches_of,
    do_batches,
    enough_memory,
    refuse_finished,
    settings_of,
)
from dschat.inference.devices import choose_device
from dschat.inference.options import InferenceOptions, ScoredOptions
from dschat.inference.policy import Policy, SampledResponse, load_policy, locate_policy
from dschat.inference.prompts import Selection, select_prompts
from dschat.models.opening import choose_dtype
from dschat.models.tokenizer import load_tokenizer
from dschat.scoring.reward_reader import RewardReader, load_reward_model, load_reward_tokenizer
from dschat.scoring.source import ResponseTexts

BOTH = "--model, --reward-model: the GPU's memory does not hold both"

Candidate = tuple[float, SampledResponse]  # a response behind its reward


@dataclass(frozen=True)
class Inputs:
    """What a run with a reward model knows before it opens the models."""

    device: torch.device
    dtype: torch.dtype
    policy_path: str | None  # None: nothing is drawn
    tokenizer: PreTrainedTokenizerBase  # of the prompts: the policy's
    reward_tokenizer: PreTrainedTokenizerBase
    selection: Selection


def run_inference(options: InferenceOptions) -> str:
    """Generates and scores, or with `ref_scores` only scores; writes `options.result_path` and returns the last line.

    Raises UserError for bad models or data, a finished file, or an interrupted run with other settings.
    """
    path = options.result_path
    refuse_finished(path, options.overwrite)  # before the data set is read
    given = open_inputs(options, options.model)
    selection = given.selection

    def prepare() -> Work:
        with enough_memory(BOTH, LARGER):
            if options.ref_scores or given.policy_path is None:
                return partial(score_references, open_reader(options, given))
            policy, reader = open_models(options, given, options.temperature_value)
        return partial(respond_and_score, policy, reader, options.num_return)

    batches = batches_of(_lengths(selection, options, given.tokenizer), options.batch_size)
    settings = settings_of(options, given.policy_path, selection, given.device, given.dtype)
    with closing(Journal(path, settings, options.overwrite)) as journal:
        entries = do_batches(journal, selection, batches, prepare, _shown)
        journal.finish(entry["row"] for entry in entries)
    left_out = f" ({selection.dropped} prompts left out)" if selection.dropped else ""
    return f"mean {_means(entries)}, {len(entries)} rows{left_out}: {path}"


def open_inputs(options: ScoredOptions, model: str | None) -> Inputs:
    """Finds the policy, if there is one, and reads tokenizers and prompts; raises UserError where one is missing."""
    device = choose_device(options.gpu, options.device)
    reward_tokenizer = load_reward_tokenizer(options.reward_model, options.rm_template)
    policy_path = None if model is None else locate_policy(model)
    tokenizer = load_tokenizer(policy_path, "--model", may_add_pad=True) if policy_path else reward_tokenizer
    return Inputs(
        device=device,
        dtype=choose_dtype(options.dtype, device),
        policy_path=policy_path,
        tokenizer=tokenizer,
        reward_tokenizer=reward_tokenizer,
        selection=select_prompts(options, tokenizer),
    )


def open_reader(options: ScoredOptions, given: Inputs) -> RewardReader:
    """Opens the reward model."""
    return load_reward_model(
        options.reward_model, given.reward_tokenizer, options.rm_template, given.device, given.dtype
    )


def open_models(options: ScoredOptions, given: Inputs, temperature: float) -> tuple[Policy, RewardReader]:
    """Opens the policy, to draw at a temperature, and the reward model."""
    reader = open_reader(options, given)
    policy = load_policy(str(given.policy_path), given.tokenizer, options, temperature, given.device, given.dtype)
    policy.check_lengths(max(map(len, given.selection.examples)))
    return policy, reader


def draw_and_score(
    policy: Policy, reader: RewardReader, num_return: int, examples: list[PromptExample], rows: list[Row]
) -> list[tuple[Candidate, ...]]:
    """Draws so many responses to each prompt and scores them.

    Returns:
        For each prompt its responses in the order of their numbers, each behind its reward.
    """
    draws = []
    for responses in policy.respond(examples, num_return):
        rewards = _rewards(reader, examples, [response.text for response in responses], rows)
        draws.append(list(zip(rewards, responses, strict=True)))
    return list(zip(*draws, strict=True))


def respond_and_score(
    policy: Policy, reader: RewardReader, num_return: int, examples: list[PromptExample], rows: list[Row]
) -> list[Entry]:
    """Draws responses and keeps the best of each prompt, the first of equals."""
    drawn = draw_and_score(policy, reader, num_return, examples, rows)
    entries = []
    for example, candidates in zip(examples, drawn, strict=True):
        reward, response = max(candidates, key=lambda candidate: candidate[0])
        row = example.columns | {"response": response.text, "reward": reward, "finished": response.finished}
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
        row = example.columns | {"response": better, "reward": rewards[0]}
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


def _lengths(selection: Selection, options: InferenceOptions, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Tokens that the reward model, or the policy before it draws, reads of each example."""
    lengths = [len(example) for example in selection.examples]
    if options.ref_scores:
        texts = _references(selection.rows)
        longer = map(max, *(map(len, encode_responses(tokenizer, some)) for some in texts))
        lengths = [length + more for length, more in zip(lengths, longer, strict=True)]
    return lengths


def _shown(entries: list[Entry]) -> dict[str, str]:
    return {"reward": f"{fmean(entry['row']['reward'] for entry in entries):.3f}"}


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
