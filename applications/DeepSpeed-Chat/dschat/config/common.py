# SPDX-License-Identifier: Apache-2.0
"""The flags that all three steps share, in sections, and the rules between them.

A field is a flag: its name, its one default and its help line. Values that follow from other flags (dtype from
`--bf16`, the TensorBoard folder, ...) are filled in when the object is made.
"""

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from dschat.config import rules
from dschat.config.batches import BatchPlan, plan_batches
from dschat.config.rules import flag
from dschat.errors import UserError

logger = logging.getLogger(__name__)

Schedule = Literal[
    "linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "constant_with_warmup", "inverse_sqrt"
]
Dtype = Literal["fp32", "bf16", "fp16"]
Attention = Literal["sdpa", "eager", "flash_attention_2"]
ZeroStage = Literal[0, 1, 2, 3]
OnNonFinite = Literal["stop", "skip"]
SCHEDULE_HELP = "learning-rate schedule over the optimiser updates of the run"


@dataclass(kw_only=True)
class DataFlags:
    """Where the rows come from."""

    _argument_group_name = "data"

    data_path: list[str] = flag(
        "one or more of: .jsonl, .json or .parquet files; folders with train* files; tldr, hh, webgpt, apps; data sets"
        " of the Hugging Face hub"
    )
    data_split: str = flag("fractions of the rows that steps 1, 2 and 3 use", "2,4,4")
    prompt_key: str = flag("column of the prompt", "prompt")
    chosen_key: str = flag("column of the preferred response", "chosen")
    rejected_key: str = flag("column of the other response", "rejected")
    response_key: str = flag("column of the response in data without preferences", "response")
    messages_key: str = flag("column of a conversation (list of role and content)", "messages")
    end_of_conversation_token: str | None = flag("token that ends a response, beside EOS", None)


@dataclass(kw_only=True)
class OutputFlags:
    """What is written and when; every count is in optimiser updates."""

    _argument_group_name = "output, evaluation and logging"

    output_dir: str = flag("folder for models, metrics and records")
    overwrite_output_dir: bool = flag("replace a run that output_dir holds, once there are new models", False)
    save_steps: int = flag("write a checkpoint to go on from every this many updates; 0 = at a signal only", 0)
    save_total_limit: int = flag("checkpoints to keep: the newest, and the best one beside; 0 = all", 2)
    save_models: int = flag("keep the models of every this many optimiser updates; 0 = only those of the end", 0)
    resume_from_checkpoint: str | None = flag(
        "go on from a checkpoint: its folder, or latest, also without a value", None, nargs="?", const="latest"
    )
    eval_interval: int = flag("evaluate every this many optimiser updates; 0 = only at the start and the end", 0)
    enable_tensorboard: bool = flag("write metrics to TensorBoard too", False)
    tensorboard_path: str | None = flag("folder of the TensorBoard files; output_dir/tensorboard if not given", None)


@dataclass(kw_only=True)
class OptimisationFlags:
    """Epochs, batches and the learning-rate schedule."""

    _argument_group_name = "optimisation"

    seed: int = flag("seed of the data split, order, sampling and initialisation", 1234)
    num_train_epochs: int = flag("passes over the training rows", 1)
    gradient_accumulation_steps: int | None = flag(
        "forward passes per optimiser update; 1, or what global_batch_size makes of it, if not given", None
    )
    global_batch_size: int | None = flag("examples per optimiser update on all processes; sets the accumulation", None)
    lr_scheduler_type: Schedule = flag(SCHEDULE_HELP, "cosine")
    num_warmup_steps: int = flag("warm-up in optimiser updates", 0)
    warmup_ratio: float | None = flag("warm-up as a part of all optimiser updates, instead of num_warmup_steps", None)
    gradient_clipping: float = flag("largest gradient norm of an update; 0 = no clipping", 1.0)
    on_nonfinite: OnNonFinite = flag("at a NaN or infinity: stop the run, or skip that update or rollout", "stop")


@dataclass(kw_only=True)
class EngineFlags:
    """Precision, memory and the launcher."""

    _argument_group_name = "precision, memory and launcher"

    dtype: Dtype | None = flag("number format; bf16 on CUDA and fp32 on a CPU if not given", None)
    bf16: bool = flag("short for --dtype bf16", False)
    attn_implementation: Attention = flag(
        "attention: sdpa (eager where a family's cap on its logits needs it), eager or flash_attention_2", "sdpa"
    )
    zero_stage: ZeroStage = flag("ZeRO stage of DeepSpeed", 0)
    offload: bool = flag("keep optimiser states and parameters in CPU memory", False)
    lora_dim: int = flag("rank of the LoRA adapters; 0 = train all weights", 0)
    lora_module_name: str | None = flag("part of the names of the layers that get LoRA adapters", None)
    merge_lora: bool = flag("with LoRA, save the merged model beside the adapter", True)
    self_checks: bool = flag("check log-probs, padding and special tokens before the first update", True)
    deepspeed: bool = flag("accepted for the launcher: every run uses DeepSpeed", False)
    deepspeed_config: str | None = flag("JSON file with DeepSpeed settings that replace ours", None)
    local_rank: int = flag("set by the launcher", -1)
    ddp_timeout: int = flag("seconds that processes wait for each other before the run ends with an error", 1800)


@dataclass(kw_only=True)
class CommonConfig(DataFlags, OutputFlags, OptimisationFlags, EngineFlags, ABC):
    """The flags of every step.

    Attributes:
        step: of the pipeline: 1, 2 or 3.
        own_inert_flags: of the step alone, accepted with a warning that says why they do nothing.
    """

    step: ClassVar[int]
    own_inert_flags: ClassVar[Mapping[str, str]] = {}

    def __post_init__(self) -> None:
        """Fill in the values that follow from other flags."""
        if self.bf16 and self.dtype is None:
            self.dtype = "bf16"
        if self.tensorboard_path is None:
            self.tensorboard_path = str(Path(self.output_dir) / "tensorboard")

    def validate(self) -> None:
        """Check every flag, alone and against the others.

        Raises:
            UserError: for the first broken rule; the message names the flag and says what to change.
        """
        self._check_common_numbers()
        self._check_common_names()
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
        """Offload and LoRA: what needs another flag beside it."""
        self._check_offload()
        if not any(self.lora_ranks) and (self.lora_module_name is not None or not self.merge_lora):
            name = "--lora_module_name" if self.lora_module_name is not None else "--no_merge_lora"
            logger.warning("%s does nothing without --lora_dim.", name)

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
        counts += ["gradient_clipping", "lora_dim"]
        rules.check_numbers(self, counts, rules.AT_LEAST_0)

    def _check_common_names(self) -> None:
        keys = ["prompt_key", "chosen_key", "rejected_key", "response_key", "messages_key"]
        rules.check_not_empty(self, ["data_path", "output_dir", "end_of_conversation_token", *keys])
        rules.check_data_split(self.data_split, self.step)
        if self.deepspeed_config is not None:
            rules.check_json_object("deepspeed_config", self.deepspeed_config)
        may_hold_run = self.overwrite_output_dir or self.resume_from_checkpoint is not None
        rules.check_output_dir(self.output_dir, may_hold_run, [*self.model_paths, *self.data_path])

    def warmup_updates(self, total_updates: int) -> int:
        """Number of warm-up updates in a run of `total_updates`; a ratio is rounded up."""
        if self.warmup_ratio is None:
            return self.num_warmup_steps
        return math.ceil(self.warmup_ratio * total_updates)

    def warn_of_warmup(self, total_updates: int) -> None:
        """Warn where a run of `total_updates` ends before its warm-up."""
        if self.num_warmup_steps >= total_updates:
            logger.warning(
                "--num_warmup_steps %d: the run makes %d updates, so its learning rate never reaches the highest.",
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


@dataclass(kw_only=True)
class SupervisedConfig(CommonConfig):
    """What steps 1 and 2 share: one model trained on whole texts.

    Attributes:
        sequences_per_example: that the model reads of an example: two of a pair.
    """

    _argument_group_name = "model and batches"
    sequences_per_example: ClassVar[int] = 1

    model_name_or_path: str = flag("model to start from: a folder or a Hugging Face name")
    max_seq_len: int = flag("longest text in tokens, prompt and response together; the rest is cut", 1024)
    per_device_train_batch_size: int = flag("examples per forward pass and process in training", 16)
    per_device_eval_batch_size: int = flag("examples per forward pass and process in evaluation", 16)
    eval_iters: int = flag("batches per process in an evaluation; 0 = all held-out rows", 100)
    gradient_checkpointing: bool = flag("recompute activations in the backward pass, to save memory", False)
    learning_rate: float  # the default is each step's own
    weight_decay: float

    def validate(self) -> None:
        """Check the shared rules, then those of steps 1 and 2. Raises UserError."""
        super().validate()
        sizes = ["max_seq_len", "per_device_train_batch_size", "per_device_eval_batch_size"]
        rules.check_numbers(self, sizes, rules.AT_LEAST_1)
        rules.check_numbers(self, ["eval_iters", "learning_rate", "weight_decay"], rules.AT_LEAST_0)
        rules.check_not_empty(self, ["model_name_or_path"])

    def num_eval_examples(self, world_size: int) -> int:
        """Most held-out examples of one evaluation; 0 = all."""
        return self.eval_iters * self.per_device_eval_batch_size * world_size

    @property
    def zero_stages(self) -> list[int]:
        """The model's ZeRO stage."""
        return [self.zero_stage]

    @property
    def lora_ranks(self) -> list[int]:
        """The model's LoRA rank."""
        return [self.lora_dim]

    @property
    def model_paths(self) -> list[str]:
        """What the model is loaded from."""
        return [self.model_name_or_path]

    def total_updates(self, per_epoch: int, global_batch: int) -> int:
        """Optimiser updates of the whole run, of so many in an epoch and examples in each."""
        return per_epoch * self.num_train_epochs

    def plan_batches(self, world_size: int) -> BatchPlan:
        """Work out the batch sizes; raises UserError when `global_batch_size` cannot be reached."""
        return plan_batches(
            "per_device_train_batch_size",
            self.per_device_train_batch_size,
            self.gradient_accumulation_steps,
            self.global_batch_size,
            world_size,
        )
