# SPDX-License-Identifier: Apache-2.0
"""Shows where termination conditions cut responses: `dschat macro-actions --help`."""

import sys
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from dschat.base.atomic import reporting, write_file
from dschat.base.errors import UserError
from dschat.data.batches import pad
from dschat.data.encoding import encode_prompt_texts, encode_responses
from dschat.evaluation.macro_actions import MacroToken, macro_text
from dschat.evaluation.page import Example, MacroPanel, Report, Section
from dschat.evaluation.panel_options import MacroActionsOptions
from dschat.evaluation.responses import read_responses
from dschat.models.load import load_causal_lm
from dschat.models.policy import PolicyModel
from dschat.models.tokenizer import load_tokenizer, token_texts
from dschat.rollouts.termination import TerminationCondition
from dschat.settings.macro_actions import TerminationFlags, termination_of
from macro_actions.segments import segment
from macro_actions.types import Rollout, Trajectory, select_rows


def run(options: MacroActionsOptions) -> str:
    """Cuts and shows."""
    examples = cut_all(options)
    in_colour = sys.stdout.isatty() or options.panels.colour
    for example in examples:
        print(_terminal(example, len(examples), in_colour))
    page = options.panels.html
    if page is None:
        return ""
    section = Section(examples=examples)
    report = Report("Macro actions", about=[f"Tokens of {options.panels.model}"], sections=[section])
    with reporting(f"--html {page}"):
        write_file(page, report.html())
    return f"page: {page}"


def cut_all(options: MacroActionsOptions) -> list[Example]:
    """Every response under every condition; raises UserError if a flag, file, model or parser cannot be used."""
    flags_of_panels = _flags_of_panels(options)
    texts = _shown_texts(options)
    tokenizer = load_tokenizer(options.panels.model, "--model")
    conditions = []
    for flags in flags_of_panels:
        conditions.append(TerminationCondition(flags, tokenizer, tokenizer.eos_token_id, options.panels.seed))

    trajectory = _trajectory(options, flags_of_panels, texts, tokenizer)
    words_of_response = []
    for token_ids in trajectory.rollout.response_rows():
        words_of_response.append(token_texts(token_ids, tokenizer))
    panels: list[list[MacroPanel]] = [[] for _ in texts]
    for flags, condition in zip(flags_of_panels, conditions, strict=True):
        macro_actions = segment(condition(trajectory, 0).ends, trajectory.response_mask)
        for row, words in enumerate(words_of_response):
            numbers = macro_actions.index[row, : len(words)].tolist()
            panels[row].append(_panel(flags.title, words, numbers))
    examples = []
    for number, text in enumerate(texts, start=1):
        examples.append(Example(f"Response {number}", text.shown_prompt, panels[number - 1]))
    return examples


def _panel(title: str, words: Sequence[str], numbers: Sequence[int]) -> MacroPanel:
    """Panel of one response, from the text of each token and the number of its macro action."""
    tokens = []
    for word, number in zip(words, numbers, strict=True):
        tokens.append(MacroToken(word, number))
    count = max(numbers, default=-1) + 1
    mean_length = len(numbers) / max(count, 1)
    return MacroPanel(title, tokens, f"{count} macro actions, {mean_length:.1f} tokens each")


def _flags_of_panels(options: MacroActionsOptions) -> list[TerminationFlags]:
    """The checked flags of each panel: `fixed` has one per length, `parsing` one per parser."""
    panels = options.panels
    flags_of_panels = []
    for condition in panels.termination_condition:
        variants: list[dict[str, object]] = [{}]
        if condition == "fixed":
            variants = [{"ngram": length} for length in panels.ngram]
        elif condition == "parsing":
            models = panels.parser_model or ["-"] * len(panels.parser)
            if len(models) != len(panels.parser):
                raise UserError(
                    f"--parser_model: give one for each of {len(panels.parser)} parsers; - is a parser's default."
                )
            variants = []
            for name, model in zip(panels.parser, models, strict=True):
                variants.append({"parser": name, "parser_model": None if model == "-" else model})
        common = options.values_of(condition) | {"isolate_last_token": panels.isolate_last_token}
        for variant in variants:
            flags = termination_of(termination_condition=condition, **common, **variant)
            flags.check_termination()
            flags_of_panels.append(flags)
    return flags_of_panels


class _ShownText(NamedTuple):
    """A response to be shown."""

    prompt: str  # as the model reads it
    shown_prompt: str  # without the marks of a chat template
    response: str
    is_finished: bool  # ends with EOS


def _shown_texts(options: MacroActionsOptions) -> list[_ShownText]:
    """The responses of --text or --jsonl."""
    panels = options.panels
    texts = []
    if panels.jsonl is None:
        for response in panels.text or []:
            texts.append(_ShownText(panels.prompt, panels.prompt, response, True))
        return texts
    for item in read_responses(panels.jsonl, "--jsonl")[: panels.limit or None]:
        is_finished = item.row.get("finished") is not False
        texts.append(_ShownText(item.row["prompt"], item.prompt, item.response, is_finished))
    return texts


def _trajectory(
    options: MacroActionsOptions,
    flags_of_panels: Sequence[TerminationFlags],
    texts: Sequence[_ShownText],
    tokenizer: PreTrainedTokenizerBase,
) -> Trajectory:
    """The responses, the finished ones with EOS, as a trajectory; log-probs only where a condition reads them."""
    prompt_texts = []
    response_texts = []
    for text in texts:
        prompt_texts.append(text.prompt)
        response_texts.append(text.response)
    prompts = encode_prompt_texts(tokenizer, prompt_texts)
    responses = encode_responses(tokenizer, response_texts)
    for text, token_ids in zip(texts, responses, strict=True):
        if text.is_finished:
            token_ids.append(tokenizer.eos_token_id)

    # Prompts are padded on the left and responses on the right, as in a sampled rollout.
    prompt_ids, prompt_mask = pad(prompts, tokenizer.pad_token_id, "left")
    response_ids, response_mask = pad(responses, tokenizer.pad_token_id, "right")
    count = len(texts)
    rollout = Rollout(
        torch.cat([prompt_ids, response_ids], 1),
        torch.cat([prompt_mask, response_mask], 1),
        response_mask,
        torch.arange(count),
        torch.tensor([text.is_finished for text in texts]),
    )

    zeros = torch.zeros(response_mask.shape)
    logprobs = zeros
    if any(flags.reads_logprobs for flags in flags_of_panels):
        logprobs = _logprobs(options, rollout, tokenizer)
    return Trajectory(rollout, logprobs, logprobs, zeros, torch.zeros(count))


def _logprobs(options: MacroActionsOptions, rollout: Rollout, tokenizer: PreTrainedTokenizerBase) -> Tensor:
    """Log-probs of the response tokens under the model, (B, R), computed one response at a time."""
    panels = options.panels
    width = rollout.response_mask.shape[1]
    has_last_prompt_token = rollout.attention_mask[:, rollout.prompt_width - 1]
    if not bool(has_last_prompt_token.all()):
        raise UserError("--prompt: the condition needs log-probs, and this tokenizer has no BOS token: give a prompt.")
    causal_lm = load_causal_lm(panels.model, "--model", torch.float32, tokenizer)
    policy = PolicyModel(causal_lm).eval()
    logprobs_by_row = []
    with torch.no_grad():
        for row in range(len(rollout.input_ids)):
            single = select_rows(rollout, torch.tensor([row]))
            logprobs, _ = policy(single.input_ids, single.attention_mask, width, panels.temperature)
            logprobs_by_row.append(logprobs)
    return torch.where(rollout.response_mask, torch.cat(logprobs_by_row), 0.0)


def _terminal(example: Example, total: int, colour: bool) -> str:
    text = f"── {example.title.lower()} of {total}\n"
    for panel in example.panels:
        response = macro_text(panel.tokens, colour)
        text += f"\n{panel.title}: {panel.caption}\n{response}\n"
    return text
