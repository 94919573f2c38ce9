# SPDX-License-Identifier: Apache-2.0
"""Converts a model with weights in pytorch_model.bin to an ordinary folder with safetensors.

    python -m dschat.models.convert FOLDER NEW_FOLDER

Reads ordinary folders of transformers, and reward models and critics as DeepSpeed-Chat saves them. The files are
opened without running code (``weights_only``).
"""

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from dschat.base.errors import UserError
from dschat.base.lfs import refuse_pointer
from dschat.models.tokenizer import open_tokenizer

VALUE_HEAD = "v_head.weight"  # in a reward model or critic of DeepSpeed-Chat, beside a backbone of any name


def convert(folder: Path, target: Path) -> None:
    """Writes a model and its tokenizer into a new folder.

    Raises:
        UserError: weights are missing, are not those of the folder's config.json, or cannot be opened without running
            code; or the target exists.
    """
    if target.exists():
        raise UserError(f"{target} exists; give the name of a new folder.")
    weights = _read_weights(folder)
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    is_classifier = any(name.endswith("ForSequenceClassification") for name in config.architectures or ())
    auto_class: Any = AutoModelForCausalLM
    if is_classifier or VALUE_HEAD in weights:
        auto_class = AutoModelForSequenceClassification
    model_class = auto_class._model_mapping[type(config)]
    if VALUE_HEAD in weights:
        config.num_labels = 1
        config.dtype = weights[VALUE_HEAD].dtype
        weights = _as_classifier(weights, model_class.base_model_prefix)
    # Buffers that earlier versions of transformers saved, such as rotary_emb.inv_freq, are known to it.
    model, loading = model_class.from_pretrained(
        None, config=config, state_dict=weights, dtype="auto", output_loading_info=True, trust_remote_code=False
    )
    differing = {*loading["missing_keys"], *loading["unexpected_keys"]}
    if differing:
        raise UserError(
            f"{folder}: the weights are not those of a {type(model).__name__}, the model of its config.json:"
            f" {', '.join(sorted(differing)[:8])} are missing or have no place in it."
        )
    model.save_pretrained(target)
    open_tokenizer(str(folder), "the tokenizer of").save_pretrained(target)


def _read_weights(folder: Path) -> dict[str, Tensor]:
    """Weights of all files, by name."""
    weights: dict[str, Tensor] = {}
    for file in sorted(folder.glob("pytorch_model*.bin")):
        refuse_pointer(file, str(folder))
        try:
            weights |= torch.load(file, map_location="cpu", weights_only=True)
        except Exception as error:
            raise UserError(f"{file} cannot be opened without running code that it may hold: {error}") from error
    if not weights:
        raise UserError(f"{folder}: no pytorch_model.bin.")
    return weights


def _as_classifier(weights: dict[str, Tensor], backbone: str) -> dict[str, Tensor]:
    """Weights of DeepSpeed-Chat's reward model under the names of transformers' classifier."""
    renamed: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        _, _, inner_name = name.partition(".")
        renamed["score.weight" if name == VALUE_HEAD else f"{backbone}.{inner_name}"] = tensor
    return renamed


def main(arguments: list[str]) -> int:
    """Runs the command; the exit status."""
    if len(arguments) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    try:
        convert(Path(arguments[0]), Path(arguments[1]))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
