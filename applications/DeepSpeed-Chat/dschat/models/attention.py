# SPDX-License-Identifier: Apache-2.0
"""How a model computes attention (``--attn_implementation``): what can be used here, and why transformers refuses."""

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch
from transformers import PreTrainedConfig

from dschat.base.errors import UserError

logger = logging.getLogger(__name__)

ATTENTION_FLAG = "--attn_implementation"
AUTO = "auto"
SDPA = "sdpa"
EAGER = "eager"
FLEX = "flex_attention"
PLAIN_ATTENTION = (AUTO, SDPA, EAGER)  # supported by every model and device
# Words in the messages with which transformers refuses an attention.
REFUSAL_WORDS = ("flash", "flex", "attn_implementation", "attention implementation", "kernels")


def check_attention(wanted: str, dtype: torch.dtype) -> None:
    """Raises UserError if an attention needs a GPU or another dtype.

    Whether its package is installed and supports the GPU is checked by transformers, see `explain_refusal`.
    """
    if wanted in PLAIN_ATTENTION:
        return
    remedy = f"Use {ATTENTION_FLAG} {SDPA}, the default."
    if not torch.cuda.is_available():
        reason = ", because torch computes no gradients of it on a CPU" if wanted == FLEX else ""
        raise UserError(f"{ATTENTION_FLAG} {wanted} needs a GPU{reason}. {remedy}")
    if dtype == torch.float32 and "flash" in wanted:
        raise UserError(f"{ATTENTION_FLAG} {wanted} computes in half precision only: give --dtype bf16. Or: {remedy}")


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


def explain_refusal(wanted: str, path: str, base: str, error: Exception) -> str | None:
    """A message if transformers refused an attention that was asked for; None for any other error.

    transformers refuses an attention that the family does not support, a kernel that does not support the GPU, and a
    kernel that cannot be downloaded from the hub.

    Args:
        wanted: value of ``--attn_implementation``.
        path: the model, as the user gave it.
        base: folder or hub id of the whole weights.
        error: what transformers raised.
    """
    first_line = str(error).strip().partition("\n")[0].rstrip(".")  # further lines may list all families, FlexOlmo too
    searched_text = first_line
    for name in (path, base):
        searched_text = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", "", searched_text)
    names_attention = any(word in searched_text.lower() for word in REFUSAL_WORDS)
    is_refusal = isinstance(error, ValueError | ImportError) and names_attention
    if wanted in PLAIN_ATTENTION or not is_refusal:
        return None
    return f"{ATTENTION_FLAG} {wanted}: {path} cannot be opened with it: {first_line}. Use {ATTENTION_FLAG} {SDPA}."


@contextmanager
def use_attention(name: str, config: PreTrainedConfig) -> Iterator[None]:
    """Inside, a model with this config uses the attention function that is registered in transformers by this name.

    Models with their own attention code (``_supports_attention_backend`` is False) are not affected.
    """
    before = [(part, part._attn_implementation) for part in _with_sub_configs(config)]
    config._attn_implementation = name  # and that of its sub-configs
    try:
        yield
    finally:
        for part, attention in before:
            part._attn_implementation = attention


def _with_sub_configs(config: PreTrainedConfig) -> Iterator[PreTrainedConfig]:
    """A config and all configs inside it, such as those of text and images; each before those inside it."""
    yield config
    for name in config.sub_configs:
        sub_config = getattr(config, name, None)
        if sub_config is not None:
            yield from _with_sub_configs(sub_config)


@cache  # so that a model that is loaded several times, as actor and reference, is warned of once
def warn_once_if_other_attention(wanted: str, used: str, path: str) -> None:
    """Warns once if a model uses another attention than the one asked for."""
    if wanted in (AUTO, used):
        return
    reason = "does not do what this model needs"
    if wanted != SDPA:
        reason = "is not installed here or not supported by this model"
    logger.warning("%s: attention is computed by %s, not by %s, which %s", path, used, wanted, reason)
