# SPDX-License-Identifier: Apache-2.0
"""Which models a run left, by name; and how the run drew its responses."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from safetensors import SafetensorError, safe_open

from dschat.common.hidden_text import visible
from dschat.data.sources import HUB_NAME
from dschat.errors import UserError
from dschat.inference.policy import FLAGS_FILE, STEP
from dschat.models.shared_base import find_adapter

ADAPTER = "adapter_model.safetensors"  # as peft calls it
START = ("actor_model_name_or_path", "model_name_or_path")  # the flags that name what a run starts from
POLICIES = ("", "actor", "actor_ema")  # folders of policies below a run's and below those of models/
DEEPEST = 3  # levels from a run's folder down to a model: models/step-N/actor
SCORES_ONLY = "a reward model or critic, which gives scores and writes no text. Give a policy's folder."

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
        if not HUB_NAME.fullmatch(place) or folder.exists():
            raise UserError(f"{visible(place)}: no such folder. Give a run's output folder, or a model's.")
        return [Checkpoint(place, place)]
    if is_classifier(read_json(folder / "config.json")):
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
    flags = read_json(run / FLAGS_FILE)
    start = next((flags[name] for name in START if isinstance(flags.get(name), str)), None)
    if start is None or not (Path(str(start)).is_dir() or HUB_NAME.fullmatch(str(start))):
        return None
    return str(start)


def is_policy(folder: Path) -> bool:
    """Whether a folder holds a causal LM, or an adapter of one; neither a reward model nor a critic."""
    config = read_json(folder / "config.json")
    if "model_type" in config:
        return any(folder.glob("*.safetensors")) and not is_classifier(config)
    adapter = adapter_of(folder)
    return adapter is not None and not has_head(adapter)


def is_classifier(config: Json) -> bool:
    """Whether a model's config.json is that of a reward model or critic."""
    architectures = config.get("architectures")
    names = architectures if isinstance(architectures, list) else []
    return any(str(name).endswith("ForSequenceClassification") for name in names)


def has_head(adapter: Path) -> bool:
    """Whether a score head was saved with an adapter: a reward model's or a critic's."""
    try:
        with safe_open(adapter / ADAPTER, framework="pt") as file:
            return any(".score." in name for name in file.keys())
    except (OSError, SafetensorError):
        return False


def adapter_of(folder: Path) -> Path | None:
    """The LoRA adapter of a folder without a whole model (--no_merge_lora)."""
    return None if (folder / "config.json").is_file() else find_adapter(str(folder))


def own_sampling(path: str) -> tuple[dict[str, float], str]:
    """How responses were drawn: by the run's flags, or else by the model's generation config.

    Returns:
        temperature, top_k, top_p, max_new_tokens, as far as they are there; and where they are from, in words.
    """
    folder = Path(path)
    run = run_of(folder) if folder.is_dir() else None
    flags = read_json(run / FLAGS_FILE) if run else {}
    values = {name: flags.get(name) for name in ("temperature", "top_k", "top_p")}
    values["max_new_tokens"] = flags.get("max_answer_seq_len")
    if run and any(value is not None for value in values.values()):
        return _numbers(values), f"from {run / FLAGS_FILE}"
    config = read_json(folder / "generation_config.json") if folder.is_dir() else {}
    values = {name: config.get(name) for name in ("temperature", "top_k", "top_p", "max_new_tokens")}
    if config.get("do_sample") is False:
        values["temperature"] = 0
    numbers = _numbers(values)
    return numbers, "from generation_config.json" if numbers else "defaults: neither run nor model says how it draws"


def read_json(file: Path) -> Json:
    """A file's JSON object; {} where there is none that can be read."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _numbers(values: Json) -> dict[str, float]:
    return {n: v for n, v in values.items() if isinstance(v, int | float) and not isinstance(v, bool)}


def _why_none(run: Path) -> str:
    adapter = adapter_of(run)
    if adapter is not None and has_head(adapter):
        return SCORES_ONLY
    if (run / "checkpoints").is_dir():
        return "it has training checkpoints alone, to resume from; models are saved at the end, or with --save_models."
    if (run / "run.json").is_file() or (run / FLAGS_FILE).is_file():
        return "the run has saved no model yet; models are saved at the end, or with --save_models."
    return "neither a run's output folder nor a model's: no config.json, actor/ or models/step-N/ in it."
