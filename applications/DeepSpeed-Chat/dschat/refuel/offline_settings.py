# SPDX-License-Identifier: Apache-2.0
"""Flags of REFUEL offline: pairs of replies that were sampled and scored beforehand."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from dschat.refuel.settings import LENGTH_RULE, RegressionConfig
from dschat.settings.common import COMMON_RULES
from dschat.settings.flags import ABOVE_0, FREE, NOT_EMPTY, default_of, flag
from dschat.settings.rules import Check, Rule, Rules
from dschat.settings.supervised import SupervisedConfig

logger = logging.getLogger(__name__)

# What the shared flags about rows of text would say, and does nothing here: the pairs are tokens.
TEXT_FLAGS = (
    *("data_split", "eval_share", "prompt_key", "chosen_key", "rejected_key", "response_key", "messages_key"),
    *("apply_chat_template", "end_of_conversation_token"),
)


@dataclass(kw_only=True, frozen=True)
class PairFlags:
    """The log-probabilities of the pairs under the initial policy."""

    section = "REFUEL"

    cluster: str | None = flag(
        "name of the machines: log-probabilities of the initial policy are cached beside the pairs under this name,"
        " for runs on such machines; in output_dir if not given",
        None,
        NOT_EMPTY,
        FREE,
        aliases=["--task.cluster"],
    )
    temperature: float = flag(
        "temperature with which the replies were sampled; divides the logits",
        0.8,
        ABOVE_0,
        aliases=["--task.temperature"],
    )


def _warn_of_text_flags(config: "RefuelConfig") -> None:
    values = config.flat()
    for name in TEXT_FLAGS:
        if values[name] != default_of(RefuelConfig, name):
            logger.warning("--%s does nothing here: the pairs are tokens already.", name)


REFUEL_RULES: "tuple[Rule[RefuelConfig] | Check[RefuelConfig], ...]" = (
    Rule(
        lambda config: config.pairs.cluster is not None and "/" in config.pairs.cluster,
        "--task.cluster {cluster}: give a name that a file can have, without a slash.",
    ),
    LENGTH_RULE,
    Check(_warn_of_text_flags),
)


class RefuelConfig(RegressionConfig, SupervisedConfig):
    """REFUEL: (log-ratio of the chosen - log-ratio of the rejected reply - eta x difference of their rewards)²."""

    own_inert_flags: ClassVar[Mapping[str, str]] = {
        "optimizer": "the optimiser is AdamW; --weight_decay 0 makes it Adam",
        **RegressionConfig.own_inert_flags,
    }
    rules: ClassVar[Rules] = (*COMMON_RULES, *REFUEL_RULES)
    defaults = {
        "max_seq_len": 2048,
        "eta": 1e3,
        "total_episodes": 64000,
        "num_warmup_steps": None,  # `derive` makes it a number
        "seed": 555134,
        "per_device_eval_batch_size": 1,
        "eval_iters": 0,
        "eval_interval": 100,
    }
    more_aliases = {"eval_interval": ("--print_sample_output_freq",)}
    helps = {
        "data_path": "pairs that `dschat refuel-data tokenize` wrote: folders, files, or data sets of the Hugging Face"
        " hub",
        "max_seq_len": "maximum length of state and reply together, in tokens; longer pairs are dropped",
        "model_name_or_path": "initial model, which generated the replies: a folder or a Hugging Face name",
        "warmup_ratio": "warm-up of the learning rate as a fraction of all optimiser updates, instead of"
        " num_warmup_steps; 0.1 if neither is given",
        "seed": "random seed of the order of the pairs and of LoRA's initialisation",
        "per_device_eval_batch_size": "pairs per forward pass and process in evaluation",
        "gradient_accumulation_steps": "forward passes per optimiser update; if not given, computed from"
        " global_batch_size, or 16",
        "eval_iters": "evaluation batches, of all processes together; 0 = all held-out pairs",
    }

    pairs: PairFlags

    @property
    def reads_rows(self) -> bool:
        """Pairs are tokens already."""
        return False

    @classmethod
    def derive(cls, values: dict[str, Any]) -> None:
        """Fill in the values that follow from other flags, in place; `values` holds every flag by its name."""
        super().derive(values)
        if values["gradient_accumulation_steps"] is None and values["global_batch_size"] is None:
            values["gradient_accumulation_steps"] = 16
        if values["num_warmup_steps"] is None:
            values["num_warmup_steps"] = 0
            if values["warmup_ratio"] is None and values["lr_scheduler_type"] != "constant":
                values["warmup_ratio"] = 0.1
