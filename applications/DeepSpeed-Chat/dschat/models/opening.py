# SPDX-License-Identifier: Apache-2.0
"""How a model is opened: its dtype, which attention computes (``--attn_implementation``), where its weights go."""

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.utils import is_flash_attn_2_available, is_flash_attn_3_available, is_kernels_available

from dschat.base.errors import UserError

logger = logging.getLogger(__name__)

FLAG = "--attn_implementation"
AUTO, SDPA, EAGER, FLEX = "auto", "sdpa", "eager", "flex_attention"
FLASH_2, FLASH_3 = "flash_attention_2", "flash_attention_3"
PLAIN_ATTENTION = (AUTO, SDPA, EAGER)  # what every model and device can compute
# Words of the messages in which transformers refuses an attention.
REFUSALS = ("flash", "flex", "attn_implementation", "attention implementation", "kernels")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


def choose_dtype(name: str | None, device: torch.device) -> torch.dtype:
    """The dtype called fp32, bf16 or fp16; without a name bf16 on a GPU and fp32 on a CPU."""
    return DTYPES[name or ("bf16" if device.type == "cuda" else "fp32")]


def check_attention(wanted: str, dtype: torch.dtype) -> None:
    """Raises UserError where an attention needs a GPU, a dtype or a package that is not there.

    Whether the GPU is one that the kernel is made for, transformers finds out when it loads the kernel.
    """
    if wanted in PLAIN_ATTENTION:
        return
    remedy = f"Use {FLAG} {SDPA}, the default."
    if not torch.cuda.is_available():
        reason = ", because torch computes no gradients of it on a CPU" if wanted == FLEX else ""
        raise UserError(f"{FLAG} {wanted} needs a GPU{reason}. {remedy}")
    if dtype == torch.float32 and "flash" in wanted:
        raise UserError(f"{FLAG} {wanted} computes in half precision only: give --dtype bf16. Or: {remedy}")
    package = missing_package(wanted)
    if package is not None:
        raise UserError(f"{FLAG} {wanted} needs the package {package}, which is not installed here. {remedy}")


def missing_package(wanted: str) -> str | None:
    """The package that an attention needs and that is not installed; None where there is none.

    With the package kernels, transformers fetches flash attention from the hub.
    """
    if wanted == FLEX or is_kernels_available():
        return None
    if wanted == FLASH_2:
        return None if is_flash_attn_2_available() else "flash-attn (or kernels)"
    if wanted == FLASH_3:
        return None if is_flash_attn_3_available() else "flash-attn-3 (or kernels)"
    return "kernels"


def implementation(wanted: str, config: PreTrainedConfig) -> str | None:
    """What to ask transformers for: None lets it take sdpa where a family has it, and otherwise eager.

    Gemma-2 caps its attention's logits, which sdpa cannot do; where a config has such a cap, eager is used. An
    attention that is named otherwise is used as it is: flex_attention and flash attention have such caps.
    """
    if wanted not in (AUTO, SDPA):
        return wanted
    return None if getattr(config.get_text_config(), "attn_logit_softcapping", None) is None else EAGER


def explain_refusal(wanted: str, path: str, error: Exception) -> str | None:
    """A message where transformers refuses an attention that was named; None for any other error.

    It does so where a model's family does not have the attention, the GPU is not one that the kernel is made for, or
    the kernel cannot be fetched from the hub.
    """
    reason = str(error).strip()
    is_refusal = isinstance(error, ValueError | ImportError) and any(word in reason.lower() for word in REFUSALS)
    if wanted in PLAIN_ATTENTION or not is_refusal:
        return None
    return f"{FLAG} {wanted}: {path} cannot be opened with it: {reason.splitlines()[0]} Use {FLAG} {SDPA}."


@contextmanager
def attention_by(name: str, config: PreTrainedConfig) -> Iterator[None]:
    """Inside, a model with this config computes attention by the function that transformers has under this name.

    Models that compute their attention by code of their own (``_supports_attention_backend`` is False) are not
    affected.
    """
    before = config._attn_implementation
    config._attn_implementation = name
    try:
        yield
    finally:
        config._attn_implementation = before


@cache
def say_what_is_used(wanted: str, used: str, path: str) -> None:
    """Says once that a model computes its attention otherwise than wanted."""
    if wanted in (AUTO, used):
        return
    reason = "does not do what this model needs" if wanted == SDPA else "is not installed here"
    logger.warning("%s: attention is computed by %s, not by %s, which %s", path, used, wanted, reason)


class Placement(Protocol):
    """Takes the weights of a model as they are loaded. Every rank must call its methods."""

    def load_sharded(self) -> AbstractContextManager[dict[str, Any]]:
        """Inside, each weight that is loaded goes where it belongs, one by one; yields options of from_pretrained."""

    def whole(self, model: nn.Module, *modules: nn.Module) -> AbstractContextManager[None]:
        """Inside, these modules' weights are whole, and may be changed or replaced; only the main process's count."""

    def finalise(self, model: nn.Module) -> None:
        """Places the weights that did not come from a file."""


@dataclass(frozen=True)
class Whole:
    """Whole weights on one device, read straight into its memory."""

    device: torch.device = torch.device("cpu")

    @contextmanager
    def load_sharded(self) -> Iterator[dict[str, Any]]:
        """transformers reads onto a CPU unless it is told another device."""
        yield {} if self.device.type == "cpu" else {"device_map": {"": self.device}}

    @contextmanager
    def whole(self, model: nn.Module, *modules: nn.Module) -> Iterator[None]:
        """They always are."""
        yield

    def finalise(self, model: nn.Module) -> None:
        """There is one place."""


@dataclass(frozen=True)
class Opening:
    """How a model is opened."""

    placement: Placement = Whole()  # where its weights go
    attention: str = SDPA  # a value of ``--attn_implementation``


PLAIN = Opening()
