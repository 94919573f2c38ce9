# SPDX-License-Identifier: Apache-2.0
"""Flags of steps 1 and 2, and of every step that trains one model."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from dschat.settings.batches import BatchPlan, BatchSizes, plan_batches
from dschat.settings.common import COMMON_RULES, CommonConfig
from dschat.settings.flags import ABOVE_0, AT_LEAST_0, AT_LEAST_1, BELOW_1, FREE, NOT_EMPTY, SHARE, flag
from dschat.settings.rules import Rule, Rules

PACKABLE = ("auto", "sdpa", "eager", "flex_attention")  # attention that keeps the examples of a row apart
RewardLoss = Literal["end", "last_token", "per_sample", "average"]


@dataclass(kw_only=True, frozen=True)
class ModelFlags:
    """The model, its batches and its optimiser."""

    section = "model and batches"

    model_name_or_path: str = flag(
        "initial model: a folder or a Hugging Face name", range=NOT_EMPTY, on_resume=FREE, path=True
    )
    max_seq_len: int = flag(
        "maximum length of prompt and response together, in tokens; longer sequences are truncated", 1024, AT_LEAST_1
    )
    per_device_train_batch_size: int = flag(
        "examples per forward pass and process in training (micro-batch)", 16, AT_LEAST_1, SHARE
    )
    learning_rate: float = flag("peak learning rate", range=AT_LEAST_0)  # the default is each step's own
    weight_decay: float = flag("weight decay of AdamW", range=AT_LEAST_0)


@dataclass(kw_only=True, frozen=True)
class HeldOutFlags:
    """The size of evaluations."""

    section = "model and batches"

    eval_iters: int = flag(
        "evaluation batches, of all processes together; 0 = all held-out rows", 100, AT_LEAST_0, FREE
    )


@dataclass(kw_only=True, frozen=True)
class SFTFlags:
    """What step 1 learns from."""

    section = "supervised fine-tuning"

    sft_on_prompt: bool = flag("also train on the prompt tokens", False)
    label_smoothing: float = flag("label smoothing: probability that is spread over all tokens", 0.0, BELOW_1)
    train_on: Literal["all", "last"] = flag(
        "which assistant messages of a conversation are trained on: all, or only the last", "last"
    )
    packing: bool = flag(
        "pack several examples into each row of max_seq_len tokens; examples do not attend to each other, and batch"
        " sizes still count examples",
        False,
    )


@dataclass(kw_only=True, frozen=True)
class PreferenceFlags:
    """The loss of step 2's reward model."""

    section = "reward model"

    reward_loss: RewardLoss = flag(
        "which values of a pair are compared: at the last token (end), at the token before it (last_token), at every"
        " token from the first difference on (per_sample), or the mean from the first difference to the token before"
        " the last (average)",
        "end",
    )
    margin_key: str | None = flag(
        "column of the margin by which the chosen response should win, at least 0", None, NOT_EMPTY
    )
    center_rewards_coefficient: float = flag(
        "weight of (chosen score + rejected score)², which keeps scores centred at 0", 0.0, AT_LEAST_0
    )
    reward_gain: bool = flag(
        "also learn one factor for all scores; it is merged into the head when the model is saved", False
    )


@dataclass(kw_only=True, frozen=True)
class DPOFlags:
    """The loss of direct preference optimisation."""

    section = "direct preference optimisation"

    beta: float = flag(
        "strength of the KL constraint: smaller values let the policy move further from its start", 0.1, ABOVE_0
    )
    label_smoothing: float = flag(
        "assumed probability that a preference label is wrong (conservative DPO)",
        0.0,
        (lambda number: 0 <= number < 0.5, "a number of at least 0 and below 0.5"),
    )
    reference_free: bool = flag("compare log-probabilities directly, without the reference policy", False)


class OneModelConfig(CommonConfig):
    """A step that trains one model."""

    planned_models: ClassVar[str] = "plan.one_model:one_model_roles"
    sequences_per_example: ClassVar[int] = 1  # that the model reads of an example: two of a pair

    model: ModelFlags

    @property
    def longest_example(self) -> tuple[int, str]:
        """One of --max_seq_len, or a pair of them."""
        number, length = self.sequences_per_example, self.model.max_seq_len
        return number * length, f"a {'pair' if number == 2 else 'text'} of --max_seq_len {length}"

    @property
    def zero_stages(self) -> list[int]:
        """The model's ZeRO stage."""
        return [self.engine.zero_stage]

    @property
    def lora_ranks(self) -> list[int]:
        """The model's LoRA rank."""
        return [self.finetuning.lora_dim]

    @property
    def model_paths(self) -> list[str]:
        """What the model is loaded from."""
        return [self.model.model_name_or_path]

    @property
    def batch_sizes(self) -> BatchSizes:
        """The flags that decide the batch sizes."""
        return BatchSizes(
            "per_device_train_batch_size",
            self.model.per_device_train_batch_size,
            self.optimisation.gradient_accumulation_steps,
            self.optimisation.global_batch_size,
        )

    def plan_batches(self, world_size: int) -> BatchPlan:
        """Work out the batch sizes; raises UserError when `global_batch_size` cannot be reached."""
        return plan_batches(self.batch_sizes, world_size, max_tokens=self.optimisation.max_tokens_per_micro_batch)


class SupervisedConfig(OneModelConfig):
    """What steps 1 and 2 share: one model trained on whole texts."""

    too_few_examples: ClassVar[str] = (
        "training examples are fewer than one global batch of {size}. Give {smaller}more data; --data_split says which"
        " part of them this step gets."
    )

    held_out: HeldOutFlags

    @property
    def num_eval_examples(self) -> int:
        """Most held-out examples of one evaluation, over all processes; 0 = all."""
        return self.held_out.eval_iters * self.output.per_device_eval_batch_size


SFT_RULES: "tuple[Rule[SFTConfig], ...]" = (
    Rule(
        lambda config: config.sft.sft_on_prompt and config.sft.train_on == "all",
        "--train_on all: --sft_on_prompt trains on every token anyway; leave one of the two out.",
    ),
    Rule(
        lambda config: config.sft.packing and config.optimisation.max_tokens_per_micro_batch is not None,
        "--max_tokens_per_micro_batch: with --packing, rows have --max_seq_len tokens anyway. Drop one of the two;"
        " --per_device_train_batch_size says how many examples they hold together.",
    ),
    Rule(
        lambda config: config.sft.packing and config.engine.attn_implementation not in PACKABLE,
        "--packing works with --attn_implementation sdpa, eager and flex_attention: give one of them.",
    ),
)


class SFTConfig(SupervisedConfig):
    """Step 1: cross-entropy on the response tokens of demonstrations."""

    step: ClassVar[int] = 1
    defaults = {"learning_rate": 2e-5, "weight_decay": 0.01}
    rules: ClassVar[Rules] = (*COMMON_RULES, *SFT_RULES)

    sft: SFTFlags

    @property
    def spreads_lengths(self) -> bool:
        """Whether a micro-batch holds examples of all lengths: packed, they leave no room."""
        return self.sft.packing


REWARD_RULES: "tuple[Rule[RewardConfig], ...]" = (
    Rule(
        lambda config: config.preferences.reward_loss in ("last_token", "average"),
        "--reward_loss {reward_loss} does not train the number at the last token, which step 3 and inference read as"
        " the score: watch eval/end_accuracy, its accuracy. With end and per_sample it is the accuracy of the score.",
        warns=True,
    ),
)


class RewardConfig(SupervisedConfig):
    """Step 2: a scalar head trained on pairs of chosen and rejected responses."""

    step: ClassVar[int] = 2
    sequences_per_example: ClassVar[int] = 2
    defaults = {"learning_rate": 1e-5, "weight_decay": 0.1}
    rules: ClassVar[Rules] = (*COMMON_RULES, *REWARD_RULES)

    preferences: PreferenceFlags


class DPOConfig(SupervisedConfig):
    """Step 2 without a reward model: the policy itself is trained on the pairs."""

    step: ClassVar[int] = 2
    sequences_per_example: ClassVar[int] = 2
    defaults = {"learning_rate": 5e-7, "weight_decay": 0.1}

    dpo: DPOFlags
