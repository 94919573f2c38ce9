# SPDX-License-Identifier: Apache-2.0
"""Which of transformers' implementations of attention a model is opened with (``--attn_implementation``)."""

import logging
from functools import cache

import torch
from transformers import PreTrainedConfig
from transformers.utils import is_flash_attn_2_available

from dschat.errors import UserError

logger = logging.getLogger(__name__)

FLAG = "--attn_implementation"
SDPA, EAGER, FLASH = "sdpa", "eager", "flash_attention_2"


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
