# SPDX-License-Identifier: Apache-2.0
"""The flags of the demos, checked before anything slow is imported."""

from dataclasses import dataclass, fields
from typing import ClassVar

from dschat.common.display import HOST
from dschat.errors import UserError
from dschat.inference.options import (
    TEMPERATURE,
    ComputeFlags,
    InferenceOptions,
    PolicyOptions,
    PromptFlags,
    ScoredOptions,
)
from dschat.settings.commands import ServerFlags
from dschat.settings.common import DataFlags
from dschat.settings.logprobs import LogprobFlags
from dschat.settings.macro_actions import TerminationFlags
from dschat.settings.rewards import RewardFlags
from dschat.settings.rollouts import RolloutFlags
from dschat.settings.rules import flag, like

PASSWORD = "DEMO_PASSWORD"  # environment variable: what the page asks for


@dataclass(kw_only=True)
class DemoOptions(TerminationFlags, ComputeFlags):
    """What a demo is told."""

    task: ClassVar[str] = ""
    model: str | None = like(
        InferenceOptions,
        "model",
        help="a run's output folder, a model's folder, or a hub id; the page asks if not given",
    )
    other: str | None = flag("a second model, which answers the same beside the first", None, path=True)
    reward_model: str | None = like(
        ScoredOptions,
        "reward_model",
        None,
        "sequence classifier with one label; its score stands under each answer",
    )
    rm_template: bool = like(
        RewardFlags, "rm_template", help="put prompt and answer through the reward model's chat template"
    )
    temperature: float | None = like(
        LogprobFlags,
        "temperature",
        None,
        "of sampling; 0 = greedy; the run's or the model's own, else 0.8, if not given",
        TEMPERATURE,
    )
    top_k: int | None = like(
        RolloutFlags,
        "top_k",
        None,
        "draw from so many of the likeliest tokens, 0 = all; the run's or model's own, or 50, if not given",
    )
    top_p: float | None = like(
        RolloutFlags,
        "top_p",
        None,
        "draw from the likeliest tokens of this share; the run's or model's own, or 1, if not given",
    )
    max_new_tokens: int | None = like(
        PromptFlags,
        "max_new_tokens",
        None,
        "longest answer in tokens; the run's or model's own, or 128, if not given",
    )
    seed: int = like(PolicyOptions, "seed", help="of the draws")
    end_of_conversation_token: str | None = like(
        DataFlags, "end_of_conversation_token", help="a token that ends an answer beside EOS, as in training"
    )
    host: str = like(
        ServerFlags,
        "host",
        HOST,
        f"address that the page listens on; any other than this machine's own needs a password in {PASSWORD}",
    )
    port: int | None = like(ServerFlags, "port", None, "of the page; the first free one from 7860 if not given")

    def __post_init__(self) -> None:
        """Looks at what is about several flags as well."""
        super().__post_init__()
        self.check_termination()
        if self.rm_template and self.reward_model is None:
            raise UserError("--rm_template: there is no --reward_model to use it; give one, or drop the flag.")

    @property
    def termination(self) -> TerminationFlags:
        """Where macro actions end."""
        return TerminationFlags(**{field.name: getattr(self, field.name) for field in fields(TerminationFlags)})

    @property
    def sides(self) -> int:
        """Models that answer."""
        return 1 if self.other is None else 2


@dataclass(kw_only=True)
class ChatOptions(DemoOptions):
    """Talk with a trained model, or with two side by side: on a page, or in a terminal, over ssh or in pipes."""

    task: ClassVar[str] = "chat"
    terminal: bool = flag("chat here instead of on a page", False)

    def __post_init__(self) -> None:
        """Looks at what is about several flags as well."""
        super().__post_init__()
        if self.terminal and self.model is None:
            raise UserError("--model is missing: --terminal needs a model to talk to.")


@dataclass(kw_only=True)
class SummaryOptions(DemoOptions):
    """Summaries of posts (TL;DR) by a trained model, on a page."""

    task: ClassVar[str] = "summary"
