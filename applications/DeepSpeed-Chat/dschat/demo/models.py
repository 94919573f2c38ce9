# SPDX-License-Identifier: Apache-2.0
"""Which models a run left and how it drew with them; one of them opened: a folder, a hub id, an adapter on a base."""

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
from dschat.data.encoding import turn_end
from dschat.data.sources import HUB_NAME
from dschat.lab.policy import FLAGS_FILE, STEP, locate_policy
from dschat.models.limits import position_limit, trained_length
from dschat.models.load import gguf_remedy, load_causal_lm, open_config
from dschat.models.lora import adapter_alone, base_of, has_score_head
from dschat.models.opening import DTYPES
from dschat.models.tokenizer import end_token_id, load_tokenizer, own_end_ids

logger = logging.getLogger(__name__)

START = ("actor_model_name_or_path", "model_name_or_path")  # the flags that name what a run starts from
POLICIES = ("", "actor", "actor_ema")  # folders of policies below a run's and below those of models/
DEEPEST = 3  # levels from a run's folder down to a model: models/step-N/actor
SCORES_ONLY = "a reward model or critic, which gives scores and writes no text. Give a policy's folder."
NAMES = {dtype: name for name, dtype in DTYPES.items()}

Json: TypeAlias = dict[str, object]


@dataclass(frozen=True)
class Checkpoint:
    """A model to choose."""

    name: str  # what the chooser shows: "models/step-40/actor"
    path: str  # folder or hub id


def find_checkpoints(place: str) -> list[Checkpoint]:
    """The policies of a run: the final ones first, then those of models/ from the last on, then what it started from.

    Args:
        place: a run's output folder, a model's folder (also inside a run's), or a hub id.

    Raises:
        UserError: no such folder, or no policy in it.
    """
    place = place.strip()
    if not place:
        raise UserError("give a run's output folder, a model's folder, or a hub id.")
    folder = Path(place).expanduser()
    if not folder.is_dir():
        if (remedy := gguf_remedy(place)) is not None:
            raise UserError(f"{visible(place)}: {remedy}")
        if not HUB_NAME.fullmatch(place) or folder.exists():
            raise UserError(f"{visible(place)}: no such folder. Give a run's output folder, or a model's.")
        return [Checkpoint(place, place)]
    if is_classifier(read_object(folder / "config.json")):
        raise UserError(f"{visible(place)}: {SCORES_ONLY}")
    run = run_of(folder) or folder
    steps = [entry for entry in (run / "models").glob("step-*") if STEP.fullmatch(entry.name)]
    steps.sort(key=lambda entry: -int(entry.name.removeprefix("step-")))
    found = [
        Checkpoint(str((base / name).relative_to(run)), str(base / name))
        for base in (run, *steps)
        for name in POLICIES
        if is_policy(base / name)
    ]
    found = [Checkpoint("final model", one.path) if one.name == "." else one for one in found]
    if not found:
        raise UserError(f"{visible(place)}: {_why_none(run)}")
    start = start_of(run)
    if start is not None:
        found.append(Checkpoint(f"start model: {start}", start))
    return found


def chosen(found: list[Checkpoint], place: str) -> Checkpoint:
    """The one that a path named: itself, or the first."""
    own = Path(place.strip()).expanduser()
    return next((one for one in found if own.exists() and Path(one.path).resolve() == own.resolve()), found[0])


def run_of(folder: Path) -> Path | None:
    """The run's folder that a model lies in, which may be its own; None where no run left it."""
    places = (folder, *folder.resolve().parents[:DEEPEST])
    return next((place for place in places if (place / FLAGS_FILE).is_file()), None)


def start_of(run: Path) -> str | None:
    """What the run started from: a folder that is there, or a hub id."""
    flags = read_object(run / FLAGS_FILE)
    start = next((flags[name] for name in START if isinstance(flags.get(name), str)), None)
    if start is None or not (Path(str(start)).is_dir() or HUB_NAME.fullmatch(str(start))):
        return None
    return str(start)


def is_policy(folder: Path) -> bool:
    """Whether a folder holds a causal LM, or an adapter of one; neither a reward model nor a critic."""
    config = read_object(folder / "config.json")
    if "model_type" in config:
        return any(folder.glob("*.safetensors")) and not is_classifier(config)
    adapter = adapter_alone(str(folder))
    return adapter is not None and not has_score_head(adapter)


def is_classifier(config: Json) -> bool:
    """Whether a model's config.json is that of a reward model or critic."""
    architectures = config.get("architectures")
    names = architectures if isinstance(architectures, list) else []
    return any(str(name).endswith("ForSequenceClassification") for name in names)


def own_sampling(path: str) -> tuple[dict[str, float], str]:
    """How responses were drawn: by the run's flags, or else by the model's generation config.

    Returns:
        temperature, top_k, top_p, max_new_tokens, as far as they are there; and where they are from, in words.
    """
    folder = Path(path)
    run = run_of(folder) if folder.is_dir() else None
    flags = read_object(run / FLAGS_FILE) if run else {}
    values = {name: flags.get(name) for name in ("temperature", "top_k", "top_p")}
    values["max_new_tokens"] = flags.get("max_answer_seq_len")
    if run and any(value is not None for value in values.values()):
        return _numbers(values), f"from {run / FLAGS_FILE}"
    config = read_object(folder / "generation_config.json") if folder.is_dir() else {}
    values = {name: config.get(name) for name in ("temperature", "top_k", "top_p", "max_new_tokens")}
    if config.get("do_sample") is False:
        values["temperature"] = 0
    numbers = _numbers(values)
    return numbers, "from generation_config.json" if numbers else "defaults: neither run nor model says how it draws"


def _numbers(values: Json) -> dict[str, float]:
    return {n: v for n, v in values.items() if isinstance(v, int | float) and not isinstance(v, bool)}


def _why_none(run: Path) -> str:
    adapter = adapter_alone(str(run))
    if adapter is not None and has_score_head(adapter):
        return SCORES_ONLY
    if (remedy := gguf_remedy(str(run))) is not None:
        return remedy
    if (run / "checkpoints").is_dir():
        return "it has training checkpoints alone, to resume from; models are saved at the end, or with --save_models."
    if (run / "run.json").is_file() or (run / FLAGS_FILE).is_file():
        return "the run has saved no model yet; models are saved at the end, or with --save_models."
    return "neither a run's output folder nor a model's: no config.json, actor/ or models/step-N/ in it."


@dataclass(frozen=True)
class Opened:
    """A model that answers."""

    path: str
    causal_lm: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    end_ids: tuple[int, ...]  # any of them ends an answer
    limit: int  # tokens that it reads at most
    seconds: float  # that opening took

    @property
    def status(self) -> str:
        """What is loaded, and where."""
        weights = self.causal_lm.num_parameters()
        size = f"{weights / 1e9:.2f} billion" if weights >= 1e9 else f"{weights / 1e6:.2f} million"
        where = f"on {self.causal_lm.device}, {NAMES[self.causal_lm.dtype]}"
        return f"Loaded {self.path}: {size} parameters, {where}, in {self.seconds:.1f} s"


@dataclass(frozen=True)
class Found:
    """What is known of a model before its weights are read."""

    path: str
    tokenizer: PreTrainedTokenizerBase
    end_ids: tuple[int, ...]


def find_model(path: str, flag: str, end_token: str | None) -> Found:
    """Looks whether there is such a model and reads its tokenizer, so that what can fail early does.

    Args:
        path: a model's folder, a run's output folder with actor/, or a hub id.
        flag: what named it, for messages.
        end_token: --end_of_conversation_token.

    Raises:
        UserError: there is none, it is a reward model or critic, or its adapter's base is missing.
    """
    path = locate_policy(path)
    _, adapters = base_of(path, flag)
    if is_classifier(read_object(Path(path) / "config.json")) or any(map(has_score_head, adapters)):
        raise UserError(f"{flag} {path}: a reward model or critic, which writes no text. Give a policy's folder.")
    open_config(path, flag)
    tokenizer = load_tokenizer(path, flag, end_token=end_token)
    ends = {tokenizer.eos_token_id, end_token_id(tokenizer, end_token), *own_end_ids(path)}
    if tokenizer.chat_template is not None:
        try:
            ends.add(turn_end(tokenizer).token_id)
        except UserError as error:
            logger.warning("%s %s: %s Answers end with EOS alone.", flag, path, error)
    return Found(path, tokenizer, tuple(sorted(ends)))


def open_model(path: str, found: Found, flag: str, device: torch.device, dtype: torch.dtype) -> Opened:
    """Reads the weights.

    Args:
        path: as it was given, for the status line.
        found: by `find_model`.
        flag: what named it, for messages.
        device: where to compute.
        dtype: of the parameters.

    Raises:
        UserError: the weights are not those of a causal LM, the adapter does not fit, or memory does not suffice.
    """
    start = time.perf_counter()
    try:
        causal_lm = load_causal_lm(found.path, flag, dtype, found.tokenizer)
        causal_lm = causal_lm.to(device).eval().requires_grad_(False)
    except torch.OutOfMemoryError as error:
        raise UserError(
            f"{flag} {path}: does not fit into the memory of {device}. Give --dtype bf16, or --device cpu."
        ) from error
    causal_lm.generation_config = GenerationConfig()  # its fields would fill whatever the panel leaves open
    limit = position_limit(causal_lm) or trained_length(causal_lm.config) or 2**31
    seconds = time.perf_counter() - start
    return Opened(path, causal_lm, found.tokenizer, found.end_ids, limit, seconds)
