# SPDX-License-Identifier: Apache-2.0
"""Flags of REFUEL online: dialogues that are sampled during training, with the users' messages of data."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from dschat.refuel.settings import LENGTH_RULE, RegressionConfig
from dschat.settings.batches import BatchPlan
from dschat.settings.common import COMMON_RULES
from dschat.settings.flags import ABOVE_0, AT_LEAST_0, AT_LEAST_1, FINITE, FREE, NOT_EMPTY, flag
from dschat.settings.kl import KL_RULES, KLFlags
from dschat.settings.rollouts import SamplingFlags
from dschat.settings.rules import Check, Rule, Rules, check_function_path


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


def _trained_otherwise(config: "RefuelOnlineConfig") -> str:
    """What beside --trained_layers says which weights are trained; empty if nothing does."""
    mode = config.finetuning.finetune_mode
    if mode is not None:
        return f"--finetune_mode {mode}"
    rank = config.finetuning.lora_dim
    return f"--lora_dim {rank}" if rank else ""


def _has_two_intervals(config: "RefuelOnlineConfig") -> bool:
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
        lambda config: config.dialogues.trained_layers > 0 and _trained_otherwise(config) != "",
        "--trained_layers {trained_layers} and {other} both say what is trained: drop one of them.",
        words=lambda config: {"other": _trained_otherwise(config)},
    ),
    LENGTH_RULE,
    Rule(
        _has_two_intervals,
        "--print_sample_output_freq {print_sample_output_freq} and --eval_interval {eval_interval} both say when to"
        " evaluate: drop one of them.",
    ),
    Rule(
        lambda config: config.model.max_seq_len <= config.sampling.max_answer_seq_len,
        "--max_seq_len {max_seq_len} leaves no room for a user beside one reply of --max_answer_seq_len"
        " {max_answer_seq_len}: raise the first or lower the second.",
    ),
)


class RefuelOnlineConfig(RegressionConfig):
    """REFUEL with users from data: pairs of replies to one state of a dialogue, regressed on their rewards."""

    planned_models: ClassVar[str] = "plan.one_model:refuel_online_roles"
    offload_needs_zero: ClassVar[bool] = False  # reference and reward model go first
    too_few_examples: ClassVar[str] = "dialogues are fewer than one round of {size}. Give {smaller}more data."
    own_inert_flags: ClassVar[Mapping[str, str]] = {
        "task.cluster": "log-probs of the policy before a round are computed in that round and not kept",
        **RegressionConfig.own_inert_flags,
    }
    rules: ClassVar[Rules] = (*COMMON_RULES, *ONLINE_RULES, *KL_RULES)
    defaults = {
        "data_split": "0,0,1",
        "lr_scheduler_type": "linear",
        "max_prompt_seq_len": 128,
        "eval_prompts": 512,
        "max_seq_len": 4096,
        "per_device_eval_batch_size": 4,
    }
    more_aliases = {
        "max_prompt_seq_len": ("--task.prompt_length",),
        "max_answer_seq_len": ("--task.response_length",),
        "temperature": ("--task.temperature",),
        "kl_coef": ("--reward.kl_coef",),
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
        "per_device_eval_batch_size": "dialogues per forward pass and process of the reward model",
    }

    dialogues: DialogueFlags
    sampling: SamplingFlags
    rounds: RoundFlags
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

    def plan_batches(self, world_size: int) -> BatchPlan:
        """Work out the batch sizes, in pairs: a round is one batch, on which noptepochs updates are made.

        Raises:
            UserError: when `global_batch_size` cannot be reached, or --max_steps ends between updates of one round.
        """
        plan = super().plan_batches(world_size)
        plan = replace(plan, rollout_per_rank=plan.update_per_rank, updates_per_rollout=self.rounds.noptepochs)
        plan.check_whole_rollouts("--max_steps", self.optimisation.max_steps or 0, least=1)
        return plan
