# SPDX-License-Identifier: Apache-2.0
"""Shows where termination conditions cut responses: `python -m dschat.macro_view.show --help`."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from dschat.errors import UserError
from dschat.macro_view.html import MacroPanel, MacroToken
from dschat.macro_view.text import macro_text

CONDITIONS = ("fixed", "randomized", "ppl", "parsing")


@dataclass(frozen=True)
class Shown:
    """A response under several conditions: its prompt, and a panel for each."""

    prompt: str
    panels: list[MacroPanel]


def main(argv: Sequence[str] | None = None) -> int:
    """Parses the flags, cuts and shows; returns the exit status."""
    args = parse(argv)
    try:
        shown = cut_all(args)
        for number, item in enumerate(shown, start=1):
            print(_terminal(item, number, len(shown), sys.stdout.isatty() or args.colour))
        if args.html is not None:
            write_page(args.html, shown, args.model)
            print(f"page: {args.html}")
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line. Flags of the conditions are those of step 3."""
    parser = argparse.ArgumentParser(prog="python -m dschat.macro_view.show", description=__doc__)
    parser.add_argument("--model", required=True, help="folder or Hugging Face name; its tokenizer cuts into tokens")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--text", nargs="+", help="responses to cut")
    source.add_argument("--jsonl", type=Path, help="file of rows with prompt and response, as inference writes them")
    parser.add_argument("--prompt", default="", help="with --text: the prompt before each (matters for ppl)")
    parser.add_argument("--limit", type=int, default=8, help="with --jsonl: rows to show; 0 = all")
    parser.add_argument("--html", type=Path, help="also write a page with the conditions side by side")
    parser.add_argument("--colour", action="store_true", help="colours even where the output is no terminal")
    cuts = parser.add_argument_group("conditions")
    cuts.add_argument("--termination_condition", nargs="+", default=["fixed"], help=f"one or more of {CONDITIONS}")
    cuts.add_argument("--ngram", nargs="+", default=["5"], help="fixed: lengths; each gets a panel; inf = all")
    cuts.add_argument("--repeat_times", type=int, default=3)
    cuts.add_argument("--ngram_lengths", type=int, nargs="+", default=[2, 3, 5, 10])
    cuts.add_argument("--ppl_mode", choices=("chunk", "prefix", "token"), default="chunk")
    cuts.add_argument("--parsing_cutoff", "--parser_cutoff", type=int, default=5)
    cuts.add_argument("--parser", nargs="+", default=["benepar"], help="parsing: backends; each gets a panel")
    cuts.add_argument(
        "--parser_model", nargs="+", help="parsing: name or path of each parser's model; - = its default"
    )
    cuts.add_argument("--parser_device", default="cpu")
    cuts.add_argument("--temperature", type=float, default=1.0, help="ppl: of the log-probs")
    cuts.add_argument("--seed", type=int, default=1234)
    return parser.parse_args(argv)


def cut_all(args: argparse.Namespace) -> list[Shown]:
    """Every response under every condition.

    Raises:
        UserError: a flag, file, model or parser that cannot be used.
    """
    configs = [config for condition in args.termination_condition for config in _configs(condition, args)]
    texts = _texts(args)
    from dschat.conditions.termination import Segmenter
    from dschat.models.tokenizer import load_tokenizer
    from dschat.rl.macro_actions import segment
    from dschat.trainers.ppo.metrics import token_texts

    tokenizer = load_tokenizer(args.model, "--model", may_add_pad=True)
    segmenters = [Segmenter(config, tokenizer) for config in configs]
    trajectory = _trajectory(args, texts, tokenizer)
    rows = trajectory.rollout.response_rows()
    pieces = [token_texts(row, tokenizer) for row in rows]
    shown = [Shown(prompt, []) for prompt, _ in texts]
    for config, segmenter in zip(configs, segmenters, strict=True):
        macro = segment(segmenter(trajectory, 0).ends, trajectory.response_mask)
        for row, item in enumerate(shown):
            numbers = macro.index[row, : len(rows[row])].tolist()
            tokens = [MacroToken(text, number) for text, number in zip(pieces[row], numbers, strict=True)]
            count = max(numbers, default=-1) + 1
            caption = f"{count} macro actions, {len(numbers) / max(count, 1):.1f} tokens each"
            item.panels.append(MacroPanel(config.title, tokens, caption))
    return shown


def write_page(file: Path, shown: Sequence[Shown], model: str) -> None:
    """Writes the HTML page.

    Raises:
        UserError: it cannot be written.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    from dschat.macro_view.html import STYLE, legend_html, panels_html

    templates = FileSystemLoader(Path(__file__).parent)
    environment = Environment(loader=templates, autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    page = environment.get_template("macro_actions.html").render(
        model=model,
        style=Markup(STYLE),
        legend=Markup(legend_html(numbers=False)),
        items=[{"prompt": item.prompt, "panels": Markup(panels_html(item.panels))} for item in shown],
    )
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(page, encoding="utf-8", errors="replace")
    except OSError as error:
        raise UserError(f"--html {file}: cannot be written: {error}") from error


def _configs(condition: str, args: argparse.Namespace) -> list[SimpleNamespace]:
    """A configuration per panel: `fixed` once per length, `parsing` once per parser."""
    common = {**vars(args), "termination_condition": condition, "end_of_conversation_token": None}
    common |= {"isolate_last_token": False, "title": condition}
    if condition == "fixed":
        return [
            SimpleNamespace(**common | {"title": f"fixed, n = {n}", "ngram_length": _ngram(n)}) for n in args.ngram
        ]
    if condition == "parsing":
        if args.parsing_cutoff < 3:
            raise UserError(f"--parsing_cutoff {args.parsing_cutoff}: give at least 3; below, a sentence stays whole.")
        models = [None if model == "-" else model for model in args.parser_model or ["-"] * len(args.parser)]
        if len(models) != len(args.parser):
            raise UserError(
                f"--parser_model: give one for each of {len(args.parser)} parsers; - is a parser's default."
            )
        return [
            SimpleNamespace(
                **common | {"parser": name, "parser_model": model, "title": f"{name}, cutoff {args.parsing_cutoff}"}
            )
            for name, model in zip(args.parser, models, strict=True)
        ]
    if condition == "ppl":
        return [SimpleNamespace(**common | {"title": f"perplexity, {args.ppl_mode}"})]
    if condition != "randomized" and ":" not in condition:
        raise UserError(f"--termination_condition {condition}: use {', '.join(CONDITIONS)} or module.py:function.")
    if condition == "randomized" and min(args.repeat_times, *args.ngram_lengths) < 1:
        raise UserError("--repeat_times and --ngram_lengths must be at least 1.")
    return [SimpleNamespace(**common)]


def _ngram(text: str) -> float:
    number = math.inf if text == "inf" else int(text) if text.isdecimal() else 0
    if number < 1:
        raise UserError(f"--ngram {text}: give a whole number of at least 1, or inf.")
    return number


def _texts(args: argparse.Namespace) -> list[tuple[str, str]]:
    """(prompt, response) of what is to be shown."""
    if args.jsonl is None:
        return [(args.prompt, text) for text in args.text]
    from dschat.evaluation.pairs.responses import read_responses

    found = read_responses(args.jsonl, "--jsonl")
    return [(item.prompt, item.response) for item in found[: args.limit or None]]


def _trajectory(args: argparse.Namespace, texts: Sequence[tuple[str, str]], tokenizer: Any) -> Any:
    """The responses, each with its EOS, as a trajectory; log-probs only where a condition reads them."""
    import torch

    from dschat.data.encoding import encode_prompts, encode_responses
    from dschat.data.formats.formats import Row
    from dschat.rl.types import Rollout, Trajectory

    rows = [Row(prompt, None, None, None, {}, "--prompt") for prompt, _ in texts]
    prompts = encode_prompts(tokenizer, rows)
    responses = [[*ids, tokenizer.eos_token_id] for ids in encode_responses(tokenizer, [text for _, text in texts])]
    left, right = max(map(len, prompts)), max(map(len, responses))
    pad = tokenizer.pad_token_id
    ids = [[pad] * (left - len(p)) + p + r + [pad] * (right - len(r)) for p, r in zip(prompts, responses, strict=True)]
    position = torch.arange(right)
    mask = position < torch.tensor([len(response) for response in responses])[:, None]
    before = torch.arange(left) >= left - torch.tensor([len(prompt) for prompt in prompts])[:, None]
    attention = torch.cat([before, mask], 1)
    rollout = Rollout(torch.tensor(ids), attention, mask, torch.arange(len(ids)), torch.ones(len(ids)).bool())
    logprobs = torch.zeros(mask.shape)
    if any(":" in condition or condition == "ppl" for condition in args.termination_condition):
        logprobs = _logprobs(args, rollout, tokenizer)
    blank = torch.zeros(mask.shape)
    return Trajectory(rollout, logprobs, logprobs, blank, torch.zeros(len(ids)))


def _logprobs(args: argparse.Namespace, rollout: Any, tokenizer: Any) -> Any:
    """(B, R) under the model, row by row: nothing here is in a hurry."""
    import torch

    from dschat.models.load import load_causal_lm
    from dschat.models.policy import PolicyModel
    from dschat.rl.types import select_rows

    if not bool(rollout.attention_mask[:, rollout.input_ids.shape[1] - rollout.response_mask.shape[1] - 1].all()):
        raise UserError("--prompt: the condition needs log-probs, and this tokenizer has no BOS token: give a prompt.")
    policy = PolicyModel(load_causal_lm(args.model, "--model", torch.float32, tokenizer)).eval()
    width, parts = rollout.response_mask.shape[1], []
    with torch.no_grad():
        for row in range(len(rollout.input_ids)):
            part = select_rows(rollout, torch.tensor([row]))
            parts.append(policy(part.input_ids, part.attention_mask, width, args.temperature)[0])
    return torch.where(rollout.response_mask, torch.cat(parts), 0.0)


def _terminal(item: Shown, number: int, total: int, colour: bool) -> str:
    lines = [f"── response {number} of {total}"]
    for panel in item.panels:
        lines += ["", f"{panel.title}: {panel.caption}", macro_text(panel.tokens, colour)]
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    sys.exit(main())
