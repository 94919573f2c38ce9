# SPDX-License-Identifier: Apache-2.0
"""What every step's configuration is: the shared flags, in sections, and the rules between them.

A field is a flag: its name, its one default and its help line. Values that follow from other flags (dtype from
`--bf16`, the TensorBoard folder, ...) are derived when the object is made.
"""

from __future__ import annotations

import logging
import math
from abc import ABCMeta, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, Literal

from dschat.base.errors import UserError
from dschat.settings import rules as checks
from dschat.settings.batches import BatchPlan, BatchSizes, smaller_sizes
from dschat.settings.config import Config
from dschat.settings.deepspeed import read_deepspeed_file
from dschat.settings.flags import (
    AT_LEAST_0,
    AT_LEAST_1,
    ATTENTION,
    BELOW_1,
    DURATION,
    FREE,
    NOT_EMPTY,
    SHARE,
    Range,
    flag,
    seconds_of,
)
from dschat.settings.processes import LaunchFlags
from dschat.settings.rules import Check, Rule, Rules, Unread

logger = logging.getLogger(__name__)

Schedule = Literal[
    "linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "constant_with_warmup", "inverse_sqrt"
]
SEED: Range = (lambda seed: 0 <= seed < 2**32, "a whole number from 0 to 4294967295")
ZeroStage = Literal[0, 1, 2, 3]
LATEST = "latest"  # value of --resume_from_checkpoint for the newest checkpoint
LORA_FLAGS = ("lora_module_name", "lora_alpha", "lora_dropout", "merge_lora")
DEFAULT_RANK = 8  # of --finetune_mode lora
COMPILED_UPDATES = 100  # of the shortest run whose layers are compiled without being told so: the first takes longer

NO_TRACKER = "none"  # a value of --report_to, alone
# Tracker → what to install where its package is missing.
TRACKERS = {"tensorboard": "tensorboard", "wandb": "'ma-rlhf[wandb]'", "trackio": "'ma-rlhf[trackio]'"}


@dataclass(kw_only=True, frozen=True)
class DataFlags:
    """Where the rows come from."""

    section = "data"

    data_path: list[str] = flag(
        "one or more of: .jsonl, .json, .csv (also .gz) or .parquet files; folders with train* files or from"
        " save_to_disk; tldr, hh, webgpt, apps; data sets of the Hugging Face hub",
        range=NOT_EMPTY,
        on_resume=FREE,
        path=True,
    )
    data_split: str | None = flag(
        "fractions of the rows for steps 1, 2 and 3, such as 2,4,4; if not given, 2,4,4 for the published data sets"
        " (tldr, hh, webgpt, apps), and all rows in every step for any other source",
        None,
    )
    eval_share: float = flag(
        "fraction of the rows that is held out for evaluation, in whole prompts, of a source without evaluation rows;"
        " 0 = none",
        0.05,
        BELOW_1,
    )
    end_of_conversation_token: str | None = flag("token that ends a response, instead of EOS", None, NOT_EMPTY)


@dataclass(kw_only=True, frozen=True)
class ColumnFlags:
    """How the columns of the rows are read."""

    section = "data"

    prompt_key: str = flag("column of the prompt", "prompt", NOT_EMPTY)
    chosen_key: str = flag("column of the chosen (preferred) response", "chosen", NOT_EMPTY)
    rejected_key: str = flag("column of the rejected response", "rejected", NOT_EMPTY)
    response_key: str = flag("column of the response in data without preferences", "response", NOT_EMPTY)
    messages_key: str = flag(
        "column of a conversation: a list of messages with role and content", "messages", NOT_EMPTY
    )
    apply_chat_template: bool = flag(
        "format plain-text prompts as a user message and responses as an assistant message, by the tokenizer's chat"
        " template",
        False,
    )


COLUMN_FLAGS = tuple(field.name for field in fields(ColumnFlags))


@dataclass(kw_only=True, frozen=True)
class OutputFlags:
    """What is written and when; every count is in optimiser updates."""

    section = "output, evaluation and logging"

    output_dir: str = flag(
        "folder for models, checkpoints, metrics and run records", range=NOT_EMPTY, on_resume=FREE, path=True
    )
    overwrite_output_dir: bool = flag(
        "start anew in a folder that holds a run, whose files are moved into its subfolder earlier-N",
        False,
        on_resume=FREE,
    )
    save_steps: int = flag(
        "save a resumable checkpoint every N optimiser updates; 0 = only when the run is stopped", 0, AT_LEAST_0, FREE
    )
    save_minutes: float = flag(
        "also save one after the first update (step 3: iteration) that ends N minutes after the last save; 0 = never",
        0.0,
        AT_LEAST_0,
        FREE,
    )
    save_total_limit: int = flag(
        "number of newest checkpoints to keep, in addition to the best one; 0 = all", 2, AT_LEAST_0, FREE
    )
    save_models: int = flag(
        "also save and keep the models every N optimiser updates; 0 = only at the end", 0, AT_LEAST_0, FREE
    )
    resume_from_checkpoint: str | None = flag(
        "resume from a checkpoint: its folder, or latest (also without a value)",
        None,
        on_resume=FREE,
        alone=LATEST,
        path=True,
    )
    max_time: str | None = flag(
        "stop as after SIGTERM, with a checkpoint and status 143, this time after the start: HH:MM:SS or D-HH:MM:SS",
        None,
        DURATION,
        FREE,
    )
    eval_interval: int = flag(
        "evaluate every N optimiser updates; 0 = only before the first and after the last update", 0, AT_LEAST_0, FREE
    )
    log: Literal["table", "plain"] | None = flag(
        "evaluations as rows of a table, above a progress bar; or plain: lines with time stamps that name every"
        " number, without bars; by default a table on a terminal, and plain in files",
        None,
        on_resume=FREE,
    )
    per_device_eval_batch_size: int = flag("examples per forward pass and process in evaluation", 16, AT_LEAST_1)
    enable_tensorboard: bool = flag("same as --report_to tensorboard", False, on_resume=FREE)
    tensorboard_path: str | None = flag(
        "folder for TensorBoard files; output_dir/tensorboard if not given", None, on_resume=FREE, path=True
    )

    @property
    def saves_checkpoints(self) -> bool:
        """Whether checkpoints are saved also while nothing stops the run."""
        return self.save_steps > 0 or self.save_minutes > 0

    @property
    def max_seconds(self) -> int | None:
        """--max_time in seconds."""
        return None if self.max_time is None else seconds_of(self.max_time)


@dataclass(kw_only=True, frozen=True)
class TrackingFlags:
    """Where metrics and models go beside the output folder. Nothing is sent anywhere unless a flag here says so."""

    section = "trackers and the hub"

    report_to: list[str] = flag(
        "trackers that also get metrics and samples: tensorboard, wandb, trackio; none for no tracker",
        factory=list,
        on_resume=FREE,
    )
    push_to_hub: str | None = flag(
        "upload the final model to this private repository on the Hugging Face hub, owner/name", None, on_resume=FREE
    )

    def check_installed(self) -> None:
        """Check that the packages which the flags need are there. Raises UserError, which says what to install."""
        for name in self.report_to:
            if find_spec(name) is None:
                raise UserError(
                    f"--report_to {name}: the package {name} is not installed. Install it with pip install "
                    f"{TRACKERS[name]}, or drop {name} from the flag; metrics.jsonl is always written."
                )


@dataclass(kw_only=True, frozen=True)
class OptimisationFlags:
    """Epochs, batches and the learning-rate schedule."""

    section = "optimisation"

    seed: int = flag(
        "random seed of data order, sampling and initialisation; the data split does not depend on it",
        1234,
        range=SEED,
    )
    num_train_epochs: int = flag("passes over the training data", 1, AT_LEAST_1, FREE)
    max_steps: int | None = flag(
        "number of optimiser updates, instead of num_train_epochs; training data is repeated if needed, and the"
        " learning-rate schedule spans these updates",
        None,
        AT_LEAST_1,
        FREE,
    )
    gradient_accumulation_steps: int | None = flag(
        "forward passes per optimiser update; if not given, computed from global_batch_size, or 1",
        None,
        AT_LEAST_1,
        SHARE,
    )
    global_batch_size: int | None = flag(
        "examples per optimiser update on all processes; sets gradient_accumulation_steps", None, AT_LEAST_1
    )
    max_tokens_per_micro_batch: int | None = flag(
        "maximum tokens per micro-batch in training, including padding, besides its maximum number of rows; four times"
        " as many in forward passes without gradients; no limit if not given",
        None,
        AT_LEAST_1,
        FREE,
    )
    lr_scheduler_type: Schedule = flag("learning-rate schedule", "cosine")
    num_warmup_steps: int = flag("warm-up of the learning rate, in optimiser updates", 0, AT_LEAST_0)
    warmup_ratio: float | None = flag(
        "warm-up of the learning rate as a fraction of all optimiser updates, instead of num_warmup_steps",
        None,
        BELOW_1,
    )
    gradient_clipping: float = flag("maximum gradient norm; 0 = no clipping", 1.0, AT_LEAST_0)
    on_nonfinite: Literal["stop", "skip"] = flag(
        "if a loss, score or gradient is NaN or infinite: stop the run, or skip that update or rollout",
        "stop",
        on_resume=FREE,
    )

    @property
    def has_warmup(self) -> bool:
        """Whether the flags ask for a warm-up."""
        return self.num_warmup_steps > 0 or bool(self.warmup_ratio)


@dataclass(kw_only=True, frozen=True)
class FinetuningFlags:
    """Which weights are trained."""

    section = "what is trained"

    finetune_mode: Literal["all", "last_layer", "lora"] | None = flag(
        "train all weights (all), only the output layer (last_layer: the language-model head, including the input"
        " embedding if tied, or the score head), or LoRA adapters (lora); lora if lora_dim is given, otherwise all",
        None,
    )
    lora_dim: int = flag(
        f"rank of the LoRA adapters; 0 = no adapters, or {DEFAULT_RANK} with --finetune_mode lora", 0, AT_LEAST_0
    )
    lora_module_name: list[str] | None = flag(
        "substrings of the names of layers that get LoRA adapters; all linear layers except the output heads if not"
        " given",
        None,
        NOT_EMPTY,
    )
    lora_alpha: int | None = flag(
        "LoRA alpha: the adapters' output is scaled by alpha / rank; twice the rank if not given", None, AT_LEAST_1
    )
    lora_dropout: float = flag("dropout on the inputs of LoRA adapters in training; not in step 3", 0.0, BELOW_1)
    merge_lora: bool = flag("with LoRA, also save the model with the adapters merged", True)

    def arguments(self, rank: int) -> dict[str, Any]:
        """Arguments of `dschat.models.finetuning.Finetuning` for a model whose adapters have this rank; 0 = none."""
        if not rank:
            return {"last_layer": self.finetune_mode == "last_layer"}
        targets = None if self.lora_module_name is None else tuple(self.lora_module_name)
        return {"rank": rank, "targets": targets, "alpha": self.lora_alpha, "dropout": self.lora_dropout}


@dataclass(kw_only=True, frozen=True)
class EngineFlags:
    """Precision, memory and the launcher."""

    section = "precision, memory and launcher"

    dtype: Literal["fp32", "bf16", "fp16"] | None = flag(
        "dtype of weights and activations; if not given, bf16 on CUDA and fp32 on a CPU", None
    )
    bf16: bool = flag("same as --dtype bf16", False)
    attn_implementation: str = flag(
        "attention implementation: sdpa, eager, flash_attention_2, flash_attention_3, flex_attention, a kernel of the"
        " hub (kernels-community/NAME), or auto; sdpa and auto use eager for models that soft-cap attention logits;"
        " compared with eager before the first update",
        "sdpa",
        ATTENTION,
    )
    gradient_checkpointing: bool = flag(
        "recompute activations in the backward pass to save memory", False, on_resume=FREE
    )
    gradient_checkpointing_every: int = flag(
        "with gradient checkpointing: recompute only every N-th layer, starting with the first; larger N takes more"
        " memory and less time",
        1,
        AT_LEAST_1,
        FREE,
        aliases=["--checkpoint_every"],
    )
    compile: Literal["auto", "on", "off"] = flag(
        "compile decoder layers with torch.compile; auto: on a GPU with ZeRO stages below 3, for runs of at least"
        f" {COMPILED_UPDATES} updates, unless vLLM runs in the training processes",
        "auto",
        on_resume=FREE,
    )
    zero_stage: ZeroStage = flag("ZeRO stage of DeepSpeed", 0)
    offload: bool = flag("keep optimiser states, and with ZeRO 3 also parameters, in CPU memory", False)
    self_checks: bool = flag(
        "check log-probabilities, padding and special tokens before the first update", True, on_resume=FREE
    )
    deepspeed: bool = flag(
        "accepted for compatibility with the launcher; every run uses DeepSpeed", False, on_resume=FREE
    )
    deepspeed_config: str | None = flag(
        'JSON file of further DeepSpeed settings; those that flags own must be left out or "auto"', None, path=True
    )
    local_rank: int = flag("set by the launcher", -1, on_resume=FREE)
    ddp_timeout: int = flag("seconds that processes wait for each other before the run fails", 1800, AT_LEAST_1, FREE)
    save_timeout: int = flag("the same while others read data or write models and checkpoints", 7200, AT_LEAST_1, FREE)


def _check_output_dir(config: CommonConfig) -> None:
    output = config.output
    resume = output.resume_from_checkpoint is not None
    inputs = [*config.model_paths, *config.data.data_path]
    checks.check_output_dir(output.output_dir, output.overwrite_output_dir, resume, inputs, config.saved_models)


def _check_checkpoint(config: CommonConfig) -> None:
    requested = config.output.resume_from_checkpoint
    if requested not in (None, LATEST) and not Path(requested).is_dir():
        raise UserError(
            f"--resume_from_checkpoint {requested}: there is no such folder. Give a checkpoint's folder"
            f" (OUTPUT_DIR/checkpoints/step-N), or {LATEST} for the newest one."
        )


def _check_trackers(config: CommonConfig) -> None:
    names = config.tracking.report_to
    for name in names:
        if name == NO_TRACKER:
            raise UserError(f"--report_to {' '.join(names)}: drop {NO_TRACKER} or the others.")
        if name not in TRACKERS:
            raise UserError(f"--report_to {name}: there is no such tracker; give {' or '.join(TRACKERS)}.")


def _check_deepspeed_file(config: CommonConfig) -> None:
    if config.engine.deepspeed_config is not None:
        read_deepspeed_file(config.engine.deepspeed_config)


def _holds_no_example(config: CommonConfig) -> bool:
    budget = config.optimisation.max_tokens_per_micro_batch
    return budget is not None and budget < config.longest_example[0]


COMMON_RULES: Rules = (
    Check(lambda config: checks.check_data_split(config.data.data_split, config.step)),
    Check(_check_deepspeed_file),
    Check(_check_output_dir),
    Check(_check_checkpoint),
    Check(_check_trackers),
    Check(lambda config: checks.check_repository("--push_to_hub", config.tracking.push_to_hub)),
    Rule(
        lambda config: config.engine.bf16 and config.engine.dtype != "bf16",
        "--bf16 contradicts --dtype {dtype}: drop one of them.",
    ),
    Rule(
        lambda config: config.optimisation.warmup_ratio is not None and config.optimisation.num_warmup_steps > 0,
        "--num_warmup_steps {num_warmup_steps} and --warmup_ratio {warmup_ratio} both set the warm-up: drop one of"
        " them.",
    ),
    Rule(
        lambda config: config.optimisation.lr_scheduler_type == "constant" and config.optimisation.has_warmup,
        "--lr_scheduler_type constant has no warm-up: use constant_with_warmup, or drop --num_warmup_steps and"
        " --warmup_ratio.",
    ),
    Rule(
        _holds_no_example,
        "--max_tokens_per_micro_batch {max_tokens_per_micro_batch} does not hold {longest}: give {tokens} or more, or"
        " lower that.",
        words=lambda config: {"tokens": config.longest_example[0], "longest": config.longest_example[1]},
    ),
    Rule(
        lambda config: config.engine.offload and 0 in config.zero_stages and config.offload_needs_zero,
        "--offload needs ZeRO: give --zero_stage 1, 2 or 3 (in step 3 for both actor and critic), or drop it.",
    ),
    Unread(
        lambda config: () if config.recomputes else ("gradient_checkpointing_every",),
        "of no effect without --gradient_checkpointing: add that, or drop it.",
        refused=True,
    ),
    Rule(
        lambda config: config.finetuning.finetune_mode == "lora" and not any(config.lora_ranks),
        "--finetune_mode lora: no model has adapters of a rank above 0; give --lora_dim.",
    ),
    Rule(
        lambda config: config.finetuning.finetune_mode in ("all", "last_layer") and any(config.lora_ranks),
        "--finetune_mode {finetune_mode} and --lora_dim both say what is trained: drop one of them.",
    ),
    Rule(
        lambda config: config.finetuning.lora_dropout > 0 and config.compares_logprobs,
        "--lora_dropout {lora_dropout}: log-probs of an update are compared with those of the policy that"
        " sampled the responses; with dropout they would differ before the first update. Drop the flag.",
    ),
    Unread(lambda config: () if any(config.lora_ranks) else LORA_FLAGS, "of no effect without --lora_dim."),
)


class CommonConfig(Config, metaclass=ABCMeta):
    """The flags of every training step."""

    step: ClassVar[int]  # of the pipeline: 1, 2 or 3
    saved_models: ClassVar[tuple[str, ...]] = checks.MODEL_FILES  # patterns of the models in the output folder
    too_few_examples: ClassVar[str]  # said after their number, with the {size} of an iteration and {smaller} sizes
    # Of the step alone, accepted with a warning that says why they do nothing.
    own_inert_flags: ClassVar[Mapping[str, str]] = {}
    # Log-probs of an update are compared with earlier ones, which dropout would make differ.
    compares_logprobs: ClassVar[bool] = False
    offload_needs_zero: ClassVar[bool] = True
    # "module:function" in dschat that lists the models of a run for its plan, see plan/models.py.
    planned_models: ClassVar[str]
    rules: ClassVar[Rules] = COMMON_RULES

    data: DataFlags
    columns: ColumnFlags
    output: OutputFlags
    tracking: TrackingFlags
    optimisation: OptimisationFlags
    finetuning: FinetuningFlags
    engine: EngineFlags
    launch: LaunchFlags

    @classmethod
    def derive(cls, values: dict[str, Any]) -> None:
        """Fill in the values that follow from other flags, in place; `values` holds every flag by its name."""
        if values["bf16"] and values["dtype"] is None:
            values["dtype"] = "bf16"
        if values["report_to"] == [NO_TRACKER]:
            values["report_to"] = []
        if values["tensorboard_path"] is None:
            values["tensorboard_path"] = str(Path(values["output_dir"]) / "tensorboard")
        if values["finetune_mode"] == "lora" and values["lora_dim"] == 0:
            values["lora_dim"] = DEFAULT_RANK

    def check_installed(self) -> None:
        """Check that the packages which the flags need are there. Raises UserError, which says what to install."""
        self.tracking.check_installed()

    @property
    def recomputes(self) -> bool:
        """Whether a trained model's activations are recomputed."""
        return self.engine.gradient_checkpointing

    @property
    def samples_here(self) -> bool:
        """Whether the training processes sample from the weights that they train."""
        return False

    @property
    def keeps_average(self) -> bool:
        """Whether a moving average of the trained weights is kept, and saved as a model."""
        return False

    @property
    def shares_process_with_vllm(self) -> bool:
        """Whether vLLM, which sets torch.compile up for itself, runs in the training processes."""
        return False

    def compiles(self, on_gpu: bool, updates: int | None = None) -> bool:
        """Whether decoder layers are compiled in a run with this number of updates; None stands for a long run."""
        if self.engine.compile != "auto":
            return self.engine.compile == "on"
        if self.shares_process_with_vllm:
            return False
        return on_gpu and 3 not in self.zero_stages and (updates is None or updates >= COMPILED_UPDATES)

    @property
    def trackers(self) -> tuple[str, ...]:
        """Those of --report_to and --enable_tensorboard, each once."""
        names = list(self.tracking.report_to)
        if self.output.enable_tensorboard:
            names.append("tensorboard")
        return tuple(dict.fromkeys(names))

    @property
    def reads_rows(self) -> bool:
        """Whether --data_path names rows of text, of which the steps take their shares."""
        return True

    @property
    def spreads_lengths(self) -> bool:
        """Whether a micro-batch holds examples of all lengths, not similar ones."""
        return False

    def total_iterations(self, per_epoch: int, size: int) -> int:
        """Number of iterations of a run without --max_steps, from those of an epoch and the examples in each."""
        return per_epoch * self.optimisation.num_train_epochs

    def total_updates(self, num_examples: int, plan: BatchPlan) -> int:
        """Number of optimiser updates of a run on this number of examples, at least those of one iteration.

        An incomplete last iteration of an epoch is dropped. --max_steps decides over epochs and episodes.

        Raises:
            UserError: there are fewer examples than one iteration takes.
        """
        size = plan.iteration_size
        if num_examples < size:
            smaller = smaller_sizes(self.batch_sizes, plan.world_size, num_examples)
            words = self.too_few_examples.format(size=size, smaller=f"{smaller}, or " if smaller else "")
            raise UserError(f"--data_path: {num_examples} {words}")
        if self.optimisation.max_steps is not None:
            return self.optimisation.max_steps
        return self.total_iterations(num_examples // size, size) * plan.updates_per_iteration

    def warmup_updates(self, total_updates: int) -> int:
        """Number of warm-up updates in a run of `total_updates`; a ratio is rounded up."""
        if self.optimisation.warmup_ratio is None:
            return self.optimisation.num_warmup_steps
        return math.ceil(self.optimisation.warmup_ratio * total_updates)

    def warn_of_warmup(self, total_updates: int) -> None:
        """Warn where a run of `total_updates` ends before its warm-up."""
        if self.optimisation.num_warmup_steps >= total_updates:
            logger.warning(
                "--num_warmup_steps %d: the run makes %d updates, so its learning rate never reaches its peak.",
                self.optimisation.num_warmup_steps,
                total_updates,
            )

    @property
    def full_disk_remedy(self) -> str:
        """What to do after a run ended because the disk was full."""
        if self.output.saves_checkpoints or self.output.resume_from_checkpoint is not None:
            return "Make room, and resume with --resume_from_checkpoint."
        return "Make room, and start again; with --save_steps, a run can continue."

    @property
    @abstractmethod
    def longest_example(self) -> tuple[int, str]:
        """Tokens of the longest that training may meet, and the flags that say so."""

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

    @property
    @abstractmethod
    def batch_sizes(self) -> BatchSizes:
        """The flags that decide the batch sizes."""

    @abstractmethod
    def plan_batches(self, world_size: int) -> BatchPlan:
        """Work out the batch sizes on `world_size` processes.

        Raises:
            UserError: when the sizes do not fit together; the message names flags with which they do.
        """
