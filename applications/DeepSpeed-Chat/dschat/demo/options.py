# SPDX-License-Identifier: Apache-2.0
"""The flags of the demos, checked before anything slow is imported."""

from dataclasses import dataclass
from typing import ClassVar

from dschat.base.web_page import HOST
from dschat.evaluation.generate_options import TEMPERATURE, TRAINING_SEED, ComputeFlags, quiet_transformers
from dschat.settings.commands import PORT
from dschat.settings.common import SEED
from dschat.settings.config import Config
from dschat.settings.flags import AT_LEAST_0, AT_LEAST_1, NOT_EMPTY, UP_TO_1, flag
from dschat.settings.macro_actions import TerminationFlags
from dschat.settings.rules import Check, Rule, Rules

PASSWORD = "DEMO_PASSWORD"  # environment variable with the password of the page
FROM_THE_RUN = "if not given, that of the model's run or of its generation_config.json, or"


@dataclass(kw_only=True)
class DemoFlags:
    """Models of a demo, sampling, and the page."""

    model: str = flag("model to talk to: a run's output folder, a model's folder, or a hub id", path=True)
    other: str | None = flag("second model, which answers the same messages beside the first", None, path=True)
    reward_model: str | None = flag(
        "reward model whose score is shown below each answer: a sequence classifier with one label", None, path=True
    )
    rm_template: bool = flag("format prompt and answer with the reward model's chat template", False)
    temperature: float | None = flag(f"sampling temperature; 0 = greedy; {FROM_THE_RUN} 0.8", None, TEMPERATURE)
    top_k: int | None = flag(f"sample from the k most likely tokens; 0 = all; {FROM_THE_RUN} 50", None, AT_LEAST_0)
    top_p: float | None = flag(
        f"sample from the most likely tokens whose probabilities add up to this; {FROM_THE_RUN} 1", None, UP_TO_1
    )
    max_new_tokens: int | None = flag(f"maximum length of an answer in tokens; {FROM_THE_RUN} 128", None, AT_LEAST_1)
    seed: int = flag("random seed of sampling", TRAINING_SEED, SEED)
    end_of_conversation_token: str | None = flag(
        "token that ends an answer in addition to EOS, as in training", None, NOT_EMPTY
    )
    host: str = flag(
        f"address on which the page is served; any other than a loopback address needs a password in {PASSWORD}", HOST
    )
    port: int | None = flag("port of the page; the first free one from 7860 if 0 or not given", None, PORT)


@dataclass(kw_only=True)
class ChatFlags:
    """What begins a chat, and whether it is in the terminal or on a page."""

    system_prompt: str | None = flag(
        "system prompt of every conversation, for models whose chat template takes one", None, NOT_EMPTY
    )
    terminal: bool = flag("chat in this terminal instead of on a web page", False)


class DemoOptions(Config):
    """Flags of every demo."""

    task: ClassVar[str] = ""
    rules: ClassVar[Rules] = (
        Check(lambda options: options.termination.check_termination()),
        Rule(
            lambda options: options.demo.rm_template and options.demo.reward_model is None,
            "--rm_template: there is no --reward_model to use it; give one, or drop the flag.",
        ),
    )

    demo: DemoFlags
    termination: TerminationFlags
    compute: ComputeFlags

    def prepare(self) -> None:
        """Turns off the progress bars of transformers; the demo has its own."""
        quiet_transformers()


class ChatOptions(DemoOptions):
    """Talk with a trained model, or with two side by side: on a page, or in a terminal, over ssh or in pipes."""

    task: ClassVar[str] = "chat"

    chat: ChatFlags


class SummaryOptions(DemoOptions):
    """Summaries of posts (TL;DR) by a trained model, on a page."""

    task: ClassVar[str] = "summary"
