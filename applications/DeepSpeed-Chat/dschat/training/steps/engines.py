# SPDX-License-Identifier: Apache-2.0
"""From flags to the settings of engines and optimisers."""

from dataclasses import dataclass
from typing import Self

from transformers import PreTrainedTokenizerBase

from dschat.engine.deepspeed_config import EngineSettings
from dschat.engine.engine import OptimizerSettings
from dschat.engine.process_group import training_dtype
from dschat.models.finetuning import Finetuning
from dschat.models.opening import LoadOptions, Placement, SingleDevice
from dschat.models.pretrained import open_config
from dschat.models.vocabulary import require_no_growth
from dschat.run.distributed import device
from dschat.settings.batches import BatchPlan
from dschat.settings.common import CommonConfig

MODEL = "--model_name_or_path"


@dataclass(frozen=True)
class RunPlan:
    """What is decided before the models are opened.

    Attributes:
        batches: batch sizes.
        updates: optimiser updates of the whole run.
        compiles: whether decoder layers are compiled; with --compile auto, what was chosen.
    """

    batches: BatchPlan
    updates: int
    compiles: bool

    @classmethod
    def of(cls, config: CommonConfig, batches: BatchPlan, updates: int) -> Self:
        """The plan of a run on this process's device."""
        return cls(batches, updates, config.compiles(device().type == "cuda", updates))


def engine_settings(
    config: CommonConfig, plan: RunPlan, gradient_checkpointing: bool, zero_stage: int
) -> EngineSettings:
    return EngineSettings(
        dtype=training_dtype(config.engine.dtype),
        plan=plan.batches,
        zero_stage=zero_stage,
        gradient_checkpointing=gradient_checkpointing,
        compile=plan.compiles,
        gradient_checkpointing_every=config.engine.gradient_checkpointing_every,
        offload=config.engine.offload,
        config_file=config.engine.deepspeed_config,
    )


def placement_of(settings: EngineSettings) -> Placement:
    """How weights are placed for an engine with these settings."""
    if settings.zero_stage != 3:
        return SingleDevice(device())
    from dschat.engine.sharded_loading import Sharded

    return Sharded(settings)


def load_options_of(config: CommonConfig, settings: EngineSettings) -> LoadOptions:
    return LoadOptions(placement_of(settings), config.engine.attn_implementation)


def optimizer_settings(
    config: CommonConfig, total_updates: int, learning_rate: float, weight_decay: float
) -> OptimizerSettings:
    return OptimizerSettings(
        learning_rate=learning_rate,
        weight_decay=weight_decay,
        total_updates=total_updates,
        warmup_updates=config.warmup_updates(total_updates),
        schedule=config.optimisation.lr_scheduler_type,
        gradient_clipping=config.optimisation.gradient_clipping,
    )


def trained_part(
    config: CommonConfig, rank: int, tokenizer: PreTrainedTokenizerBase, path: str, flag: str
) -> Finetuning:
    """Which parameters the flags train of the model at a path; `rank` is that of LoRA adapters.

    Raises:
        UserError: an adapter alone would be saved (--no_merge_lora) over embeddings that must grow.
    """
    finetuning = Finetuning(**config.finetuning.arguments(rank))
    if finetuning.rank and not config.finetuning.merge_lora:
        require_no_growth(open_config(path, flag), tokenizer, f"{flag} {path}")
    return finetuning
