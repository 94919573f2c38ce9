# SPDX-License-Identifier: Apache-2.0
"""Flags of the judge's command lines, and what is wrong with them."""

import argparse
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, TypeVar

from dschat.common.chat_servers import Endpoint, checked_address, checked_key
from dschat.common.script import add_flags, flag
from dschat.data.hub import compared_set
from dschat.errors import UserError
from dschat.evaluation.judge.costs import Prices

DEFAULT_JUDGE = "gpt-4o-2024-05-13"
DEFAULT_SERVER = "https://api.openai.com/v1"
Options = TypeVar("Options", bound="AskingOptions")


@dataclass
class AskingOptions:
    """What every run of a judge is told. A field is a flag: its name, type, default and help line."""

    model_name_a: Path = flag("responses of the first model", also="model_a")
    model_name_b: Path = flag("responses of the second model", also="model_b")
    output: Path = flag("verdicts, as JSON Lines in the order of the first file")
    overwrite: bool = flag("make --output anew, also if it is there or was begun without this flag", False)
    judge_model: str = flag("name of the judge; default: %(default)s", DEFAULT_JUDGE)
    base_url: str | None = flag("an OpenAI-compatible server; default: OpenAI's, or OPENAI_BASE_URL", None)
    sk: str | None = flag("the key; better: the environment variable OPENAI_API_KEY", None, nargs="?")
    single_order: bool = flag("show each pair once, sides by chance, not in both orders", False)
    seed: int = flag("of the sides with --single-order; default: %(default)s", 42)
    max_tokens: int = flag("longest answer; default: %(default)s", 1024)
    dry_run: bool = flag("estimate tokens and cost, send and write nothing", False)
    price_in: float | None = flag("US dollars per million tokens sent", None)
    price_out: float | None = flag("US dollars per million tokens answered", None)
    max_cost: float | None = flag("stop before this run costs more dollars; every start counts from 0", None)
    cache: Path | None = flag("answers of earlier runs; default: .judge-cache beside --output", None)
    concurrency: int = flag("requests at the same time; default: %(default)s", 8)
    timeout: float = flag("seconds to wait for an answer; default: %(default)s", 120.0)
    max_tries: int = flag("times to send a request; default: %(default)s", 8)

    def __post_init__(self) -> None:
        """Refuses values that mean nothing. Raises UserError, which names the flag."""
        for name in ("concurrency", "max_tries", "max_tokens"):
            if not 1 <= getattr(self, name) <= 1_000_000:
                raise UserError(f"--{name.replace('_', '-')} must be at least 1, not {getattr(self, name)}.")
        for name in ("timeout", "max_cost", "price_in", "price_out"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < float("inf"):
                raise UserError(f"--{name.replace('_', '-')} must be a number from 0 on, not {value}.")
        if self.timeout == 0:
            raise UserError("--timeout must be more than 0 seconds.")
        for name, file in (("model_name_a", self.model_name_a), ("model_name_b", self.model_name_b)):
            if file.resolve() == self.output.resolve():
                raise UserError(f"--output {self.output} is the file of --{name}; give another one.")

    def prices(self) -> Prices | None:
        """What --price-in and --price-out say; None where neither is given. Raises UserError where one is missing."""
        if self.price_in is not None and self.price_out is not None:
            return Prices(self.price_in, self.price_out)
        if self.max_cost is not None:
            raise UserError("--max-cost needs the prices of the model: give --price-in and --price-out.")
        if self.price_in is not None or self.price_out is not None:
            raise UserError("--price-in and --price-out: give both, or neither.")
        return None

    def endpoint(self) -> Endpoint:
        """Whom to ask, at --base-url, OPENAI_BASE_URL or OpenAI's; raises UserError where that is no bare address."""
        url = checked_address(self.base_url or os.environ.get("OPENAI_BASE_URL") or DEFAULT_SERVER, "--base-url")
        return Endpoint(self.judge_model, url, self.max_tokens, self.timeout, self.max_tries)

    def key(self, endpoint: Endpoint) -> str:
        """The key: --sk or OPENAI_API_KEY; a dummy for a server on this machine. Raises UserError where it is bad."""
        source = "--sk" if self.sk else "OPENAI_API_KEY"
        return checked_key(self.sk or os.environ.get("OPENAI_API_KEY"), source, endpoint)


@dataclass
class JudgeOptions(AskingOptions):
    """What a run on responses to the prompts of a data set is told."""

    dataset: str = flag(
        "rubric: summarize, hh-rlhf (hh) or webgpt; with --rubric a name for the results; default: %(default)s",
        "summarize",
    )
    rubric: Path | None = flag("file of your own rubric (.toml or .json), see docs/evaluation.md", None)

    def __post_init__(self) -> None:
        """Refuses values that mean nothing. Raises UserError, which names the flag."""
        super().__post_init__()
        remedy = "for data of your own any name, with --rubric FILE, which says how they are compared"
        self.dataset = compared_set(self.dataset, self.rubric is not None, remedy)


class _DiscreetParser(argparse.ArgumentParser):
    """Says what is wrong without repeating words: one of them may be a key at the wrong place."""

    def error(self, message: str) -> NoReturn:
        super().error(re.sub(r"(invalid \w+ value|ignored explicit argument|ambiguous option).*", r"\1", message))


def parse_flags(options: type[Options], words: Sequence[str], description: str) -> Options:
    """The options of a command line without its program. Raises UserError, see the class."""
    parser = _DiscreetParser(description=description, allow_abbrev=False)
    add_flags(parser, options)
    flags, unknown = parser.parse_known_args(words)
    if unknown:
        parser.error("some words are no flags of this script (not repeated here: one may be a key); see --help")
    return options(**vars(flags))
