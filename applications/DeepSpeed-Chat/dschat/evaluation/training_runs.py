# SPDX-License-Identifier: Apache-2.0
"""The runs that trained a model, by the records beside it, and the rows of a source that they held out."""

import logging
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dschat.base.errors import UserError
from dschat.base.fingerprints import file_hash
from dschat.base.jsonl import read_object
from dschat.data.known_sets import find_known
from dschat.data.prepared.folder import open_prepared
from dschat.data.prepared.read import prepared_rows
from dschat.data.rows import Row, Split
from dschat.data.sources import EVAL_SHARE, HUB_NAME, Source, hold_out, is_published, read_source
from dschat.evaluation.generate_options import TextOptions
from dschat.settings.common import COLUMN_FLAGS, ColumnFlags
from dschat.settings.flag_types import as_text

logger = logging.getLogger(__name__)

FLAGS_FILE = "train_config.json"  # which every run writes
RECORD_FILE = "run.json"
START_FLAGS = ("actor_model_name_or_path", "model_name_or_path")  # name the model that a run starts from
# Flags that decide how a run reads texts, and which of their tokens have a loss; `dschat text` has them, too.
TEXT_FLAGS = ("max_seq_len", "sft_on_prompt", "train_on", "end_of_conversation_token", *COLUMN_FLAGS)
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
    changes = {}
    for name, value in _other_flags(run, TEXT_FLAGS, options).items():
        if name not in options.arguments:
            changes[name] = value
    if not changes:
        return options
    words = [f"--{name}={as_text(value)}" for name, value in changes.items()]
    logger.info("--checkpoints %s: as in that run, %s", run, shlex.join(words))
    return options.changed(**changes)


def _other_flags(run: Path, names: Iterable[str], options: TextOptions) -> dict[str, Any]:
    """Flags of a run, among these, whose values are not those of the options."""
    run_flags = read_object(run / FLAGS_FILE)
    current = options.flat()
    others = {}
    for name in names:
        if run_flags.get(name, current[name]) != current[name]:
            others[name] = run_flags[name]
    return others


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
        for name, value in _other_flags(run, FORMAT_FLAGS, options).items():
            if name == END_TOKEN and model.flag == "--reward_model" and given_end is None:
                continue
            logger.warning(
                "%s %s: its run had --%s %s, and this measurement has %s: the texts are not those of training. "
                "Give the same --%s.",
                model.flag,
                model.path,
                name,
                value,
                current[name],
                name,
            )


def measured_rows(
    flag: str, data: str, keys: ColumnFlags, models: Sequence[NamedModel], split: Split | None
) -> tuple[list[Row], str]:
    """The rows of a source for a command that trains nothing, in the order of the data; and which ones they are.

    Without `split` these are the source's evaluation rows. Of a source that has none, they are the rows that all runs
    behind the models held out of it, and all rows if no run was trained on it. Published sets are always split.

    Args:
        flag: that names the source.
        data: the source, as for --data_path.
        keys: column names.
        models: the models to measure.
        split: which rows to read.

    Raises:
        UserError: the source cannot be read, or has no such rows.
    """
    folder = open_prepared(data)
    if folder is not None:
        rows, names = prepared_rows(folder, split or "eval", flag)
        return rows, f"{len(rows)} {names} rows of the prepared folder"
    source = read_source(data, keys)
    note = ""
    if source.has_eval_rows:
        split = split or "eval"
    else:
        shares = [] if split == "all" else _shares_of_runs(data, source, models)
        if split is None and not (shares or is_published(data)):
            split = "all"
            note = " (no run behind the models held out a part of them)"
        elif split != "all":
            split = split or "eval"
            share = min(shares, default=EVAL_SHARE)  # its rows are among those of a larger share
            source = hold_out(source, share)
            note = f" (training holds out {100 * share:g} % of {source.num_rows[0]} rows)"
    rows = source.train + source.eval
    name = ""
    if split == "eval":
        rows = source.eval
        name = "evaluation "
    elif split == "train":
        rows = source.train
        name = "training "
    if not rows:
        raise UserError(f"{flag} {data}: there are no {name}rows{note}. With --split all, all rows are read.")
    return rows, f"{len(rows)} {name}rows{note}"


def _shares_of_runs(data: str, source: Source, models: Sequence[NamedModel]) -> list[float]:
    """The shares (--eval_share) of a source's rows that the runs behind the models held out."""
    shares: list[float] = []
    hashes: set[str] | None = None  # of the source's files, which are hashed only if there is a run
    for model in models:
        for run in runs_behind(model.path):
            hashes = {file_hash(file) for file in source.files} if hashes is None else hashes
            if _has_split(run, data, hashes):
                shares.append(float(read_object(run / FLAGS_FILE).get("eval_share", EVAL_SHARE)))
    return shares


def _has_split(run: Path, data: str, hashes: set[str]) -> bool:
    """Whether a run held out rows of a source, which it knows by name or by the content of its files.

    It did not if the files are a part of a folder with evaluation rows of its own.

    Raises:
        UserError: the source's files have changed since.
    """
    paths = read_object(run / FLAGS_FILE).get("data_path") or []
    record = read_object(run / RECORD_FILE).get("data") or {}
    sources = record.get("sources")
    for number, path in enumerate(paths):
        if sources and sources[number]["rows"]["eval"] is not None:
            continue
        own_hashes = set()
        for file, content in record.get("sha256", {}).items():
            if _innermost(file, paths) == path:
                own_hashes.add(content)
        is_same_source = _is_same_source(data, path)
        if is_same_source and own_hashes and hashes != own_hashes:
            raise UserError(
                f"{data} has changed since {run} was trained on it, so that the rows which it held out are not known."
                " Give the file as it was, or --split all."
            )
        if is_same_source or not hashes.isdisjoint(own_hashes):
            return True
    return False


def _innermost(file: str, paths: Sequence[str]) -> str | None:
    """The path that a file was read from: one path may lie in another."""
    around = (Path(file), *Path(file).parents)
    owners = [path for path in paths if Path(path) in around]
    return max(owners, key=lambda path: len(Path(path).parts), default=None)


def _is_same_source(first: str, second: str) -> bool:
    """Whether two names mean the same file, folder or data set of the hub."""
    published = find_known(first)
    if published is not None and published is find_known(second):
        return True
    if Path(first).exists() and Path(second).exists():
        return Path(first).samefile(second)
    return first == second
