# SPDX-License-Identifier: Apache-2.0
"""Responses of a policy, scored by a reward model or a function: the best of some, or all of a sweep."""

from collections.abc import Callable, Sequence
from functools import cache, partial
from statistics import fmean
from typing import Any

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from dschat.base.errors import UserError
from dschat.base.fingerprints import folder_stamp
from dschat.base.statistics import mean_estimate
from dschat.base.user_function import load_function
from dschat.data.encoding import encode_responses
from dschat.data.examples import PromptExample
from dschat.data.turn_end import response_texts
from dschat.lab.best_of import sweep_of, write_best_of
from dschat.lab.generate_options import BestOfOptions, InferenceOptions, ScoredOptions
from dschat.lab.policy import SampledResponse, SamplingPolicy
from dschat.lab.prompts import Answering, Selection, refuse_finished
from dschat.lab.refuel.datasets import described_function
from dschat.lab.responses import with_origins
from dschat.lab.runner import (
    BatchFunction,
    Concluded,
    Entry,
    RunPart,
    enough_memory,
    entry_rows,
    run_batches,
    settings_of,
)
from dschat.scoring.function import require_arguments, score_texts
from dschat.scoring.reward_reader import RewardReader, load_reward_model, load_reward_tokenizer
from dschat.scoring.source import ResponseTexts

BOTH = "--model, --reward_model: the GPU's memory does not hold both"
FUNCTION = "--reward_function"

Scorer = Callable[[ResponseTexts], Tensor]  # texts of B responses → their scores (B,)
Candidate = tuple[float, SampledResponse]  # reward and response


def run_inference(options: InferenceOptions) -> str:
    """Sample and score responses, or with --ref_scores score those of the data set; writes `options.result_path`.

    Returns:
        The last line of output.

    Raises:
        UserError: bad models or data, a finished file, or an interrupted run with other settings.
    """
    answering, settings, open_scorer = _open_run(options)
    selection = answering.selection
    num_return = options.responses.num_return
    temperature = options.responses.temperature_value
    ref_scores = options.reference.ref_scores

    def prepare() -> BatchFunction:
        with enough_memory(BOTH):
            scorer = open_scorer()
            if ref_scores or answering.path is None:
                assert scorer is not None  # the rules of the options require one
                template = _template_of(scorer, answering)
                return selection.of_batch(partial(score_references, scorer, template))
            policy = answering.open_policy(temperature)
        policy.check_lengths(selection.longest)
        if scorer is None:
            return selection.of_batch(partial(respond, policy))
        return selection.of_batch(partial(respond_and_score, policy, scorer, num_return, best_of))

    def conclude(entries: list[Entry]) -> Concluded:
        left_out = f" ({selection.dropped} prompts left out)" if selection.dropped else ""
        line = f"mean {_means(entries)}, {len(entries)} rows{left_out}: {options.result_path}"
        return entry_rows(entries), line

    settings |= {"num-return": num_return, "temperature": temperature}
    lengths = _lengths(selection, ref_scores, answering.tokenizer)
    batches = selection.batches(options.generation.batch_size, lengths)
    part = RunPart(batches=batches, prepare=prepare, shown=_mean)
    return run_batches(options.result_path, settings, options.result.overwrite, [part], conclude)


def run_best_of_n(options: BestOfOptions) -> str:
    """Sample and score a sweep; writes `options.result_path`, a table and a chart, and returns the table.

    At each temperature, the responses to a prompt are sampled once, as many as the largest N; the best of N is that
    of the first N of them.

    Raises:
        UserError: bad models or data, a finished file, or an interrupted run with other settings.
    """
    path = options.result_path
    answering, settings, open_scorer = _open_run(options)
    selection = answering.selection
    num_responses = options.sweep.responses_per_prompt

    @cache
    def models() -> tuple[SamplingPolicy, Scorer]:
        with enough_memory(BOTH):
            scorer = open_scorer()
            policy = answering.open_policy(min(num_responses))
        assert scorer is not None  # the rules of the options require one
        policy.check_lengths(selection.longest)
        return policy, scorer

    def prepare(temperature: float) -> BatchFunction:
        policy, scorer = models()
        make_entry = partial(all_of, temperature)
        function = partial(respond_and_score, policy.at(temperature), scorer, num_responses[temperature], make_entry)
        return selection.of_batch(function)

    def conclude(entries: list[Entry]) -> Concluded:
        rows = entry_rows(entries)
        sweep = sweep_of(path.stem, with_origins(path, rows))
        table = write_best_of([sweep], options.sweep.best_of, path.parent, path.stem)
        left_out = f", {selection.dropped} prompts left out" if selection.dropped else ""
        files = f"{path}, and the same name with .md, .json and .png"
        return rows, f"{table}\n{len(selection.examples)} prompts{left_out}: {files}"

    settings |= settings_of(options, ("best_of", "temperatures", "single_temperatures"))
    parts: list[RunPart] = []
    for temperature in num_responses:
        parts.append(
            RunPart(
                batches=selection.batches(options.generation.batch_size),
                prepare=partial(prepare, temperature),
                shown=_mean_and_best,
                columns={"temperature": temperature},
                title=f"temperature {temperature:g}",
            )
        )
    return run_batches(path, settings, options.result.overwrite, parts, conclude)


def _open_run(options: ScoredOptions) -> tuple[Answering, dict[str, Any], Callable[[], Scorer | None]]:
    """Find prompts, policy and scorer of a run, without loading a model.

    A function is loaded at once, so that a wrong name is reported before anything is read.

    Returns:
        Prompts and policy; the settings that the rows depend on; and what opens the scorer, or returns None if
        nothing scores.
    """
    refuse_finished(options)
    scores = options.scores
    if scores.reward_model is not None:
        model = scores.reward_model
        template = scores.rm_template
        tokenizer = load_reward_tokenizer(model, template)
        answering = Answering.find(options, tokenizer)
        settings = {"reward-model": folder_stamp(model), "rm-template": template} | answering.settings
        where = answering.where

        def open_reader() -> RewardReader:
            return load_reward_model(model, tokenizer, template, where.device, where.dtype)

        return answering, settings, open_reader
    if scores.reward_function is not None:
        function = load_function(scores.reward_function, FUNCTION)
        require_arguments(function, scores.reward_function, FUNCTION, with_segments=False)
        answering = Answering.find(options)
        settings = {"reward-function": described_function(scores.reward_function)} | answering.settings
        return answering, settings, lambda: partial(score_texts, function, FUNCTION)
    answering = Answering.find(options)
    settings = {"reward-model": None} | answering.settings
    return answering, settings, lambda: None


def respond(policy: SamplingPolicy, examples: list[PromptExample]) -> list[Entry]:
    """Sample one response to each prompt, without a score."""
    (responses,) = policy.respond(examples, 1)
    entries: list[Entry] = []
    for example, response in zip(examples, responses, strict=True):
        row = example.columns
        row["response"] = response.text
        row["finished"] = response.finished
        entries.append({"number": example.index, "row": row, "tokens": response.tokens})
    return entries


def respond_and_score(
    policy: SamplingPolicy,
    scorer: Scorer,
    num_responses: int,
    make_entry: Callable[[Sequence[Candidate]], Entry],
    examples: list[PromptExample],
) -> list[Entry]:
    """Sample `num_responses` responses to each prompt and score them.

    `make_entry` turns the candidates of one prompt, in the order of their numbers, into an entry of the journal.
    """
    candidates_by_number: list[list[Candidate]] = []
    for responses in policy.respond(examples, num_responses):
        rewards = _rewards(scorer, examples, [response.text for response in responses])
        candidates_by_number.append(list(zip(rewards, responses, strict=True)))

    entries: list[Entry] = []
    for example, candidates in zip(examples, zip(*candidates_by_number, strict=True), strict=True):
        entry = make_entry(candidates)
        entry["number"] = example.index
        entry["row"] = example.columns | entry["row"]
        entries.append(entry)
    return entries


def best_of(candidates: Sequence[Candidate]) -> Entry:
    """The response with the highest reward, the first of equals."""
    reward, response = max(candidates, key=lambda candidate: candidate[0])
    row = {"response": response.text, "reward": reward, "finished": response.finished}
    if len(candidates) > 1:
        row["rewards"] = [candidate[0] for candidate in candidates]
    return {"row": row, "tokens": response.tokens}


def all_of(temperature: float, candidates: Sequence[Candidate]) -> Entry:
    """All responses to a prompt at a temperature."""
    texts = []
    rewards = []
    finished = []
    for reward, response in candidates:
        texts.append(response.text)
        rewards.append(reward)
        finished.append(response.finished)
    row = {
        "temperature": temperature,
        "responses": texts,
        "rewards": rewards,
        "finished": finished,
    }
    return {"row": row}


def _template_of(scorer: Scorer, answering: Answering) -> PreTrainedTokenizerBase:
    """The tokenizer whose chat template writes scored messages: the reward model's, if it has a template."""
    if isinstance(scorer, RewardReader) and scorer.tokenizer.chat_template is not None:
        return scorer.tokenizer
    return answering.tokenizer


def score_references(
    scorer: Scorer,
    tokenizer: PreTrainedTokenizerBase,
    examples: list[PromptExample],
) -> list[Entry]:
    """Score the data set's own responses, behind messages as the chat template of the tokenizer writes them."""
    chosen, rejected = _references(examples, tokenizer)
    chosen_rewards = _rewards(scorer, examples, chosen)
    rejected_rewards = _rewards(scorer, examples, rejected)
    entries: list[Entry] = []
    for number, example in enumerate(examples):
        row = example.columns | {
            "response": chosen[number],
            "reward": chosen_rewards[number],
            "rejected_response": rejected[number],
            "rejected_reward": rejected_rewards[number],
        }
        entries.append({"number": example.index, "row": row, "tokens": None})
    return entries


def _rewards(
    scorer: Scorer,
    examples: list[PromptExample],
    responses: list[str],
) -> list[float]:
    prompts = []
    rows = []
    for example in examples:
        prompts.append(example.prompt_text)
        rows.append(example.row)
    scores = scorer(ResponseTexts(prompts, responses, rows))
    return scores.tolist()


def _references(
    examples: list[PromptExample],
    tokenizer: PreTrainedTokenizerBase,
) -> tuple[list[str], list[str]]:
    """The data set's chosen and rejected responses."""
    rows = []
    for example in examples:
        row = example.row
        if row.chosen is None or row.rejected is None:
            missing = "chosen" if row.chosen is None else "rejected"
            raise UserError(f"--ref_scores: {row.origin} has no {missing} response; use a data set that has both.")
        rows.append(row)
    return response_texts(tokenizer, rows, "chosen"), response_texts(tokenizer, rows, "rejected")


def _lengths(selection: Selection, ref_scores: bool, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Tokens read of each example: by the reward model, or by the policy before it samples."""
    lengths = [len(example) for example in selection.examples]
    if not ref_scores:
        return lengths
    chosen, rejected = _references(selection.examples, tokenizer)
    chosen_ids = encode_responses(tokenizer, chosen)
    rejected_ids = encode_responses(tokenizer, rejected)
    for number, ids in enumerate(zip(chosen_ids, rejected_ids, strict=True)):
        lengths[number] += max(map(len, ids))
    return lengths


def _mean_of(rows: list[dict[str, Any]], column: str, digits: int, factor: float = 1.0) -> str:
    """The mean of a column ± one standard error."""
    values = [float(row[column]) for row in rows]
    return mean_estimate(values).text(digits, factor)


def _means(entries: list[Entry]) -> str:
    """Means over the rows of the file, each ± one standard error."""
    rows = entry_rows(entries)
    if "rejected_reward" in rows[0]:
        reward = _mean_of(rows, "reward", 4)
        rejected = _mean_of(rows, "rejected_reward", 4)
        wins = [float(row["reward"] > row["rejected_reward"]) for row in rows]
        win_rate = mean_estimate(wins).text(1, 100.0)
        return f"reward {reward}, rejected {rejected}, chosen above rejected {win_rate} %"
    length = _mean_of(entries, "tokens", 1)
    finished = _mean_of(rows, "finished", 1, 100.0)
    summary = f"length {length} tokens, EOS rate {finished} %"
    if "reward" not in rows[0]:
        return f"{summary} (no scores: neither --reward_model nor --reward_function)"
    reward = _mean_of(rows, "reward", 4)
    return f"reward {reward}, {summary}"


def _mean(entries: list[Entry]) -> dict[str, str]:
    """Mean reward for the progress bar; without scores the mean length."""
    rows = entry_rows(entries)
    if "reward" not in rows[0]:
        length = fmean(entry["tokens"] for entry in entries)
        return {"tokens": f"{length:.1f}"}
    reward = fmean(row["reward"] for row in rows)
    return {"reward": f"{reward:.3f}"}


def _mean_and_best(entries: list[Entry]) -> dict[str, str]:
    """Mean reward, and mean of the best reward of each prompt, for the progress bar."""
    means = []
    maxima = []
    for row in entry_rows(entries):
        means.append(fmean(row["rewards"]))
        maxima.append(max(row["rewards"]))
    return {"reward": f"{fmean(means):.3f}", "best": f"{fmean(maxima):.3f}"}
