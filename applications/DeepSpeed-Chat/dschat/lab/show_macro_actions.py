# SPDX-License-Identifier: Apache-2.0
"""Shows where termination conditions cut responses: `dschat macro-actions --help`."""

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from dschat.base.atomic import reporting, write_file
from dschat.base.errors import UserError
from dschat.data.collate import pad
from dschat.data.encoding import encode_prompts, encode_responses
from dschat.data.rows import Row
from dschat.lab.macro_actions import MacroToken, macro_text
from dschat.lab.page import Example, MacroPanel, Report, Section
from dschat.lab.responses import read_responses
from dschat.models.load import load_causal_lm
from dschat.models.policy import PolicyModel
from dschat.models.tokenizer import load_tokenizer, token_texts
from dschat.rollouts.termination import TerminationCondition
from dschat.settings.macro_actions import MacroActionsOptions, TerminationFlags, termination_of
from macro_actions.segments import segment
from macro_actions.types import Rollout, Trajectory, select_rows


@dataclasses.dataclass(frozen=True)
class Shown:
    """A response under several conditions: its prompt, and a panel for each."""

    prompt: str
    panels: list[MacroPanel]


def run(options: MacroActionsOptions) -> str:
    """Cuts and shows."""
    shown = cut_all(options)
    for number, item in enumerate(shown, start=1):
        print(_terminal(item, number, len(shown), sys.stdout.isatty() or options.panels.colour))
    if options.panels.html is None:
        return ""
    write_page(options.panels.html, shown, options.panels.model)
    return f"page: {options.panels.html}"


def cut_all(options: MacroActionsOptions) -> list[Shown]:
    """Every response under every condition; raises UserError if a flag, file, model or parser cannot be used."""
    titled = [pair for condition in options.panels.termination_condition for pair in _titled_flags(condition, options)]
    for _, flags in titled:
        flags.check_termination()
    texts = _texts(options)
    tokenizer = load_tokenizer(options.panels.model, "--model")
    conditions = [
        TerminationCondition(flags, tokenizer, tokenizer.eos_token_id, options.panels.seed) for _, flags in titled
    ]
    trajectory = _trajectory(options, texts, tokenizer)
    rows = trajectory.rollout.response_rows()
    pieces = [token_texts(row, tokenizer) for row in rows]
    shown = [Shown(prompt, []) for prompt, _ in texts]
    for (title, _), condition in zip(titled, conditions, strict=True):
        macro = segment(condition(trajectory, 0).ends, trajectory.response_mask)
        for row, item in enumerate(shown):
            numbers = macro.index[row, : len(rows[row])].tolist()
            tokens = []
            for text, number in zip(pieces[row], numbers, strict=True):
                tokens.append(MacroToken(text, number))
            count = max(numbers, default=-1) + 1
            caption = f"{count} macro actions, {len(numbers) / max(count, 1):.1f} tokens each"
            item.panels.append(MacroPanel(title, tokens, caption))
    return shown


def write_page(file: Path, shown: Sequence[Shown], model: str) -> None:
    """Writes the HTML page; raises UserError if it cannot."""
    examples = []
    for number, item in enumerate(shown, start=1):
        examples.append(Example(f"Response {number}", item.prompt, item.panels))
    section = Section(examples=examples, numbers=False)
    report = Report("Macro actions", notes=[f"Tokens of {model}"], sections=[section])
    with reporting(f"--html {file}"):
        write_file(file, report.html())


def _titled_flags(condition: str, options: MacroActionsOptions) -> list[tuple[str, TerminationFlags]]:
    """The title and the flags of each panel: `fixed` once per length, `parsing` once per parser."""
    common = {"termination_condition": condition, **options.values_of(condition)}
    if condition == "fixed":
        panels = [common | {"ngram": length} for length in options.panels.ngram]
    elif condition == "parsing":
        panels = [common | parser for parser in _parsers(options)]
    else:
        panels = [common]
    titled = []
    for values in panels:
        flags = termination_of(**values)
        titled.append((flags.title, flags))
    return titled


def _parsers(options: MacroActionsOptions) -> list[dict[str, str | None]]:
    """The flags of each parser: its name and its model, where - stands for its default model."""
    models = options.panels.parser_model or ["-"] * len(options.panels.parser)
    if len(models) != len(options.panels.parser):
        raise UserError(
            f"--parser_model: give one for each of {len(options.panels.parser)} parsers; - is a parser's default."
        )
    pairs = zip(options.panels.parser, models, strict=True)
    changes: list[dict[str, str | None]] = []
    for name, model in pairs:
        changes.append({"parser": name, "parser_model": None if model == "-" else model})
    return changes


def _texts(options: MacroActionsOptions) -> list[tuple[str, str]]:
    """The pairs (prompt, response) to be shown."""
    if options.panels.jsonl is None:
        return [(options.panels.prompt, text) for text in options.panels.text or []]
    responses = read_responses(options.panels.jsonl, "--jsonl")
    shown = responses[: options.panels.limit or None]
    return [(item.prompt, item.response) for item in shown]


def _trajectory(
    options: MacroActionsOptions, texts: Sequence[tuple[str, str]], tokenizer: PreTrainedTokenizerBase
) -> Trajectory:
    """The responses, each with its EOS, as a trajectory; log-probs only where a condition reads them."""
    prompts = encode_prompts(tokenizer, [Row(prompt, None, None, None, {}, "--prompt") for prompt, _ in texts])
    responses = [[*ids, tokenizer.eos_token_id] for ids in encode_responses(tokenizer, [text for _, text in texts])]
    left, before = pad(prompts, tokenizer.pad_token_id, "left")
    right, mask = pad(responses, tokenizer.pad_token_id, "right")
    ids, attention = torch.cat([left, right], 1), torch.cat([before, mask], 1)
    rollout = Rollout(ids, attention, mask, torch.arange(len(ids)), torch.ones(len(ids)).bool())
    blank = torch.zeros(mask.shape)
    reads_them = any(
        termination_of(termination_condition=name).reads_logprobs for name in options.panels.termination_condition
    )
    logprobs = _logprobs(options, rollout, tokenizer) if reads_them else blank
    return Trajectory(rollout, logprobs, logprobs, blank, torch.zeros(len(ids)))


def _logprobs(options: MacroActionsOptions, rollout: Rollout, tokenizer: PreTrainedTokenizerBase) -> Tensor:
    """(B, R) under the model, row by row: nothing here is in a hurry."""
    width = rollout.response_mask.shape[1]
    if not bool(rollout.attention_mask[:, rollout.prompt_width - 1].all()):
        raise UserError("--prompt: the condition needs log-probs, and this tokenizer has no BOS token: give a prompt.")
    policy, parts = PolicyModel(load_causal_lm(options.panels.model, "--model", torch.float32, tokenizer)).eval(), []
    with torch.no_grad():
        for row in range(len(rollout.input_ids)):
            part = select_rows(rollout, torch.tensor([row]))
            parts.append(policy(part.input_ids, part.attention_mask, width, options.panels.temperature)[0])
    return torch.where(rollout.response_mask, torch.cat(parts), 0.0)


def _terminal(item: Shown, number: int, total: int, colour: bool) -> str:
    lines = [f"── response {number} of {total}"]
    for panel in item.panels:
        lines += ["", f"{panel.title}: {panel.caption}", macro_text(panel.tokens, colour)]
    return "\n".join([*lines, ""])
