# SPDX-License-Identifier: Apache-2.0
"""Responses of a policy scored by a reward model: the best of some at one temperature, or all of a sweep."""

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cache, partial
from statistics import fmean
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from dschat.common.fingerprints import folder_stamp
from dschat.common.journal import Journal
from dschat.common.statistics import mean_estimate
from dschat.data.encoding import encode_responses
from dschat.data.examples import PromptExample
from dschat.data.rows import Row
from dschat.errors import UserError
from dschat.evaluation.best_of import sweep_of
from dschat.inference.options import BestOfOptions, InferenceOptions, ScoredOptions
from dschat.inference.policy import (
    SampledResponse,
    SamplingPolicy,
    choose_device,
    load_policy,
    locate_policy,
)
from dschat.inference.runner import (
    LARGER,
    BatchFunction,
    Entry,
    Selection,
    enough_memory,
    prompt_settings,
    refuse_finished,
    run_batches,
    select_prompts,
    settings_of,
)
from dschat.models.opening import choose_dtype
from dschat.models.tokenizer import load_tokenizer
from dschat.reports.evaluations import write_best_of
from dschat.scoring.reward_reader import RewardReader, load_reward_model, load_reward_tokenizer
from dschat.scoring.source import ResponseTexts

BOTH = "--model, --reward_model: the GPU's memory does not hold both"

Candidate = tuple[float, SampledResponse]  # a response behind its reward


@dataclass(frozen=True)
class Inputs:
    """What a run knows before it opens the models."""

    options: ScoredOptions
    device: torch.device
    dtype: torch.dtype
    policy_path: str | None  # None: nothing is drawn
    tokenizer: PreTrainedTokenizerBase  # of the prompts: the policy's
    reward_tokenizer: PreTrainedTokenizerBase
    selection: Selection

    @classmethod
    def find(cls, options: ScoredOptions, model: str | None) -> "Inputs":
        """Finds the policy, if there is one, and reads tokenizers and prompts; UserError where one is missing."""
        device = choose_device(options.gpu, options.device)
        reward_tokenizer = load_reward_tokenizer(options.reward_model, options.rm_template)
        path = None if model is None else locate_policy(model)
        tokenizer = load_tokenizer(path, "--model", may_add_pad=True) if path else reward_tokenizer
        selection = select_prompts(options, tokenizer)
        dtype = choose_dtype(options.dtype, device)
        return cls(options, device, dtype, path, tokenizer, reward_tokenizer, selection)

    @property
    def settings(self) -> dict[str, Any]:
        """What the rows of every command with a reward model depend on."""
        reward = {"reward-model": folder_stamp(self.options.reward_model), "rm-template": self.options.rm_template}
        return reward | prompt_settings(self.options, self.policy_path, self.selection, self.device, self.dtype)

    def open_reader(self) -> RewardReader:
        """Opens the reward model."""
        options = self.options
        parts = (options.reward_model, self.reward_tokenizer, options.rm_template, self.device, self.dtype)
        return load_reward_model(*parts)

    def open_models(self, temperature: float) -> tuple[SamplingPolicy, RewardReader]:
        """Opens the policy, to draw at a temperature, and the reward model."""
        with enough_memory(BOTH, LARGER):
            reader, path = self.open_reader(), str(self.policy_path)
            policy = load_policy(path, self.tokenizer, self.options, temperature, self.device, self.dtype)
        policy.check_lengths(self.selection.longest)
        return policy, reader


def run_inference(options: InferenceOptions) -> str:
    """Generates and scores, or with `ref_scores` only scores; writes `options.result_path` and returns the last line.

    Raises UserError for bad models or data, a finished file, or an interrupted run with other settings.
    """
    path = options.result_path
    refuse_finished(path, options.overwrite)  # before the data set is read
    given = Inputs.find(options, options.model)
    selection = given.selection

    def prepare() -> BatchFunction:
        if options.ref_scores or given.policy_path is None:
            with enough_memory(BOTH, LARGER):
                return selection.of_batch(partial(score_references, given.open_reader()))
        policy, reader = given.open_models(options.temperature_value)
        return selection.of_batch(partial(respond_and_score, policy, reader, options.num_return, best_of))

    batches = selection.batches(options.batch_size, _lengths(selection, options, given.tokenizer))
    settings = given.settings | {"num-return": options.num_return, "temperature": options.temperature_value}
    with closing(Journal(path, settings, options.overwrite)) as journal:
        entries = run_batches(
            journal,
            batches,
            prepare,
            lambda some: {"reward": f"{fmean(entry['row']['reward'] for entry in some):.3f}"},
        )
        journal.finish(entry["row"] for entry in entries)
    left_out = f" ({selection.dropped} prompts left out)" if selection.dropped else ""
    return f"mean {_means(entries)}, {len(entries)} rows{left_out}: {path}"


def run_best_of_n(options: BestOfOptions) -> str:
    """Draws and scores; writes `options.result_path`, table and curves beside it, and returns the table.

    At a temperature, the responses to a prompt are drawn once, as many as the largest N; the best of N is that of the
    first N of them. Raises UserError for bad models or data, a finished file, or an interrupted run with other
    settings.
    """
    path = options.result_path
    refuse_finished(path, options.overwrite)  # before the data set is read
    given = Inputs.find(options, options.model)
    selection, draws = given.selection, options.draws
    models = cache(partial(given.open_models, next(iter(draws))))

    def prepare(temperature: float) -> BatchFunction:
        policy, reader = models()
        policy, count = policy.at(temperature), draws[temperature]
        return selection.of_batch(partial(respond_and_score, policy, reader, count, partial(all_of, temperature)))

    batches = selection.batches(options.batch_size)
    settings = given.settings | settings_of(options, ("best_of", "temperatures", "single_temperatures"))
    with closing(Journal(path, settings, options.overwrite)) as journal:
        rows = []
        for temperature in draws:
            part, title = ("temperature", temperature), f"temperature {temperature:g}"
            entries = run_batches(journal, batches, partial(prepare, temperature), _mean_and_best, part, title)
            rows += [entry["row"] for entry in entries]
        with_places = ((f"{path}:{number}", row) for number, row in enumerate(rows, start=1))
        # Before the file is there, which says that the run is over.
        table = write_best_of([sweep_of(path.stem, with_places)], options.best_of, path.parent, path.stem)
        journal.finish(rows)
    left_out = f", {selection.dropped} prompts left out" if selection.dropped else ""
    return f"{table}\n{len(selection.examples)} prompts{left_out}: {path} and beside it .md, .json and .png"


def respond_and_score(
    policy: SamplingPolicy,
    reader: RewardReader,
    draws: int,
    keep: Callable[[Sequence[Candidate]], Entry],
    examples: list[PromptExample],
    rows: list[Row],
) -> list[Entry]:
    """Draws so many responses to each prompt and scores them.

    Args:
        policy: draws.
        reader: scores.
        draws: responses to a prompt.
        keep: makes an entry of the responses to a prompt, which come in the order of their numbers.
        examples: the prompts.
        rows: of the data set.
    """
    drawn = []
    for responses in policy.respond(examples, draws):
        rewards = _rewards(reader, examples, [response.text for response in responses], rows)
        drawn.append(list(zip(rewards, responses, strict=True)))
    entries = []
    for example, candidates in zip(examples, zip(*drawn, strict=True), strict=True):
        entry = keep(candidates)
        entries.append(entry | {"number": example.index, "row": example.columns | entry["row"]})
    return entries


def best_of(candidates: Sequence[Candidate]) -> Entry:
    """The response with the highest reward, the first of equals."""
    reward, response = max(candidates, key=lambda candidate: candidate[0])
    row = {"response": response.text, "reward": reward, "finished": response.finished}
    if len(candidates) > 1:
        row["rewards"] = [candidate[0] for candidate in candidates]
    return {"row": row, "tokens": response.tokens}


def all_of(temperature: float, candidates: Sequence[Candidate]) -> Entry:
    """All responses that were drawn at a temperature."""
    rewards, responses = zip(*candidates, strict=True)
    row = {"temperature": temperature, "responses": [response.text for response in responses]}
    row |= {"rewards": list(rewards), "finished": [response.finished for response in responses]}
    return {"row": row, "temperature": temperature}


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
    return reader(ResponseTexts([example.prompt_text for example in examples], responses, rows)).tolist()


def _references(rows: list[Row]) -> tuple[list[str], list[str]]:
    """The data set's chosen and rejected responses."""
    for row in rows:
        if row.chosen is None or row.rejected is None:
            missing = "chosen" if row.chosen is None else "rejected"
            raise UserError(f"--ref_scores: {row.origin} has no {missing} response; use a data set that has both.")
    return [row.chosen or "" for row in rows], [row.rejected or "" for row in rows]


def _lengths(selection: Selection, options: InferenceOptions, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Tokens that the reward model, or the policy before it draws, reads of each example."""
    lengths = [len(example) for example in selection.examples]
    if options.ref_scores:
        texts = _references(selection.rows)
        longer = map(max, *(map(len, encode_responses(tokenizer, some)) for some in texts))
        lengths = [length + more for length, more in zip(lengths, longer, strict=True)]
    return lengths


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


def _mean_and_best(entries: list[Entry]) -> dict[str, str]:
    rewards = [entry["row"]["rewards"] for entry in entries]
    return {"reward": f"{fmean(map(fmean, rewards)):.3f}", "best": f"{fmean(map(max, rewards)):.3f}"}
