# SPDX-License-Identifier: Apache-2.0
"""Rules between flags, as rows of a table, and the checks that several commands share.

    RULES = (
        Rule(lambda config: config.engine.bf16 and config.engine.dtype != "bf16",
             "--bf16 contradicts --dtype {dtype}: drop one of them."),
    )

A message names the flag, its value and the remedy; `{name}` in it stands for the value of a flag.
"""

import json
import logging
import math
import re
import symtable
import tokenize
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from dschat.base.errors import UserError
from dschat.base.jsonl import read_object
from dschat.base.package_functions import function_path
from dschat.settings.flags import flags_of, groups_of, value_of

C = TypeVar("C")
logger = logging.getLogger(__name__)

STAR_IMPORT = re.compile(r"\bimport\s*\*")
REPOSITORY = re.compile(r"\w[\w.-]*/\w[\w.-]*")
ADDRESS = re.compile(r"https?://[^/\s@?]+(/[^\s?]*)?")  # without a user's name, password or query
# Folders that a run writes below its output folder.
FOLDERS_WITH_MODELS = ("actor", "actor_ema", "critic", "adapter", "models", "checkpoints", "samples")
RUN_FOLDERS = (*FOLDERS_WITH_MODELS, "nonfinite", "reference")  # the last two also by a run that is refused
# Files and folders that a run replaces in its output folder: its records, and the models of its step.
REPLACED_RECORDS = ("config.yaml", "train_config.json", "metrics.jsonl")
MODEL_FILES = ("config.json", "README.md", "*.safetensors", "adapter")
PPO_MODELS = ("actor", "actor_ema", "critic")
ADAPTER_SETTINGS = "adapter_config.json"  # of LoRA, in the adapter's folder


@dataclass(frozen=True)
class Rule(Generic[C]):
    """A combination of flags that is refused or, as a warning, unwise.

    Attributes:
        when: whether a configuration breaks the rule.
        message: what to say; `{name}` stands for the value of a flag.
        words: values of further placeholders, from the configuration.
        warns: log a warning instead of raising.
    """

    when: Callable[[C], bool]
    message: str
    words: Callable[[C], dict[str, Any]] = lambda config: {}
    warns: bool = False

    def check(self, config: C) -> None:
        """Raise UserError, or log a warning, if the configuration breaks the rule."""
        if self.when(config):
            _say(config, self.message, self.words(config), self.warns)


def _say(config: Any, message: str, words: dict[str, Any], warns: bool) -> None:
    """Fill in the values of flags and further words, and raise UserError or log a warning."""
    values: dict[str, Any] = {}
    for name, flag in flags_of(type(config)).items():
        values[name] = value_of(config, flag)
    text = message.format_map(values | words)
    if not warns:
        raise UserError(text)
    logger.warning("%s", text)


@dataclass(frozen=True)
class Unread(Generic[C]):
    """Flags that have no effect in a configuration. Where they have another value than their default, users are told.

    Attributes:
        flags: names of the flags that the configuration does not read.
        why: end of the message, after the flags; `{name}` stands for the value of a flag.
        refused: raise UserError instead of logging a warning.
    """

    flags: Callable[[C], Iterable[str]]
    why: str
    refused: bool = False

    def check(self, config: C) -> None:
        """Raise UserError, or log a warning, if one of the flags was changed."""
        changed: list[str] = []
        declared = flags_of(type(config))
        for name in dict.fromkeys(self.flags(config)):
            default = declared[name].default
            if value_of(config, declared[name]) != default:
                changed.append(f"--no_{name}" if default is True else f"--{name}")
        if changed:
            _say(config, f"{', '.join(changed)}: {self.why}", {}, not self.refused)


@dataclass(frozen=True)
class Check(Generic[C]):
    """A rule that needs more than a predicate and a message: a function that raises UserError or warns."""

    check: Callable[[C], None]


Rules = Sequence[Rule[Any] | Unread[Any] | Check[Any]]


def check_rules(config: Any, rules: Rules) -> None:
    """Check a configuration by each row in turn.

    Raises:
        UserError: for the first rule that it breaks.
    """
    for rule in rules:
        rule.check(config)


def check_rules_of_groups(config: Any) -> None:
    """Check a configuration by the rules that its groups bring with them (`GroupRow`)."""
    for group in groups_of(type(config)):
        check_rules(config, group.rules)


def check_choice_or_function(name: str, value: str, choices: Collection[str]) -> None:
    """Raise UserError unless a flag's value is one of the choices or a function as `check_function_path` wants it."""
    if ":" in value:
        check_function_path(name, value)
    elif value not in choices:
        raise UserError(f"--{name} {value} is unknown: use {', '.join(choices)} or module.py:function.")


def check_function_path(name: str, value: str) -> None:
    """Check that `value` is `module.py:function`, that the file exists and that it defines the function.

    A name of the package's functions stands for such a value. The file is parsed, never executed.

    Args:
        name: the flag, without its dashes.
        value: what the user gave.

    Raises:
        UserError: when the form, the file, its syntax or the function's name is wrong.
    """
    file_name, colon, function = function_path(value).rpartition(":")
    if not colon or not file_name.endswith(".py") or not function.isidentifier():
        raise UserError(f"--{name} {value} is not of the form module.py:function: give a Python file and a function.")
    path = Path(file_name)
    if not path.is_file():
        raise UserError(f"--{name} {value}: there is no file {file_name}; give its path from {Path.cwd()}.")
    try:
        with tokenize.open(path) as file:  # in the encoding that it declares
            source = file.read()
        symbols = symtable.symtable(source, file_name, "exec").get_symbols()
    except (SyntaxError, ValueError, OSError) as error:
        raise UserError(f"--{name} {value}: cannot read {file_name} as Python ({error}); correct the file.") from error
    names: set[str] = set()
    for symbol in symbols:
        if symbol.is_assigned() or symbol.is_imported():
            names.add(symbol.get_name())
    if function not in names and not STAR_IMPORT.search(source):
        defined = ", ".join(sorted(names)) or "nothing"
        raise UserError(
            f"--{name} {value}: {file_name} does not define {function}; give one of what it does: {defined}."
        )


def check_output_dir(
    output_dir: str, overwrite: bool, resume: bool, inputs: Sequence[str], models: Sequence[str]
) -> None:
    """Refuse an output folder that is an address, a file or an input, or whose files the run would replace unasked.

    Args:
        output_dir: the folder; it need not exist.
        overwrite: replace what is there.
        resume: continue with a run that is there.
        inputs: models and data, as the flags name them; of an adapter, the base models, too.
        models: patterns of the files and folders of the run's models, MODEL_FILES or PPO_MODELS.

    Raises:
        UserError: naming the folder and the flag that changes the decision.
    """
    folder = Path(output_dir)
    if "://" in output_dir:
        raise UserError(
            f"--output_dir {output_dir} is an address: give a folder of this machine, and copy it there after the run."
        )
    if folder.exists() and not folder.is_dir():
        raise UserError(f"--output_dir {output_dir} is a file: give a folder.")
    for name in with_adapter_bases(inputs):
        if Path(name).exists() and _would_replace(folder.resolve(), Path(name).resolve()):
            raise UserError(
                f"--output_dir {output_dir}: the run reads {name}, which its own models would replace. Give another"
                " folder."
            )
    if overwrite:
        return
    foreign = _foreign_names(folder, models)
    if foreign:
        raise UserError(
            f"--output_dir {output_dir} holds {', '.join(foreign)} but no run: a run writes files of these names. Give"
            " another folder, or --overwrite_output_dir to move them aside."
        )
    if resume or not _holds_run(folder):
        return
    raise UserError(
        f"--output_dir {output_dir} holds a run: add --resume_from_checkpoint to continue with it, or"
        " --overwrite_output_dir to move its files aside, or give another folder."
    )


def with_adapter_bases(paths: Sequence[str]) -> list[str]:
    """Paths of models and data, and for LoRA adapters the models that they are for."""
    inputs = list(paths)
    for path in inputs:
        settings_files = [Path(path) / ADAPTER_SETTINGS]
        if not (Path(path) / "config.json").exists():  # otherwise the adapter is merged, and its base is not read
            settings_files.append(Path(path) / "adapter" / ADAPTER_SETTINGS)
        for settings_file in settings_files:
            try:
                base = json.loads(settings_file.read_text(encoding="utf-8"))["base_model_name_or_path"]
            except (OSError, ValueError, KeyError, TypeError):  # opening the model says what is wrong
                continue
            is_local = isinstance(base, str) and Path(base).is_dir()
            if is_local and base not in inputs:
                inputs.append(base)
    return inputs


def _would_replace(folder: Path, used: Path) -> bool:
    """Whether a run that writes into a folder replaces a file or folder that it reads."""
    if used == folder:
        return True
    return folder in used.parents and used.relative_to(folder).parts[0] in RUN_FOLDERS


def _foreign_names(folder: Path, models: Sequence[str]) -> list[str]:
    """Names of files and folders that a run would replace, in a folder that no run has written to.

    Empty files and folders do not count: a run that is killed before its first checkpoint leaves some.
    """
    traces_of_a_run = ("run.json", "checkpoints/step-*")
    if any(any(folder.glob(pattern)) for pattern in traces_of_a_run):
        return []
    names: dict[str, None] = {}
    for pattern in (*REPLACED_RECORDS, *models, *FOLDERS_WITH_MODELS):
        for path in sorted(folder.glob(pattern)):
            is_empty = not any(path.iterdir()) if path.is_dir() else path.stat().st_size == 0
            if not is_empty:
                names[path.name] = None
    return list(names)


def _holds_run(folder: Path) -> bool:
    """Whether a folder holds a run that is finished, has made at least one update, or has saved a checkpoint."""
    if not (folder / "run.json").is_file():
        return False
    is_finished = read_object(folder / "run.json").get("finished") is True
    metrics = folder / "metrics.jsonl"
    has_rows = metrics.is_file() and metrics.stat().st_size > 0
    return is_finished or has_rows or any(folder.glob("checkpoints/step-*"))


def check_data_split(data_split: str | None, step: int) -> None:
    """Check that a split has three fractions and leaves rows for this step; None passes.

    Args:
        data_split: for example "2,4,4"; fractions for steps 1, 2 and 3, of any sum.
        step: 1, 2 or 3.

    Raises:
        UserError: when there are not three fractions, or the one of this step is zero.
    """
    if data_split is None:
        return
    try:
        fractions = [float(part) for part in data_split.split(",")]
    except ValueError:
        fractions = []
    if len(fractions) != 3 or not all(math.isfinite(part) and part >= 0 for part in fractions):
        raise UserError(
            f"--data_split {data_split} is not a split: give three numbers of at least 0, one per step, as in 2,4,4."
        )
    if fractions[step - 1] == 0:
        raise UserError(f"--data_split {data_split} leaves no rows for step {step}: make number {step} larger than 0.")


def check_repository(flag_name: str, repository: str | None) -> None:
    """Raise UserError unless a repository is named owner/name; None passes."""
    if repository is not None and not REPOSITORY.fullmatch(repository):
        raise UserError(f"{flag_name} {repository}: give the repository as owner/name, such as you/my-model.")
