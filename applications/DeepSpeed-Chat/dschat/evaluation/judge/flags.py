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
from dschat.errors import UserError
from dschat.evaluation.judge.server import on_this_machine
from dschat.evaluation.pairs.dataset_names import dataset_name

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
        UserError: no data set has this name.
    """
    parser = _Parser(description=description, allow_abbrev=False)
    _add_files(parser, datasets)
    _add_judge(parser)
    _add_costs(parser)
    _add_pace(parser)
    flags, unknown = parser.parse_known_args(words)
    if unknown:
        parser.error("some words are no flags of this script (not repeated here: one may be a key); see --help")
    flags.dataset = dataset_name(flags.dataset)
    return flags


def check_flags(flags: argparse.Namespace) -> None:
    """Refuses values that mean nothing.

    Raises:
        UserError: names the flag.
    """
    least = {"concurrency": 1, "max_tries": 1, "max_tokens": 1}
    for name, value in least.items():
        if not value <= getattr(flags, name) <= 1_000_000:
            raise UserError(f"--{name.replace('_', '-')} must be at least {value}, not {getattr(flags, name)}.")
    for name in ("timeout", "max_cost", "price_in", "price_out", "retry_wait"):
        value = getattr(flags, name)
        if value is not None and not (0 <= value < float("inf")):
            raise UserError(f"--{name.replace('_', '-')} must be a number from 0 on, not {value}.")
    if flags.timeout == 0:
        raise UserError("--timeout must be more than 0 seconds.")
    for name, file in (("--model_name_a", flags.model_name_a), ("--model_name_b", flags.model_name_b)):
        if file.resolve() == flags.output.resolve():
            raise UserError(f"--output {flags.output} is the file of {name}; give another one.")


def server_of(flags: argparse.Namespace) -> str:
    """Address of the server: --base-url, OPENAI_BASE_URL or OpenAI's.

    Raises:
        UserError: it is no http or https address, or holds a user or a password.
    """
    url = (flags.base_url or os.environ.get("OPENAI_BASE_URL") or DEFAULT_SERVER).rstrip("/")
    parts = urllib.parse.urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UserError(f"--base-url {url}: an address such as http://127.0.0.1:8000/v1 is needed.")
    if parts.username or parts.password or parts.query:
        raise UserError("--base-url holds a password or a query; give the key in OPENAI_API_KEY and the bare address.")
    return url


def key_of(flags: argparse.Namespace, server: str) -> str:
    """The key: --sk or OPENAI_API_KEY; a dummy for a server on this machine.

    Raises:
        UserError: there is none, or it cannot be one.
    """
    source = "--sk" if flags.sk else "OPENAI_API_KEY"
    key = (flags.sk or os.environ.get("OPENAI_API_KEY") or "").strip()
    if not key and on_this_machine(server):
        return "none"
    if not key:
        raise UserError(f"no key for {server}: set the environment variable OPENAI_API_KEY.")
    if not (key.isascii() and key.isprintable()) or " " in key:
        raise UserError(f"{source} holds characters that no key has; copy it again.")
    return key


def _add_files(parser: argparse.ArgumentParser, datasets: str) -> None:
    add = parser.add_argument_group("files").add_argument
    required: dict[str, Any] = {"type": Path, "required": True, "metavar": "FILE"}
    add(
        *both_spellings("--model_name_a", "--model_a"),
        dest="model_name_a",
        help="responses of the first model",
        **required,
    )
    add(
        *both_spellings("--model_name_b", "--model_b"),
        dest="model_name_b",
        help="responses of the second model",
        **required,
    )
    add("--output", help="verdicts, as JSON Lines in the order of the first file", **required)
    add("--dataset", default="summarize", metavar="NAME", help=datasets)
    add(
        "--overwrite",
        action="store_true",
        help="make --output anew, also if it is there or was begun without this flag",
    )


def _add_judge(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("judge").add_argument
    add(*both_spellings("--judge-model"), default=DEFAULT_JUDGE, metavar="NAME", help="default: %(default)s")
    add(
        *both_spellings("--base-url"),
        metavar="URL",
        help="an OpenAI-compatible server; default: OpenAI's, or OPENAI_BASE_URL",
    )
    add("--sk", nargs="?", default="", metavar="KEY", help="the key; better: the environment variable OPENAI_API_KEY")
    add(
        *both_spellings("--single-order"),
        action="store_true",
        help="show each pair once, sides by chance, not in both orders",
    )
    add("--seed", type=int, default=42, help="of the sides with --single-order; default: %(default)s")
    add(
        *both_spellings("--max-tokens"),
        type=int,
        default=1024,
        metavar="N",
        help="longest answer; default: %(default)s",
    )


def _add_costs(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("costs").add_argument
    add(*both_spellings("--dry-run"), action="store_true", help="estimate tokens and cost, send and write nothing")
    add(
        *both_spellings("--max-cost"),
        type=float,
        metavar="USD",
        help="stop before this run costs more; every start counts from 0",
    )
    add(*both_spellings("--price-in"), type=float, metavar="USD", help="per million tokens sent")
    add(*both_spellings("--price-out"), type=float, metavar="USD", help="per million tokens answered")
    add("--cache", type=Path, metavar="DIR", help="answers of earlier runs; default: .judge-cache beside --output")


def _add_pace(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("pace").add_argument
    add("--concurrency", type=int, default=8, metavar="N", help="requests at the same time; default: %(default)s")
    add("--timeout", type=float, default=120, metavar="S", help="seconds to wait for an answer; default: %(default)s")
    add(
        *both_spellings("--max-tries"),
        type=int,
        default=8,
        metavar="N",
        help="times to send a request; default: %(default)s",
    )
    add(
        *both_spellings("--retry-wait"),
        type=float,
        default=1,
        metavar="S",
        help="before the 2nd try, then doubled; default: 1",
    )
