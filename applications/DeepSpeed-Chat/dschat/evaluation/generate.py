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
from dschat.base.statistics import mean_estimate
from dschat.base.user_function import load_function
from dschat.data.encoding import encode_responses
from dschat.data.examples import PromptExample
from dschat.data.turn_end import response_texts
from dschat.evaluation.best_of import sweep_of, write_best_of
from dschat.evaluation.generate_options import BestOfOptions, InferenceOptions, ScoredOptions, model_name
from dschat.evaluation.policy import SampledResponse, SamplingPolicy
from dschat.evaluation.prompts import Answering, Selection, refuse_finished
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
from dschat.scoring.reward_reader import RewardReader, load_reward_model, load_reward_tokenizer
from dschat.scoring.segments import is_finite
from dschat.scoring.source import ResponseTexts

REWARD_FUNCTION = "--reward_function"
MODELS_DO_NOT_FIT = "--model, --reward_model: the GPU's memory does not hold them"

Scorer = Callable[[ResponseTexts], Tensor]  # texts of B responses → their scores (B,)
Candidate = tuple[float | None, SampledResponse]  # score, None if nothing scores it, and response
MakeEntry = Callable[[Sequence[Candidate]], Entry]  # candidates of one prompt in the order of their numbers → entry


@dataclass(frozen=True)
class ScoredRun:
    """A run before its models are loaded.

    Attributes:
        answering: prompts and policy.
        settings: the settings that the rows depend on.
        open_scorer: loads what scores responses; None if nothing scores them.
        scorer_name: its name with a hash of its content, for the column SCORER; empty if nothing scores responses.
    """

    answering: Answering
    settings: dict[str, Any]
    open_scorer: Callable[[], Scorer] | None
    scorer_name: str = ""

    def rows_of(self, entries: list[Entry]) -> list[dict[str, Any]]:
        """The rows of entries as the file will hold them, with the column SCORER if they have rewards."""
        rows = entry_rows(entries)
        if self.scorer_name:
            rows = [row | {SCORER: self.scorer_name} for row in rows]
        return rows


def run_inference(options: InferenceOptions) -> str:
    """Samples and scores responses, or with --ref_scores scores those of the data set; writes `options.result_path`.

    Returns:
        The last line of output.

    Raises:
        UserError: bad models or data, a finished file, or an interrupted run with other settings.
    """
    run = _find_run(options)
    selection = run.answering.selection
    num_return = options.responses.num_return
    temperature = options.responses.temperature_value
    lengths = [len(example) for example in selection.examples]
    if options.reference.ref_scores:
        lengths = _lengths_with_references(selection, run.answering.tokenizer)
        prepare = partial(_prepare_references, run)
    else:
        open_models = partial(_open_models, run, temperature)
        prepare = partial(_prepare_sampling, selection, open_models, temperature, num_return, best_entry)

    def conclude(entries: list[Entry]) -> Concluded:
        left_out = f" ({selection.dropped} prompts left out)" if selection.dropped else ""
        line = f"mean {_summary(entries)}, {len(entries)} rows{left_out}: {options.result_path}"
        return run.rows_of(entries), line

    settings = run.settings | {"num-return": num_return, "temperature": temperature}
    batches = selection.batches(options.generation.batch_size, lengths)
    part = RunPart(batches=batches, prepare=prepare)
    return run_batches(options.result_path, settings, options.result.overwrite, [part], conclude)


def run_best_of_n(options: BestOfOptions) -> str:
    """Samples and scores a sweep; writes `options.result_path`, a table and a chart, and returns the table.

    Each prompt gets max(N) responses per temperature; the best of N is that of the first N of them.

    Raises:
        UserError: bad models or data, a finished file, or an interrupted run with other settings.
    """
    path = options.result_path
    run = _find_run(options)
    selection = run.answering.selection
    num_responses_at = options.sweep.responses_per_prompt
    lowest_temperature = min(num_responses_at)
    # Loaded once for all temperatures, and only if a batch is left to do.
    open_models = cache(partial(_open_models, run, lowest_temperature))

    def conclude(entries: list[Entry]) -> Concluded:
        rows = run.rows_of(entries)
        sweep = sweep_of(path.stem, with_origins(path, rows))
        table = write_best_of([sweep], options.sweep.best_of, path.parent, path.stem)
        left_out = f", {selection.dropped} prompts left out" if selection.dropped else ""
        files = f"{path}, and the same name with .md, .json and .png"
        return rows, f"{table}\n{len(selection.examples)} prompts{left_out}: {files}"

    settings = run.settings | settings_of(options, ("best_of", "temperatures", "single_temperatures"))
    parts: list[RunPart] = []
    for temperature, num_responses in num_responses_at.items():
        parts.append(
            RunPart(
                batches=selection.batches(options.generation.batch_size),
                prepare=partial(
                    _prepare_sampling,
                    selection,
                    open_models,
                    temperature,
                    num_responses,
                    partial(sweep_entry, temperature),
                ),
                columns={"temperature": temperature},
                title=f"temperature {temperature:g}",
            )
        )
    return run_batches(path, settings, options.result.overwrite, parts, conclude)


# -- before the models are loaded


def _find_run(options: ScoredOptions) -> ScoredRun:
    """Finds prompts, policy and scorer of a run, without loading a model."""
    refuse_finished(options)
    scores = options.scores
    if scores.reward_model is not None:
        return _run_with_model(options, scores.reward_model)
    if scores.reward_function is not None:
        return _run_with_function(options, scores.reward_function)
    answering = Answering.find(options)
    return ScoredRun(answering, {"reward-model": None} | answering.settings, None)


def _run_with_model(options: ScoredOptions, model: str) -> ScoredRun:
    """A run that a reward model scores."""
    template = options.scores.rm_template
    open_config(model, "--reward_model")  # so that a folder without a model is refused
    content = content_hash(f"{model_hash(model)} {template}")
    tokenizer = load_reward_tokenizer(model, template)
    answering = Answering.find(options, tokenizer)
    settings = {"reward-model": folder_stamp(model), "rm-template": template} | answering.settings
    where = answering.where

    def open_scorer() -> RewardReader:
        return load_reward_model(model, tokenizer, template, where.device, where.dtype)

    return ScoredRun(answering, settings, open_scorer, f"{model_name(model)} {content[:12]}")


def _run_with_function(options: ScoredOptions, name: str) -> ScoredRun:
    """A run that a function scores; it is loaded first, so that a wrong name is reported before data are read."""
    function = load_function(name, REWARD_FUNCTION)
    require_arguments(function, name, REWARD_FUNCTION, with_segments=False)
    scorer = partial(score_texts, FunctionScores(function, REWARD_FUNCTION))
    answering = Answering.find(options)
    settings = {"reward-function": described_function(name)} | answering.settings
    path, _, function_name = name.rpartition(":")
    scorer_name = f"{Path(path).name}:{function_name} {file_hash(path)[:12]}"
    return ScoredRun(answering, settings, lambda: scorer, scorer_name)


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


def _lengths_with_references(selection: Selection, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Tokens of each prompt and the longer one of its two responses in the data set."""
    chosen, rejected = _references(selection.examples, tokenizer)
    chosen_ids = encode_responses(tokenizer, chosen)
    rejected_ids = encode_responses(tokenizer, rejected)
    lengths = []
    for number, example in enumerate(selection.examples):
        longest_response = max(len(chosen_ids[number]), len(rejected_ids[number]))
        lengths.append(len(example) + longest_response)
    return lengths


# -- loading the models: each function returns what makes the entries of a batch


def _prepare_references(run: ScoredRun) -> BatchFunction:
    """Loads the scorer, for the data set's own responses."""
    assert run.open_scorer is not None  # the rules of the options require one
    with enough_memory(MODELS_DO_NOT_FIT):
        scorer = run.open_scorer()
    tokenizer = _tokenizer_of_template(scorer, run.answering)
    return run.answering.selection.of_batch(partial(score_references, scorer=scorer, tokenizer=tokenizer))


def _prepare_sampling(
    selection: Selection,
    open_models: Callable[[], tuple[SamplingPolicy, Scorer | None]],
    temperature: float,
    num_responses: int,
    make_entry: MakeEntry,
) -> BatchFunction:
    """Loads policy and scorer, for responses to each prompt at one temperature."""
    policy, scorer = open_models()
    sample = partial(
        respond_and_score,
        policy=policy.at(temperature),
        scorer=scorer,
        num_responses=num_responses,
        make_entry=make_entry,
    )
    return selection.of_batch(sample)


def _open_models(run: ScoredRun, temperature: float) -> tuple[SamplingPolicy, Scorer | None]:
    """Loads the scorer, if there is one, and the policy, which samples at a temperature."""
    with enough_memory(MODELS_DO_NOT_FIT):
        scorer = None if run.open_scorer is None else run.open_scorer()
        policy = run.answering.open_policy(temperature)
    policy.check_lengths(run.answering.selection.longest)
    return policy, scorer


def _tokenizer_of_template(scorer: Scorer, answering: Answering) -> PreTrainedTokenizerBase:
    """The tokenizer whose chat template writes scored messages: the reward model's, if it has a template."""
    if isinstance(scorer, RewardReader) and scorer.tokenizer.chat_template is not None:
        return scorer.tokenizer
    return answering.tokenizer


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
