# SPDX-License-Identifier: Apache-2.0
"""Writing Hugging Face folders from a stream of whole weights, file by file, without touching the live model."""

import copy
import json
import logging
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import PrefixChange, WeightConverter, revert_weight_conversion

from dschat.base.atomic import put, write_file
from dschat.models.heads import folded
from dschat.models.lora import is_adapter, lora_config, merged, save_adapter

logger = logging.getLogger(__name__)

FILE_SIZE = 5 * 10**9  # bytes of weights in one file, as much as is held in main memory
Weights = Iterable[tuple[str, Tensor]]


def save_model(
    model: Any, weights: Weights, tokenizer: Any, folder: Path, merge: bool = True, file_size: int = FILE_SIZE
) -> None:
    """Writes an ordinary Hugging Face folder: safetensors, tokenizer and, for a causal LM, the generation config.

    The model may be sharded: only its class, configs and data type are used. `weights` are whole, names as in
    ``model``, shared ones once; read once, one at a time. With LoRA, its adapter goes into ``folder/adapter``, and
    with `merge` the merged model into ``folder``. A file holds `file_size` bytes of weights, unless one weight alone
    is larger.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(folder)
    weights = folded(weights)
    if lora_config(model) is None:
        _save_plain(model, weights, folder, file_size)
        return
    adapter: dict[str, Tensor] = {}
    noted = _noting_adapter(weights, adapter)
    if merge:
        _save_plain(model, merged(model, noted), folder, file_size)
    else:
        for _ in noted:
            pass
        if hasattr(model, "generation_config"):
            model.generation_config.save_pretrained(folder)  # what ends a response
    save_adapter(model, adapter, folder / "adapter")


def _noting_adapter(weights: Weights, adapter: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Hands weights on, and copies those of the adapter."""
    for name, tensor in weights:
        if is_adapter(name):
            adapter[name] = _copied(tensor)
        yield name, tensor


def _save_plain(model: Any, weights: Weights, folder: Path, file_size: int) -> None:
    """Writes the configs by a model without weights of the same class, then the weights."""
    config = copy.deepcopy(model.config)
    config.use_cache = True  # gradient checkpointing turns it off
    with torch.device("meta"):
        plain = type(model)(config).to(next(model.parameters()).dtype)
    if hasattr(model, "generation_config"):
        plain.generation_config = model.generation_config
    plain.save_pretrained(folder, state_dict={})
    total = plain.num_parameters()
    _write_files(as_published(plain, weights), folder, file_size, {"total_parameters": total})


def as_published(model: Any, weights: Weights) -> Iterator[tuple[str, Tensor]]:
    """Names and shapes that the family's folders have where transformers holds weights otherwise, such as experts.

    The model may be sharded, and have adapters. `weights` are whole, by their names without adapters, one at a time.
    """
    with torch.device("meta"):
        plain = type(model)(copy.deepcopy(model.config))
    conversions = get_model_conversion_mapping(plain, add_legacy=False)
    plain._weight_conversions = [conversion for conversion in conversions if not isinstance(conversion, PrefixChange)]
    left_out = set(plain._keys_to_ignore_on_save or ())
    kept = ((name, tensor) for name, tensor in weights if name not in left_out)
    converters = [entry for entry in plain._weight_conversions if isinstance(entry, WeightConverter)]
    if any(len(converter.target_patterns) > 1 for converter in converters):
        logger.warning("weights of %s keep the names that they have in transformers", type(plain).__name__)
        yield from kept
        return
    for name, tensor in kept:
        yield from revert_weight_conversion(plain, {name: tensor}).items()


def _write_files(weights: Weights, folder: Path, file_size: int, metadata: dict[str, int]) -> None:
    """model.safetensors; or, where there is more than one file, model-00001-of-00002.safetensors … and their index."""
    names: list[list[str]] = []  # by file
    held: dict[str, Tensor] = {}
    total = size = 0

    def write() -> None:
        save_file(held, folder / _numbered(len(names)), metadata={"format": "pt"})
        names.append(list(held))
        held.clear()

    for name, tensor in weights:
        if held and size + tensor.nbytes > file_size:
            write()
            size = 0
        held[name] = _copied(tensor)
        size += tensor.nbytes
        total += tensor.nbytes
    write()
    if len(names) == 1:
        put(folder / _numbered(0), folder / "model.safetensors")
        return
    where: dict[str, str] = {}
    for number, inside in enumerate(names):
        file = f"model-{number + 1:05d}-of-{len(names):05d}.safetensors"
        put(folder / _numbered(number), folder / file)
        where |= dict.fromkeys(inside, file)
    index = {"metadata": metadata | {"total_size": total}, "weight_map": where}
    write_file(folder / "model.safetensors.index.json", json.dumps(index, indent=2, sort_keys=True) + "\n")


def _numbered(number: int) -> str:
    """A file's name for as long as it is not known how many there are."""
    return f"model-{number + 1:05d}.safetensors"


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True).contiguous()
