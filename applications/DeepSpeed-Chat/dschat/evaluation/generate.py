# SPDX-License-Identifier: Apache-2.0
"""Samples responses of a policy and scores them with a reward model or a function.

`dschat generate` keeps the best of N responses to each prompt, or scores the data set's own responses.
`dschat best-of-n` keeps all responses at several temperatures. Both run in `evaluation/runner.py`: each part of a run
prepares a function that makes the entries of a batch; `conclude` makes the rows of the file, and a summary, from all
entries.

A score is called "reward" in the files and messages of these commands.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from dschat.base.errors import UserError
from dschat.base.fingerprints import content_hash, file_hash, folder_stamp, model_hash
from dschat.base.package_functions import function_path
from dschat.base.statistics import mean_estimate
from dschat.base.user_function import load_function
from dschat.data.examples import PromptExample
from dschat.data.turn_end import response_texts
from dschat.evaluation.best_of import sweep_of, write_best_of
from dschat.evaluation.generate_options import BestOfOptions, InferenceOptions, ScoreFlags, model_name
from dschat.evaluation.policy import Compute, SampledResponse, SamplingPolicy
from dschat.evaluation.prompts import Answering, Selection
from dschat.evaluation.responses import SCORER, with_origins
from dschat.evaluation.runner import (
    BatchFunction,
    Concluded,
    Entry,
    RunPart,
    described_function,
    enough_memory,
    entry_rows,
    run_batches,
    settings_of,
)
from dschat.models.pretrained import open_config
from dschat.scoring.function import FunctionScores, require_arguments
from dschat.scoring.reward_reader import RewardReader, load_reward_model
from dschat.scoring.reward_tokenizer import load_reward_tokenizer
from dschat.scoring.segments import is_finite
from dschat.scoring.source import ResponseTexts

REWARD_FUNCTION = "--reward_function"

Scorer = Callable[[ResponseTexts], Tensor]  # texts of B responses → their scores (B,)
Candidate = tuple[float | None, SampledResponse]  # score, None if nothing scores it, and response
MakeEntry = Callable[[Sequence[Candidate]], Entry]  # candidates of one prompt in the order of their numbers → entry


@dataclass(frozen=True)
class Scoring:
    """What scores responses, before it is loaded.

    Attributes:
        settings: the settings that scores depend on.
        load: loads it; None if nothing scores responses.
        name: its name with a hash of its content, for the column SCORER; empty if nothing scores responses.
        tokenizer: the reward model's.
    """

    settings: dict[str, Any]
    load: Callable[[Compute], Scorer] | None = None
    name: str = ""
    tokenizer: PreTrainedTokenizerBase | None = None

    def rows_of(self, entries: list[Entry]) -> list[dict[str, Any]]:
        """The rows of entries as the file will hold them, with the column SCORER if they have rewards."""
        rows = entry_rows(entries)
        if self.name:
            rows = [row | {SCORER: self.name} for row in rows]
        return rows


def run_inference(options: InferenceOptions) -> str:
    """Samples and scores responses, or with --ref_scores scores those of the data set; writes `options.result_path`.

    Returns:
        The last line of output.

    Raises:
        UserError: bad models or data, a finished file, or an interrupted run with other settings.
    """
    scoring = find_scoring(options.scores)
    answering = Answering.find(options, scoring.tokenizer)
    selection = answering.selection
    num_return = options.responses.num_return
    temperature = options.responses.temperature_value

    def prepare() -> BatchFunction:
        if options.reference.ref_scores:
            return _reference_function(answering, scoring)
        policy, scorer = _open_models(answering, scoring, temperature)
        return _sampling_function(selection, policy, scorer, num_return, best_entry)

    def conclude(entries: list[Entry]) -> Concluded:
        left_out = f" ({selection.dropped} prompts left out)" if selection.dropped else ""
        line = f"mean {_summary(entries)}, {len(entries)} rows{left_out}: {options.result_path}"
        return scoring.rows_of(entries), line

    settings = scoring.settings | answering.settings | {"num-return": num_return, "temperature": temperature}
    settings["ref-scores"] = options.reference.ref_scores
    part = RunPart(batches=selection.batches(options.generation.batch_size), prepare=prepare)
    return run_batches(options.result_path, settings, options.result.overwrite, [part], conclude)


def run_best_of_n(options: BestOfOptions) -> str:
    """Samples and scores a sweep; writes `options.result_path`, a table and a chart, and returns the table.

    Each prompt gets max(N) responses per temperature; the best of N is that of the first N of them.

    Raises:
        UserError: bad models or data, a finished file, or an interrupted run with other settings.
    """
    path = options.result_path
    scoring = find_scoring(options.scores)
    answering = Answering.find(options, scoring.tokenizer)
    selection = answering.selection
    num_responses_at = options.sweep.responses_per_prompt
    # Loaded once for all temperatures, and only if a batch is left to do.
    open_models = cache(partial(_open_models, answering, scoring, min(num_responses_at)))

    def prepare(temperature: float) -> BatchFunction:
        policy, scorer = open_models()
        make_entry = partial(sweep_entry, temperature)
        return _sampling_function(selection, policy.at(temperature), scorer, num_responses_at[temperature], make_entry)

    def conclude(entries: list[Entry]) -> Concluded:
        rows = scoring.rows_of(entries)
        sweep = sweep_of(path.stem, with_origins(path, rows))
        table = write_best_of([sweep], options.sweep.best_of, path.parent, path.stem)
        left_out = f", {selection.dropped} prompts left out" if selection.dropped else ""
        files = f"{path}, and the same name with .md, .json and .png"
        return rows, f"{table}\n{len(selection.examples)} prompts{left_out}: {files}"

    settings = scoring.settings | answering.settings
    settings |= settings_of(options, ("best_of", "temperatures", "single_temperatures"))
    parts: list[RunPart] = []
    for temperature in num_responses_at:
        parts.append(
            RunPart(
                batches=selection.batches(options.generation.batch_size),
                prepare=partial(prepare, temperature),
                columns={"temperature": temperature},
                title=f"temperature {temperature:g}",
            )
        )
    return run_batches(path, settings, options.result.overwrite, parts, conclude)


# -- what scores responses


def find_scoring(flags: ScoreFlags) -> Scoring:
    """What the flags name, checked before data are read, without loading a model."""
    if flags.reward_model is not None:
        return _scoring_by_model(flags.reward_model, flags.rm_template)
    if flags.reward_function is not None:
        return _scoring_by_function(flags.reward_function)
    return Scoring({"reward-model": None})


def _scoring_by_model(model: str, template: bool) -> Scoring:
    open_config(model, "--reward_model")  # so that a folder without a model is refused
    content = content_hash(f"{model_hash(model)} {template}")
    tokenizer = load_reward_tokenizer(model, template)

    def load(where: Compute) -> RewardReader:
        with enough_memory(f"--reward_model: the GPU's memory does not hold {model}"):
            return load_reward_model(model, tokenizer, template, where.device, where.dtype)

    settings = {"reward-model": folder_stamp(model), "rm-template": template}
    return Scoring(settings, load, f"{model_name(model)} {content[:12]}", tokenizer)


def _scoring_by_function(name: str) -> Scoring:
    name = function_path(name)
    function = load_function(name, REWARD_FUNCTION)
    require_arguments(function, name, REWARD_FUNCTION, with_segments=False)
    scorer = partial(score_texts, FunctionScores(function, REWARD_FUNCTION))
    path, _, function_name = name.rpartition(":")
    content = content_hash(f"{function_name} {file_hash(path)}")
    scorer_name = f"{Path(path).name}:{function_name} {content[:12]}"
    return Scoring({"reward-function": described_function(name)}, lambda _: scorer, scorer_name)


def score_texts(function: FunctionScores, texts: ResponseTexts) -> Tensor:
    """A function's numbers for B responses, (B,) float32. Raises UserError if one is missing or not finite."""
    scores = function.numbers(texts)
    for score, row in zip(scores, texts.rows, strict=True):
        if not is_finite(score):
            raise UserError(
                f"{REWARD_FUNCTION}: {function.name} returned {score} for the response to {row.origin}; it must "
                "return a number."
            )
    return torch.tensor(scores)


# -- loading the models, and what makes the entries of a batch with them


def _open_models(answering: Answering, scoring: Scoring, temperature: float) -> tuple[SamplingPolicy, Scorer | None]:
    """Loads the policy, which samples at a temperature, and the scorer, if there is one."""
    scorer = None if scoring.load is None else scoring.load(answering.where)
    return answering.open_policy(temperature), scorer


def _sampling_function(
    selection: Selection, policy: SamplingPolicy, scorer: Scorer | None, num_responses: int, make_entry: MakeEntry
) -> BatchFunction:
    """Samples responses to each prompt."""
    sample = partial(
        respond_and_score, policy=policy, scorer=scorer, num_responses=num_responses, make_entry=make_entry
    )
    return selection.of_batch(sample)


def _reference_function(answering: Answering, scoring: Scoring) -> BatchFunction:
    """Scores the data set's own responses, in the chat template of the reward model, if it has one."""
    assert scoring.load is not None  # the rules of the options require one
    scorer = scoring.load(answering.where)
    tokenizer = answering.tokenizer
    if scoring.tokenizer is not None and scoring.tokenizer.chat_template is not None:
        tokenizer = scoring.tokenizer
    return answering.selection.of_batch(partial(score_references, scorer=scorer, tokenizer=tokenizer))


# -- entries of a batch


def respond_and_score(
    examples: list[PromptExample],
    *,
    policy: SamplingPolicy,
    scorer: Scorer | None,
    num_responses: int,
    make_entry: MakeEntry,
) -> list[Entry]:
    """Samples responses to each prompt and scores them.

    Args:
        examples: the prompts.
        policy: samples the responses.
        scorer: scores them; None if nothing does.
        num_responses: number of responses to each prompt.
        make_entry: turns the candidates of one prompt into an entry of the journal.
    """
    candidates_by_number: list[list[Candidate]] = []
    for responses in policy.respond(examples, num_responses):  # one response to each prompt
        scores: list[float | None] = [None] * len(examples)
        if scorer is not None:
            texts = [response.text for response in responses]
            scores = [*_score(scorer, examples, texts, [response.finished for response in responses])]
        candidates_by_number.append(list(zip(scores, responses, strict=True)))
    candidates_by_prompt = zip(*candidates_by_number, strict=True)

    entries: list[Entry] = []
    for example, candidates in zip(examples, candidates_by_prompt, strict=True):
        entry = make_entry(candidates)
        entry["number"] = example.index
        entry["row"] = example.columns | entry["row"]
        entries.append(entry)
    return entries


def best_entry(candidates: Sequence[Candidate]) -> Entry:
    """The response with the highest score, the first of equals; without scores the only response."""
    scores = [candidate[0] or 0.0 for candidate in candidates]
    best = scores.index(max(scores))
    score, response = candidates[best]
    row: dict[str, Any] = {"response": response.text}
    if score is not None:
        row["reward"] = score
    row["finished"] = response.finished
    if len(candidates) > 1:
        row["rewards"] = scores
    return {"row": row, "tokens": response.tokens}


def sweep_entry(temperature: float, candidates: Sequence[Candidate]) -> Entry:
    """All responses to a prompt at a temperature."""
    texts = []
    scores = []
    finished = []
    for score, response in candidates:
        texts.append(response.text)
        scores.append(score)
        finished.append(response.finished)
    row = {"temperature": temperature, "responses": texts, "rewards": scores, "finished": finished}
    return {"row": row}


def score_references(
    examples: list[PromptExample], *, scorer: Scorer, tokenizer: PreTrainedTokenizerBase
) -> list[Entry]:
    """Scores the data set's chosen and rejected responses, which the chat template of `tokenizer` writes."""
    chosen, rejected = _references(examples, tokenizer)
    finished = [True] * len(examples)
    chosen_scores = _score(scorer, examples, chosen, finished)
    rejected_scores = _score(scorer, examples, rejected, finished)
    entries: list[Entry] = []
    for number, example in enumerate(examples):
        row = example.columns | {
            "response": chosen[number],
            "reward": chosen_scores[number],
            "rejected_response": rejected[number],
            "rejected_reward": rejected_scores[number],
        }
        entries.append({"number": example.index, "row": row, "tokens": None})
    return entries


def _score(scorer: Scorer, examples: list[PromptExample], responses: list[str], finished: list[bool]) -> list[float]:
    """Scores of one response to each prompt."""
    prompts = []
    rows = []
    for example in examples:
        prompts.append(example.prompt_text)
        rows.append(example.row)
    return scorer(ResponseTexts(prompts, responses, rows, finished)).tolist()


def _references(examples: list[PromptExample], tokenizer: PreTrainedTokenizerBase) -> tuple[list[str], list[str]]:
    """The data set's chosen and rejected responses."""
    rows = []
    for example in examples:
        row = example.row
        if row.chosen is None or row.rejected is None:
            missing = "chosen" if row.chosen is None else "rejected"
            raise UserError(f"--ref_scores: {row.origin} has no {missing} response; use a data set that has both.")
        rows.append(row)
    return response_texts(tokenizer, rows, "chosen"), response_texts(tokenizer, rows, "rejected")


# -- summaries


def _summary(entries: list[Entry]) -> str:
    """Means over the rows of the file, each ± one standard error."""
    rows = entry_rows(entries)
    if "rejected_reward" in rows[0]:
        chosen = _mean_text(rows, "reward", 4)
        rejected = _mean_text(rows, "rejected_reward", 4)
        wins = [float(row["reward"] > row["rejected_reward"]) for row in rows]
        win_rate = mean_estimate(wins).text(1, 100.0)
        return f"reward {chosen}, rejected {rejected}, chosen above rejected {win_rate} %"
    length = _mean_text(entries, "tokens", 1)
    finished = _mean_text(rows, "finished", 1, 100.0)
    summary = f"length {length} tokens, EOS rate {finished} %"
    if "reward" not in rows[0]:
        return f"{summary} (no scores: neither --reward_model nor --reward_function)"
    return f"reward {_mean_text(rows, 'reward', 4)}, {summary}"


def _mean_text(rows: list[dict[str, Any]], column: str, digits: int, factor: float = 1.0) -> str:
    """The mean of a column ± one standard error."""
    values = [float(row[column]) for row in rows]
    return mean_estimate(values).text(digits, factor)
