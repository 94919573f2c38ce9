# SPDX-License-Identifier: Apache-2.0
"""Flags of REFUEL with users from data (its setting two), and the rules between them."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal

from dschat.config import rules
from dschat.config.batches import BatchPlan, plan_batches
from dschat.config.common import CommonConfig
from dschat.config.inert import NO_WANDB
from dschat.config.rollouts import engine_name
from dschat.config.rules import default_of, flag
from dschat.config.sections import SCHEDULE_HELP, Schedule
from dschat.errors import UserError

logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class RefuelModelFlags:
    """The policy and where the score comes from."""

    _argument_group_name = "model and reward"

    model_name_or_path: str = flag(
        "chat model: the policy starts from it, the frozen reference is it", aliases=["--base_model"]
    )
    reward_model_name_or_path: str | None = flag(
        "sequence classifier with one label that scores whole dialogues, by its own chat template",
        None,
        aliases=["--reward_model"],
    )
    reward_function: str | None = flag(
        "module.py:function, called with (dialogues, rows), that returns one score per dialogue (a list of messages),"
        " instead of a reward model",
        None,
    )
    trained_layers: int = flag("train only so many of the topmost layers and the norm behind them; 0 = everything", 0)


@dataclass(kw_only=True)
class DialogueFlags:
    """Dialogues: their sizes, and how replies are drawn."""

    _argument_group_name = "dialogues and batches"

    max_turns: int = flag("most turns of a dialogue; one with more is dropped", 5)
    max_prompt_seq_len: int = flag(
        "longest message of a user in tokens; a dialogue with a longer one is dropped",
        128,
        aliases=["--task.prompt_length"],
    )
    max_answer_seq_len: int = flag(
        "longest reply in tokens: sampling stops there, and a dialogue with a longer one is dropped",
        512,
        aliases=["--task.response_length"],
    )
    max_seq_len: int = flag(
        "longest dialogue in tokens, each reply counted as max_answer_seq_len; a longer one is dropped",
        4096,
        aliases=["--task.total_length"],
    )
    temperature: float = flag("sampling temperature, also of all log-probs", 1.0, aliases=["--task.temperature"])
    rollout_engine: Annotated[Literal["continuous", "generate"], engine_name] = flag(
        "what draws replies: our own continuous batching, which drops rows that have ended and takes in waiting ones"
        " (continuous); or transformers' generate",
        "continuous",
        choices=("continuous", "generate"),
    )
    total_episodes: int | None = flag(
        "dialogues sampled in the run, those of an incomplete last round left out; num_train_epochs passes over the"
        " data if not given",
        None,
    )
    per_device_train_batch_size: int = flag("pairs per forward pass and process in training", 1)
    per_device_generation_batch_size: int = flag("replies drawn at once on one process", 16)
    per_device_eval_batch_size: int = flag("dialogues that the reward model reads at once on one process", 4)
    eval_prompts: int = flag("held-out dialogues of an evaluation, on all processes together; 0 = all", 512)
    eval_temperature: float = flag("sampling temperature of evaluations; 0 = the likeliest token, always", 0.0)
    print_sample_output_freq: int | None = flag(
        "evaluate every this many rounds of sampling, instead of eval_interval; 0 = only at the start and the end",
        None,
    )


@dataclass(kw_only=True)
class RefuelLossFlags:
    """Rewards, the regression and its optimiser."""

    _argument_group_name = "REFUEL"

    eta: float = flag(
        "step size: log-ratios of a pair are to differ by this times its rewards",
        1.0,
        aliases=["--refuel.eta", "--rebel.eta"],
    )
    noptepochs: int = flag("optimiser updates on the pairs of one round, each on all of them", 4)
    kl_coef: float = flag(
        "coefficient of the KL penalty against the reference in the reward",
        0.05,
        aliases=["--reward.kl_coef", "--kl_ctl"],
    )
    adaptive_kl_target: float | None = flag("KL per reply that kl_coef is steered to; fixed if not given", None)
    adaptive_kl_horizon: int = flag("dialogues over which kl_coef is steered", 10000)
    penalty_reward_value: float = flag(
        "score of a dialogue whose compared reply was cut", -10.0, aliases=["--task.penalty_reward_value"]
    )
    whiten_rewards: bool = flag("scale the rewards of a round to variance 1", False)
    learning_rate: float = flag("peak learning rate", 3e-7, aliases=["--lr"])
    weight_decay: float = flag("weight decay of AdamW", 1e-6)
    gradient_clipping: float = flag("largest gradient norm of an update; 0 = no clipping", 0.0)
    adam_epsilon: float = flag("epsilon of AdamW", 1e-8, aliases=["--eps"])


@dataclass(kw_only=True)
class RefuelOnlineConfig(RefuelModelFlags, DialogueFlags, RefuelLossFlags, CommonConfig):
    """REFUEL with users from data: pairs of replies to one state of a dialogue, regressed on their rewards."""

    step: ClassVar[int] = 3
    too_few_examples: ClassVar[str] = (
        "dialogues are fewer than one round of {size}. Lower --per_device_train_batch_size or"
        " --gradient_accumulation_steps, or give more data."
    )
    compares_logprobs: ClassVar[bool] = True
    own_inert_flags: ClassVar[Mapping[str, str]] = {
        "task.cluster": "log-probs of the policy before a round are computed in that round and not kept",
        "track": NO_WANDB,
        "wandb_project_name": NO_WANDB,
    }

    data_path: list[str] = flag(
        ".jsonl, .json or .parquet files, folders with train* files, data sets of the Hugging Face hub;"
        " rows hold messages",
        aliases=["--task.query_dataset"],
    )
    data_split: str = flag("fractions of the rows that steps 1, 2 and 3 use; this is step 3", "0,0,1")
    lr_scheduler_type: Schedule = flag(SCHEDULE_HELP, "linear")
    offload: bool = flag(
        "keep reference and reward model in CPU memory while they do nothing; with ZeRO the optimiser states, and at"
        " stage 3 the parameters, too",
        False,
    )

    def __post_init__(self) -> None:
        """Fill in the values that follow from other flags."""
        super().__post_init__()
        if self.print_sample_output_freq is not None and self.eval_interval == 0:
            self.eval_interval = self.print_sample_output_freq * self.noptepochs

    def validate(self) -> None:
        """Check every flag, alone and against the others. Raises UserError."""
        super().validate()
        sizes = ["max_turns", "max_prompt_seq_len", "max_answer_seq_len", "max_seq_len", "total_episodes"]
        sizes += ["per_device_train_batch_size", "per_device_generation_batch_size", "per_device_eval_batch_size"]
        rules.check_numbers(self, [*sizes, "noptepochs", "adaptive_kl_horizon"], rules.AT_LEAST_1)
        others = [
            "trained_layers",
            "eval_prompts",
            "eval_temperature",
            "print_sample_output_freq",
            "kl_coef",
            "learning_rate",
        ]
        rules.check_numbers(self, [*others, "weight_decay"], rules.AT_LEAST_0)
        rules.check_numbers(self, ["temperature", "eta", "adaptive_kl_target", "adam_epsilon"], rules.ABOVE_0)
        rules.check_numbers(self, ["penalty_reward_value"], (lambda number: True, "a number"))
        self._check_models()
        self._check_counts()
        self._check_kl()

    def _check_models(self) -> None:
        rules.check_not_empty(self, ["model_name_or_path", "reward_model_name_or_path"])
        if (self.reward_model_name_or_path is None) == (self.reward_function is None):
            raise UserError(
                "the score comes from --reward_model or from --reward_function module.py:function: give one of them."
            )
        if self.reward_function is not None:
            rules.check_function_path("reward_function", self.reward_function)
        if self.trained_layers and (self.lora_dim or self.finetune_mode):
            other = "--lora_dim" if self.finetune_mode is None else f"--finetune_mode {self.finetune_mode}"
            raise UserError(f"--trained_layers and {other} both say what is trained: drop one of them.")

    def _check_counts(self) -> None:
        if self.total_episodes is not None and self.num_train_epochs != default_of(CommonConfig, "num_train_epochs"):
            raise UserError("--total_episodes and --num_train_epochs both say how long to train: drop one of them.")
        rounds = self.print_sample_output_freq
        if rounds is not None and self.eval_interval != rounds * self.noptepochs:
            raise UserError(
                "--print_sample_output_freq and --eval_interval both say when to evaluate: drop one of them."
            )
        if self.max_seq_len <= self.max_answer_seq_len:
            raise UserError(
                f"--max_seq_len {self.max_seq_len} leaves no room for a user beside one reply of --max_answer_seq_len"
                f" {self.max_answer_seq_len}: raise the first or lower the second."
            )

    def _check_kl(self) -> None:
        usual = default_of(RefuelLossFlags, "adaptive_kl_horizon")
        if self.adaptive_kl_target is None and self.adaptive_kl_horizon != usual:
            raise UserError(
                f"--adaptive_kl_horizon {self.adaptive_kl_horizon} does nothing on its own: add --adaptive_kl_target,"
                " or drop it."
            )
        if self.adaptive_kl_target is not None and self.kl_coef == 0:
            raise UserError("--adaptive_kl_target cannot steer --kl_coef 0: give a --kl_coef above 0 to start from.")

    def _check_offload(self) -> None:
        """Offload works at every ZeRO stage: reference and reward model go first."""

    @property
    def zero_stages(self) -> list[int]:
        """The policy's ZeRO stage."""
        return [self.zero_stage]

    @property
    def lora_ranks(self) -> list[int]:
        """The policy's LoRA rank."""
        return [self.lora_dim]

    @property
    def model_paths(self) -> list[str]:
        """What policy and reward model are loaded from."""
        return [path for path in (self.model_name_or_path, self.reward_model_name_or_path) if path]

    def total_iterations(self, per_epoch: int, size: int) -> int:
        """Rounds: as many as --total_episodes fill, or --num_train_epochs passes.

        Raises:
            UserError: --total_episodes is less than one.
        """
        if self.total_episodes is None:
            return super().total_iterations(per_epoch, size)
        if self.total_episodes < size:
            raise UserError(
                f"--total_episodes {self.total_episodes} is less than one round of {size} dialogues: raise it, or"
                " lower --per_device_train_batch_size or --gradient_accumulation_steps."
            )
        return self.total_episodes // size

    def plan_batches(self, world_size: int) -> BatchPlan:
        """Work out the batch sizes, in pairs: a round is one batch, on which noptepochs updates are made.

        Raises:
            UserError: when `global_batch_size` cannot be reached.
        """
        plan = plan_batches(
            "per_device_train_batch_size",
            self.per_device_train_batch_size,
            self.gradient_accumulation_steps,
            self.global_batch_size,
            world_size,
        )
        return replace(plan, rollout_per_rank=plan.update_per_rank, updates_per_rollout=self.noptepochs)
