# SPDX-License-Identifier: Apache-2.0
"""Messages for models and tokenizers that cannot be opened: the reason, and what to do."""

import errno
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from dschat.base.atomic import NO_ROOM
from dschat.base.errors import UserError, is_lost_peer
from dschat.base.lfs import refuse_pointer

# Patterns of the files that transformers reads from a folder.
FILES_READ = ("model*.safetensors", "adapter_model.safetensors", "*.json", "*.txt", "*.model", "*.jinja")


@contextmanager
def explaining(kind: str, path: str, flag: str) -> Iterator[None]:
    """Turns every error of opening a model's config or tokenizer into a UserError, see `explain_missing`.

    transformers checks few values of a config: a wrong one surfaces as an arbitrary exception.
    """
    try:
        yield
    except Exception as error:
        if is_machine_error(error):
            raise
        raise UserError(explain_missing(kind, path, flag, error)) from error


def is_machine_error(error: Exception) -> bool:
    """Whether the machine or another process failed, which is no fault of the folder that is opened."""
    if isinstance(error, OSError) and error.errno in (*NO_ROOM, errno.ENOMEM):
        return True
    if "can't allocate memory" in str(error):  # a RuntimeError of torch on CPUs
        return True
    kinds = (MemoryError, torch.OutOfMemoryError, torch.AcceleratorError, torch.distributed.DistError)
    return isinstance(error, kinds) or is_lost_peer(error)


def explain_missing(kind: str, path: str, flag: str, error: Exception) -> str:
    """The message for a model or tokenizer that cannot be opened, local or on the hub.

    Args:
        kind: "model" or "tokenizer".
        path: folder or hub id.
        flag: flag that the path came from.
        error: transformers' error.
    """
    message = str(error).strip() or type(error).__name__
    first_line = re.sub(r"\n +", " ", message).splitlines()[0]  # with indented lines, which continue it
    if "trust_remote_code" in str(error):
        return f"{flag} {path}: its {kind} needs Python code of its own (auto_map), which is never run. Give another."
    if _is_gguf(path):
        return (
            f"{flag} {path}: GGUF weights, which are quantised for inference. Give the original model (safetensors)."
        )
    location = Path(path)
    if location.is_dir():
        subfolders = [str(config.parent) for config in sorted(location.glob("*/config.json"))]
        hint = f" Did you mean {' or '.join(subfolders)}?" if subfolders else ""
        if Path(path, "run.json").exists() and not subfolders:
            hint = (
                " It holds a run that has not finished: repeat the command of that run, with --resume_from_checkpoint."
            )
        return f"{flag} {path}: this folder holds no {kind} that transformers can open: {first_line}{hint}"
    if location.is_file():
        return f"{flag} {path}: a file, and no folder. Give the folder that holds the model's config.json."
    is_local = path.startswith(("/", ".", "~")) or path.count("/") > 1
    if is_local:
        return f"{flag} {path}: no such folder. Give the folder that holds the model's config.json."
    # A path with one slash is a name on the hub, or the folder of a step that has not written it.
    if "/" in path and location.parent.is_dir():
        return (
            f"{flag} {path}: no such folder, though {location.parent}/ is there. If a step shall write it, has"
            f" that step ended without an error? The Hugging Face hub gave no such {kind} either: {first_line}"
        )
    if "safetensors" in first_line:
        return (
            f"{flag} {path}: no safetensors of it were found. If it has them on the hub, fetch them with `hf download"
            f" {path}`. If it has pickles alone, fetch these with `hf download {path} --local-dir FOLDER`, run `python"
            " -m dschat.models.convert FOLDER NEW_FOLDER` and give NEW_FOLDER."
        )
    return (
        f"{flag} {path}: there is no such folder here, and the {kind} could not be fetched from the Hugging Face hub: "
        f"{first_line.rstrip('.')}. Check the name, the connection and, for gated models, HF_TOKEN; or download it "
        f"first with `hf download {path}`."
    )


def refuse_pointers(path: str, where: str) -> None:
    """Raises UserError if a file in a model's folder is a pointer of Git LFS; the message begins with `where`."""
    for pattern in FILES_READ:
        for file in sorted(Path(path).glob(pattern)):
            refuse_pointer(file, where)


def refuse_pickles(path: str, where: str) -> None:
    """Raises UserError if a folder holds its weights only as pickles; the message begins with `where`."""
    folder = Path(path)
    if any(folder.glob("*.safetensors")):
        return
    pickles = [*sorted(folder.glob("pytorch_model*.bin")), *folder.glob("adapter_model.bin")]
    if not pickles:
        return
    file = pickles[0]
    refuse_pointer(file, where)
    if file.name == "adapter_model.bin":
        remedy = (
            "Convert it in Python: import torch, safetensors.torch; safetensors.torch.save_file("
            f"torch.load({str(file)!r}, weights_only=True), {str(file.with_suffix('.safetensors'))!r})"
        )
    else:
        remedy = (
            "Convert the model, which may be a reward model or critic of DeepSpeed-Chat: `python -m"
            f" dschat.models.convert {folder} NEW_FOLDER`. Then give NEW_FOLDER, also in the adapter_config.json of an"
            " adapter on it."
        )
    raise UserError(f"{where}: {file} is a pickle, and no weights are there in safetensors. {remedy}")


def _is_gguf(path: str) -> bool:
    """Whether a path is a GGUF file, or a folder or repository of such files."""
    location = Path(path)
    return any(location.glob("*.gguf")) or (not location.is_dir() and "gguf" in location.name.lower())
