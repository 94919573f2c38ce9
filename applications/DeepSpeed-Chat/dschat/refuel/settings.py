# SPDX-License-Identifier: Apache-2.0
"""Flags of REFUEL, which regresses the relative rewards of two replies: on pairs sampled beforehand, and online."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from dschat.base.errors import UserError
from dschat.settings.batches import BatchPlan
from dschat.settings.common import COMMON_RULES
from dschat.settings.flags import ABOVE_0, AT_LEAST_0, AT_LEAST_1, FINITE, FREE, NOT_EMPTY, default_of, flag
from dschat.settings.kl import KL_RULES, KLFlags
from dschat.settings.rollouts import SamplingFlags
from dschat.settings.rules import Check, Rule, Rules, check_function_path
from dschat.settings.supervised import OneModelConfig, SupervisedConfig

logger = logging.getLogger(__name__)

NO_WANDB = "give --report_to wandb, with the project in WANDB_PROJECT"
# What the shared flags about rows of text would say, and does nothing here: the pairs are tokens.
TEXT_FLAGS = (
    *("data_split", "eval_share", "prompt_key", "chosen_key", "rejected_key", "response_key", "messages_key"),
    *("apply_chat_template", "end_of_conversation_token"),
)


@dataclass(kw_only=True, frozen=True)
class RegressionFlags:
    """Settings of the regression and of the length of training."""

    section = "REFUEL"

    eta: float = flag(
        "step size: log-ratios of a pair are regressed on eta times the difference of their rewards",
        1.0,
        ABOVE_0,
        aliases=["--refuel.eta", "--rebel.eta"],
    )
    total_episodes: int | None = flag(
        "dialogues sampled in the run; an incomplete last round is dropped; num_train_epochs passes over the data if"
        " not given",
        None,
        AT_LEAST_1,
        FREE,
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


@dataclass(kw_only=True, frozen=True)
class DialogueFlags:
    """Dialogues: their sizes, how replies are sampled, and where the score comes from."""

    section = "dialogues and batches"

    reward_model_name_or_path: str | None = flag(
        "reward model for whole dialogues: a sequence classifier with one label, which uses its own chat template",
        None,
        NOT_EMPTY,
        FREE,
        path=True,
        aliases=["--reward_model"],
    )
    reward_function: str | None = flag(
        "module.py:function, called with (dialogues, rows), which returns one score per dialogue (a list of"
        " messages), instead of a reward model",
        None,
        path=True,
    )
    trained_layers: int = flag("train only the last N layers and the final norm; 0 = all weights", 0, AT_LEAST_0)
    max_turns: int = flag("maximum number of turns; longer dialogues are dropped", 5, AT_LEAST_1)
    rollout_engine: Literal["continuous", "generate"] = flag(
        "how replies are generated: built-in continuous batching (continuous), or transformers' generate", "continuous"
    )
    eval_temperature: float = flag("sampling temperature in evaluation; 0 = greedy decoding", 0.0, AT_LEAST_0, FREE)
    print_sample_output_freq: int | None = flag(
        "evaluate every N rounds, instead of eval_interval; 0 = only before the first and after the last round",
        None,
        AT_LEAST_0,
        FREE,
    )


@dataclass(kw_only=True, frozen=True)
class RoundFlags:
    """Rewards of a round, its updates and its optimiser."""

    section = "REFUEL"

    noptepochs: int = flag("optimiser updates per round, each on all pairs of the round", 4, AT_LEAST_1)
    penalty_reward_value: float = flag(
        "score of a dialogue whose compared reply was truncated",
        -10.0,
        FINITE,
        aliases=["--task.penalty_reward_value"],
    )
    whiten_rewards: bool = flag("normalise the rewards of each round to variance 1", False)
    adam_epsilon: float = flag("epsilon of AdamW", 1e-8, ABOVE_0, aliases=["--eps"])


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
    Rule(
        lambda config: bool(config.regression.total_episodes) and config.optimisation.num_train_epochs != 1,
        "--num_train_epochs {num_train_epochs} and --total_episodes {total_episodes} both say how long to train: drop"
        " one of them; --total_episodes 0 leaves it to the epochs.",
    ),
    Check(_warn_of_text_flags),
)


class RefuelConfig(SupervisedConfig):
    """REFUEL: (log-ratio of the chosen - log-ratio of the rejected reply - eta x difference of their rewards)²."""

    step: ClassVar[int] = 3
    sequences_per_example: ClassVar[int] = 2
    compares_logprobs: ClassVar[bool] = True
    own_inert_flags: ClassVar[Mapping[str, str]] = {
        "optimizer": "the optimiser is AdamW; --weight_decay 0 makes it Adam",
        "track": NO_WANDB,
        "wandb_project_name": NO_WANDB,
    }
    rules: ClassVar[Rules] = (*COMMON_RULES, *REFUEL_RULES)
    defaults = {
        "max_seq_len": 2048,
        "eta": 1e3,
        "total_episodes": 64000,
        "learning_rate": 3e-7,
        "weight_decay": 1e-6,
        "gradient_clipping": 0.0,
        "seed": 555134,
        "per_device_train_batch_size": 1,
        "per_device_eval_batch_size": 1,
        "eval_iters": 0,
        "eval_interval": 100,
    }
    ranges = {"eta": AT_LEAST_0, "total_episodes": AT_LEAST_0}
    more_aliases = {
        "data_path": ("--task.query_dataset",),
        "max_seq_len": ("--task.total_length",),
        "model_name_or_path": ("--base_model",),
        "learning_rate": ("--lr",),
        "eval_interval": ("--print_sample_output_freq",),
    }
    helps = {
        "data_path": "pairs that `dschat refuel-data tokenize` wrote: folders, files, or data sets of the Hugging Face"
        " hub",
        "max_seq_len": "maximum length of state and reply together, in tokens; longer pairs are dropped",
        "eta": "weight of the reward difference; larger values take larger steps",
        "total_episodes": "total number of training pairs, in several passes over the data if needed; 0 ="
        " num_train_epochs passes",
        "model_name_or_path": "initial model, which generated the replies: a folder or a Hugging Face name",
        "warmup_ratio": "warm-up of the learning rate as a fraction of all optimiser updates, instead of"
        " num_warmup_steps; 0.1 if neither is given",
        "seed": "random seed of the order of the pairs and of LoRA's initialisation",
        "per_device_train_batch_size": "pairs per forward pass and process in training",
        "per_device_eval_batch_size": "pairs per forward pass and process in evaluation",
        "gradient_accumulation_steps": "forward passes per optimiser update; if not given, computed from"
        " global_batch_size, or 16",
        "eval_iters": "evaluation batches per process; 0 = all held-out pairs",
    }

    pairs: PairFlags
    regression: RegressionFlags

    @classmethod
    def derive(cls, values: dict[str, Any]) -> None:
        """Fill in the values that follow from other flags, in place; `values` holds every flag by its name."""
        super().derive(values)
        if values["gradient_accumulation_steps"] is None and values["global_batch_size"] is None:
            values["gradient_accumulation_steps"] = 16
        has_warmup = values["num_warmup_steps"] or values["warmup_ratio"] is not None
        if not has_warmup and values["lr_scheduler_type"] != "constant":
            values["warmup_ratio"] = 0.1

    def total_iterations(self, per_epoch: int, size: int) -> int:
        """Updates: as many as --total_episodes fill, or --num_train_epochs passes; at least one."""
        if not self.regression.total_episodes:
            return super().total_iterations(per_epoch, size)
        return max(1, self.regression.total_episodes // size)


def _trained_otherwise(config: "RefuelOnlineConfig") -> str:
    """What beside --trained_layers says which weights are trained; empty if nothing does."""
    mode = config.finetuning.finetune_mode
    if mode is not None:
        return f"--finetune_mode {mode}"
    return "--lora_dim" if config.finetuning.lora_dim else ""


def _is_evaluated_twice(config: "RefuelOnlineConfig") -> bool:
    rounds = config.dialogues.print_sample_output_freq
    return rounds is not None and config.output.eval_interval != rounds * config.rounds.noptepochs


def _check_dialogue_function(config: "RefuelOnlineConfig") -> None:
    if config.dialogues.reward_function is not None:
        check_function_path("reward_function", config.dialogues.reward_function)


ONLINE_RULES: "tuple[Rule[RefuelOnlineConfig] | Check[RefuelOnlineConfig], ...]" = (
    Rule(
        lambda config: (
            (config.dialogues.reward_model_name_or_path is None) == (config.dialogues.reward_function is None)
        ),
        "the score comes from --reward_model or from --reward_function module.py:function: give one of them.",
    ),
    Check(_check_dialogue_function),
    Rule(
        lambda config: config.dialogues.trained_layers > 0 and bool(_trained_otherwise(config)),
        "--trained_layers and {other} both say what is trained: drop one of them.",
        words=lambda config: {"other": _trained_otherwise(config)},
    ),
    Rule(
        lambda config: config.regression.total_episodes is not None and config.optimisation.num_train_epochs != 1,
        "--total_episodes and --num_train_epochs both say how long to train: drop one of them.",
    ),
    Rule(
        _is_evaluated_twice,
        "--print_sample_output_freq and --eval_interval both say when to evaluate: drop one of them.",
    ),
    Rule(
        lambda config: config.model.max_seq_len <= config.sampling.max_answer_seq_len,
        "--max_seq_len {max_seq_len} leaves no room for a user beside one reply of --max_answer_seq_len"
        " {max_answer_seq_len}: raise the first or lower the second.",
    ),
)


class RefuelOnlineConfig(OneModelConfig):
    """REFUEL with users from data: pairs of replies to one state of a dialogue, regressed on their rewards."""

    step: ClassVar[int] = 3
    planned_models: ClassVar[str] = "plan.sampled_steps:refuel_online_roles"
    sequences_per_example: ClassVar[int] = 2
    compares_logprobs: ClassVar[bool] = True
    offload_needs_zero: ClassVar[bool] = False  # reference and reward model go first
    too_few_examples: ClassVar[str] = "dialogues are fewer than one round of {size}. Give {smaller}more data."
    own_inert_flags: ClassVar[Mapping[str, str]] = {
        "task.cluster": "log-probs of the policy before a round are computed in that round and not kept",
        "track": NO_WANDB,
        "wandb_project_name": NO_WANDB,
    }
    rules: ClassVar[Rules] = (*COMMON_RULES, *ONLINE_RULES, *KL_RULES)
    defaults = {
        "data_split": "0,0,1",
        "lr_scheduler_type": "linear",
        "max_prompt_seq_len": 128,
        "eval_prompts": 512,
        "max_seq_len": 4096,
        "per_device_train_batch_size": 1,
        "per_device_eval_batch_size": 4,
        "learning_rate": 3e-7,
        "weight_decay": 1e-6,
        "gradient_clipping": 0.0,
    }
    more_aliases = {
        "data_path": ("--task.query_dataset",),
        "max_prompt_seq_len": ("--task.prompt_length",),
        "max_answer_seq_len": ("--task.response_length",),
        "temperature": ("--task.temperature",),
        "kl_coef": ("--reward.kl_coef",),
        "model_name_or_path": ("--base_model",),
        "max_seq_len": ("--task.total_length",),
        "learning_rate": ("--lr",),
    }
    helps = {
        "data_path": ".jsonl, .json or .parquet files, folders with train* files, data sets of the Hugging Face hub;"
        " rows hold messages",
        "data_split": "fractions of the rows for steps 1, 2 and 3; this is step 3",
        "max_prompt_seq_len": "maximum length of a user message in tokens; dialogues with longer ones are dropped",
        "max_answer_seq_len": "maximum length of a generated reply in tokens; dialogues of the data with longer"
        " replies are dropped",
        "per_device_generation_batch_size": "replies per process that are generated at the same time",
        "eval_prompts": "held-out dialogues per evaluation, on all processes together; 0 = all",
        "kl_coef": "coefficient of the KL penalty against the reference model, part of the reward",
        "adaptive_kl_target": "target KL of the adaptive controller, in nats per reply; kl_coef stays constant if not"
        " given",
        "adaptive_kl_horizon": "horizon of the adaptive KL controller, in dialogues",
        "offload": "keep reference and reward model in CPU memory while they are idle; with ZeRO also optimiser"
        " states, and with ZeRO 3 parameters",
        "model_name_or_path": "chat model: initialises the policy, and is the frozen reference",
        "max_seq_len": "maximum length of a dialogue in tokens, counting max_answer_seq_len for each reply; longer"
        " ones are dropped",
        "per_device_train_batch_size": "pairs per forward pass and process in training",
        "per_device_eval_batch_size": "dialogues per forward pass and process of the reward model",
    }

    dialogues: DialogueFlags
    sampling: SamplingFlags
    rounds: RoundFlags
    regression: RegressionFlags
    kl: KLFlags

    @classmethod
    def derive(cls, values: dict[str, Any]) -> None:
        """Fill in the values that follow from other flags, in place; `values` holds every flag by its name."""
        super().derive(values)
        rounds = values["print_sample_output_freq"]
        if rounds is not None and values["eval_interval"] == 0:
            values["eval_interval"] = rounds * values["noptepochs"]

    @property
    def samples_here(self) -> bool:
        return True

    @property
    def model_paths(self) -> list[str]:
        """What policy and reward model are loaded from."""
        paths = [self.model.model_name_or_path, self.dialogues.reward_model_name_or_path]
        return [path for path in paths if path]

    def total_iterations(self, per_epoch: int, size: int) -> int:
        """Rounds: as many as --total_episodes fill, or --num_train_epochs passes.

        Raises:
            UserError: --total_episodes is less than one.
        """
        episodes = self.regression.total_episodes
        if episodes is None:
            return super().total_iterations(per_epoch, size)
        if episodes < size:
            raise UserError(
                f"--total_episodes {episodes} is less than one round of {size} dialogues: make it {size} or more."
            )
        return episodes // size

    def plan_batches(self, world_size: int) -> BatchPlan:
        """Work out the batch sizes, in pairs: a round is one batch, on which noptepochs updates are made.

        Raises:
            UserError: when `global_batch_size` cannot be reached, or --max_steps ends between updates of one round.
        """
        plan = super().plan_batches(world_size)
        plan = replace(plan, rollout_per_rank=plan.update_per_rank, updates_per_rollout=self.rounds.noptepochs)
        plan.check_whole_rollouts("--max_steps", self.optimisation.max_steps or 0, least=1)
        return plan
