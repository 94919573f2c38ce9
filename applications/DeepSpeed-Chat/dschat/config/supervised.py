# SPDX-License-Identifier: Apache-2.0
"""What the configurations of steps 1 and 2 share."""

from dataclasses import dataclass
from typing import ClassVar

from dschat.config import rules
from dschat.config.batches import BatchPlan, plan_batches
from dschat.config.common import CommonConfig
from dschat.config.rules import flag


@dataclass(kw_only=True)
class SupervisedConfig(CommonConfig):
    """What steps 1 and 2 share: one model trained on whole texts.

    Attributes:
        sequences_per_example: that the model reads of an example: two of a pair.
    """

    _argument_group_name = "model and batches"
    sequences_per_example: ClassVar[int] = 1
    too_few_examples: ClassVar[str] = (
        "training examples are fewer than one global batch of {size}. Lower --global_batch_size (or"
        " --per_device_train_batch_size and --gradient_accumulation_steps), or give more data; --data_split says which"
        " part of them this step gets."
    )

    model_name_or_path: str = flag("model to start from: a folder or a Hugging Face name")
    max_seq_len: int = flag("longest text in tokens, prompt and response together; the rest is cut", 1024)
    per_device_train_batch_size: int = flag("examples per forward pass and process in training", 16)
    per_device_eval_batch_size: int = flag("examples per forward pass and process in evaluation", 16)
    eval_iters: int = flag("batches per process in an evaluation; 0 = all held-out rows", 100)
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

    def plan_batches(self, world_size: int) -> BatchPlan:
        """Work out the batch sizes; raises UserError when `global_batch_size` cannot be reached."""
        return plan_batches(
            "per_device_train_batch_size",
            self.per_device_train_batch_size,
            self.gradient_accumulation_steps,
            self.global_batch_size,
            world_size,
        )
