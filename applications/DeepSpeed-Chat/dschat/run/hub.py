# SPDX-License-Identifier: Apache-2.0
"""A finished model on the Hugging Face hub: what is uploaded, what never is, and what can go wrong.

A repository gets a model's own folder (weights, config, tokenizer, model card, run.json) and, from the folder of its
run, metrics.jsonl and train_config.json. Of step 3's output that is the policy in actor/.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path

from dschat.base.errors import UserError
from dschat.settings.commands import PushOptions
from dschat.settings.rules import check_repository

logger = logging.getLogger(__name__)

POLICY = "actor"  # of step 3's output
MODEL_FILES = (
    *("*.safetensors", "*.safetensors.index.json", "config.json", "generation_config.json", "adapter_config.json"),
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tokenizer.model"),
    *("vocab.json", "vocab.txt", "merges.txt", "spiece.model", "chat_template.jinja", "README.md", "run.json"),
)
RUN_FILES = ("metrics.jsonl", "train_config.json")
WEIGHTS = re.compile(r"(?:adapter/)?[^/]+\.safetensors(?:\.index\.json)?")  # in a repository
ADAPTER = "adapter"  # a folder below a model's
ROLES = (POLICY, "critic", "actor_ema")  # folders of step 3's models
TEXTS = (".json", ".jsonl", ".md", ".jinja", ".txt")
# What a secret looks like, and the variables that hold some.
SECRET = re.compile(
    r"\bhf_[A-Za-z0-9]{30,}|\bsk-[A-Za-z0-9_-]{20,}|\b(?:AKIA|ASIA)[A-Z0-9]{16}\b|\bAIza[A-Za-z0-9_-]{30,}"
    r"|\bgh[opsu]_[A-Za-z0-9]{30,}|\bgithub_pat_\w{30,}|\bxox[abp]-[A-Za-z0-9-]{10,}|://[^/\s@\"']+@"
    r"|[?&](?:access_token|api_?key|key|token)=[^&\s\"']{6,}"
)
SECRET_VARIABLES = re.compile(r"TOKEN|API_KEY|SECRET|PASSWORD")
SHORTEST_SECRET = 12  # characters; shorter values of such variables stand in texts by chance


def push(folder: Path, repository: str, public: bool = False, message: str = "Upload model") -> str:
    """Uploads a model, or the policy of step 3's output, in one commit, and makes the repository owner/name where it
    is missing.

    `public`: the repository is new, or public already; else it is private. Returns the repository's address. Raises
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
        found = api.model_info(repository)
        if not public and not found.private:
            raise UserError(f"{repository} is public on the hub: give --public if the model may be, or another name.")
        if public and found.private:
            raise UserError(f"{repository} is private on the hub: drop --public, or make it public there first.")
        # Weights of another model in the same place would be read instead of these.
        old = [file.rfilename for file in found.siblings or [] if WEIGHTS.fullmatch(file.rfilename)]
        deletions = [CommitOperationDelete(name) for name in old if name not in files]
        additions = [CommitOperationAdd(name, str(file)) for name, file in files.items()]
        api.create_commit(repository, [*additions, *deletions], commit_message=message)
    except UserError:
        raise
    except Exception as error:  # the client's errors have no common class, and a network has many ways to fail
        raise UserError(_explain(repository, error)) from error
    return str(address)


def push_after_training(folder: str, repository: str) -> None:
    """Uploads what a run has saved; where that fails, says that it is saved and how to try again."""
    try:
        logger.info("uploaded to %s", push(Path(folder), repository))
    except UserError as error:
        again = f"dschat push {folder} {repository}"
        logger.error(
            "--push_to_hub: %s The run is finished and its models are saved in %s. Again: %s", error, folder, again
        )


def push_problem(what: str) -> str | None:
    """Why nothing can be uploaded from here, as far as this machine knows; `what` begins the message."""
    from huggingface_hub import constants, get_token

    if constants.HF_HUB_OFFLINE:
        return f"{what}: HF_HUB_OFFLINE is set, so nothing can be uploaded. Unset it, or push later from elsewhere."
    if get_token() is None:
        return f"{what}: there is no token for the hub. Run hf auth login, or set HF_TOKEN to one that may write."
    return None


def files_of(folder: Path) -> Iterator[tuple[str, Path]]:
    """Name in the repository and file of everything that is uploaded. Raises UserError where the folder holds no
    model.
    """
    model = folder / POLICY if not _is_model(folder) and _is_model(folder / POLICY) else folder
    if not _is_model(model):
        raise UserError(
            f"{folder}: there is no model here, no file ends with .safetensors. Give the folder of a finished model, "
            "or step 3's output folder."
        )
    places: list[tuple[Path, str, tuple[str, ...]]] = [
        (model, "", MODEL_FILES),
        (model / ADAPTER, f"{ADAPTER}/", MODEL_FILES),
    ]
    run = _run_of(model)
    places += [(run, "", RUN_FILES)] if run is not None else []
    for place, prefix, patterns in places:
        for pattern in patterns:
            yield from ((prefix + file.name, file) for file in sorted(place.glob(pattern)) if file.is_file())


def refuse_secrets(files: dict[str, Path]) -> None:
    """Raises UserError, which names the file, where a text holds what looks like a token, a key or a password."""
    values = [value for name, value in os.environ.items() if SECRET_VARIABLES.search(name)]
    values = [value for value in values if len(value) >= SHORTEST_SECRET]
    for name, file in files.items():
        if file.suffix not in TEXTS or file.name in ("tokenizer.json", "vocab.json", "vocab.txt", "merges.txt"):
            continue
        text = file.read_text(encoding="utf-8", errors="replace")
        found = SECRET.search(text)
        if found or any(value in text for value in values):
            shown = f" ({found[0][:6]}…)" if found else ""
            raise UserError(
                f"{file}: holds what looks like a secret{shown}, so nothing was uploaded. Take it out of {name} "
                "(run.json, train_config.json and the card repeat the command line as it was given)."
            )


def _is_model(folder: Path) -> bool:
    """Whether weights lie here, or with --no_merge_lora an adapter below."""
    return any(any(place.glob("*.safetensors")) for place in (folder, folder / ADAPTER))


def _run_of(model: Path) -> Path | None:
    """The folder of the run that made a model: see `dschat.run.model_folders`; None where it holds no metrics."""
    place = model.resolve()
    place = place.parent if place.name in ROLES else place
    if place.parent.name == "models" and place.name.startswith("step-"):
        place = place.parent.parent
    return place if (place / "metrics.jsonl").is_file() else None


def _explain(repository: str, error: Exception) -> str:
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
    """`dschat push`; says where the model is."""
    return f"uploaded to {push(options.folder, options.repository, options.public)}"
