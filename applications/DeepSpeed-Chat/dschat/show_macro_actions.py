# SPDX-License-Identifier: Apache-2.0
"""Shows where termination conditions cut responses: `python -m dschat.show_macro_actions --help`."""

import argparse
import dataclasses
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from dschat.common.atomic import reporting, write_file
from dschat.conditions.termination import TerminationCondition
from dschat.config.macro_actions import FLAGS_OF, TerminationFlags, parse_ngram
from dschat.config.rules import default_of
from dschat.data.collate import pad
from dschat.data.encoding import encode_prompts, encode_responses
from dschat.data.rows import Row
from dschat.errors import UserError
from dschat.evaluation.pairs import read_responses
from dschat.models.load import load_causal_lm
from dschat.models.policy import PolicyModel
from dschat.models.tokenizer import load_tokenizer
from dschat.reports.macro_actions import MacroToken, macro_text
from dschat.reports.report import Example, MacroPanel, Report, Section
from dschat.rl.macro_actions import segment
from dschat.rl.types import Rollout, Trajectory, select_rows
from dschat.trainers.rollout_metrics import token_texts

SEVERAL = ("termination_condition", "ngram", "parser")  # flags whose every value gets a panel
CONVERT: dict[str, Callable[[str], object]] = {"ngram": parse_ngram, "ngram_lengths": int}  # where it is not the type
# What each condition reads beside those; --parser_model is given once for each parser.
READ = {
    condition: [name for name in names if name not in (*SEVERAL, "parser_model")]
    for condition, names in FLAGS_OF.items()
}


@dataclasses.dataclass(frozen=True)
class Shown:
    """A response under several conditions: its prompt, and a panel for each."""

    prompt: str
    panels: list[MacroPanel]


def main(argv: Sequence[str] | None = None) -> int:
    """Parses the flags, cuts and shows; returns the exit status."""
    try:
        args = parse(argv)
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
    """The command line. Flags of the conditions are those of step 3; raises UserError for an --ngram of no number."""
    parser = argparse.ArgumentParser(prog="python -m dschat.show_macro_actions", description=__doc__)
    parser.add_argument("--model", required=True, help="folder or Hugging Face name; its tokenizer cuts into tokens")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--text", nargs="+", help="responses to cut")
    source.add_argument("--jsonl", type=Path, help="file of rows with prompt and response, as inference writes them")
    parser.add_argument("--prompt", default="", help="with --text: the prompt before each (matters for ppl)")
    parser.add_argument("--limit", type=int, default=8, help="with --jsonl: rows to show; 0 = all")
    parser.add_argument("--html", type=Path, help="also write a page with the conditions side by side")
    parser.add_argument("--colour", action="store_true", help="colours even where the output is no terminal")
    parser.add_argument("--temperature", type=float, default=1.0, help="ppl: of the log-probs")
    parser.add_argument("--seed", type=int, default=1234, help="randomized: of the run")
    parser.add_argument("--parser_model", nargs="+", help="parsing: of each parser; - = its default")
    conditions = parser.add_argument_group("conditions")
    fields = {field.name: field for field in dataclasses.fields(TerminationFlags)}
    for name in (*SEVERAL, *(name for names in READ.values() for name in names)):
        default = default_of(TerminationFlags, name)
        flags = [f"--{name}", *fields[name].metadata["aliases"]]
        help = fields[name].metadata["help"] + ("; each gets a panel" if name in SEVERAL else "")
        convert = CONVERT.get(name, type(default))
        nargs = "+" if name in SEVERAL or isinstance(default, list) else None
        default = [default] if name in SEVERAL else default
        conditions.add_argument(*flags, type=convert, nargs=nargs, default=default, help=help)
    return parser.parse_args(argv)


def cut_all(args: argparse.Namespace) -> list[Shown]:
    """Every response under every condition; raises UserError where a flag, file, model or parser cannot be used."""
    titled = [pair for condition in args.termination_condition for pair in _titled_flags(condition, args)]
    for _, flags in titled:
        flags.check_termination()
    texts = _texts(args)
    tokenizer = load_tokenizer(args.model, "--model", may_add_pad=True)
    conditions = [TerminationCondition(flags, tokenizer, tokenizer.eos_token_id, args.seed) for _, flags in titled]
    trajectory = _trajectory(args, texts, tokenizer)
    rows = trajectory.rollout.response_rows()
    pieces = [token_texts(row, tokenizer) for row in rows]
    shown = [Shown(prompt, []) for prompt, _ in texts]
    for (title, _), condition in zip(titled, conditions, strict=True):
        macro = segment(condition(trajectory, 0).ends, trajectory.response_mask)
        for row, item in enumerate(shown):
            numbers = macro.index[row, : len(rows[row])].tolist()
            tokens = [MacroToken(text, number) for text, number in zip(pieces[row], numbers, strict=True)]
            count = max(numbers, default=-1) + 1
            caption = f"{count} macro actions, {len(numbers) / max(count, 1):.1f} tokens each"
            item.panels.append(MacroPanel(title, tokens, caption))
    return shown


def write_page(file: Path, shown: Sequence[Shown], model: str) -> None:
    """Writes the HTML page; raises UserError where it cannot."""
    examples = [Example(f"Response {number}", item.prompt, item.panels) for number, item in enumerate(shown, start=1)]
    section = Section(examples=examples, numbers=False)
    report = Report("Macro actions", notes=[f"Tokens of {model}"], sections=[section])
    with reporting(f"--html {file}"):
        write_file(file, report.html())


def _titled_flags(condition: str, args: argparse.Namespace) -> list[tuple[str, TerminationFlags]]:
    """The title and the flags of each panel: `fixed` once per length, `parsing` once per parser."""
    read = {name: getattr(args, name) for name in READ.get(condition, ())}
    if condition == "fixed":
        return [(f"fixed, n = {n:g}", TerminationFlags(ngram=n)) for n in args.ngram]
    if condition != "parsing":
        title = f"perplexity, {args.ppl_mode}" if condition == "ppl" else condition
        return [(title, TerminationFlags(termination_condition=condition, **read))]
    models = [None if model == "-" else model for model in args.parser_model or ["-"] * len(args.parser)]
    if len(models) != len(args.parser):
        raise UserError(f"--parser_model: give one for each of {len(args.parser)} parsers; - is a parser's default.")
    titles = [f"{name}, cutoff {args.parsing_cutoff}" for name in args.parser]
    parsers = [{"parser": name, "parser_model": model} for name, model in zip(args.parser, models, strict=True)]
    flags = [TerminationFlags(termination_condition=condition, **parser, **read) for parser in parsers]
    return list(zip(titles, flags, strict=True))


def _texts(args: argparse.Namespace) -> list[tuple[str, str]]:
    """(prompt, response) of what is to be shown."""
    if args.jsonl is None:
        return [(args.prompt, text) for text in args.text]
    found = read_responses(args.jsonl, "--jsonl")
    return [(item.prompt, item.response) for item in found[: args.limit or None]]


def _trajectory(
    args: argparse.Namespace, texts: Sequence[tuple[str, str]], tokenizer: PreTrainedTokenizerBase
) -> Trajectory:
    """The responses, each with its EOS, as a trajectory; log-probs only where a condition reads them."""
    prompts = encode_prompts(tokenizer, [Row(prompt, None, None, None, {}, "--prompt") for prompt, _ in texts])
    responses = [[*ids, tokenizer.eos_token_id] for ids in encode_responses(tokenizer, [text for _, text in texts])]
    left, before = pad(prompts, tokenizer.pad_token_id, "left")
    right, mask = pad(responses, tokenizer.pad_token_id, "right")
    ids, attention = torch.cat([left, right], 1), torch.cat([before, mask], 1)
    rollout = Rollout(ids, attention, mask, torch.arange(len(ids)), torch.ones(len(ids)).bool())
    blank = torch.zeros(mask.shape)
    reads_them = any(":" in condition or condition == "ppl" for condition in args.termination_condition)
    logprobs = _logprobs(args, rollout, tokenizer) if reads_them else blank
    return Trajectory(rollout, logprobs, logprobs, blank, torch.zeros(len(ids)))


def _logprobs(args: argparse.Namespace, rollout: Rollout, tokenizer: PreTrainedTokenizerBase) -> Tensor:
    """(B, R) under the model, row by row: nothing here is in a hurry."""
    width = rollout.response_mask.shape[1]
    if not bool(rollout.attention_mask[:, rollout.prompt_width - 1].all()):
        raise UserError("--prompt: the condition needs log-probs, and this tokenizer has no BOS token: give a prompt.")
    policy, parts = PolicyModel(load_causal_lm(args.model, "--model", torch.float32, tokenizer)).eval(), []
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
