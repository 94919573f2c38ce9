# SPDX-License-Identifier: Apache-2.0
"""Flags of the judge's command lines, and what is wrong with them."""

from __future__ import annotations

import argparse
import os
import re
import urllib.parse
from pathlib import Path
from typing import Any, NoReturn

from dschat.common.script import both_spellings
from dschat.data.formats.registry import compared_set
from dschat.errors import UserError
from dschat.evaluation.judge.costs import Prices
from dschat.evaluation.judge.question import Endpoint

DEFAULT_JUDGE = "gpt-4o-2024-05-13"
DEFAULT_SERVER = "https://api.openai.com/v1"


class _Parser(argparse.ArgumentParser):
    """Says what is wrong without repeating words: one of them may be a key at the wrong place."""

    def error(self, message: str) -> NoReturn:
        super().error(re.sub(r"(invalid \w+ value|ignored explicit argument|ambiguous option).*", r"\1", message))


def parse_flags(words: list[str], description: str, datasets: str) -> argparse.Namespace:
    """The command line of a judge; every long flag also with underscores instead of dashes, or the other way round.

    Args:
        words: the command line without the program.
        description: first lines of --help.
        datasets: help of --dataset.

    Raises:
        UserError: a value means nothing, or no data set has this name; names the flag.
    """
    parser = _Parser(description=description, allow_abbrev=False)
    _add_flags(parser, datasets)
    flags, unknown = parser.parse_known_args(words)
    if unknown:
        parser.error("some words are no flags of this script (not repeated here: one may be a key); see --help")
    for name in ("concurrency", "max_tries", "max_tokens"):
        if not 1 <= getattr(flags, name) <= 1_000_000:
            raise UserError(f"--{name.replace('_', '-')} must be at least 1, not {getattr(flags, name)}.")
    for name in ("timeout", "max_cost", "price_in", "price_out"):
        value = getattr(flags, name)
        if value is not None and not 0 <= value < float("inf"):
            raise UserError(f"--{name.replace('_', '-')} must be a number from 0 on, not {value}.")
    if flags.timeout == 0:
        raise UserError("--timeout must be more than 0 seconds.")
    for name in ("model_name_a", "model_name_b"):
        if getattr(flags, name).resolve() == flags.output.resolve():
            raise UserError(f"--output {flags.output} is the file of --{name}; give another one.")
    flags.dataset = compared_set(flags.dataset)
    return flags


def prices_of(flags: argparse.Namespace) -> Prices | None:
    """What --price-in and --price-out say; None where neither is given. Raises UserError where one is missing."""
    if flags.price_in is not None and flags.price_out is not None:
        return Prices(flags.price_in, flags.price_out)
    if flags.max_cost is not None:
        raise UserError("--max-cost needs the prices of the model: give --price-in and --price-out.")
    if flags.price_in is not None or flags.price_out is not None:
        raise UserError("--price-in and --price-out: give both, or neither.")
    return None


def endpoint_of(flags: argparse.Namespace) -> Endpoint:
    """Whom to ask, at --base-url, OPENAI_BASE_URL or OpenAI's; raises UserError where that is no bare address."""
    url = (flags.base_url or os.environ.get("OPENAI_BASE_URL") or DEFAULT_SERVER).rstrip("/")
    parts = urllib.parse.urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UserError(f"--base-url {url}: an address such as http://127.0.0.1:8000/v1 is needed.")
    if parts.username or parts.password or parts.query:
        raise UserError("--base-url holds a password or a query; give the key in OPENAI_API_KEY and the bare address.")
    return Endpoint(flags.judge_model, url, flags.max_tokens, flags.timeout, flags.max_tries)


def key_of(flags: argparse.Namespace, endpoint: Endpoint) -> str:
    """The key: --sk or OPENAI_API_KEY; a dummy for a server on this machine. Raises UserError where there is none."""
    source = "--sk" if flags.sk else "OPENAI_API_KEY"
    key = (flags.sk or os.environ.get("OPENAI_API_KEY") or "").strip()
    if not key and endpoint.is_local:
        return "none"
    if not key:
        raise UserError(f"no key for {endpoint.base_url}: set the environment variable OPENAI_API_KEY.")
    if not (key.isascii() and key.isprintable()) or " " in key:
        raise UserError(f"{source} holds characters that no key has; copy it again.")
    return key


def _add_flags(parser: argparse.ArgumentParser, datasets: str) -> None:
    def add(group: Any, *flags: str, **details: Any) -> None:
        group.add_argument(*both_spellings(*flags), **details)

    file: dict[str, Any] = {"type": Path, "required": True, "metavar": "FILE"}
    files = parser.add_argument_group("files")
    add(files, "--model_name_a", "--model_a", help="responses of the first model", **file)
    add(files, "--model_name_b", "--model_b", help="responses of the second model", **file)
    add(files, "--output", help="verdicts, as JSON Lines in the order of the first file", **file)
    add(files, "--dataset", default="summarize", metavar="NAME", help=datasets)
    anew = "make --output anew, also if it is there or was begun without this flag"
    add(files, "--overwrite", action="store_true", help=anew)
    judge = parser.add_argument_group("judge")
    add(judge, "--judge-model", default=DEFAULT_JUDGE, metavar="NAME", help="default: %(default)s")
    server = "an OpenAI-compatible server; default: OpenAI's, or OPENAI_BASE_URL"
    add(judge, "--base-url", metavar="URL", help=server)
    key = "the key; better: the environment variable OPENAI_API_KEY"
    add(judge, "--sk", nargs="?", default="", metavar="KEY", help=key)
    once = "show each pair once, sides by chance, not in both orders"
    add(judge, "--single-order", action="store_true", help=once)
    add(judge, "--seed", type=int, default=42, help="of the sides with --single-order; default: %(default)s")
    add(judge, "--max-tokens", type=int, default=1024, metavar="N", help="longest answer; default: %(default)s")
    costs = parser.add_argument_group("costs")
    dollars: dict[str, Any] = {"type": float, "metavar": "USD"}
    add(costs, "--dry-run", action="store_true", help="estimate tokens and cost, send and write nothing")
    add(costs, "--price-in", help="per million tokens sent", **dollars)
    add(costs, "--price-out", help="per million tokens answered", **dollars)
    limit = "stop before this run costs more (needs both prices); every start counts from 0"
    add(costs, "--max-cost", help=limit, **dollars)
    kept = "answers of earlier runs; default: .judge-cache beside --output"
    add(costs, "--cache", type=Path, metavar="DIR", help=kept)
    pace = parser.add_argument_group("pace")
    count: dict[str, Any] = {"type": int, "default": 8, "metavar": "N"}
    add(pace, "--concurrency", help="requests at the same time; default: %(default)s", **count)
    add(pace, "--max-tries", help="times to send a request; default: %(default)s", **count)
    seconds = "seconds to wait for an answer; default: %(default)s"
    add(pace, "--timeout", type=float, default=120, metavar="S", help=seconds)
