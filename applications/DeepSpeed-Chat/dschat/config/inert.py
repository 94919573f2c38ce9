# SPDX-License-Identifier: Apache-2.0
"""Flags of DeepSpeed-Chat that do nothing here. Old command lines keep working; each one says why, once."""

import argparse
import logging
from collections.abc import Mapping, Sequence
from typing import Any

logger = logging.getLogger(__name__)

_DROPOUT = "dropout is always off: the policy that samples and the one that is updated must be the same function"
NO_WANDB = "give --report_to wandb, with the project in WANDB_PROJECT"
_TEST_MODE = "there is no test mode: give --data_path a smaller file for a short run"

INERT_FLAGS: dict[str, str] = {
    "data_output_path": "data files are read directly, nothing is cached on disk",
    "num_padding_at_beginning": "padding is known from the attention mask, wherever it is",
    "only_optimize_lora": "with LoRA only the adapters and a new head are ever trained",
    "dropout": _DROPOUT,
    "actor_dropout": _DROPOUT,
    "critic_dropout": _DROPOUT,
    "print_answers_interval": "answers are shown at each evaluation: set --eval_interval",
    "print_loss": "losses are always written to metrics.jsonl",
    "add_eot_token": "--end_of_conversation_token alone chooses the token",
    "compute_fp32_loss": "losses are always computed in float32",
    "align_overflow": "actor and critic each handle the overflow of their own fp16 steps",
    "enable_hybrid_engine": "generation uses the training weights, there is no second engine",
    "inference_tp_size": "generation is not split over devices",
    "enable_zero3_generation_gather": "generation gathers the weights whenever they are split",
    "enable_test_mode": _TEST_MODE,
    "test_stop_step": _TEST_MODE,
}


class InertAction(argparse.Action):
    """Takes an optional value, stores nothing and logs one warning however often the flag is given."""

    def __init__(self, option_strings: Sequence[str], dest: str, *, reason: str, **kwargs: Any) -> None:
        """Remember why the flag does nothing."""
        super().__init__(option_strings, dest=argparse.SUPPRESS, default=argparse.SUPPRESS, nargs="?", **kwargs)
        self.reason = reason
        self.warned = False

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        """Warn, the first time."""
        if not self.warned:
            logger.warning("%s does nothing here: %s.", self.option_strings[0], self.reason)
        self.warned = True


def add_inert_flags(parser: argparse.ArgumentParser, own: Mapping[str, str]) -> None:
    """Let `parser` accept every inert flag, in both spellings, with or without a value.

    Args:
        parser: of a step.
        own: flag → reason, of flags that only this step accepts.
    """
    group = parser.add_argument_group("accepted with a warning, without effect")
    for name, reason in (INERT_FLAGS | dict(own)).items():
        options = dict.fromkeys([f"--{name}", f"--{name.replace('_', '-')}"])
        group.add_argument(*options, action=InertAction, reason=reason, metavar="VALUE", help=reason)
