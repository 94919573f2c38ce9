# SPDX-License-Identifier: Apache-2.0
"""How a flag is declared, and the checks that several configurations share.

Each check raises UserError with the flag and what to change.
"""

import ast
import inspect
import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from dschat.common.jsonl import read_object
from dschat.errors import UserError

T = TypeVar("T")
Rule = tuple[Callable[[Any], bool], str]  # a predicate of a number, and the words that say what it accepts
OnResume = Literal["same", "free", "share"]
FREE: OnResume = "free"
SHARE: OnResume = "share"
UNCHANGED = object()  # not MISSING, of which dataclasses make a field without default
REQUIRED: Any = MISSING

AT_LEAST_0: Rule = (lambda number: number >= 0, "a number of at least 0")
AT_LEAST_1: Rule = (lambda number: number >= 1, "a whole number of at least 1")
ABOVE_0: Rule = (lambda number: number > 0, "a number above 0")
ZERO_TO_ONE: Rule = (lambda number: 0 <= number <= 1, "a number from 0 to 1")
BELOW_1: Rule = (lambda number: 0 <= number < 1, "a number of at least 0 and below 1")
UP_TO_1: Rule = (lambda share: 0 < share <= 1, "a number above 0 and at most 1")
FINITE: Rule = (lambda number: True, "a number")
NOT_EMPTY: Rule = (bool, "a value")  # of a text, or of each of several

REPOSITORY = re.compile(r"\w[\w.-]*/\w[\w.-]*")
FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef
# Folders that a run writes below its output folder.
RUN_FOLDERS = ("actor", "actor_ema", "critic", "adapter", "models", "checkpoints", "samples", "nonfinite", "reference")


@dataclass(frozen=True)
class Notes:
    """What is declared of a flag beside its name, default and help."""

    rule: Rule | None = None  # of its value, or of each of its values
    only_with: str | None = None  # without this flag, or flag and value, it does nothing
    # A run that goes on must have the same value; or may have any (free); or may on another number of processes
    # (share: it is a process's share of a batch).
    on_resume: OnResume = "same"
    environment: str | None = None  # variable that holds its value where the flag is not given
    positional: bool = False  # a word without dashes
    secret: bool = False  # never repeated in a message
    path: bool = False  # a text, or each of several, may be a path: `~` and variables in it are expanded


def flag(
    help: str,
    default: Any = MISSING,
    rule: Rule | None = None,
    on_resume: OnResume = "same",
    *,
    factory: Any = MISSING,
    aliases: Sequence[str] = (),
    only_with: str | None = None,
    environment: str | None = None,
    positional: bool = False,
    secret: bool = False,
    path: bool = False,
    **options: Any,
) -> Any:
    """Declare a dataclass field that is a command-line flag; without a default the flag is required.

    Help says the default behind it by itself. What has the name of an argument of `Notes` is that; `options` are
    further ones of argparse's `add_argument`: choices, nargs, const.
    """
    notes = Notes(rule, only_with, on_resume, environment, positional, secret, path)
    metadata = {"help": help, "aliases": list(aliases), "notes": notes, **options}
    return field(default=default, default_factory=factory, metadata=metadata)


@dataclass(frozen=True)
class Changed:
    """What a subclass declares otherwise of a flag; what is not given stays. Aliases are further ones."""

    default: Any = UNCHANGED
    help: str | None = None
    aliases: Sequence[str] = ()
    rule: Rule | None = None


def redeclared(**changes: Any) -> Callable[[type[T]], type[T]]:
    """Decorates a class below @dataclass: flags of its bases with other defaults, or other in what `Changed` says."""

    def apply(cls: type[T]) -> type[T]:
        for name, change in changes.items():
            old = inherited(cls, name)
            new = change if isinstance(change, Changed) else Changed(change)
            kept = (old.default, old.default_factory)
            default, factory = kept if new.default is UNCHANGED else (new.default, MISSING)
            notes = replace(old.metadata["notes"], rule=new.rule or old.metadata["notes"].rule)
            metadata = {**old.metadata, "help": new.help or old.metadata["help"], "notes": notes}
            metadata["aliases"] = [*old.metadata["aliases"], *new.aliases]
            setattr(cls, name, field(default=default, default_factory=factory, metadata=metadata))
            cls.__annotations__ = {**inspect.get_annotations(cls), name: old.type}
        return cls

    def inherited(cls: type, name: str) -> Field[Any]:
        known = (vars(base).get("__dataclass_fields__", {}) for base in cls.__mro__[1:])
        return next(found[name] for found in known if name in found)

    return apply


def like(
    cls: type, name: str, default: Any = UNCHANGED, help: str | None = None, rule: Rule | None = None, **options: Any
) -> Any:
    """A flag that another class declares, for one that does not inherit it; what is given differs here.

    A default of REQUIRED is none. `options` are those of `flag`.
    """
    (old,) = (one for one in fields(cls) if one.name == name)
    notes = replace(old.metadata["notes"], rule=rule or old.metadata["notes"].rule, only_with=None)
    metadata = {**old.metadata, "help": help or old.metadata["help"], "notes": notes, **options}
    kept = (old.default, old.default_factory) if default is UNCHANGED else (default, MISSING)
    if isinstance(default, list):
        kept = (MISSING, default.copy)
    return field(default=kept[0], default_factory=kept[1], metadata=metadata)


def default_of(config_class: type, name: str) -> Any:
    """The default of a flag, which is stated once: at its field."""
    (found,) = (f for f in fields(config_class) if f.name == name)
    return found.default if found.default_factory is MISSING else found.default_factory()


def flags_on_resume(config: Any, kind: OnResume) -> frozenset[str]:
    """The flags of a configuration (or its class) that a run which goes on treats alike."""
    return frozenset(field.name for field in fields(config) if field.metadata["notes"].on_resume == kind)


def check_flags(config: Any) -> None:
    """Checks each flag by its own declaration: its rule, then whether it does something. None passes.

    Raises:
        UserError: for the first that is refused.
    """
    hints = get_type_hints(type(config), include_extras=True)
    for one in fields(config):
        value, rule = getattr(config, one.name), one.metadata["notes"].rule
        if value is None:
            continue
        _check_choice(one.name, value, one.metadata.get("choices") or choices_of(hints[one.name]))
        if rule is not None:
            _check_value(one.name, value, rule)
    for one in fields(config):
        value, other = getattr(config, one.name), one.metadata["notes"].only_with
        if other and not _is_given(config, other) and value != default_of(config, one.name):
            raise UserError(f"--{one.name} {value} does nothing on its own: add --{other}, or drop it.")


def choices_of(hint: Any) -> tuple[Any, ...]:
    """The values that a type allows: of a Literal, also one with None; of others none."""
    if get_origin(hint) is Literal:
        return get_args(hint)
    return next((choices for part in get_args(hint) if (choices := choices_of(part))), ())


def _check_choice(name: str, value: Any, choices: Sequence[Any]) -> None:
    for one in value if isinstance(value, list | tuple) else [value]:
        if choices and one not in choices:
            known = ", ".join(map(str, choices))
            raise UserError(f"--{name} {one} is unknown: give one of {known}.")


def _check_value(name: str, value: Any, rule: Rule) -> None:
    if rule is NOT_EMPTY:
        if not value or (isinstance(value, list | tuple) and "" in value):
            raise UserError(f"--{name} is empty: give a value, or drop the flag.")
        return
    accept, wanted = rule
    for number in value if isinstance(value, list | tuple) else [value]:
        if not ((isinstance(number, str) or math.isfinite(number)) and accept(number)):
            raise UserError(f"--{name} {number} is out of range: give {wanted}.")


def _is_given(config: Any, other: str) -> bool:
    """Whether a flag has a value, or that after its name."""
    name, _, wanted = other.partition(" ")
    value = getattr(config, name)
    return value == wanted if wanted else value is not None


def check_function_path(name: str, value: str) -> None:
    """Check that `value` is `module.py:function`, that the file exists and that it defines the function.

    The file is parsed, never executed.

    Args:
        name: the flag, without its dashes.
        value: what the user gave.

    Raises:
        UserError: when the form, the file, its syntax or the function's name is wrong.
    """
    file_name, colon, function = value.rpartition(":")
    if not colon or not file_name.endswith(".py") or not function.isidentifier():
        raise UserError(f"--{name} {value} is not of the form module.py:function: give a Python file and a function.")
    path = Path(file_name)
    if not path.is_file():
        raise UserError(f"--{name} {value}: there is no file {file_name}; give its path from {Path.cwd()}.")
    try:
        tree = ast.parse(path.read_bytes(), filename=file_name)
        names = _bound_names(tree)
    except (SyntaxError, ValueError, OSError) as error:
        raise UserError(f"--{name} {value}: cannot read {file_name} as Python ({error}); correct the file.") from error
    if function not in names and "*" not in names:
        found = ", ".join(sorted(names)) or "nothing"
        raise UserError(
            f"--{name} {value}: {file_name} does not define {function}; give one of what it does: {found}."
        )
    last = [node for node in tree.body if isinstance(node, FUNCTIONS) and node.name == function][-1:]
    if last and isinstance(last[0], ast.AsyncFunctionDef):
        raise UserError(f"--{name} {value}: {function} is an async function; give a plain one (def).")


def _bound_names(tree: ast.AST) -> set[str]:
    """Names that a module binds at its top level, blocks included; "*" stands for a star import."""
    names: set[str] = set()
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, FUNCTIONS | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names.update(alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        else:
            names |= _bound_names(node)
    return names


def check_json_object(name: str, value: str) -> None:
    """Check that `value` is the path of a file that holds one JSON object.

    Raises:
        UserError: when the file is missing or holds anything else.
    """
    path = Path(value)
    if not path.is_file():
        raise UserError(f"--{name} {value}: there is no such file; give the path of a JSON file.")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"--{name} {value} is not JSON ({error}); correct the file.") from error
    if not isinstance(content, dict):
        raise UserError(f"--{name} {value} must hold a JSON object, like {{...}}; correct the file.")


def check_output_dir(output_dir: str, overwrite: bool, inputs: Sequence[str]) -> None:
    """Refuse an output folder that is a file or an input, or that holds a run unless `overwrite`.

    Args:
        output_dir: the folder; it need not exist.
        overwrite: replace a run that is there.
        inputs: models and data, as the flags name them.

    Raises:
        UserError: naming the folder and the flag that changes the decision.
    """
    folder = Path(output_dir)
    if folder.exists() and not folder.is_dir():
        raise UserError(f"--output_dir {output_dir} is a file: give a folder.")
    for name in inputs:
        if Path(name).exists() and _would_replace(folder.resolve(), Path(name).resolve()):
            raise UserError(
                f"--output_dir {output_dir}: the run reads {name}, which its own models would replace. Give another"
                " folder."
            )
    if overwrite or not _holds_run(folder):
        return
    raise UserError(
        f"--output_dir {output_dir} holds a run: add --resume_from_checkpoint to go on with it, or"
        " --overwrite_output_dir to replace it as soon as there are new models, or give another folder."
    )


def _would_replace(folder: Path, used: Path) -> bool:
    """Whether a run that writes into `folder` replaces what lies at `used`."""
    return used == folder or (folder in used.parents and used.relative_to(folder).parts[0] in RUN_FOLDERS)


def _holds_run(folder: Path) -> bool:
    """Whether a run left more in a folder than its beginning."""
    record, metrics = read_object(folder / "run.json"), folder / "metrics.jsonl"
    return (folder / "run.json").is_file() and (
        record.get("finished") is True or (metrics.is_file() and metrics.stat().st_size > 0)
    )


def check_data_split(data_split: str, step: int) -> None:
    """Check that a split has three fractions and leaves rows for this step.

    Args:
        data_split: for example "2,4,4"; fractions for steps 1, 2 and 3, of any sum.
        step: 1, 2 or 3.

    Raises:
        UserError: when there are not three fractions, or the one of this step is zero.
    """
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
    """Raises UserError unless a repository is named owner/name; None passes."""
    if repository is not None and not REPOSITORY.fullmatch(repository):
        raise UserError(f"{flag_name} {repository}: give the repository as owner/name, such as you/my-model.")
