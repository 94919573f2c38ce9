# SPDX-License-Identifier: Apache-2.0
"""Flags of REFUEL on pairs that were drawn before: regression of the relative rewards of two replies."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from dschat.config import rules
from dschat.config.inert import NO_WANDB
from dschat.config.rules import flag
from dschat.config.supervised import SupervisedConfig
from dschat.errors import UserError

logger = logging.getLogger(__name__)

# What the shared flags about rows of text would say, and does nothing here: the pairs are tokens.
TEXT_FLAGS = ("data_split", "prompt_key", "chosen_key", "rejected_key", "response_key", "messages_key")


@dataclass(kw_only=True)
class RefuelConfig(SupervisedConfig):
    """REFUEL: (log-ratio of the chosen - log-ratio of the rejected reply - eta x difference of their rewards)²."""

    _argument_group_name = "REFUEL"
    step: ClassVar[int] = 3
    compares_logprobs: ClassVar[bool] = True
    sequences_per_example: ClassVar[int] = 2
    own_inert_flags: ClassVar[Mapping[str, str]] = {"track": NO_WANDB, "wandb_project_name": NO_WANDB}

    data_path: list[str] = flag(
        "pairs that tokenize_masks.py wrote: folders, files, or data sets of the Hugging Face hub",
        aliases=["--task.query_dataset"],
    )
    cluster: str | None = flag(
        "name of the machines: log-probs of the policy before training are kept beside the pairs under it, for runs on"
        " the same kind; without it, in output_dir",
        None,
        aliases=["--task.cluster"],
    )
    max_seq_len: int = flag(
        "longest state and reply together in tokens; longer pairs are left out", 2048, aliases=["--task.total_length"]
    )
    temperature: float = flag("divides the logits, as it did when the replies were drawn", 0.8,
                              aliases=["--task.temperature"])  # fmt: skip
    eta: float = flag("weight of the rewards' difference; a large one is a large step", 1e3,
                      aliases=["--refuel.eta", "--rebel.eta"])  # fmt: skip
    total_episodes: int = flag(
        "pairs to train on in all, in several passes over the data if need be; 0 = num_train_epochs passes", 64000
    )
    start_idx: int = flag("first training row to use, from 0", 0)
    end_idx: int = flag("training row to stop before; -1 = use all", -1)
    optimizer: Literal["adamw", "adam"] = flag("adamw, or adam: without weight decay", "adamw")

    model_name_or_path: str = flag(
        "model to start from, which drew the replies: a folder or a Hugging Face name", aliases=["--base_model"]
    )
    learning_rate: float = flag("peak learning rate", 3e-7, aliases=["--lr"])
    weight_decay: float = flag("weight decay of AdamW", 1e-6)
    warmup_ratio: float | None = flag(
        "warm-up as a part of all optimiser updates, instead of num_warmup_steps; 0.1 if neither is given", None
    )
    gradient_clipping: float = flag("largest gradient norm of an update; 0 = no clipping", 0.0)
    seed: int = flag("seed of the order of the pairs, and of LoRA's initialisation", 555134)
    per_device_train_batch_size: int = flag("pairs per forward pass and process in training", 1)
    per_device_eval_batch_size: int = flag("pairs per forward pass and process in evaluation", 1)
    gradient_accumulation_steps: int | None = flag(
        "forward passes per optimiser update; 16, or what global_batch_size makes of it, if not given", None
    )
    eval_iters: int = flag("batches per process in an evaluation; 0 = all held-out pairs", 0)
    eval_interval: int = flag(
        "evaluate every this many optimiser updates; 0 = only at the start and the end",
        100,
        aliases=["--print_sample_output_freq"],
    )

    def __post_init__(self) -> None:
        """Fill in the values that follow from other flags."""
        super().__post_init__()
        if self.gradient_accumulation_steps is None and self.global_batch_size is None:
            self.gradient_accumulation_steps = 16
        if self.warmup_ratio is None and not self.num_warmup_steps and self.lr_scheduler_type != "constant":
            self.warmup_ratio = 0.1
        if self.optimizer == "adam" and self.weight_decay == rules.default_of(RefuelConfig, "weight_decay"):
            self.weight_decay = 0.0

    def validate(self) -> None:
        """Check the shared rules, then REFUEL's. Raises UserError."""
        super().validate()
        rules.check_numbers(self, ["temperature"], rules.ABOVE_0)
        rules.check_numbers(self, ["eta", "total_episodes", "start_idx"], rules.AT_LEAST_0)
        rules.check_not_empty(self, ["cluster"])
        if self.optimizer == "adam" and self.weight_decay:
            raise UserError(f"--weight_decay {self.weight_decay}: --optimizer adam has none. Use adamw, or drop it.")
        if self.cluster is not None and "/" in self.cluster:
            raise UserError(f"--task.cluster {self.cluster}: give a name that a file can have, without a slash.")
        if self.end_idx != -1 and self.end_idx <= self.start_idx:
            raise UserError(f"--end_idx {self.end_idx} is not above --start_idx {self.start_idx}: give another range.")
        if self.total_episodes and self.num_train_epochs != 1:
            raise UserError(
                f"--num_train_epochs {self.num_train_epochs} and --total_episodes {self.total_episodes} both say how"
                " long to train: drop one of them; --total_episodes 0 leaves it to the epochs."
            )
        for name in (*TEXT_FLAGS, "end_of_conversation_token"):
            if getattr(self, name) != rules.default_of(RefuelConfig, name):
                logger.warning("--%s does nothing here: the pairs are tokens already.", name)

    def total_iterations(self, per_epoch: int, size: int) -> int:
        """Updates: as many as --total_episodes fill, or --num_train_epochs passes; at least one."""
        return (
            max(1, self.total_episodes // size) if self.total_episodes else super().total_iterations(per_epoch, size)
        )
