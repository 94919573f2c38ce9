# SPDX-License-Identifier: Apache-2.0
"""Model configs: from a folder, from the hub, or, of models that presets name, the published sizes."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PreTrainedConfig

from dschat.errors import UserError
from dschat.models.limits import open_decoder_config

logger = logging.getLogger(__name__)

GEMMA_2B = {"hidden_size": 2048, "intermediate_size": 16384, "num_hidden_layers": 18}
GEMMA_2B |= {"num_attention_heads": 8, "num_key_value_heads": 1}
GEMMA_7B = {"hidden_size": 3072, "intermediate_size": 24576, "num_hidden_layers": 28}
GEMMA_7B |= {"num_attention_heads": 16, "num_key_value_heads": 16}
GEMMA2_27B = {"hidden_size": 4608, "intermediate_size": 36864, "num_hidden_layers": 46}
GEMMA2_27B |= {"num_attention_heads": 32, "num_key_value_heads": 16, "head_dim": 128, "query_pre_attn_scalar": 144}
# Hub id → family and the sizes that differ from transformers' defaults, or are written out although they do not.
PUBLISHED: dict[str, tuple[str, Mapping[str, int]]] = {
    "google/gemma-2b": ("gemma", GEMMA_2B),
    "google/gemma-7b": ("gemma", GEMMA_7B),
    "google/codegemma-2b": ("gemma", GEMMA_2B),
    "google/codegemma-7b-it": ("gemma", GEMMA_7B),
    "google/gemma-2-27b": ("gemma2", GEMMA2_27B),
}
VOCABULARY = 256_000  # of all of them


def find_config(path: str, flag: str) -> PreTrainedConfig:
    """A model's config: from a folder, from what was fetched before, of PUBLISHED, or from the hub, in this order.

    Args:
        path: folder or hub id.
        flag: that named it, for messages.

    Raises:
        UserError: there is none.
    """
    if path not in PUBLISHED or Path(path).exists():
        return open_decoder_config(path, flag)
    try:
        return open_decoder_config(path, flag, local_files_only=True)
    except UserError:
        logger.warning("%s %s was not fetched from the hub before: its sizes are those published.", flag, path)
        return published_config(path)


def published_config(hub_id: str) -> PreTrainedConfig:
    """The config of one of PUBLISHED, as far as its sizes go."""
    family, sizes = PUBLISHED[hub_id]
    options: dict[str, Any] = dict(sizes)
    return AutoConfig.for_model(family, vocab_size=VOCABULARY, **options)
