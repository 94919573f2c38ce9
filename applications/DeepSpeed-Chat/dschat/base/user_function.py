# SPDX-License-Identifier: Apache-2.0
"""A user's own Python function, named on the command line as ``module.py:function``."""

import importlib.util
import inspect
import sys
import traceback
import zlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from dschat.base.errors import UserError


def load_function(spec: str, flag: str) -> Callable[..., Any]:
    """Imports a file and returns one of its functions.

    Args:
        spec: ``path/to/module.py:function``.
        flag: the command-line flag that gave it, for messages.

    Raises:
        UserError: no such file or function, the file fails on import, or the function is an async one.
    """
    path, _, name = spec.rpartition(":")
    if not path.endswith(".py") or not Path(path).is_file():
        raise UserError(f"{flag} {spec}: there is no such file. Give path/to/module.py:function.")
    try:
        function = getattr(_import_file(Path(path).resolve()), name, None)
    except (Exception, SystemExit) as error:
        raise UserError(f"{flag} {spec}: importing the file failed: {type(error).__name__}: {error}") from error
    if not callable(function):
        raise UserError(f"{flag} {spec}: the file defines no function named {name!r}.")
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        raise UserError(f"{flag} {spec}: {name} is an async function; give a plain one (def).")
    return function


def _import_file(file: Path) -> ModuleType:
    """The module of a file, imported once. As for a script, its imports are first looked up in its own folder."""
    name = f"{file.stem}_{zlib.crc32(str(file).encode()):08x}"  # different from the names of other modules
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None  # a .py file always has a loader
    sys.modules[name] = module = importlib.util.module_from_spec(spec)  # dataclasses look for their module there
    folder = str(file.parent)
    sys.path.insert(0, folder)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    finally:
        # Moved to the end: imports inside functions still work, but later imports of libraries are not shadowed.
        sys.path.remove(folder)
        sys.path.append(folder)
    return module


def call_function(
    function: Callable[..., Any],
    flag: str,
    *args: Any,
) -> Any:
    """Calls a user's function; errors inside are reported with their line in the user's file.

    Raises:
        UserError: the function raised, or called sys.exit. A UserError of its own is left as it is.
    """
    try:
        return function(*args)
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        name = getattr(function, "__name__", "function")
        where = _line_of(error, function)
        raise UserError(f"{flag}: {name} failed{where}: {type(error).__name__}: {error}") from error


def _line_of(error: BaseException, function: Callable[..., Any]) -> str:
    """Where a call failed: the last line in the function's file, or in another one; empty if it did not begin."""
    _, *frames = traceback.extract_tb(error.__traceback__)  # the first is the call
    file = _file_of(function)
    frames = [frame for frame in frames if frame.filename == file] or frames
    return f" in {frames[-1].filename}, line {frames[-1].lineno}" if frames else ""


def _file_of(function: Callable[..., Any]) -> str | None:
    """The file in which a function, a method, or the class of a callable object is defined; None of a built-in one."""
    definition = inspect.unwrap(function)
    if not (inspect.isroutine(definition) or inspect.isclass(definition)):
        definition = type(definition)
    try:
        return inspect.getfile(definition)
    except (TypeError, OSError):
        return None
