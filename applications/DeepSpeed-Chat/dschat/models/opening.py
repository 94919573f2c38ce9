# SPDX-License-Identifier: Apache-2.0
"""Options for loading a model: device, dtype, attention (``--attn_implementation``) and where its weights are."""

import logging
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch
from torch import nn
from transformers import PreTrainedConfig

from dschat.base.errors import UserError

logger = logging.getLogger(__name__)

FLAG = "--attn_implementation"
AUTO = "auto"
SDPA = "sdpa"
EAGER = "eager"
FLEX = "flex_attention"
PLAIN_ATTENTION = (AUTO, SDPA, EAGER)  # supported by every model and device
# Words in the messages with which transformers refuses an attention.
REFUSAL_WORDS = ("flash", "flex", "attn_implementation", "attention implementation", "kernels")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def choose_device(gpu: int | None = None, device: str | None = None) -> torch.device:
    """The device that the flags ask for; with neither flag the first GPU, or else the CPU.

    Args:
        gpu: --gpu. Number 0 falls back to the CPU, with a warning, where there is no GPU at all.
        device: --device, which takes precedence over `gpu`: "cpu", "cuda" or "cuda:N".
    """
    if device is not None and not re.fullmatch(r"cpu|cuda(:\d+)?", device):
        raise UserError(f"--device {device}: must be cpu, cuda or cuda:N with the number of a GPU.")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    asked = f"--device {device}" if device is not None else f"--gpu {gpu}"
    if device is None and count == 0 and not gpu:
        if gpu is not None:
            logger.warning("%s: there is no GPU here, computing on the CPU", asked)
        device = "cpu"
    if device == "cpu":
        return torch.device("cpu")
    number = int((device or f"cuda:{gpu or 0}").removeprefix("cuda").removeprefix(":") or 0)
    if number >= count:
        raise UserError(
            f"{asked}: PyTorch finds {count or 'no'} GPUs here. Give one that exists, counted from 0, or --device cpu;"
            " or check the driver, CUDA_VISIBLE_DEVICES and that PyTorch was installed with CUDA."
        )
    return torch.device("cuda", number)


def choose_dtype(name: str | None, device: torch.device) -> torch.dtype:
    """The dtype called fp32, bf16 or fp16; by default bf16 on a GPU and fp32 on a CPU."""
    if name is None:
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return DTYPES[name]


def check_attention(wanted: str, dtype: torch.dtype) -> None:
    """Raises UserError if an attention needs a GPU or another dtype.

    Whether its package is installed and supports the GPU is checked by transformers, see `explain_refusal`.
    """
    if wanted in PLAIN_ATTENTION:
        return
    remedy = f"Use {FLAG} {SDPA}, the default."
    if not torch.cuda.is_available():
        reason = ", because torch computes no gradients of it on a CPU" if wanted == FLEX else ""
        raise UserError(f"{FLAG} {wanted} needs a GPU{reason}. {remedy}")
    if dtype == torch.float32 and "flash" in wanted:
        raise UserError(f"{FLAG} {wanted} computes in half precision only: give --dtype bf16. Or: {remedy}")


def resolve_attention(wanted: str, config: PreTrainedConfig) -> str | None:
    """The value of attn_implementation for transformers, given that of ``--attn_implementation``.

    For auto and sdpa it is None, which lets transformers take sdpa if the family has it, and eager otherwise. It is
    eager if the model caps attention logits, as Gemma-2 does, because sdpa cannot. Any other value is returned as it
    is; flex_attention and flash attention support caps.
    """
    if wanted not in (AUTO, SDPA):
        return wanted
    has_cap = getattr(config.get_text_config(), "attn_logit_softcapping", None) is not None
    return EAGER if has_cap else None


def explain_refusal(wanted: str, path: str, error: Exception) -> str | None:
    """A message if transformers refused an attention that was asked for; None for any other error.

    transformers refuses an attention that the family does not support, a kernel that does not support the GPU, and a
    kernel that cannot be downloaded from the hub.
    """
    reason = str(error).strip()
    names_attention = any(word in reason.lower() for word in REFUSAL_WORDS)
    is_refusal = isinstance(error, ValueError | ImportError) and names_attention
    if wanted in PLAIN_ATTENTION or not is_refusal:
        return None
    first_line = reason.splitlines()[0].rstrip(".")
    return f"{FLAG} {wanted}: {path} cannot be opened with it: {first_line}. Use {FLAG} {SDPA}."


@contextmanager
def use_attention(name: str, config: PreTrainedConfig) -> Iterator[None]:
    """Inside, a model with this config uses the attention function that is registered in transformers by this name.

    Models with their own attention code (``_supports_attention_backend`` is False) are not affected.
    """
    before = config._attn_implementation
    config._attn_implementation = name
    try:
        yield
    finally:
        config._attn_implementation = before


@cache  # so that a model that is loaded several times, as actor and reference, is warned of once
def warn_once_if_other_attention(wanted: str, used: str, path: str) -> None:
    """Warns once if a model uses another attention than the one asked for."""
    if wanted in (AUTO, used):
        return
    reason = "does not do what this model needs"
    if wanted != SDPA:
        reason = "is not installed here or not supported by this model"
    logger.warning("%s: attention is computed by %s, not by %s, which %s", path, used, wanted, reason)


class Placement(Protocol):
    """Places the weights of a model while it is loaded. Every rank must call the methods."""

    def while_loading(self) -> AbstractContextManager[dict[str, Any]]:
        """Inside, each weight is placed as soon as it is loaded; yields options of from_pretrained."""

    def gathered(self, model: nn.Module, *modules: nn.Module) -> AbstractContextManager[None]:
        """Inside, these modules' weights are whole on every process and may be changed.

        At the end the main process's values are broadcast to the others.
        """

    def finalise(self, model: nn.Module) -> None:
        """Places the weights that did not come from a file."""


@dataclass(frozen=True)
class SingleDevice:
    """Places whole weights on one device, loaded directly into its memory."""

    device: torch.device = torch.device("cpu")

    @contextmanager
    def while_loading(self) -> Iterator[dict[str, Any]]:
        """Loads onto the device; transformers needs no option for the CPU."""
        yield {} if self.device.type == "cpu" else {"device_map": {"": self.device}}

    @contextmanager
    def gathered(self, model: nn.Module, *modules: nn.Module) -> Iterator[None]:
        """Does nothing: all weights are whole."""
        yield

    def finalise(self, model: nn.Module) -> None:
        """Does nothing: new weights are on the device already."""


@dataclass(frozen=True)
class LoadOptions:
    """Attention of a model that is loaded, and placement of its weights."""

    placement: Placement = SingleDevice()
    attention: str = SDPA  # value of ``--attn_implementation``


DEFAULT_OPTIONS = LoadOptions()
