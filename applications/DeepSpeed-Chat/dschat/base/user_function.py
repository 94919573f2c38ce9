# SPDX-License-Identifier: Apache-2.0
"""A user's own Python function, named on the command line as ``module.py:function``."""

import importlib.util
import inspect
import sys
import traceback
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from dschat.base.errors import UserError
from dschat.base.package_functions import function_path

PACKAGE = Path(__file__).resolve().parents[1]
_imported_folders: set[Path] = set()  # of the user's files that were imported so far


def load_function(spec: str, flag: str, arguments: Sequence[str] = ()) -> Callable[..., Any]:
    """Imports a file and returns one of its functions.

    Args:
        spec: ``path/to/module.py:function``, or a name in `PACKAGE_FUNCTIONS`.
        flag: the command-line flag that gave it, for messages.
        arguments: names of what it will be called with, to check that it can be; empty to check nothing.

    Raises:
        UserError: no such file or function, importing the file fails, the function is an async one, or it does not
            take the arguments.
    """
    path, _, name = function_path(spec).rpartition(":")
    if not path.endswith(".py"):
        raise UserError(f"{flag} {spec}: not of the form path/to/module.py:function.")
    file = Path(path).resolve()
    if not file.is_file():
        raise UserError(f"{flag} {spec}: there is no such file. Give path/to/module.py:function.")
    try:
        function = getattr(_import_file(file), name, None)
    except (Exception, SystemExit) as error:
        location = _location_of(error, str(file))
        raise UserError(
            f"{flag} {spec}: importing the file failed{location}: {type(error).__name__}: {error}"
        ) from error
    if not callable(function):
        raise UserError(f"{flag} {spec}: the file defines no function named {name!r}.")
    if _is_async(function) or _is_async(type(function).__call__):
        raise UserError(f"{flag} {spec}: {name} is an async function; give a plain one (def).")
    if arguments and not takes(function, len(arguments)):
        plural = "s" if len(arguments) > 1 else ""
        raise UserError(
            f"{flag} {spec}: it is called with {len(arguments)} argument{plural}: make it"
            f" {name}({', '.join(arguments)})."
        )
    return function


def _is_async(function: Callable[..., Any]) -> bool:
    """Whether a call returns a coroutine or an asynchronous generator."""
    return inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function)


def _import_file(file: Path) -> ModuleType:
    """The module of a file, which is run once; `import reward` in another file makes a second, independent module.

    As for a script, the file's folder comes first on sys.path while it is run.
    """
    if file.is_relative_to(PACKAGE):  # its folder on sys.path would give the user's `import source` a file of ours
        return importlib.import_module(".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts))
    name = f"{file.stem}_{zlib.crc32(str(file).encode()):08x}"  # unique, so that no other module is shadowed
    if name in sys.modules:
        return sys.modules[name]
    _check_neighbours(file)
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None  # a .py file always has a loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look for their module there
    folder = str(file.parent)
    sys.path.insert(0, folder)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    finally:
        with suppress(ValueError):  # the file has removed it
            sys.path.remove(folder)
    if folder not in sys.path:
        sys.path.append(folder)  # for imports inside functions; last, so that no library is shadowed
    return module


def _check_neighbours(file: Path) -> None:
    """Raises ImportError if this folder has a module of a name that was imported from another user's folder.

    Python keeps one module per name: `import utils` in this file would return the other folder's. Imports inside
    functions, which are made later, are not checked.
    """
    for neighbour in file.parent.iterdir():
        module = sys.modules.get(neighbour.stem)
        origins = [getattr(module, "__file__", None), *getattr(module, "__path__", ())]
        for origin in map(Path, filter(None, origins)):
            is_neighbours = origin.parent in (file.parent, neighbour)
            if is_neighbours or _imported_folders.isdisjoint(origin.parents[:2]):
                continue
            if neighbour.suffix == ".py" or any(neighbour.rglob("*.py")):  # and not data
                raise ImportError(f"{neighbour} has the name of {origin}, which is imported already: rename one.")
    _imported_folders.add(file.parent)


def takes(function: Callable[..., Any], count: int) -> bool:
    """Whether a function can be called with `count` positional arguments; True if it has no signature."""
    try:
        signature = inspect.signature(function)
    except ValueError:
        return True
    try:
        signature.bind(*range(count))
    except TypeError:
        return False
    return True


def call_function(function: Callable[..., Any], flag: str, *args: Any) -> Any:
    """Calls a user's function; errors inside are reported with their line in the user's file.

    Raises:
        UserError: the function raised, or called sys.exit. A UserError of its own is left as it is.
    """
    try:
        return function(*args)
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        while isinstance(function, partial):
            function = function.func
        name = getattr(function, "__name__", type(function).__name__)
        location = _location_of(error, _file_of(function))
        raise UserError(f"{flag}: {name} failed{location}: {type(error).__name__}: {error}") from error


def _location_of(error: BaseException, file: str | None) -> str:
    """Phrase that names the last line of the user's file, or else of any file, that an error came through.

    Empty if no frame lies outside this file.
    """
    frames = []
    for frame in traceback.extract_tb(error.__traceback__):
        if frame.filename != __file__ and not frame.filename.startswith("<frozen "):
            frames.append(frame)
    if not frames:
        return ""
    own_frames = [frame for frame in frames if frame.filename == file]
    last = (own_frames or frames)[-1]
    return f" in {last.filename}, line {last.lineno}"


def _file_of(function: Callable[..., Any]) -> str | None:
    """The file that defines a function, a class or an object's __call__; None if no Python file defines it."""
    function = inspect.unwrap(function)
    if not hasattr(function, "__name__"):
        function = type(function).__call__
    try:
        return inspect.getfile(function)
    except (TypeError, OSError):
        return None
