# SPDX-License-Identifier: Apache-2.0
"""The runs that trained a model, by the records beside it, and the rows of a source that they held out."""

import logging
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dschat.base.fingerprints import file_hash
from dschat.base.jsonl import read_object
from dschat.data.hub import find_known
from dschat.data.sources import HUB_NAME, Source, load_source, with_held_out
from dschat.lab.generate_options import TRAINING_SEED, TextOptions
from dschat.settings.common import COLUMN_FLAGS, ColumnFlags
from dschat.settings.words import as_words

logger = logging.getLogger(__name__)

FLAGS_FILE = "train_config.json"  # which every run writes
RECORD_FILE = "run.json"
START_FLAGS = ("actor_model_name_or_path", "model_name_or_path")  # name the model that a run starts from
# Flags that decide how a run reads texts; `dschat text` has them, too.
TEXT_FLAGS = (
    "max_seq_len",
    "end_of_conversation_token",
    *COLUMN_FLAGS,
)
END_TOKEN = "end_of_conversation_token"
FORMAT_FLAGS = (END_TOKEN, "apply_chat_template")  # of them, those that a model learnt
MODEL_DEPTH = 3  # levels from a run's folder down to a model: models/step-N/actor


@dataclass(frozen=True)
class NamedModel:
    """A model that a command-line flag names."""

    flag: str
    path: str  # folder or hub id


def run_of(folder: Path) -> Path | None:
    """The folder of the run that saved a model (may be `folder` itself); None if there is none."""
    for candidate in (folder, *folder.resolve().parents[:MODEL_DEPTH]):
        if (candidate / FLAGS_FILE).is_file():
            return candidate
    return None


def start_of(run: Path) -> str | None:
    """The model that a run started from, if it is an existing folder or a hub id."""
    flags = read_object(run / FLAGS_FILE)
    for name in START_FLAGS:
        start = flags.get(name)
        if isinstance(start, str):
            return start if Path(start).is_dir() or HUB_NAME.fullmatch(start) else None
    return None


def runs_behind(path: str) -> list[Path]:
    """The run that saved a model, the run that saved the model which that one started from, and so on."""
    runs: list[Path] = []
    model: str | None = path
    while model is not None and Path(model).is_dir():
        run = run_of(Path(model))
        if run is None or run.resolve() in runs:
            break
        runs.append(run.resolve())
        model = start_of(run)
    return runs


def with_flags_of_run(options: TextOptions, run: Path) -> TextOptions:
    """Options that read texts as a run did: with its values of the TEXT_FLAGS that the command line does not give."""
    run_flags = read_object(run / FLAGS_FILE)
    current = options.flat()
    changes = {}
    for name in TEXT_FLAGS:
        is_given = name in options.arguments
        if name in run_flags and not is_given and run_flags[name] != current[name]:
            changes[name] = run_flags[name]
    if not changes:
        return options
    logger.info("--checkpoints %s: as in that run, %s", run, shlex.join(as_words(type(options), changes)))
    return options.changed(**changes)


def warn_of_formats(options: TextOptions, models: Sequence[NamedModel], given_end: str | None) -> None:
    """Warns of runs that wrote texts in another format than a command does, once for all models of a run.

    Without `given_end`, the end token of the command line, a reward model is read with the token of its own training.
    """
    model_of_run: dict[Path, NamedModel] = {}
    for model in models:
        run = run_of(Path(model.path)) if Path(model.path).is_dir() else None
        if run is not None:
            model_of_run.setdefault(run.resolve(), model)
    current = options.flat()
    for run, model in model_of_run.items():
        run_flags = read_object(run / FLAGS_FILE)
        for name in FORMAT_FLAGS:
            if name == END_TOKEN and model.flag == "--reward_model" and given_end is None:
                continue
            if name in run_flags and run_flags[name] != current[name]:
                logger.warning(
                    "%s %s: its run had --%s %s, and this measurement has %s: the texts are not those of training. "
                    "Give the same --%s.",
                    model.flag,
                    model.path,
                    name,
                    run_flags[name],
                    current[name],
                    name,
                )


def load_split(
    data: str,
    keys: ColumnFlags,
    models: Sequence[NamedModel],
    given_seed: int | None = None,
) -> tuple[Source, int]:
    """Reads a source whose held-out rows are those that the runs of some models held out.

    Only for a source without evaluation rows of its own does a seed decide which rows these are. It warns if two runs
    were trained on the source with different seeds.

    Args:
        data: the source, as for --data_path.
        keys: column names.
        models: the models to measure, the most important one first.
        given_seed: the seed to use, if it is known.

    Returns:
        The source and the seed: the given one, or else that of the first run that was trained on the source, or else
        training's default.

    Raises:
        UserError: the source cannot be read.
    """
    source = load_source(data, keys, seed=None)
    _, num_eval = source.num_rows
    if num_eval is not None:
        return source, TRAINING_SEED if given_seed is None else given_seed
    model_of_seed = _training_seeds(data, source, models)
    seed = given_seed
    if seed is None:
        _note_unknown_runs(data, models)
        seed = next(iter(model_of_seed), TRAINING_SEED)
    other_runs = []
    for other_seed, model in model_of_seed.items():
        if other_seed != seed:
            other_runs.append(f"{model.flag} {model.path} with --seed {other_seed}")
    if other_runs:
        logger.warning(
            "%s has no evaluation rows. Those that --seed %d holds out of training are used, but runs held out other "
            "ones: %s. Most of the rows used are training rows of these. Train all models with the same --seed, or "
            "on data with evaluation rows.",
            data,
            seed,
            ", ".join(other_runs),
        )
    return with_held_out(source, seed), seed


def _training_seeds(data: str, source: Source, models: Sequence[NamedModel]) -> dict[int, NamedModel]:
    """The seeds of the runs that were trained on a source, in the order of the models, each with its first model."""
    model_of_seed: dict[int, NamedModel] = {}
    hashes: set[str] | None = None  # of the source's files, which are hashed only if there is a run
    for model in models:
        for run in runs_behind(model.path):
            hashes = {file_hash(file) for file in source.files} if hashes is None else hashes
            seed = read_object(run / FLAGS_FILE).get("seed")
            if isinstance(seed, int) and _was_trained_on(run, data, hashes):
                model_of_seed.setdefault(seed, model)
    return model_of_seed


def _note_unknown_runs(data: str, models: Sequence[NamedModel]) -> None:
    """Logs which models have no run beside them, so that the seed of their training is not known."""
    models_without_run = [f"{model.flag} {model.path}" for model in models if not runs_behind(model.path)]
    if models_without_run:
        logger.info(
            "no %s of a run beside %s: if one of them was trained on %s, give it in its run's folder, since the --seed"
            " of the run decides which rows were held out",
            FLAGS_FILE,
            ", ".join(models_without_run),
            data,
        )


def _was_trained_on(run: Path, data: str, hashes: set[str]) -> bool:
    """Whether a run read a source, by the name of the source or the content of its files."""
    paths = read_object(run / FLAGS_FILE).get("data_path")
    if isinstance(paths, list) and any(_is_same_source(data, str(path)) for path in paths):
        return True
    record = read_object(run / RECORD_FILE).get("data")
    files = record.get("sha256") if isinstance(record, dict) else None
    return isinstance(files, dict) and not hashes.isdisjoint(map(str, files.values()))


def _is_same_source(first: str, second: str) -> bool:
    """Whether two names mean the same file, folder or data set of the hub."""
    published = find_known(first)
    if published is not None and published is find_known(second):
        return True
    if Path(first).exists() and Path(second).exists():
        return Path(first).samefile(second)
    return first == second
