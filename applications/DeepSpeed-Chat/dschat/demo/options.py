# SPDX-License-Identifier: Apache-2.0
"""The flags of the demos, checked before anything slow is imported."""

import argparse
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args, get_origin, get_type_hints

from dschat.common.display import HOST
from dschat.common.script import add_flags, flag
from dschat.config.macro_actions import TerminationFlags, parse_ngram
from dschat.errors import UserError
from dschat.inference.options import ComputeFlags

TASKS = {"chat": "talk with a model", "summary": "summaries of posts (TL;DR)"}
CONVERT: dict[str, Callable[[str], object]] = {"ngram": parse_ngram, "ngram_lengths": int}  # where it is not the type


@dataclass(frozen=True, kw_only=True)
class DemoOptions(ComputeFlags):
    """What a demo is told."""

    model: str | None = flag("a run's output folder, a model's folder, or a hub id (the page asks)", None)
    other: str | None = flag("a second model, which answers the same beside the first", None)
    reward_model: str | None = flag("sequence classifier with one label; its score stands under each answer", None)
    rm_template: bool = flag("put prompt and answer through the reward model's chat template", False)
    temperature: float | None = flag("of sampling; 0 = greedy (the run's or the model's own, else 0.8)", None)
    top_k: int | None = flag(
        "draw from so many of the likeliest tokens, 0 = all (the run's or model's own, or 50)", None
    )
    top_p: float | None = flag("draw from the likeliest tokens of this share (the run's or model's own, or 1)", None)
    max_new_tokens: int | None = flag("longest answer in tokens (the run's or model's own, or 128)", None)
    seed: int = flag("of the draws (%(default)s)", 1234)
    end_of_conversation_token: str | None = flag("a token that ends an answer beside EOS, as in training", None)
    terminal: bool = flag("chat here instead of on a page", False)
    host: str = flag("address that the page listens on (%(default)s: this machine alone)", HOST)
    port: int | None = flag("of the page (the first free one from 7860)", None)

    def __post_init__(self) -> None:
        """Looks at what is about several flags as well."""
        super().__post_init__()
        if self.rm_template and self.reward_model is None:
            raise UserError("--rm-template: there is no --reward-model to use it; give one, or drop the flag.")
        if self.terminal and self.model is None:
            raise UserError("--model is missing: --terminal needs a model to talk to.")

    @property
    def sides(self) -> int:
        """Models that answer."""
        return 1 if self.other is None else 2


def parse_options(words: Sequence[str]) -> tuple[str, DemoOptions, TerminationFlags]:
    """The task, the options and where macro actions end. Raises UserError, see the classes."""
    parser = argparse.ArgumentParser(prog="python -m dschat.demo", description=__doc__, allow_abbrev=False)
    tasks = parser.add_subparsers(dest="task", required=True, metavar=" | ".join(TASKS))
    for task, help in TASKS.items():
        own = tasks.add_parser(task, help=help, description=help, allow_abbrev=False)
        add_flags(own, DemoOptions)
        _add_termination_flags(own)
    args = vars(parser.parse_args(words))
    task = args.pop("task")
    termination = TerminationFlags(
        **{field.name: args.pop(field.name) for field in dataclasses.fields(TerminationFlags)}
    )
    termination.check_termination()
    options = DemoOptions(**args)
    if task == "summary" and options.terminal:
        raise UserError("--terminal: only `chat` has one; leave the flag out for the page of summaries.")
    return task, options, termination


def _add_termination_flags(parser: argparse.ArgumentParser) -> None:
    """Where macro actions end: the flags of step 3."""
    group = parser.add_argument_group("macro actions")
    plain, hints = TerminationFlags(), get_type_hints(TerminationFlags)
    for field in dataclasses.fields(TerminationFlags):
        default, help = getattr(plain, field.name), field.metadata["help"]
        names = [field.name, *(alias.lstrip("-") for alias in field.metadata["aliases"])]
        spellings = dict.fromkeys(f"--{word}" for name in names for word in (name.replace("_", "-"), name))
        if isinstance(default, bool):
            group.add_argument(*spellings, action="store_true", help=help)
            continue
        kind: Callable[[str], object] = CONVERT.get(field.name, str if default is None else type(default))
        nargs = "+" if isinstance(default, list) else None
        if get_origin(hints[field.name]) is Literal:
            group.add_argument(*spellings, choices=get_args(hints[field.name]), default=default, help=help)
        else:
            metavar = "STR" if kind is str else "INT"
            group.add_argument(*spellings, type=kind, nargs=nargs, default=default, metavar=metavar, help=help)
