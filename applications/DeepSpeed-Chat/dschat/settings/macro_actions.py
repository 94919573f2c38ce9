# SPDX-License-Identifier: Apache-2.0
"""The flags of macro actions: where one ends, and how its tokens are pooled."""

import logging
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from dschat.errors import UserError
from dschat.settings import rules
from dschat.settings.commands import ServerFlags
from dschat.settings.common import OptimisationFlags
from dschat.settings.logprobs import LogprobFlags
from dschat.settings.rules import AT_LEAST_0, AT_LEAST_1, NOT_EMPTY, default_of, flag, like

logger = logging.getLogger(__name__)

FLAGS_OF = {  # termination condition → the flags that it reads
    "fixed": ("ngram",),
    "randomized": ("repeat_times", "ngram_lengths"),
    "parsing": ("parsing_cutoff", "parser", "parser_model", "parser_device"),
    "ppl": ("ppl_mode",),
    "sentence": (),
    "line": (),
    "surprise": ("surprise_probability", "surprise_count"),
}
PARSERS = ("benepar", "link-grammar", "chunker", "tree-sitter")


def reads_logprobs(condition: str, of_policy: bool = False) -> bool:
    """Whether a condition asks for log-probs, the reference's or the policy's; or for the latter alone."""
    return ":" in condition or condition in (("surprise",) if of_policy else ("ppl", "surprise"))


def parse_ngram(text: str) -> float:
    """`5` → 5, `inf` → math.inf. Raises UserError where it is neither a whole number nor inf."""
    if text == "inf":
        return math.inf
    try:
        return int(text)
    except ValueError:
        raise UserError(_wrong_ngram(text)) from None


@dataclass(kw_only=True)
class TerminationFlags:
    """Where a macro action ends."""

    _argument_group_name = "macro actions"

    termination_condition: str = flag(
        "where a macro action ends: fixed, randomized, parsing, ppl (where the reference is surprised), surprise"
        " (where the policy was), sentence, line, or module.py:function with (trajectory, tokenizer) -> ends",
        "fixed",
    )
    ngram: Annotated[float, parse_ngram] = flag(
        "fixed: tokens in a macro action; 1 = vanilla PPO, inf = the whole response", 5
    )
    repeat_times: int = flag("randomized: how often the list of lengths is repeated", 3, AT_LEAST_1)
    ngram_lengths: list[int] = flag(
        "randomized: the lengths to shuffle", factory=lambda: [2, 3, 5, 10], rule=AT_LEAST_1
    )
    parsing_cutoff: int = flag(
        "parsing: a constituent of fewer tokens than this is one macro action; at least 3",
        5,
        aliases=["--parser_cutoff"],
        rule=(
            lambda tokens: tokens >= 3,
            "a whole number of at least 3: below it, each sentence becomes one macro action",
        ),
    )
    parser: str = flag(
        "parsing: benepar, link-grammar, chunker, tree-sitter (for programs), or module.py:function with (model) ->"
        " parser",
        "benepar",
    )
    parser_model: str | None = flag(
        "parsing: name or path of the parser's model; benepar_en3 for benepar",
        None,
        NOT_EMPTY,
        path=True,
    )
    parser_device: str = flag("parsing: where benepar computes: cpu or cuda", "cpu", NOT_EMPTY)
    ppl_mode: Literal["chunk", "prefix", "token"] = flag("ppl: which rise in perplexity ends a macro action", "chunk")
    surprise_probability: float = flag(
        "surprise: a token that the policy gave less than this is unlikely",
        0.9,
        (lambda value: 0 < value <= 1, "a number above 0 and at most 1"),
    )
    surprise_count: int = flag("surprise: every so many unlikely tokens a macro action begins", 5, AT_LEAST_1)
    isolate_last_token: bool = flag("make the last response token a macro action of its own", False)

    def check_termination(self) -> None:
        """Check these flags, alone and against each other, and warn of those without effect. Raises UserError."""
        rules.check_flags(self)
        if not self.ngram >= 1 or (not math.isinf(self.ngram) and self.ngram != int(self.ngram)):
            raise UserError(_wrong_ngram(f"{self.ngram:g}"))
        condition = self.termination_condition
        if ":" in condition:
            rules.check_function_path("termination_condition", condition)
        elif condition not in FLAGS_OF:
            known = ", ".join(FLAGS_OF)
            raise UserError(f"--termination_condition {condition} is unknown: use {known} or module.py:function.")
        self._check_parser()
        for reader, names in FLAGS_OF.items():
            given = [f"--{name}" for name in names if getattr(self, name) != default_of(TerminationFlags, name)]
            if given and condition != reader:
                logger.warning("%s: of no effect without --termination_condition %s.", ", ".join(given), reader)

    def _check_parser(self) -> None:
        if ":" in self.parser:
            rules.check_function_path("parser", self.parser)
        elif self.parser not in PARSERS:
            raise UserError(f"--parser {self.parser} is unknown: use {', '.join(PARSERS)} or module.py:function.")
        if not re.fullmatch(r"cpu|cuda(:\d+)?", self.parser_device):
            raise UserError(f"--parser_device {self.parser_device}: give cpu, cuda or cuda:0 and the like.")
        usual = default_of(TerminationFlags, "parser_device")
        if self.termination_condition == "parsing" and self.parser != "benepar" and self.parser_device != usual:
            logger.warning("--parser_device %s: of no effect, only benepar uses it.", self.parser_device)


@dataclass(kw_only=True)
class PoolingFlags:
    """How the tokens of a macro action are pooled."""

    _argument_group_name = "pooling of macro actions"

    value_function: Literal["equal", "unit", "position", "first"] = flag(
        "weights of the token values in the value of a macro action", "equal"
    )
    macro_reward: Literal["sum", "mean"] = flag("how the token rewards of a macro action are pooled", "sum")
    policy_ratio: Literal["token", "macro", "macro_mean", "sequence_mean"] = flag(
        "probability ratio per token; per macro action (product), or its geometric mean; or that of the whole response"
        " (GSPO)",
        "token",
    )
    loss_mean: Literal["token", "macro", "response", "length"] | None = flag(
        "the policy's loss is a mean over tokens (DAPO), over macro actions, over responses (GRPO), or the sum over"
        " tokens divided by a constant length (Dr. GRPO); token if not given, but macro with policy_ratio macro, and"
        " response with sequence_mean",
        None,
    )

    @property
    def mean_of_loss(self) -> str:
        """--loss_mean, or what follows from --policy_ratio."""
        return self.loss_mean or {"macro": "macro", "sequence_mean": "response"}.get(self.policy_ratio, "token")


SEVERAL = ("termination_condition", "ngram", "parser")  # flags whose every value gets a panel
# What each condition reads beside those; --parser_model is given once for each parser.
READ = {
    condition: [name for name in names if name not in (*SEVERAL, "parser_model")]
    for condition, names in FLAGS_OF.items()
}


@dataclass(kw_only=True)
class MacroActionsOptions:
    """Show where termination conditions cut responses, side by side; their flags are those of step 3."""

    model: str = like(ServerFlags, "model", help="folder or Hugging Face name; its tokenizer cuts into tokens")
    text: list[str] | None = flag("responses to cut", None)
    jsonl: Path | None = flag("file of rows with prompt and response, as inference writes them", None)
    prompt: str = flag("with --text: the prompt before each (matters for ppl)", "")
    limit: int = flag("with --jsonl: rows to show; 0 = all", 8, AT_LEAST_0)
    html: Path | None = flag("also write a page with the conditions side by side", None)
    colour: bool = flag("colours even where the output is no terminal", False)
    temperature: float = like(LogprobFlags, "temperature", help="ppl: of the log-probs")
    seed: int = like(OptimisationFlags, "seed", help="randomized: of the run")
    termination_condition: list[str] = like(TerminationFlags, "termination_condition", ["fixed"])
    ngram: list[Annotated[float, parse_ngram]] = like(TerminationFlags, "ngram", [5])
    parser: list[str] = like(TerminationFlags, "parser", ["benepar"])
    parser_model: list[str] | None = like(
        TerminationFlags, "parser_model", help="parsing: of each parser; - = its default"
    )
    repeat_times: int = like(TerminationFlags, "repeat_times")
    ngram_lengths: list[int] = like(TerminationFlags, "ngram_lengths")
    parsing_cutoff: int = like(TerminationFlags, "parsing_cutoff")
    parser_device: str = like(TerminationFlags, "parser_device")
    ppl_mode: Literal["chunk", "prefix", "token"] = like(TerminationFlags, "ppl_mode")
    surprise_probability: float = like(TerminationFlags, "surprise_probability")
    surprise_count: int = like(TerminationFlags, "surprise_count")

    def __post_init__(self) -> None:
        """Refuses values that mean nothing. Raises UserError, which names the flag."""
        rules.check_flags(self)
        if (self.text is None) == (self.jsonl is None):
            raise UserError("give either --text or --jsonl: the responses to cut.")


def _wrong_ngram(text: str) -> str:
    return f"--ngram {text} is out of range: give a whole number of at least 1 (1 = vanilla PPO), or inf."
