# SPDX-License-Identifier: Apache-2.0
"""Converts a model with weights in pytorch_model.bin to an ordinary folder with safetensors.

    python -m dschat.models.convert FOLDER NEW_FOLDER

Reads ordinary folders of transformers, and reward models and critics as DeepSpeed-Chat saves them. The files are
opened without running code (``weights_only``).
"""

import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedConfig
from transformers.utils import GENERATION_CONFIG_NAME

from dschat.base.atomic import writing_folder
from dschat.base.errors import UserError
from dschat.base.lfs import refuse_pointer
from dschat.models.open_errors import explaining
from dschat.models.tokenizer import open_tokenizer, save_tokenizer

VALUE_HEAD = "v_head.weight"  # in a reward model or critic of DeepSpeed-Chat, beside a backbone of any name


def convert(folder: Path, target: Path) -> None:
    """Writes a model and its tokenizer into a new folder, which appears when it is complete.

    Raises:
        UserError: the weights or the tokenizer are missing; the weights are not those of the folder's config.json, or
            cannot be opened without running code; or the target exists.
        OSError, ValueError: the target cannot be written, or transformers has no model for the folder's config.json.
    """
    if target.exists():
        raise UserError(f"{target} exists; give the name of a new folder.")
    weights = _read_weights(folder)
    with explaining("model", str(folder), "FOLDER"):
        config: PreTrainedConfig = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    tokenizer = open_tokenizer(str(folder), "FOLDER")
    has_value_head = VALUE_HEAD in weights
    is_classifier = any(name.endswith("ForSequenceClassification") for name in config.architectures or ())
    auto_class = AutoModelForSequenceClassification if is_classifier or has_value_head else AutoModelForCausalLM
    with torch.device("meta"):  # without memory for weights
        model_class = type(auto_class.from_config(config))
    if has_value_head:
        config.num_labels = 1
        config.dtype = weights[VALUE_HEAD].dtype
        weights = _as_classifier(weights, model_class.base_model_prefix)
    model = _build_model(model_class, config, weights, folder)
    with writing_folder(target) as unfinished:
        model.save_pretrained(unfinished)
        generation_config = folder / GENERATION_CONFIG_NAME
        if generation_config.exists():  # transformers has made one from config.json
            shutil.copyfile(generation_config, unfinished / GENERATION_CONFIG_NAME)
        save_tokenizer(tokenizer, unfinished)


def _read_weights(folder: Path) -> dict[str, Tensor]:
    """Weights of all files, by name."""
    weights: dict[str, Tensor] = {}
    for file in sorted(folder.glob("pytorch_model*.bin")):
        refuse_pointer(file, str(folder))
        try:
            weights |= torch.load(file, map_location="cpu", weights_only=True)
        except Exception as error:  # of any type, if a file is cut off or holds something else
            raise UserError(f"{file} holds no weights that can be opened without running code: {error}") from error
    if not weights:
        raise UserError(f"{folder}: no pytorch_model.bin.")
    return weights


def _as_classifier(weights: dict[str, Tensor], backbone: str) -> dict[str, Tensor]:
    """Weights of DeepSpeed-Chat's reward model under the names of transformers' classifier."""
    renamed = {"score.weight": weights[VALUE_HEAD]}
    for name, tensor in weights.items():
        if name != VALUE_HEAD:
            _, _, inner_name = name.partition(".")
            renamed[f"{backbone}.{inner_name}"] = tensor
    return renamed


def _build_model(model_class: Any, config: PreTrainedConfig, weights: dict[str, Tensor], folder: Path) -> Any:
    """A model with these weights and no others."""
    # Buffers that earlier versions of transformers saved, such as rotary_emb.inv_freq, are known to it.
    model, loading = model_class.from_pretrained(
        None,
        config=config,
        state_dict=weights,
        dtype="auto",
        output_loading_info=True,
        ignore_mismatched_sizes=True,
        trust_remote_code=False,
    )
    differing = {*loading["missing_keys"], *loading["unexpected_keys"]}
    differing.update(name for name, _, _ in loading["mismatched_keys"])
    if differing:
        raise UserError(
            f"{folder}: the weights are not those of a {model_class.__name__}, the model of its config.json:"
            f" {', '.join(sorted(differing)[:8])} are missing, of another shape or have no place in it."
        )
    return model


def main(arguments: list[str]) -> int:
    """Runs the command. Returns the exit status."""
    if len(arguments) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    try:
        convert(Path(arguments[0]), Path(arguments[1]))
    except (UserError, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
