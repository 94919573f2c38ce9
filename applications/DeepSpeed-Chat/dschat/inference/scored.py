# SPDX-License-Identifier: Apache-2.0
"""Responses of a policy scored by a reward model: the best of some at one temperature, or all of a sweep."""

from collections.abc import Callable, Sequence
from functools import cache, partial
from statistics import fmean
from typing import Any

from transformers import PreTrainedTokenizerBase

from dschat.common.fingerprints import folder_stamp
from dschat.common.statistics import mean_estimate
from dschat.data.encoding import encode_responses, response_texts
from dschat.data.examples import PromptExample
from dschat.errors import UserError
from dschat.evaluation.best_of import sweep_of
from dschat.inference.options import BestOfOptions, InferenceOptions
from dschat.inference.policy import SampledResponse, SamplingPolicy
from dschat.inference.prompts import Answering, Selection, refuse_finished
from dschat.inference.runner import BatchFunction, Concluded, Entry, Part, enough_memory, run_batches, settings_of
from dschat.reports.evaluations import write_best_of
from dschat.scoring.reward_reader import RewardReader, load_reward_model, load_reward_tokenizer
from dschat.scoring.source import ResponseTexts

BOTH = "--model, --reward_model: the GPU's memory does not hold both"

Candidate = tuple[float, SampledResponse]  # a response behind its reward


def run_inference(options: InferenceOptions) -> str:
    """Generates and scores, or with `ref_scores` only scores; writes `options.result_path` and returns the last line.

    Raises UserError for bad models or data, a finished file, or an interrupted run with other settings.
    """
    given, settings, open_reader = _find(options)
    selection = given.selection

    def prepare() -> BatchFunction:
        with enough_memory(BOTH):
            reader = open_reader()
            if options.ref_scores or given.path is None:
                return selection.of_batch(partial(score_references, reader, _template_of(reader, given)))
            policy = given.open_policy(options.temperature_value)
        policy.check_lengths(selection.longest)
        return selection.of_batch(partial(respond_and_score, policy, reader, options.num_return, best_of))

    def conclude(entries: list[Entry]) -> Concluded:
        left_out = f" ({selection.dropped} prompts left out)" if selection.dropped else ""
        line = f"mean {_means(entries)}, {len(entries)} rows{left_out}: {options.result_path}"
        return [entry["row"] for entry in entries], line

    settings |= {"num-return": options.num_return, "temperature": options.temperature_value}
    batches = selection.batches(options.batch_size, _lengths(selection, options, given.tokenizer))
    part = Part(batches=batches, prepare=prepare, shown=_mean)
    return run_batches(options.result_path, settings, options.overwrite, [part], conclude)


def run_best_of_n(options: BestOfOptions) -> str:
    """Draws and scores; writes `options.result_path`, table and curves beside it, and returns the table.

    At a temperature, the responses to a prompt are drawn once, as many as the largest N; the best of N is that of the
    first N of them. Raises UserError for bad models or data, a finished file, or an interrupted run with other
    settings.
    """
    path = options.result_path
    given, settings, open_reader = _find(options)
    selection, draws = given.selection, options.draws

    @cache
    def models() -> tuple[SamplingPolicy, RewardReader]:
        with enough_memory(BOTH):
            reader, policy = open_reader(), given.open_policy(next(iter(draws)))
        policy.check_lengths(selection.longest)
        return policy, reader

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
        Part(
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
) -> tuple[Answering, dict[str, Any], Callable[[], RewardReader]]:
    """The prompts and who answers them, what the rows depend on, and what opens the reward model."""
    refuse_finished(options)
    model, template = options.reward_model, options.rm_template
    tokenizer = load_reward_tokenizer(model, template)
    given = Answering.find(options, tokenizer)
    settings = {"reward-model": folder_stamp(model), "rm-template": template} | given.settings
    return (
        given,
        settings,
        lambda: load_reward_model(model, tokenizer, template, given.where.device, given.where.dtype),
    )


def respond_and_score(
    policy: SamplingPolicy,
    reader: RewardReader,
    draws: int,
    keep: Callable[[Sequence[Candidate]], Entry],
    examples: list[PromptExample],
) -> list[Entry]:
    """Draws so many responses to each prompt and scores them.

    `keep` makes an entry of the responses to a prompt, which come in the order of their numbers.
    """
    drawn = []
    for responses in policy.respond(examples, draws):
        rewards = _rewards(reader, examples, [response.text for response in responses])
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


def _template_of(reader: RewardReader, given: Answering) -> PreTrainedTokenizerBase:
    """The tokenizer whose chat template writes what the reward model reads of messages: its own, if it has one."""
    return given.tokenizer if reader.tokenizer.chat_template is None else reader.tokenizer


def score_references(
    reader: RewardReader, tokenizer: PreTrainedTokenizerBase, examples: list[PromptExample]
) -> list[Entry]:
    """Scores the data set's own responses, behind messages as the chat template of the tokenizer writes them."""
    chosen, rejected = _references(examples, tokenizer)
    scores = (_rewards(reader, examples, texts) for texts in (chosen, rejected))
    entries = []
    for example, better, worse, *rewards in zip(examples, chosen, rejected, *scores, strict=True):
        row = example.columns | {"response": better, "reward": rewards[0]}
        row |= {"rejected_response": worse, "rejected_reward": rewards[1]}
        entries.append({"number": example.index, "row": row, "tokens": None})
    return entries


def _rewards(reader: RewardReader, examples: list[PromptExample], responses: list[str]) -> list[float]:
    prompts, rows = [example.prompt_text for example in examples], [example.row for example in examples]
    return reader(ResponseTexts(prompts, responses, rows)).tolist()


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
    """The means over the rows of the file."""
    rows = [entry["row"] for entry in entries]
    reward = f"reward {mean_estimate([row['reward'] for row in rows]).text(4)}"
    if "rejected_reward" in rows[0]:
        rejected = mean_estimate([row["rejected_reward"] for row in rows]).text(4)
        higher = fmean(row["reward"] > row["rejected_reward"] for row in rows)
        return f"{reward}, rejected {rejected}, chosen above rejected {higher:.1%}"
    length = fmean(entry["tokens"] for entry in entries)
    return f"{reward}, length {length:.1f} tokens, EOS rate {fmean(row['finished'] for row in rows):.1%}"


def _mean(entries: list[Entry]) -> dict[str, str]:
    return {"reward": f"{fmean(entry['row']['reward'] for entry in entries):.3f}"}


def _mean_and_best(entries: list[Entry]) -> dict[str, str]:
    rewards = [entry["row"]["rewards"] for entry in entries]
    return {"reward": f"{fmean(map(fmean, rewards)):.3f}", "best": f"{fmean(map(max, rewards)):.3f}"}
