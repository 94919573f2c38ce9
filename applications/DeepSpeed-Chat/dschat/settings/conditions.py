# SPDX-License-Identifier: Apache-2.0
"""The termination conditions, which say where macro actions end: name, help, flags and function of each.

To add a condition, write its group of flags and its row of CONDITIONS here, and its function in
`dschat.rollouts.termination`; parser, help, checks and every command that cuts responses take it from this table.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from dschat.base.errors import UserError
from dschat.settings.flag_types import read_whole_number
from dschat.settings.flags import AT_LEAST_1, NOT_EMPTY, UP_TO_1, flag
from dschat.settings.rules import check_choice_or_function

PARSERS = ("benepar", "chunker", "tree-sitter")


@dataclass(kw_only=True, frozen=True)
class NoFlags:
    """The flags of a condition that has none."""


@dataclass(frozen=True)
class Condition:
    """A termination condition.

    Attributes:
        name: its value of --termination_condition.
        function: "module:function" in dschat, imported when a run needs it; takes the condition's flags and the
            `dschat.rollouts.termination.RunParts`, and returns a function of (trajectory, epoch) → `Ends`.
        flags: its group of flags.
        note: what else --help says of the name.
        logprobs: whose log-probs it reads. None: it may be given a rollout without log-probs and values;
            ``reference``: it reads `ref_logprobs`; ``policy``: it is given a trajectory, with `logprobs` and `values`.
        check: raises UserError, or warns, where its flags cannot be used.
        title: what a panel is called that shows it, from its flags.
    """

    name: str
    function: str
    flags: type = NoFlags
    note: str = ""
    logprobs: Literal["reference", "policy"] | None = None
    check: Callable[[Any], None] = lambda flags: None
    title: Callable[[Any], str] = field(default=lambda flags: "")


def read_ngram(text: str) -> float:
    """`5` → 5, `inf` → math.inf. Raises ValueError if it is neither a whole number nor inf."""
    return math.inf if text in ("inf", ".inf") else read_whole_number(text)


@dataclass(kw_only=True, frozen=True)
class FixedFlags:
    """Macro actions of one length."""

    section = "macro actions"

    ngram: Annotated[float, read_ngram] = flag(
        "fixed: tokens per macro action; 1 = token-level PPO, inf = the whole response",
        5,
        (lambda ngram: ngram >= 1, "a whole number of at least 1 (1 = vanilla PPO), or inf"),
    )


@dataclass(kw_only=True, frozen=True)
class RandomizedFlags:
    """Macro actions of shuffled lengths."""

    section = "macro actions"

    repeat_times: int = flag(
        "randomized: how often each length occurs before the remaining tokens become one macro action", 3, AT_LEAST_1
    )
    ngram_lengths: list[int] = flag(
        "randomized: lengths of macro actions, which are shuffled for each response",
        factory=lambda: [2, 3, 5, 10],
        range=AT_LEAST_1,
    )


@dataclass(kw_only=True, frozen=True)
class ParsingFlags:
    """Macro actions that are constituents of a parse."""

    section = "macro actions"

    parsing_cutoff: int = flag(
        "parsing: a constituent of fewer tokens becomes one macro action; at least 3",
        5,
        aliases=["--parser_cutoff"],
        range=(
            lambda tokens: tokens >= 3,
            "a whole number of at least 3: below it, each sentence becomes one macro action",
        ),
    )
    parser: str = flag(
        "parsing: benepar, chunker, tree-sitter (for programs), or module.py:function with (model) -> parser",
        "benepar",
    )
    parser_model: str | None = flag(
        "parsing: name or path of the parser's model; benepar_en3 for benepar if not given", None, NOT_EMPTY, path=True
    )
    parser_device: str = flag("parsing: device of benepar, cpu or cuda", "cpu", NOT_EMPTY)


@dataclass(kw_only=True, frozen=True)
class PerplexityFlags:
    """Macro actions that end where the reference is surprised."""

    section = "macro actions"

    ppl_mode: Literal["chunk", "prefix", "token"] = flag(
        "ppl: end a macro action where the perplexity under the reference rises: against the macro action's own mean"
        " (chunk), the mean of the whole response so far (prefix), or the previous token (token)",
        "chunk",
    )


@dataclass(kw_only=True, frozen=True)
class SurpriseFlags:
    """Macro actions that begin at tokens which were unlikely under the policy."""

    section = "macro actions"

    surprise_probability: float = flag(
        "surprise: a token is unlikely if the policy gave it less than this probability", 0.9, UP_TO_1
    )
    surprise_count: int = flag("surprise: begin a macro action at every N-th unlikely token", 5, AT_LEAST_1)


def _check_parser(flags: ParsingFlags) -> None:
    check_choice_or_function("parser", flags.parser, PARSERS)
    if not re.fullmatch(r"cpu|cuda(:\d+)?", flags.parser_device):
        raise UserError(f"--parser_device {flags.parser_device}: give cpu, cuda or cuda:0 and the like.")


_TABLE = (
    Condition("fixed", "rollouts.termination:fixed", FixedFlags, title=lambda flags: f"fixed, n = {flags.ngram:g}"),
    Condition("randomized", "rollouts.termination:randomized", RandomizedFlags),
    Condition(
        "parsing",
        "rollouts.text_conditions:Parsing",
        ParsingFlags,
        check=_check_parser,
        title=lambda flags: f"{flags.parser}, cutoff {flags.parsing_cutoff}",
    ),
    Condition(
        "ppl",
        "rollouts.termination:perplexity",
        PerplexityFlags,
        note="where perplexity under the reference rises",
        logprobs="reference",
        title=lambda flags: f"perplexity, {flags.ppl_mode}",
    ),
    Condition(
        "surprise",
        "rollouts.termination:surprise",
        SurpriseFlags,
        note="at tokens unlikely under the policy",
        logprobs="policy",
    ),
    Condition("sentence", "rollouts.text_conditions:sentences"),
    Condition("line", "rollouts.text_conditions:lines"),
    Condition("turn", "rollouts.termination:turn", note="where the policy's turn ends, see environment"),
)
CONDITIONS: dict[str, Condition] = {condition.name: condition for condition in _TABLE}


def groups_of_conditions() -> dict[str, type]:
    """Condition → its group of flags."""
    return {name: condition.flags for name, condition in CONDITIONS.items()}


def names_with_notes() -> str:
    """The conditions for --help."""
    texts = []
    for name, condition in CONDITIONS.items():
        texts.append(f"{name} ({condition.note})" if condition.note else name)
    return ", ".join(texts)
