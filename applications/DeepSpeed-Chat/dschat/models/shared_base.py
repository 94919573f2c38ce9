# SPDX-License-Identifier: Apache-2.0
"""One base in memory for several models, each with its own LoRA adapters and head (--share_base).

Every model keeps modules of its own; only the frozen weights inside them are the same tensors. So a model's adapters,
gradient checkpointing, checkpoints and saved folder are its own affair, and no forward pass has to switch adapters.
"""

import copy
import json
import logging
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, inject_adapter_in_model
from safetensors.torch import load_file
from torch import nn

from dschat.errors import UserError
from dschat.models.load import classifier_class
from dschat.models.lora import NAME, is_adapter

logger = logging.getLogger(__name__)

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."  # of every name in peft's files
# What an adapter's config may set; peft knows variants of LoRA beside, which are merged in other ways.
PLAIN_LORA = """r lora_alpha lora_dropout use_rslora rank_pattern alpha_pattern fan_in_fan_out target_modules
exclude_modules layers_to_transform layers_pattern modules_to_save base_model_name_or_path revision task_type peft_type
peft_version inference_mode auto_mapping""".split()


def classifier_beside(causal_lm: Any, flag: str) -> Any:
    """A sequence classifier with one label whose backbone holds a causal LM's own weights; its head starts at zero.

    Args:
        causal_lm: without adapters. Its weights must not be trained: a change of them would change the classifier.
        flag: that asked for it, for messages.

    Raises:
        UserError: the family's classifiers have another backbone, or no ``score`` layer.
    """
    shared = [*causal_lm.base_model.parameters(), *causal_lm.base_model.buffers()]
    backbone = copy.deepcopy(causal_lm.base_model, {id(tensor): tensor for tensor in shared})
    config = backbone.config
    config.num_labels = 1
    with torch.device("meta"):
        classifier: Any = classifier_class(config)(config)
    prefix, head = classifier.base_model_prefix, getattr(classifier, "score", None)
    if type(getattr(classifier, prefix, None)) is not type(backbone) or not isinstance(head, nn.Linear):
        raise UserError(
            f"{flag}: a {type(classifier).__name__} cannot stand on the base of a {type(causal_lm).__name__}. Leave "
            "--share_base out."
        )
    setattr(classifier, prefix, backbone)
    weight = next(causal_lm.parameters())
    classifier.score = nn.Linear(head.in_features, 1, head.bias is not None, device=weight.device, dtype=weight.dtype)
    nn.init.zeros_(classifier.score.weight)
    if classifier.score.bias is not None:
        nn.init.zeros_(classifier.score.bias)
    return classifier


def find_adapter(path: str | None) -> Path | None:
    """The folder of a LoRA adapter, which is ``path`` or ``path/adapter``; None where neither holds one."""
    folders = [] if path is None else [Path(path), Path(path) / "adapter"]
    return next((folder for folder in folders if (folder / CONFIG).is_file()), None)


def adapter_settings(folder: Path) -> dict[str, Any]:
    """What an adapter's config says: ``r``, ``base_model_name_or_path`` and so on.

    Raises:
        UserError: it cannot be read.
    """
    try:
        settings: dict[str, Any] = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{folder / CONFIG} cannot be read: {error}") from error
    return settings


def base_of(path: str, flag: str) -> tuple[str, Path | None]:
    """The path of a model's whole weights, and the folder of the LoRA adapter that goes on them; None without one.

    An adapter alone goes on its base. Raises UserError, which names the flag, where it does not say what that is.
    """
    folder = find_adapter(path)
    if folder is None or (Path(path) / "config.json").is_file():
        return path, None
    base = adapter_settings(folder).get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise UserError(f"{flag} {path}: {folder / CONFIG} does not say which model it is for.")
    logger.info("%s %s: a LoRA adapter, which is put on %s", flag, path, base)
    return base, folder


def load_adapter(model: Any, folder: Path, flag: str, base: str) -> None:
    """Puts a saved adapter and its score head into a classifier, and freezes everything else.

    Args:
        model: of `classifier_beside` or `load_scalar`, changed in place.
        folder: from `find_adapter`.
        flag: that named it, for messages.
        base: path of the model below it, recorded when the adapter is saved again.

    Raises:
        UserError: the adapter is not plain LoRA, or not of a reward model over such a base.
    """
    try:
        config = LoraConfig.from_pretrained(str(folder))
        saved = load_file(folder / WEIGHTS)
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{flag} {folder}: the adapter cannot be read: {error}") from error
    if config.init_lora_weights in (False, "gaussian", "orthogonal"):  # others would change the base
        config.init_lora_weights = True
    names, plain = [field.name for field in fields(config) if field.name not in PLAIN_LORA], LoraConfig()
    if more := ", ".join(name for name in names if getattr(config, name) != getattr(plain, name)):
        raise UserError(
            f"{flag} {folder}: the adapter is no plain LoRA, its {CONFIG} sets {more}. Merge it into its base by "
            "peft's merge_and_unload and give that as a whole model, without --share_base."
        )
    config.base_model_name_or_path, config.inference_mode, config.modules_to_save = base, False, None
    config.lora_dropout = 0.0  # log-probs and values of an update are compared with earlier ones
    try:
        inject_adapter_in_model(config, model, NAME)
    except ValueError as error:
        raise UserError(f"{flag} {folder}: the adapter does not fit the base {base}: {error}") from error
    weights = {_own_name(name): tensor for name, tensor in saved.items()}
    own = {name: parameter for name, parameter in model.named_parameters() if is_adapter(name)}
    fits = weights.keys() == own.keys() and all(weights[name].shape == own[name].shape for name in own)
    if not fits:
        odd = sorted(weights.keys() ^ own.keys())[:3] or "the shapes of its weights"
        raise UserError(
            f"{flag} {folder}: not the adapter and score head of a reward model over {base}, which differ in {odd}."
        )
    for name, parameter in model.named_parameters():
        if name in own:
            parameter.data.copy_(weights[name])
        parameter.requires_grad_(name in own)


def _own_name(name: str) -> str:
    """The name in the model of a weight in peft's file."""
    name = name.removeprefix(PREFIX)
    for matrix in (".lora_A", ".lora_B"):
        name = name.replace(f"{matrix}.weight", f"{matrix}.{NAME}.weight")
    return name
