# SPDX-License-Identifier: Apache-2.0
"""Writes Hugging Face folders from a stream of whole weights, file by file; the live model is not changed."""

import copy
import json
import logging
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import PrefixChange, WeightConverter, revert_weight_conversion

from dschat.base.atomic import put, write_file
from dschat.models.adapters import is_adapter, lora_config
from dschat.models.heads import folded
from dschat.models.tensor_files import save_tensors
from dschat.models.tokenizer import save_tokenizer

logger = logging.getLogger(__name__)

FILE_SIZE = 5 * 10**9  # bytes of weights per file; up to two files are held in main memory
Weights = Iterable[tuple[str, Tensor]]


def save_model(
    model: Any, weights: Weights, tokenizer: Any, folder: Path, merge: bool = True, file_size: int = FILE_SIZE
) -> None:
    """Writes an ordinary Hugging Face folder: safetensors, configs, tokenizer.

    Args:
        model: may be sharded; only its class, configs and dtype are used.
        weights: whole weights by their names in the model, shared ones once; read once, one at a time.
        tokenizer: saved with the model.
        folder: created if it does not exist. With LoRA, the adapter goes into ``folder/adapter``.
        merge: with LoRA, also write the merged model.
        file_size: maximum bytes of weights per file, unless a single weight is larger.
    """
    folder.mkdir(parents=True, exist_ok=True)
    save_tokenizer(tokenizer, folder)
    weights = folded(weights)
    if lora_config(model) is None:
        _save_plain(model, weights, folder, file_size)
        return
    from dschat.models.lora import merged, save_adapter

    adapter: dict[str, Tensor] = {}
    weights = _collect_adapter(weights, adapter)
    if merge:
        _save_plain(model, merged(model, weights), folder, file_size)
    else:
        for _ in weights:
            pass
        if hasattr(model, "generation_config"):
            model.generation_config.save_pretrained(folder)  # it has the ids that end a response
    save_adapter(model, adapter, folder / "adapter")


def _collect_adapter(weights: Weights, adapter: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Passes weights on, and copies those of the adapter into `adapter`."""
    for name, tensor in weights:
        if is_adapter(name):
            adapter[name] = _copied(tensor)
        yield name, tensor


def _save_plain(model: Any, weights: Weights, folder: Path, file_size: int) -> None:
    """Writes the configs, using a model of the same class without weights, then the weights."""
    config = copy.deepcopy(model.config)
    config.use_cache = True  # training with gradient checkpointing turns it off, also in published folders
    with torch.device("meta"):
        plain = type(model)(config).to(next(model.parameters()).dtype)
    if hasattr(model, "generation_config"):
        plain.generation_config = model.generation_config
    plain.save_pretrained(folder, state_dict={})
    _write_files(as_published(plain, weights), folder, file_size, {"total_parameters": plain.num_parameters()})


def as_published(model: Any, weights: Weights) -> Iterator[tuple[str, Tensor]]:
    """Converts weights to the names and shapes of the family's published folders, which differ for experts, say.

    Args:
        model: may be sharded and have adapters.
        weights: whole weights by their names without adapters, one at a time.
    """
    with torch.device("meta"):
        plain = type(model)(copy.deepcopy(model.config))
    conversions = get_model_conversion_mapping(plain, add_legacy=False)
    plain._weight_conversions = [conversion for conversion in conversions if not isinstance(conversion, PrefixChange)]
    converters = []
    for entry in plain._weight_conversions:
        if isinstance(entry, WeightConverter):
            converters.append(entry)
    can_convert = all(len(converter.target_patterns) == 1 for converter in converters)
    if not can_convert:
        logger.warning("weights of %s keep the names that they have in transformers", type(plain).__name__)
    ignored_names = set(plain._keys_to_ignore_on_save or ())
    for name, tensor in weights:
        if name in ignored_names:
            continue
        if can_convert:
            yield from revert_weight_conversion(plain, {name: tensor}).items()
        else:
            yield name, tensor


def _write_files(weights: Weights, folder: Path, file_size: int, metadata: dict[str, int]) -> None:
    """Writes model.safetensors; or, if it needs several files, model-00001-of-00002.safetensors … and their index."""
    names_by_file: list[list[str]] = []
    buffered: dict[str, Tensor] = {}
    buffered_size = 0
    total_size = 0

    def unfinished(number: int) -> Path:
        """The name of a file until the number of files is known."""
        return folder / f"model-{number + 1:05d}.safetensors"

    def write_buffered() -> None:
        save_tensors(buffered, unfinished(len(names_by_file)), metadata={"format": "pt"})
        names_by_file.append(list(buffered))
        buffered.clear()

    for name, tensor in weights:
        if buffered and buffered_size + tensor.nbytes > file_size:
            write_buffered()
            buffered_size = 0
        buffered[name] = _copied(tensor)
        buffered_size += tensor.nbytes
        total_size += tensor.nbytes
    write_buffered()
    if len(names_by_file) == 1:
        put(unfinished(0), folder / "model.safetensors")
        return

    weight_map: dict[str, str] = {}
    for number, names in enumerate(names_by_file):
        file = f"model-{number + 1:05d}-of-{len(names_by_file):05d}.safetensors"
        put(unfinished(number), folder / file)
        weight_map |= dict.fromkeys(names, file)
    index = {"metadata": metadata | {"total_size": total_size}, "weight_map": weight_map}
    write_file(folder / "model.safetensors.index.json", json.dumps(index, indent=2, sort_keys=True) + "\n")


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True).contiguous()
