# SPDX-License-Identifier: Apache-2.0
"""Which models have LoRA adapters: folders of saved ones, and the model that each was trained on.

What is done with adapters is in lora.py, which only runs that have some import.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from dschat.base.errors import UserError
from dschat.base.fingerprints import model_hash
from dschat.models.reward_notes import BASE_KEY, NOTES, read_adapter_notes

if TYPE_CHECKING:
    from peft import LoraConfig

NAME = "default"  # peft's name of the adapter
CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"


def lora_config(model: Any) -> LoraConfig | None:
    """The configuration of a model's adapters; None if it has none."""
    return (getattr(model, "peft_config", None) or {}).get(NAME)


def is_adapter(name: str) -> bool:
    """Whether a weight of this name belongs to an adapter, or to a score head that is trained with it."""
    return ".lora_" in name or name.startswith("score.")


def find_adapter(path: str | None) -> Path | None:
    """The folder of a LoRA adapter, either ``path`` or ``path/adapter``; None if neither holds one."""
    if path is None:
        return None
    for folder in (Path(path), Path(path) / "adapter"):
        if (folder / CONFIG).is_file():
            return folder
    return None


def adapter_settings(folder: Path) -> dict[str, Any]:
    """Reads an adapter's config: r, base_model_name_or_path and so on. Raises UserError if it cannot be read."""
    try:
        settings: dict[str, Any] = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{folder / CONFIG} cannot be read: {error}") from error
    return settings


def adapter_alone(path: str) -> Path | None:
    """The folder of a LoRA adapter at a path without a whole model (--no_merge_lora); None otherwise.

    Some programs write the base model's config.json into an adapter's folder.
    """
    model_folder = Path(path)
    adapter_folder = find_adapter(path)
    if adapter_folder is None or not (model_folder / "config.json").is_file():
        return adapter_folder
    has_weights = any(file.name != WEIGHTS for file in model_folder.glob("*.safetensors"))
    if has_weights or adapter_folder != model_folder:
        return None
    return adapter_folder


def base_of(path: str, flag: str) -> tuple[str, list[Path]]:
    """The path of a model's whole weights, and the folders of the LoRA adapters to merge into them, in order.

    The base of an adapter may be an adapter itself. A path with a whole model has no adapters.

    Raises:
        UserError: an adapter does not name its base, or another model is there now; the message names the flag.
    """
    adapters: list[Path] = []
    base = path
    while (folder := adapter_alone(base)) is not None:
        if folder in adapters:
            raise UserError(f"{flag} {path}: {folder / CONFIG} names its own folder as the model that it is for.")
        adapters.insert(0, folder)
        base = _base_of_adapter(folder, f"{flag} {path}")
    return base, adapters


def _base_of_adapter(folder: Path, where: str) -> str:
    """The path of the model that an adapter was trained on; `where` begins messages."""
    base = adapter_settings(folder).get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise UserError(f"{where}: {folder / CONFIG} does not say which model it is for.")
    remedy = f"set base_model_name_or_path in {folder / CONFIG} to the folder"
    if Path(base).is_absolute() and not Path(base).is_dir():
        raise UserError(
            f"{where}: its LoRA adapter is for {base}: no such folder. If the model has moved, {remedy} where it is."
        )
    recorded = recorded_base(folder)
    if recorded is None or is_model(base, recorded):
        return base
    if adapter_settings(folder).get("revision") == recorded:
        raise UserError(
            f"{where}: its LoRA adapter was trained on the revision {recorded} of {base}, which is another one now. "
            f"Run `hf download {base} --revision {recorded} --local-dir FOLDER`; {remedy}, and revision to null."
        )
    raise UserError(
        f"{where}: its LoRA adapter was trained on another model than the one that is in {base} now; {remedy} of the"
        f" model that it was trained on. If that is this one, with an edited config.json, remove {BASE_KEY} from"
        f" {folder / NOTES}."
    )


def recorded_base(folder: Path) -> str | None:
    """What `record_base` noted of an adapter's base: hash of its folder, or commit on the hub; None if unknown.

    Other programs may write the name of a branch or tag, which says nothing of the weights.
    """
    recorded = str(read_adapter_notes(folder).get(BASE_KEY) or adapter_settings(folder).get("revision"))
    return recorded if re.fullmatch(r"[0-9a-f]{40,64}", recorded) else None


def is_model(path: str, recorded: str) -> bool:
    """Whether a model is the one that `recorded_base` describes. If it cannot be found, opening it says so."""
    try:
        return model_hash(path) == recorded
    except (OSError, ValueError):
        return True


def named_base(path: str, flag: str) -> str:
    """The words before the base's path in messages about a path that cannot be opened."""
    return flag if adapter_alone(path) is None else f"{flag} {path}: its LoRA adapter is for"


def file_place(path: str, name: str, flag: str) -> str:
    """The folder or hub id that has a model's file `name`, such as its tokenizer's.

    For an adapter alone, it is the first that has the file of the adapter's folder, the folder above and the base.
    """
    base, adapters = base_of(path, flag)
    for adapter in reversed(adapters):
        for folder in (adapter, adapter.parent):
            if (folder / name).is_file():
                return str(folder)
    return base


def has_score_head(adapter: Path) -> bool:
    """Whether a score head was saved with an adapter, as for a reward model or critic."""
    try:
        with safe_open(adapter / WEIGHTS, framework="pt") as file:
            return any(".score." in name for name in file.keys())
    except (OSError, SafetensorError):
        return False
