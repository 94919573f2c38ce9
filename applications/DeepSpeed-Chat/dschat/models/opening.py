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
from transformers.utils import is_flash_attn_2_available

from dschat.errors import UserError

logger = logging.getLogger(__name__)

FLAG = "--attn_implementation"
SDPA, EAGER, FLASH = "sdpa", "eager", "flash_attention_2"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


def choose_dtype(name: str | None, device: torch.device) -> torch.dtype:
    """The dtype called fp32, bf16 or fp16; without a name bf16 on a GPU and fp32 on a CPU."""
    return DTYPES[name or ("bf16" if device.type == "cuda" else "fp32")]


def check_attention(wanted: str, dtype: torch.dtype) -> None:
    """Raises UserError where flash attention is wanted and cannot work."""
    if wanted != FLASH:
        return
    remedy = f"Use {FLAG} {SDPA}, the default."
    if not torch.cuda.is_available():
        raise UserError(f"{FLAG} {FLASH} needs a GPU. {remedy}")
    if dtype == torch.float32:
        raise UserError(f"{FLAG} {FLASH} computes in half precision only: give --dtype bf16. Or: {remedy}")
    if not is_flash_attn_2_available():
        raise UserError(f"{FLAG} {FLASH} needs the package flash-attn, which is not installed here. {remedy}")


def implementation(wanted: str, config: PreTrainedConfig) -> str | None:
    """What to ask transformers for: None lets it take sdpa where a family has it, and otherwise eager.

    Gemma-2 caps its attention's logits, which sdpa cannot do; where a config has such a cap, eager is used.
    """
    if wanted != SDPA:
        return wanted
    return None if getattr(config.get_text_config(), "attn_logit_softcapping", None) is None else EAGER


def without_flash(wanted: str, path: str, error: Exception) -> str | None:
    """A message where transformers says that a family has no flash attention; None of any other error."""
    if wanted != FLASH or "flash" not in str(error).lower():
        return None
    return f"{FLAG} {FLASH}: {path} cannot be opened with it: {str(error).splitlines()[0]} Use {FLAG} {SDPA}."


@cache
def say_what_is_used(wanted: str, used: str, path: str) -> None:
    """Tells once of a model that computes its attention otherwise than wanted."""
    if used != wanted:
        told = "%s: attention is computed by %s, not by %s, which does not do what this model needs"
        logger.warning(told, path, used, wanted)


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
