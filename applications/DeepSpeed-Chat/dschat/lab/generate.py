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
from dschat.data.encoding import encode_responses, response_texts
from dschat.data.examples import PromptExample
from dschat.lab.best_of import sweep_of, write_best_of
from dschat.lab.generate_options import BestOfOptions, InferenceOptions
from dschat.lab.policy import SampledResponse, SamplingPolicy
from dschat.lab.prompts import Answering, Selection, refuse_finished
from dschat.lab.refuel.datasets import described_function
from dschat.lab.runner import BatchFunction, Concluded, Entry, RunPart, enough_memory, run_batches, settings_of
from dschat.scoring.function import require_arguments, score_texts
from dschat.scoring.reward_reader import RewardReader, load_reward_model, load_reward_tokenizer
from dschat.scoring.source import ResponseTexts

BOTH = "--model, --reward_model: the GPU's memory does not hold both"

FUNCTION = "--reward_function"
Scorer = Callable[[ResponseTexts], Tensor]  # texts of B responses → their scores (B,)
Candidate = tuple[float, SampledResponse]  # a response behind its reward


def run_inference(options: InferenceOptions) -> str:
    """Generates and scores, where there is something to score with, or with `ref_scores` only scores; writes
    `options.result_path` and returns the last line.

    Raises UserError for bad models or data, a finished file, or an interrupted run with other settings.
    """
    given, settings, open_scorer = _find(options)
    selection = given.selection

    def prepare() -> BatchFunction:
        with enough_memory(BOTH):
            scorer = open_scorer()
            if options.ref_scores or given.path is None:
                assert scorer is not None  # the options have something to score with
                return selection.of_batch(partial(score_references, scorer, _template_of(scorer, given)))
            policy = given.open_policy(options.temperature_value)
        policy.check_lengths(selection.longest)
        if scorer is None:
            return selection.of_batch(partial(respond, policy))
        return selection.of_batch(partial(respond_and_score, policy, scorer, options.num_return, best_of))

    def conclude(entries: list[Entry]) -> Concluded:
        left_out = f" ({selection.dropped} prompts left out)" if selection.dropped else ""
        line = f"mean {_means(entries)}, {len(entries)} rows{left_out}: {options.result_path}"
        return [entry["row"] for entry in entries], line

    settings |= {"num-return": options.num_return, "temperature": options.temperature_value}
    batches = selection.batches(options.batch_size, _lengths(selection, options, given.tokenizer))
    part = RunPart(batches=batches, prepare=prepare, shown=_mean)
    return run_batches(options.result_path, settings, options.overwrite, [part], conclude)


def run_best_of_n(options: BestOfOptions) -> str:
    """Draws and scores; writes `options.result_path`, table and curves beside it, and returns the table.

    At a temperature, the responses to a prompt are drawn once, as many as the largest N; the best of N is that of the
    first N of them. Raises UserError for bad models or data, a finished file, or an interrupted run with other
    settings.
    """
    path = options.result_path
    given, settings, open_scorer = _find(options)
    selection, draws = given.selection, options.draws

    @cache
    def models() -> tuple[SamplingPolicy, Scorer]:
        with enough_memory(BOTH):
            scorer = open_scorer()
            policy = given.open_policy(next(iter(draws)))
        assert scorer is not None  # the options have something to score with
        policy.check_lengths(selection.longest)
        return policy, scorer

    def prepare(temperature: float) -> BatchFunction:
        policy, reader = models()
        policy, count = policy.at(temperature), draws[temperature]
        return selection.of_batch(partial(respond_and_score, policy, reader, count, partial(all_of, temperature)))

    def conclude(entries: list[Entry]) -> Concluded:
        rows = [entry["row"] for entry in entries]
        with_places = ((f"{path}:{number}", row) for number, row in enumerate(rows, start=1))
        table = write_best_of([sweep_of(path.stem, with_places)], options.best_of, path.parent, path.stem)
        left_out = f", {selection.dropped} prompts left out" if selection.dropped else ""
        return rows, f"{table}\n{len(selection.examples)} prompts{left_out}: {path} and beside it .md, .json and .png"

    settings |= settings_of(options, ("best_of", "temperatures", "single_temperatures"))
    parts = [
        RunPart(
            batches=selection.batches(options.batch_size),
            prepare=partial(prepare, temperature),
            shown=_mean_and_best,
            columns={"temperature": temperature},
            title=f"temperature {temperature:g}",
        )
        for temperature in draws
    ]
    return run_batches(path, settings, options.overwrite, parts, conclude)


def _find(
    options: InferenceOptions | BestOfOptions,
) -> tuple[Answering, dict[str, Any], Callable[[], Scorer | None]]:
    """The prompts and who answers them, what the rows depend on, and what opens the source of scores, if there is one.

    A function is loaded at once, so that a wrong name is said before anything is read.
    """
    refuse_finished(options)
    model, template = options.reward_model, options.rm_template
    if model is not None:
        tokenizer = load_reward_tokenizer(model, template)
        given = Answering.find(options, tokenizer)
        settings = {"reward-model": folder_stamp(model), "rm-template": template} | given.settings
        where = given.where.device, given.where.dtype
        return given, settings, lambda: load_reward_model(model, tokenizer, template, *where)
    if options.reward_function is not None:
        function = load_function(options.reward_function, FUNCTION)
        require_arguments(function, options.reward_function, FUNCTION, with_segments=False)
        given = Answering.find(options)
        settings = {"reward-function": described_function(options.reward_function)} | given.settings
        return given, settings, lambda: partial(score_texts, function, FUNCTION)
    given = Answering.find(options)
    return given, {"reward-model": None} | given.settings, lambda: None


def respond(policy: SamplingPolicy, examples: list[PromptExample]) -> list[Entry]:
    """One response to each prompt, without a score."""
    (responses,) = policy.respond(examples, 1)
    entries = []
    for example, response in zip(examples, responses, strict=True):
        row = example.columns | {"response": response.text, "finished": response.finished}
        entries.append({"number": example.index, "row": row, "tokens": response.tokens})
    return entries


def respond_and_score(
    policy: SamplingPolicy,
    scorer: Scorer,
    draws: int,
    keep: Callable[[Sequence[Candidate]], Entry],
    examples: list[PromptExample],
) -> list[Entry]:
    """Draws so many responses to each prompt and scores them.

    `keep` makes an entry of the responses to a prompt, which come in the order of their numbers.
    """
    drawn = []
    for responses in policy.respond(examples, draws):
        rewards = _rewards(scorer, examples, [response.text for response in responses])
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
    return {"row": row}


def _template_of(scorer: Scorer, given: Answering) -> PreTrainedTokenizerBase:
    """The tokenizer whose chat template writes what is scored of messages: the reward model's own, if it has one."""
    if isinstance(scorer, RewardReader) and scorer.tokenizer.chat_template is not None:
        return scorer.tokenizer
    return given.tokenizer


def score_references(scorer: Scorer, tokenizer: PreTrainedTokenizerBase, examples: list[PromptExample]) -> list[Entry]:
    """Scores the data set's own responses, behind messages as the chat template of the tokenizer writes them."""
    chosen, rejected = _references(examples, tokenizer)
    scores = (_rewards(scorer, examples, texts) for texts in (chosen, rejected))
    entries = []
    for example, better, worse, *rewards in zip(examples, chosen, rejected, *scores, strict=True):
        row = example.columns | {"response": better, "reward": rewards[0]}
        row |= {"rejected_response": worse, "rejected_reward": rewards[1]}
        entries.append({"number": example.index, "row": row, "tokens": None})
    return entries


def _rewards(scorer: Scorer, examples: list[PromptExample], responses: list[str]) -> list[float]:
    prompts, rows = [example.prompt_text for example in examples], [example.row for example in examples]
    return scorer(ResponseTexts(prompts, responses, rows)).tolist()


def _references(examples: list[PromptExample], tokenizer: PreTrainedTokenizerBase) -> tuple[list[str], list[str]]:
    """The data set's chosen and rejected responses."""
    rows = [example.row for example in examples]
    for row in rows:
        if row.chosen is None or row.rejected is None:
            missing = "chosen" if row.chosen is None else "rejected"
            raise UserError(f"--ref_scores: {row.origin} has no {missing} response; use a data set that has both.")
    return response_texts(tokenizer, rows, "chosen"), response_texts(tokenizer, rows, "rejected")


def _lengths(selection: Selection, options: InferenceOptions, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Tokens that the reward model, or the policy before it draws, reads of each example."""
    lengths = [len(example) for example in selection.examples]
    if options.ref_scores:
        texts = _references(selection.examples, tokenizer)
        longer = map(max, *(map(len, encode_responses(tokenizer, some)) for some in texts))
        lengths = [length + more for length, more in zip(lengths, longer, strict=True)]
    return lengths


def _means(entries: list[Entry]) -> str:
    """The means over the rows of the file, each ± one standard error."""
    rows = [entry["row"] for entry in entries]
    if "rejected_reward" in rows[0]:
        reward = mean_estimate([row["reward"] for row in rows]).text(4)
        rejected = mean_estimate([row["rejected_reward"] for row in rows]).text(4)
        higher = mean_estimate([float(row["reward"] > row["rejected_reward"]) for row in rows]).text(1, 100.0)
        return f"reward {reward}, rejected {rejected}, chosen above rejected {higher} %"
    length = mean_estimate([float(entry["tokens"]) for entry in entries]).text(1)
    ended = mean_estimate([float(row["finished"]) for row in rows]).text(1, 100.0)
    numbers = f"length {length} tokens, EOS rate {ended} %"
    if "reward" not in rows[0]:
        return f"{numbers} (no scores: neither --reward_model nor --reward_function)"
    return f"reward {mean_estimate([row['reward'] for row in rows]).text(4)}, {numbers}"


def _mean(entries: list[Entry]) -> dict[str, str]:
    """What the progress bar shows."""
    if "reward" not in entries[0]["row"]:
        return {"tokens": f"{fmean(entry['tokens'] for entry in entries):.1f}"}
    return {"reward": f"{fmean(entry['row']['reward'] for entry in entries):.3f}"}


def _mean_and_best(entries: list[Entry]) -> dict[str, str]:
    rewards = [entry["row"]["rewards"] for entry in entries]
    return {"reward": f"{fmean(map(fmean, rewards)):.3f}", "best": f"{fmean(map(max, rewards)):.3f}"}
