# SPDX-License-Identifier: Apache-2.0
"""Finds the models that a run has saved, reads how the run sampled from them, and loads one of them.

A model is named by its folder, which may hold an adapter alone, or by a hub id.
"""

import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from dschat.base.display import visible
from dschat.base.errors import UserError
from dschat.base.jsonl import read_object
from dschat.data.sources import HUB_NAME
from dschat.data.turn_end import turn_end
from dschat.evaluation.policy import STEP, locate_policy
from dschat.evaluation.training_runs import FLAGS_FILE, run_of, start_of
from dschat.models.limits import position_limit, trained_length
from dschat.models.load import attends_to_later_tokens, load_causal_lm
from dschat.models.lora import adapter_alone, base_of, file_place, has_score_head
from dschat.models.open_errors import gguf_remedy
from dschat.models.opening import DTYPE_NAMES
from dschat.models.pretrained import open_config
from dschat.models.tokenizer import end_token_id, load_tokenizer, own_end_ids

logger = logging.getLogger(__name__)

# Folders of policies, below a run's folder and below models/step-N; "" is that folder itself.
POLICIES = ("", "actor", "actor_ema")
SCORES_ONLY = "a reward model or critic, which gives scores and writes no text. Give a policy's folder."
UNLIMITED = 2**31  # sequence length in tokens, where the model's config names no maximum

SAMPLING_SETTINGS = ("temperature", "top_k", "top_p", "max_new_tokens")

Json: TypeAlias = dict[str, object]


@dataclass(frozen=True)
class ModelChoice:
    """A model that can be chosen."""

    name: str  # in the chooser: "models/step-40/actor"
    path: str  # folder or hub id


def find_models(path: str) -> list[ModelChoice]:
    """The policies of a run: the final ones, then those of models/, newest first, then the one it started from.

    Args:
        path: a run's output folder, a model's folder (also inside a run's), or a hub id.

    Raises:
        UserError: no such folder, or no policy in it.
    """
    path = path.strip()
    if not path:
        raise UserError("give a run's output folder, a model's folder, or a hub id.")
    folder = Path(path).expanduser()
    if not folder.is_dir():
        remedy = gguf_remedy(path)
        if remedy is not None:
            raise UserError(f"{visible(path)}: {remedy}")
        if not HUB_NAME.fullmatch(path) or folder.exists():
            raise UserError(f"{visible(path)}: no such folder. Give a run's output folder, or a model's.")
        return [ModelChoice(path, path)]
    if is_classifier(read_object(folder / "config.json")):
        raise UserError(f"{visible(path)}: {SCORES_ONLY}")

    run = run_of(folder) or folder
    choices = _saved_policies(run)
    if not _is_listed(folder, choices) and is_policy(folder):  # somewhere else in the run, such as a merged adapter
        choices.insert(0, ModelChoice(path, str(folder)))
    if not choices:
        raise UserError(f"{visible(path)}: {_why_no_policy(run)}")
    start = start_of(run)
    if start is not None:
        choices.append(ModelChoice(f"start model: {start}", start))
    return choices


def _saved_policies(run: Path) -> list[ModelChoice]:
    """The policies that a run saved: the final ones, then those of models/, newest first."""
    steps = [entry for entry in (run / "models").glob("step-*") if STEP.fullmatch(entry.name)]
    steps.sort(key=lambda entry: int(entry.name.removeprefix("step-")), reverse=True)
    choices = []
    for base in (run, *steps):
        for policy_name in POLICIES:
            policy = base / policy_name
            if is_policy(policy):
                name = "final model" if policy == run else str(policy.relative_to(run))
                choices.append(ModelChoice(name, str(policy)))
    return choices


def select_model(choices: list[ModelChoice], path: str) -> ModelChoice:
    """The model at a path, or else the first of the choices."""
    folder = Path(path.strip()).expanduser()
    for choice in choices:
        if _is_listed(folder, [choice]):
            return choice
    return choices[0]


def _is_listed(folder: Path, choices: list[ModelChoice]) -> bool:
    """Whether a folder that exists is that of one of the choices."""
    return folder.exists() and folder.resolve() in [Path(choice.path).resolve() for choice in choices]


def is_policy(folder: Path) -> bool:
    """Whether a folder holds a causal LM, or an adapter of one; neither a reward model nor a critic."""
    config = read_object(folder / "config.json")
    if "model_type" in config:
        return any(folder.glob("*.safetensors")) and is_causal_lm(config)
    adapter = adapter_alone(str(folder))
    return adapter is not None and not has_score_head(adapter)


def is_classifier(config: Json) -> bool:
    """Whether a config.json belongs to a reward model or critic."""
    architectures = config.get("architectures")
    names = architectures if isinstance(architectures, list) else []
    return any(str(name).endswith("ForSequenceClassification") for name in names)


def is_causal_lm(config: Json) -> bool:
    """Whether a config.json with a model_type is that of a model that writes text, one token after another."""
    return not (is_classifier(config) or attends_to_later_tokens(config))


def saved_sampling(path: str) -> tuple[dict[str, float], str]:
    """Sampling settings of a model: from the run's flags, or else from its generation config.

    Returns:
        temperature, top_k, top_p, max_new_tokens, as far as they are set; and where they are from, in words.
    """
    folder = Path(path)
    run = run_of(folder) if folder.is_dir() else None
    if run is not None:
        flags = read_object(run / FLAGS_FILE)
        settings = _read_numbers(flags, {"max_new_tokens": "max_answer_seq_len"})
        if settings:
            return settings, f"from {run / FLAGS_FILE}"
    config = _generation_config(path)
    settings = _read_numbers(config, {})
    if config.get("do_sample") is False:
        settings["temperature"] = 0
    source = "from generation_config.json" if settings else "defaults: neither run nor model says how it samples"
    return settings, source


def _generation_config(path: str) -> Json:
    """The fields that a model's generation_config.json sets; of an adapter alone, those of its base."""
    try:
        config = GenerationConfig.from_pretrained(file_place(path, "generation_config.json", ""))
    except (OSError, ValueError):  # no such file, or transformers refuses its values
        return {}
    return config.to_diff_dict()


def _read_numbers(values: Json, other_names: dict[str, str]) -> dict[str, float]:
    """The sampling settings that are numbers; `other_names` gives their names in `values` where they differ."""
    settings = {}
    for name in SAMPLING_SETTINGS:
        value = values.get(other_names.get(name, name))
        if isinstance(value, int | float) and not isinstance(value, bool):
            settings[name] = value
    return settings


def _why_no_policy(run: Path) -> str:
    adapter = adapter_alone(str(run))
    if adapter is not None and has_score_head(adapter):
        return SCORES_ONLY
    config = read_object(run / "config.json")
    if is_classifier(config):
        return SCORES_ONLY
    if "model_type" in config and not is_causal_lm(config):
        return f"a model of the type {config['model_type']}, which reads text and writes none. Give a causal LM."
    if "model_type" in config:
        return (
            "it has a config.json, but no weights (*.safetensors). Save the model with transformers' save_pretrained."
        )
    remedy = gguf_remedy(str(run))
    if remedy is not None:
        return remedy
    if (run / "checkpoints").is_dir():
        return "it has only training checkpoints, to resume from; models are saved at the end, or with --save_models."
    if (run / "run.json").is_file() or (run / FLAGS_FILE).is_file():
        return "the run has saved no model yet; models are saved at the end, or with --save_models."
    return "neither a run's output folder nor a model's: no config.json, actor/ or models/step-N/ in it."


@dataclass(frozen=True)
class LoadedModel:
    """A loaded model, ready to generate."""

    path: str
    causal_lm: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    end_ids: tuple[int, ...]  # any of them ends an answer
    limit: int  # maximum sequence length in tokens
    seconds: float  # loading time

    @property
    def status(self) -> str:
        """The status line: path, size, device and time."""
        weights = self.causal_lm.num_parameters()
        size = f"{weights / 1e9:.2f} billion" if weights >= 1e9 else f"{weights / 1e6:.2f} million"
        where = f"on {self.causal_lm.device}, {DTYPE_NAMES[self.causal_lm.dtype]}"
        return f"Loaded {self.path}: {size} parameters, {where}, in {self.seconds:.1f} s"


@dataclass(frozen=True)
class ModelFiles:
    """A model's folder and tokenizer, before its weights are read."""

    path: str
    tokenizer: PreTrainedTokenizerBase
    end_ids: tuple[int, ...]


def open_model_files(path: str, flag: str, end_token: str | None) -> ModelFiles:
    """Checks that a model exists and reads its tokenizer, so that errors come before the weights are read.

    Args:
        path: a model's folder, a run's output folder with actor/, or a hub id.
        flag: the flag that named the model, for messages.
        end_token: --end_of_conversation_token.

    Raises:
        UserError: there is no model, it is a reward model or critic, or its adapter's base is missing.
    """
    path = locate_policy(path)
    _, adapters = base_of(path, flag)
    config = open_config(path, flag)
    if is_classifier(config.to_dict()) or any(map(has_score_head, adapters)):
        raise UserError(f"{flag} {path}: {SCORES_ONLY}")
    tokenizer = load_tokenizer(path, flag, end_token=end_token)  # refuses a tokenizer without EOS
    end_ids = {tokenizer.eos_token_id, end_token_id(tokenizer, end_token), *own_end_ids(path)}
    if tokenizer.chat_template is not None:
        try:
            end_ids.add(turn_end(tokenizer).token_id)
        except UserError as error:
            logger.warning("%s %s: %s Answers end with EOS alone.", flag, path, error)
    return ModelFiles(path, tokenizer, tuple(sorted(end_ids)))


def load_model(path: str, files: ModelFiles, flag: str, device: torch.device, dtype: torch.dtype) -> LoadedModel:
    """Reads the weights.

    Args:
        path: the path as the user gave it, for the status line.
        files: the files that `open_model_files` returned.
        flag: the flag that named the model, for messages.
        device: where to compute.
        dtype: dtype of the parameters.

    Raises:
        UserError: the weights are not those of a causal LM, the adapter does not fit, or memory does not suffice.
    """
    start = time.perf_counter()
    try:
        causal_lm = load_causal_lm(files.path, flag, dtype, files.tokenizer)
        causal_lm = causal_lm.to(device).requires_grad_(False)
    except torch.OutOfMemoryError as error:
        raise UserError(
            f"{flag} {path}: does not fit into the memory of {device}. Give --dtype bf16, or --device cpu."
        ) from error
    causal_lm.generation_config = GenerationConfig()  # its fields would fill settings that the panel leaves open
    limit = position_limit(causal_lm) or trained_length(causal_lm.config) or UNLIMITED
    seconds = time.perf_counter() - start
    return LoadedModel(path, causal_lm, files.tokenizer, files.end_ids, limit, seconds)
