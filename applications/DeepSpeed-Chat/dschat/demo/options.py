# SPDX-License-Identifier: Apache-2.0
"""The flags of the demos, checked before anything slow is imported."""

from dataclasses import dataclass
from typing import ClassVar

from dschat.base.display import HOST
from dschat.lab.generate_options import TEMPERATURE, TRAINING_SEED, ComputeFlags, quiet_transformers
from dschat.settings.commands import PORT
from dschat.settings.common import SEED
from dschat.settings.config import Config
from dschat.settings.flags import AT_LEAST_0, AT_LEAST_1, NOT_EMPTY, UP_TO_1, flag
from dschat.settings.macro_actions import TerminationFlags
from dschat.settings.rules import Check, Rule, Rules

PASSWORD = "DEMO_PASSWORD"  # environment variable: what the page asks for


@dataclass(kw_only=True)
class DemoFlags:
    """The models of a demo, how they answer, and its page."""

    model: str | None = flag(
        "a run's output folder, a model's folder, or a hub id; the page asks if not given", None, path=True
    )
    other: str | None = flag("a second model, which answers the same beside the first", None, path=True)
    reward_model: str | None = flag(
        "sequence classifier with one label; its score stands under each answer", None, path=True
    )
    rm_template: bool = flag("put prompt and answer through the reward model's chat template", False)
    temperature: float | None = flag(
        "of sampling; 0 = greedy; the run's or the model's own, else 0.8, if not given", None, TEMPERATURE
    )
    top_k: int | None = flag(
        "draw from so many of the likeliest tokens, 0 = all; the run's or model's own, or 50, if not given",
        None,
        AT_LEAST_0,
    )
    top_p: float | None = flag(
        "draw from the likeliest tokens of this share; the run's or model's own, or 1, if not given", None, UP_TO_1
    )
    max_new_tokens: int | None = flag(
        "longest answer in tokens; the run's or model's own, or 128, if not given", None, AT_LEAST_1
    )
    seed: int = flag("of the draws", TRAINING_SEED, SEED)
    end_of_conversation_token: str | None = flag(
        "a token that ends an answer beside EOS, as in training", None, NOT_EMPTY
    )
    host: str = flag(
        f"address that the page listens on; any other than this machine's own needs a password in {PASSWORD}", HOST
    )
    port: int | None = flag("of the page; the first free one from 7860 if not given", None, PORT)

    @property
    def sides(self) -> int:
        """Models that answer."""
        return 1 if self.other is None else 2


@dataclass(kw_only=True)
class TerminalFlags:
    """Where one talks with the models."""

    terminal: bool = flag("chat here instead of on a page", False)


DEMO_RULES: "tuple[Rule[DemoOptions] | Check[DemoOptions], ...]" = (
    Check(lambda options: options.termination.check_termination()),
    Rule(
        lambda options: options.demo.rm_template and options.demo.reward_model is None,
        "--rm_template: there is no --reward_model to use it; give one, or drop the flag.",
    ),
)


class DemoOptions(Config):
    """What every demo is told."""

    task: ClassVar[str] = ""
    rules: ClassVar[Rules] = DEMO_RULES

    demo: DemoFlags
    termination: TerminationFlags
    compute: ComputeFlags

    def prepare(self) -> None:
        """Leaves the screen to our own bar and messages."""
        quiet_transformers()


class ChatOptions(DemoOptions):
    """Talk with a trained model, or with two side by side: on a page, or in a terminal, over ssh or in pipes."""

    task: ClassVar[str] = "chat"
    rules: ClassVar[Rules] = (
        *DEMO_RULES,
        Rule(
            lambda options: options.chat.terminal and options.demo.model is None,
            "--model is missing: --terminal needs a model to talk to.",
        ),
    )

    chat: TerminalFlags


class SummaryOptions(DemoOptions):
    """Summaries of posts (TL;DR) by a trained model, on a page."""

    task: ClassVar[str] = "summary"
