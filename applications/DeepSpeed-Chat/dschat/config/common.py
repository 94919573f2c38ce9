# SPDX-License-Identifier: Apache-2.0
"""What every step's configuration is: the shared flags, and the rules between them.

Values that follow from other flags (dtype from `--bf16`, the TensorBoard folder, ...) are filled in when the object is
made.
"""

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from dschat.config import rules
from dschat.config.batches import BatchPlan
from dschat.config.finetuning import FinetuningFlags
from dschat.config.sections import DataFlags, EngineFlags, OptimisationFlags, OutputFlags
from dschat.config.tracking import TrackingFlags
from dschat.errors import UserError

logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class CommonConfig(DataFlags, OutputFlags, TrackingFlags, OptimisationFlags, FinetuningFlags, EngineFlags, ABC):
    """The flags of every step.

    Attributes:
        step: of the pipeline: 1, 2 or 3.
        own_inert_flags: of the step alone, accepted with a warning that says why they do nothing.
        too_few_examples: what is said after their number, with the {size} of an iteration.
    """

    step: ClassVar[int]
    too_few_examples: ClassVar[str]
    own_inert_flags: ClassVar[Mapping[str, str]] = {}

    def __post_init__(self) -> None:
        """Fill in the values that follow from other flags."""
        if self.bf16 and self.dtype is None:
            self.dtype = "bf16"
        if self.tensorboard_path is None:
            self.tensorboard_path = str(Path(self.output_dir) / "tensorboard")
        self.fill_in_rank()

    def validate(self) -> None:
        """Check every flag, alone and against the others.

        Raises:
            UserError: for the first broken rule; the message names the flag and says what to change.
        """
        self._check_common_numbers()
        self._check_common_names()
        self.check_tracking()
        if self.bf16 and self.dtype != "bf16":
            raise UserError(f"--bf16 contradicts --dtype {self.dtype}: drop one of them.")
        if self.warmup_ratio is not None and self.num_warmup_steps > 0:
            raise UserError(
                f"--num_warmup_steps {self.num_warmup_steps} and --warmup_ratio {self.warmup_ratio} both set the"
                " warm-up: drop one of them."
            )
        if self.lr_scheduler_type == "constant" and (self.num_warmup_steps > 0 or self.warmup_ratio):
            raise UserError(
                "--lr_scheduler_type constant has no warm-up: use constant_with_warmup, or drop --num_warmup_steps and"
                " --warmup_ratio."
            )

        self._check_memory_flags()

    def _check_memory_flags(self) -> None:
        """Offload and what is trained: what needs another flag beside it."""
        self._check_offload()
        self.check_finetuning(self.lora_ranks)

    def _check_offload(self) -> None:
        if self.offload and 0 in self.zero_stages:
            raise UserError(
                "--offload needs ZeRO: give --zero_stage 1, 2 or 3 (in step 3 for both actor and critic), or drop it."
            )

    def _check_common_numbers(self) -> None:
        seed_rule = (lambda seed: 0 <= seed < 2**32, "a whole number from 0 to 4294967295")
        ratio_rule = (lambda ratio: 0 <= ratio < 1, "a number of at least 0 and below 1")
        rules.check_numbers(self, ["seed"], seed_rule)
        rules.check_numbers(self, ["warmup_ratio"], ratio_rule)
        rules.check_numbers(
            self,
            ["num_train_epochs", "gradient_accumulation_steps", "global_batch_size", "ddp_timeout"],
            rules.AT_LEAST_1,
        )
        counts = ["save_steps", "save_total_limit", "save_models", "eval_interval", "num_warmup_steps"]
        counts += ["gradient_clipping"]
        rules.check_numbers(self, counts, rules.AT_LEAST_0)

    def _check_common_names(self) -> None:
        keys = ["prompt_key", "chosen_key", "rejected_key", "response_key", "messages_key"]
        rules.check_not_empty(self, ["data_path", "output_dir", "end_of_conversation_token", *keys])
        rules.check_data_split(self.data_split, self.step)
        if self.deepspeed_config is not None:
            rules.check_json_object("deepspeed_config", self.deepspeed_config)
        may_hold_run = self.overwrite_output_dir or self.resume_from_checkpoint is not None
        rules.check_output_dir(self.output_dir, may_hold_run, [*self.model_paths, *self.data_path])

    @property
    def trackers(self) -> tuple[str, ...]:
        """Those of --report_to and --enable_tensorboard, each once."""
        return tuple(dict.fromkeys([*self.report_to, *(["tensorboard"] if self.enable_tensorboard else [])]))

    @property
    def spreads_lengths(self) -> bool:
        """Whether a micro-batch holds examples of all lengths, not similar ones."""
        return False

    def total_iterations(self, per_epoch: int, size: int) -> int:
        """Iterations of the whole run, of so many in an epoch and examples in each."""
        return per_epoch * self.num_train_epochs

    def warmup_updates(self, total_updates: int) -> int:
        """Number of warm-up updates in a run of `total_updates`; a ratio is rounded up."""
        if self.warmup_ratio is None:
            return self.num_warmup_steps
        return math.ceil(self.warmup_ratio * total_updates)

    def warn_of_warmup(self, total_updates: int) -> None:
        """Warn where a run of `total_updates` ends before its warm-up."""
        if self.num_warmup_steps >= total_updates:
            logger.warning(
                "--num_warmup_steps %d: the run makes %d updates, so its learning rate never reaches its peak.",
                self.num_warmup_steps,
                total_updates,
            )

    @property
    def full_disk_remedy(self) -> str:
        """What to do after a run ended because the disk was full."""
        if self.save_steps or self.resume_from_checkpoint is not None:
            return "Make room, and go on with --resume_from_checkpoint."
        return "Make room, and start again; with --save_steps, a run can go on."

    @property
    @abstractmethod
    def zero_stages(self) -> list[int]:
        """ZeRO stage of each trained model."""

    @property
    @abstractmethod
    def lora_ranks(self) -> list[int]:
        """Rank of each trained model's LoRA adapters; 0 = none."""

    @property
    @abstractmethod
    def model_paths(self) -> list[str]:
        """The models that the flags name."""

    @abstractmethod
    def plan_batches(self, world_size: int) -> BatchPlan:
        """Work out the batch sizes on `world_size` processes.

        Raises:
            UserError: when the sizes do not fit together; the message names the nearest that do.
        """
