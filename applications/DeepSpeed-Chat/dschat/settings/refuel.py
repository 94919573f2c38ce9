# SPDX-License-Identifier: Apache-2.0
"""Flags of REFUEL, which regresses the relative rewards of two replies: on pairs drawn before, and online."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from dschat.errors import UserError
from dschat.settings import rules
from dschat.settings.batches import BatchPlan
from dschat.settings.common import CommonConfig
from dschat.settings.logprobs import KLFlags, LogprobFlags
from dschat.settings.rewards import RewardFlags, RewardModelFlags
from dschat.settings.rollouts import RolloutFlags, SamplingFlags
from dschat.settings.rules import (
    ABOVE_0,
    AT_LEAST_0,
    AT_LEAST_1,
    FINITE,
    FREE,
    NOT_EMPTY,
    Changed,
    default_of,
    flag,
    like,
    redeclared,
)
from dschat.settings.supervised import OneModelConfig, SupervisedConfig

logger = logging.getLogger(__name__)

NO_WANDB = "give --report_to wandb, with the project in WANDB_PROJECT"
# What the shared flags about rows of text would say, and does nothing here: the pairs are tokens.
TEXT_FLAGS = (
    *("data_split", "prompt_key", "chosen_key", "rejected_key", "response_key", "messages_key"),
    "apply_chat_template",
)


@dataclass(kw_only=True)
class RegressionFlags:
    """The regression, and how long it goes on."""

    _argument_group_name = "REFUEL"

    eta: float = flag(
        "step size: log-ratios of a pair are to differ by this times its rewards",
        1.0,
        ABOVE_0,
        aliases=["--refuel.eta", "--rebel.eta"],
    )
    total_episodes: int | None = flag(
        "dialogues sampled in the run, those of an incomplete last round left out; num_train_epochs passes over the"
        " data if not given",
        None,
        AT_LEAST_1,
        FREE,
    )


@dataclass(kw_only=True)
@redeclared(
    data_path=Changed(
        help="pairs that tokenize_masks.py wrote: folders, files, or data sets of the Hugging Face hub",
        aliases=["--task.query_dataset"],
    ),
    max_seq_len=Changed(
        2048, "longest state and reply together in tokens; longer pairs are left out", aliases=["--task.total_length"]
    ),
    temperature=Changed(
        0.8, "divides the logits, as it did when the replies were drawn", aliases=["--task.temperature"]
    ),
    eta=Changed(1e3, "weight of the rewards' difference; a large one is a large step", rule=AT_LEAST_0),
    total_episodes=Changed(
        64000,
        "pairs to train on in all, in several passes over the data if need be; 0 = num_train_epochs passes",
        rule=AT_LEAST_0,
    ),
    model_name_or_path=Changed(
        help="model to start from, which drew the replies: a folder or a Hugging Face name", aliases=["--base_model"]
    ),
    learning_rate=Changed(3e-7, aliases=["--lr"]),
    weight_decay=1e-6,
    warmup_ratio=Changed(
        help="warm-up as a part of all optimiser updates, instead of num_warmup_steps; 0.1 if neither is given"
    ),
    gradient_clipping=0.0,
    seed=Changed(555134, "seed of the order of the pairs, and of LoRA's initialisation"),
    per_device_train_batch_size=Changed(1, "pairs per forward pass and process in training"),
    per_device_eval_batch_size=Changed(1, "pairs per forward pass and process in evaluation"),
    gradient_accumulation_steps=Changed(
        help="forward passes per optimiser update; 16, or what global_batch_size makes of it, if not given"
    ),
    eval_iters=Changed(0, "batches per process in an evaluation; 0 = all held-out pairs"),
    eval_interval=Changed(100, aliases=["--print_sample_output_freq"]),
)
class RefuelConfig(LogprobFlags, RegressionFlags, SupervisedConfig):
    """REFUEL: (log-ratio of the chosen - log-ratio of the rejected reply - eta x difference of their rewards)²."""

    _argument_group_name = "REFUEL"
    step: ClassVar[int] = 3
    sequences_per_example: ClassVar[int] = 2
    own_inert_flags: ClassVar[Mapping[str, str]] = {"track": NO_WANDB, "wandb_project_name": NO_WANDB}

    cluster: str | None = flag(
        "name of the machines: log-probs of the policy before training are kept beside the pairs under it, for runs on"
        " the same kind; without it, in output_dir",
        None,
        NOT_EMPTY,
        FREE,
        aliases=["--task.cluster"],
    )
    start_idx: int = flag("first training row to use, from 0", 0, AT_LEAST_0)
    end_idx: int = flag("training row to stop before; -1 = use all", -1)
    optimizer: Literal["adamw", "adam"] = flag("adamw, or adam: without weight decay", "adamw")

    def __post_init__(self) -> None:
        """Fill in the values that follow from other flags."""
        super().__post_init__()
        if self.gradient_accumulation_steps is None and self.global_batch_size is None:
            self.gradient_accumulation_steps = 16
        if self.warmup_ratio is None and not self.num_warmup_steps and self.lr_scheduler_type != "constant":
            self.warmup_ratio = 0.1
        if self.optimizer == "adam" and self.weight_decay == default_of(RefuelConfig, "weight_decay"):
            self.weight_decay = 0.0

    def validate(self) -> None:
        """Check the shared rules, then REFUEL's. Raises UserError."""
        super().validate()
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
            if getattr(self, name) != default_of(RefuelConfig, name):
                logger.warning("--%s does nothing here: the pairs are tokens already.", name)

    def total_iterations(self, per_epoch: int, size: int) -> int:
        """Updates: as many as --total_episodes fill, or --num_train_epochs passes; at least one."""
        if not self.total_episodes:
            return super().total_iterations(per_epoch, size)
        return max(1, self.total_episodes // size)


@dataclass(kw_only=True)
@redeclared(
    reward_model_name_or_path=Changed(
        help="sequence classifier with one label that scores whole dialogues, by its own chat template",
        aliases=["--reward_model"],
    ),
    max_prompt_seq_len=Changed(
        128,
        "longest message of a user in tokens; a dialogue with a longer one is dropped",
        aliases=["--task.prompt_length"],
    ),
    max_answer_seq_len=Changed(
        help="longest reply in tokens: sampling stops there, and a dialogue with a longer one is dropped",
        aliases=["--task.response_length"],
    ),
    temperature=Changed(aliases=["--task.temperature"]),
    per_device_generation_batch_size=Changed(help="replies drawn at once on one process"),
    eval_prompts=Changed(512, "held-out dialogues of an evaluation, on all processes together; 0 = all"),
)
class DialogueFlags(RewardModelFlags, SamplingFlags):
    """Dialogues: their sizes, how replies are drawn, and where the score comes from."""

    _argument_group_name = "dialogues and batches"

    reward_function: str | None = like(
        RewardFlags,
        "reward_function",
        help="module.py:function, called with (dialogues, rows), that returns one score per dialogue (a list of"
        " messages), instead of a reward model",
    )
    trained_layers: int = flag(
        "train only so many of the topmost layers and the norm behind them; 0 = everything", 0, AT_LEAST_0
    )
    max_turns: int = flag("most turns of a dialogue; one with more is dropped", 5, AT_LEAST_1)
    rollout_engine: Literal["continuous", "generate"] = like(
        RolloutFlags,
        "rollout_engine",
        help="what draws replies: our own continuous batching, which drops rows that have ended and takes in waiting"
        " ones (continuous); or transformers' generate",
    )
    eval_temperature: float = flag(
        "sampling temperature of evaluations; 0 = the likeliest token, always", 0.0, AT_LEAST_0, FREE
    )
    print_sample_output_freq: int | None = flag(
        "evaluate every this many rounds of sampling, instead of eval_interval; 0 = only at the start and the end",
        None,
        AT_LEAST_0,
        FREE,
    )


@dataclass(kw_only=True)
@redeclared(
    kl_coef=Changed(
        help="coefficient of the KL penalty against the reference in the reward", aliases=["--reward.kl_coef"]
    ),
    adaptive_kl_target=Changed(help="target of the adaptive KL controller, in nats per reply; fixed if not given"),
    adaptive_kl_horizon=Changed(help="dialogues over which the adaptive KL controller changes kl_coef"),
)
class RefuelLossFlags(RegressionFlags, KLFlags):
    """Rewards, the regression and its optimiser."""

    _argument_group_name = "REFUEL"

    noptepochs: int = flag("optimiser updates on the pairs of one round, each on all of them", 4, AT_LEAST_1)
    penalty_reward_value: float = flag(
        "score of a dialogue whose compared reply was cut", -10.0, FINITE, aliases=["--task.penalty_reward_value"]
    )
    whiten_rewards: bool = flag("scale the rewards of a round to variance 1", False)
    adam_epsilon: float = flag("epsilon of AdamW", 1e-8, ABOVE_0, aliases=["--eps"])


@dataclass(kw_only=True)
@redeclared(
    data_path=Changed(
        help=".jsonl, .json or .parquet files, folders with train* files, data sets of the Hugging Face hub;"
        " rows hold messages",
        aliases=["--task.query_dataset"],
    ),
    data_split=Changed("0,0,1", "fractions of the rows that steps 1, 2 and 3 use; this is step 3"),
    lr_scheduler_type="linear",
    offload=Changed(
        help="keep reference and reward model in CPU memory while they do nothing; with ZeRO the optimiser states, and"
        " at stage 3 the parameters, too"
    ),
    model_name_or_path=Changed(
        help="chat model: the policy starts from it, the frozen reference is it", aliases=["--base_model"]
    ),
    max_seq_len=Changed(
        4096,
        "longest dialogue in tokens, each reply counted as max_answer_seq_len; a longer one is dropped",
        aliases=["--task.total_length"],
    ),
    per_device_train_batch_size=Changed(1, "pairs per forward pass and process in training"),
    per_device_eval_batch_size=Changed(4, "dialogues that the reward model reads at once on one process"),
    learning_rate=Changed(3e-7, aliases=["--lr"]),
    weight_decay=1e-6,
    gradient_clipping=0.0,
)
class RefuelOnlineConfig(DialogueFlags, RefuelLossFlags, OneModelConfig):
    """REFUEL with users from data: pairs of replies to one state of a dialogue, regressed on their rewards."""

    step: ClassVar[int] = 3
    sequences_per_example: ClassVar[int] = 2
    too_few_examples: ClassVar[str] = (
        "dialogues are fewer than one round of {size}. Lower --per_device_train_batch_size or"
        " --gradient_accumulation_steps, or give more data."
    )
    own_inert_flags: ClassVar[Mapping[str, str]] = {
        "task.cluster": "log-probs of the policy before a round are computed in that round and not kept",
        "track": NO_WANDB,
        "wandb_project_name": NO_WANDB,
    }

    def __post_init__(self) -> None:
        """Fill in the values that follow from other flags."""
        super().__post_init__()
        if self.print_sample_output_freq is not None and self.eval_interval == 0:
            self.eval_interval = self.print_sample_output_freq * self.noptepochs

    def validate(self) -> None:
        """Check every flag, alone and against the others. Raises UserError."""
        super().validate()
        if (self.reward_model_name_or_path is None) == (self.reward_function is None):
            raise UserError(
                "the score comes from --reward_model or from --reward_function module.py:function: give one of them."
            )
        if self.reward_function is not None:
            rules.check_function_path("reward_function", self.reward_function)
        if self.trained_layers and (self.lora_dim or self.finetune_mode):
            other = "--lora_dim" if self.finetune_mode is None else f"--finetune_mode {self.finetune_mode}"
            raise UserError(f"--trained_layers and {other} both say what is trained: drop one of them.")
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
        self.check_kl()

    def _check_offload(self) -> None:
        """Offload works at every ZeRO stage: reference and reward model go first."""

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
            UserError: when `global_batch_size` cannot be reached, or --max_steps ends between updates of one round.
        """
        plan = super().plan_batches(world_size)
        plan = replace(plan, rollout_per_rank=plan.update_per_rank, updates_per_rollout=self.noptepochs)
        plan.check_max_steps(self.max_steps)
        return plan
