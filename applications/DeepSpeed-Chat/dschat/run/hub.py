# SPDX-License-Identifier: Apache-2.0
"""Uploads a finished model to the Hugging Face hub.

A repository gets the files of a model's folder (weights, config, tokenizer, model card, run.json) and, from the folder
of its run, metrics.jsonl and train_config.json. From step 3's output, the policy in actor/ is uploaded. If a text file
seems to contain a secret, nothing is uploaded.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path

from dschat.base.errors import UserError
from dschat.base.jsonl import read_object
from dschat.base.secrets import SECRET_NAME
from dschat.run.model_files import MODEL_FILES
from dschat.settings.commands import PushOptions
from dschat.settings.rules import check_repository

logger = logging.getLogger(__name__)

POLICY = "actor"  # folder in step 3's output
RUN_FILES = ("metrics.jsonl", "train_config.json")
ADAPTER = "adapter"  # folder inside a model's folder
ROLES = (POLICY, "critic", "actor_ema")  # folders of step 3's models
TEXTS = (".json", ".jsonl", ".md", ".jinja", ".txt")
VOCABULARIES = ("tokenizer.json", "vocab.json", "vocab.txt", "merges.txt")  # texts that are not searched for secrets
# Pattern of secrets.
SECRET = re.compile(
    r"\bhf_[A-Za-z0-9]{30,}|\bsk-[A-Za-z0-9_-]{20,}|\b(?:AKIA|ASIA)[A-Z0-9]{16}\b|\bAIza[A-Za-z0-9_-]{30,}"
    r"|\bgh[opsu]_[A-Za-z0-9]{30,}|\bgithub_pat_\w{30,}|\bxox[abp]-[A-Za-z0-9-]{10,}|://[^/\s@\"']+@"
    r"|[?&](?:access_token|api_?key|key|token)=[^&\s\"']{6,}"
)
MIN_SECRET_LENGTH = 12  # characters; shorter values of such variables may occur in texts by chance


def push(folder: Path, repository: str, public: bool = False, message: str = "Upload model") -> str:
    """Uploads a model, or the policy of step 3's output, in one commit.

    Args:
        folder: folder of the model, or of step 3's run.
        repository: owner/name, created if it does not exist.
        public: upload to a public repository; False: to a private one. An existing repository must match.
        message: message of the commit.

    Returns:
        The repository's address.

    Raises:
        UserError: there is no model, a file holds a secret, or the hub refuses or cannot be reached.
    """
    check_repository("repository", repository)
    files = dict(files_of(folder))
    refuse_secrets(files)
    problem = push_problem(repository)
    if problem:
        raise UserError(problem)
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

    api = HfApi()
    try:
        address = api.create_repo(repository, private=not public, exist_ok=True)
        info = api.model_info(repository)
        if not public and not info.private:
            raise UserError(
                f"{repository} is public on the hub: give --public if the model may be public, too, or another name."
            )
        if public and info.private:
            raise UserError(f"{repository} is private on the hub: drop --public, or make it public there first.")
        operations: list[CommitOperationAdd | CommitOperationDelete] = []
        for name, file in files.items():
            operations.append(CommitOperationAdd(name, str(file)))
        # Files of a previous model, such as its weights or chat template, might be loaded beside these.
        for sibling in info.siblings or []:
            if _is_of_model(sibling.rfilename) and sibling.rfilename not in files:
                operations.append(CommitOperationDelete(sibling.rfilename))
        api.create_commit(repository, operations, commit_message=message)
    except UserError:
        raise
    except Exception as error:  # the errors of the client and the network have no common class
        raise UserError(_explain(repository, error)) from error
    return str(address)


def listed_files(folder: Path, repository: str) -> str:
    """The files that `push` would upload, with their sizes; needs no network. Raises UserError as `push` does."""
    check_repository("repository", repository)
    files = dict(files_of(folder))
    refuse_secrets(files)
    lines = []
    total = 0
    for name, file in files.items():
        size = file.stat().st_size
        total += size
        lines.append(f"{size:>15,} bytes  {name}")
    return "\n".join([*lines, f"{total:>15,} bytes would be uploaded to {repository}; nothing was"])


def push_after_training(folder: str, repository: str) -> None:
    """Uploads the models of a finished run; if that fails, logs that they are saved and how to try again."""
    try:
        logger.info("uploaded to %s", push(Path(folder), repository))
    except UserError as error:
        logger.error(
            "--push_to_hub: %s The run is finished and its models are saved in %s. Try again: dschat push %s %s",
            error,
            folder,
            folder,
            repository,
        )


def push_problem(what: str) -> str | None:
    """Why this machine cannot upload to the hub, as a message that begins with `what`; None if it can."""
    from huggingface_hub import constants, get_token

    if constants.HF_HUB_OFFLINE:
        return f"{what}: HF_HUB_OFFLINE is set, so nothing can be uploaded. Unset it, or push later from elsewhere."
    if get_token() is None:
        return f"{what}: there is no token for the hub. Run hf auth login, or set HF_TOKEN to one that may write."
    return None


def files_of(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yields every file that is uploaded, after its name in the repository.

    Raises:
        UserError: the folder has no model.
    """
    model = folder
    if not _is_model(folder):
        model = folder / POLICY
    if not _is_model(model):
        raise UserError(
            f"{folder}: there is no model here, no file ends with .safetensors. Give the folder of a finished model, "
            "or step 3's output folder."
        )
    yield from _files(model, MODEL_FILES, "")
    yield from _files(model / ADAPTER, MODEL_FILES, f"{ADAPTER}/")
    run = _run_of(model)
    is_final = run in (model.resolve(), model.resolve().parent)
    if run is not None and is_final and read_object(run / "run.json").get("finished") is False:
        raise UserError(
            f"{folder}: the run is not finished, so that its final models are those of an earlier part of it. Continue"
            f" it with --resume_from_checkpoint, or push one of {run / 'models'}."
        )
    if run is not None:
        yield from _files(run, RUN_FILES, "")


def _is_of_model(name: str) -> bool:
    """Whether a file of a repository is one of those that a push may write, its card aside."""
    inside = name.removeprefix(f"{ADAPTER}/")
    if "/" in inside or inside == "README.md":
        return False
    return any(fnmatch(inside, pattern) for pattern in (*MODEL_FILES, *RUN_FILES))


def _files(folder: Path, patterns: Sequence[str], prefix: str) -> Iterator[tuple[str, Path]]:
    for pattern in patterns:
        for file in sorted(folder.glob(pattern)):
            if file.is_file():
                yield prefix + file.name, file


def refuse_secrets(files: dict[str, Path]) -> None:
    """Raises UserError with the file's name if a text file seems to contain a token, key or password."""
    secret_values: list[str] = []
    for variable, value in os.environ.items():
        if SECRET_NAME.search(variable) and len(value) >= MIN_SECRET_LENGTH:
            secret_values.append(value)
    for name, file in files.items():
        if file.suffix not in TEXTS or file.name in VOCABULARIES:
            continue
        text = file.read_text(encoding="utf-8", errors="replace")
        match = SECRET.search(text)
        if match or any(value in text for value in secret_values):
            shown = f" ({match[0][:6]}…)" if match else ""
            raise UserError(
                f"{file}: holds what looks like a secret{shown}, so nothing was uploaded. Take it out of {name} "
                "(run.json, train_config.json and the card repeat the command line as it was given)."
            )


def _is_model(folder: Path) -> bool:
    """Whether a folder has weights, or, with --no_merge_lora, an adapter."""
    return any(folder.glob("*.safetensors")) or any((folder / ADAPTER).glob("*.safetensors"))


def _run_of(model: Path) -> Path | None:
    """The folder of the run that made a model, see `dschat.run.model_folders`; None if it has no metrics."""
    run = model.resolve()
    if run.name in ROLES:
        run = run.parent
    if run.parent.name == "models" and run.name.startswith("step-"):
        run = run.parent.parent
    return run if (run / "metrics.jsonl").is_file() else None


def _explain(repository: str, error: Exception) -> str:
    """The message for an error of the hub's client, with a remedy."""
    from huggingface_hub.errors import HfHubHTTPError

    reason = " ".join(str(error).split())
    if not isinstance(error, HfHubHTTPError):
        return f"{repository}: the hub cannot be reached ({type(error).__name__}: {reason}). Check the network."
    status = error.response.status_code
    if status == 401:
        return (
            f"{repository}: the hub does not know the token. Run hf auth login, or set HF_TOKEN to one that may write."
        )
    if status == 403:
        return (
            f"{repository}: the token may not write there. Make one with write access, or push to a name of your own."
        )
    return f"{repository}: the hub refused the upload: {reason}"


def run_push(options: PushOptions) -> str:
    """`dschat push`; returns a line with the model's address, or with --dry_run the files. Raises UserError."""
    if options.dry_run:
        return listed_files(options.folder, options.repository)
    return f"uploaded to {push(options.folder, options.repository, options.public)}"
