# SPDX-License-Identifier: Apache-2.0
"""The flags that all three steps share, in sections.

A field is a flag: its name, its one default and its help line.
"""

from dataclasses import dataclass
from typing import Literal

from dschat.config.rules import flag

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
        "one or more of: .jsonl, .json, .csv (also .gz) or .parquet files; folders with train* files or from"
        " save_to_disk; tldr, hh, webgpt, apps; data sets of the Hugging Face hub"
    )
    data_split: str = flag("fractions of the rows that steps 1, 2 and 3 use", "2,4,4")
    prompt_key: str = flag("column of the prompt", "prompt")
    chosen_key: str = flag("column of the preferred response", "chosen")
    rejected_key: str = flag("column of the other response", "rejected")
    response_key: str = flag("column of the response in data without preferences", "response")
    messages_key: str = flag("column of a conversation (list of role and content)", "messages")
    end_of_conversation_token: str | None = flag("token that ends a response, instead of EOS", None)


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
    enable_tensorboard: bool = flag("short for --report_to tensorboard", False)
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

    dtype: Dtype | None = flag("dtype of weights and activations; bf16 on CUDA and fp32 on a CPU if not given", None)
    bf16: bool = flag("short for --dtype bf16", False)
    attn_implementation: Attention = flag(
        "attention: sdpa (eager where a family's cap on its logits needs it), eager or flash_attention_2", "sdpa"
    )
    gradient_checkpointing: bool = flag("recompute activations in the backward pass, to save memory", False)
    zero_stage: ZeroStage = flag("ZeRO stage of DeepSpeed", 0)
    offload: bool = flag("keep optimiser states and parameters in CPU memory", False)
    self_checks: bool = flag("check log-probs, padding and special tokens before the first update", True)
    deepspeed: bool = flag("accepted for the launcher: every run uses DeepSpeed", False)
    deepspeed_config: str | None = flag("JSON file with DeepSpeed settings that replace ours", None)
    local_rank: int = flag("set by the launcher", -1)
    ddp_timeout: int = flag("seconds that processes wait for each other before the run ends with an error", 1800)
