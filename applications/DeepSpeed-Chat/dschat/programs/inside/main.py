# SPDX-License-Identifier: Apache-2.0
"""Reads a job, restricts this process and runs the program once; the parent judges the output.

The job comes from standard input. The descriptor `report` receives "R" when the sandbox is set up, or "F" and a reason
if that failed; then "C" or "E", whether the source compiles, all before a line of the program runs; then the text of
its exception. Standard output receives what the program prints, or the JSON of the function's result, see
`dschat.programs.inside.values`.

A program that reads standard input is the module `__main__`. A program whose function is called is the module
`program`, as if it were imported, so code below `if __name__ == "__main__"` (reading input, `unittest.main()`) does
not run.
"""

from __future__ import annotations

import _sitebuiltins
import builtins
import marshal
import os
import signal
import sys
import types

from .confine import drop_capabilities, limit_resources, restrict_calls, restrict_files
from .job import JobFile
from .kernel import PR_SET_PDEATHSIG, prctl
from .namespaces import DEVICES, become_program, enter
from .values import json_of

MAX_MESSAGE = 300  # characters of an exception's text
# Names that programs of functions use without an import, because the sites that publish the problems provide them.
FOR_FUNCTIONS = """
import bisect, collections, copy, fractions, functools, heapq, itertools, math, operator, random, re, string, sys, time
from bisect import bisect_left, bisect_right, insort
from collections import ChainMap, Counter, OrderedDict, defaultdict, deque, namedtuple
from fractions import Fraction
from functools import cache, cmp_to_key, lru_cache, reduce
from heapq import heapify, heappop, heappush, heappushpop, heapreplace, nlargest, nsmallest
from itertools import accumulate, chain, combinations, count, cycle, groupby, permutations, product, repeat
from math import ceil, cos, exp, factorial, floor, gcd, hypot, inf, log, log2, log10, pi, sin, sqrt, tan
from typing import Any, Callable, Dict, Iterable, List, Optional, Set, Tuple, Union
"""


def main(level: str, report: int, info: int, mapped: int) -> None:
    """Runs one test of one program.

    Args:
        level: of the sandbox, see `levels`.
        report: descriptor for the outcome.
        info: descriptor that receives the process id in the new namespaces.
        mapped: descriptor that says when the user ids of the namespaces are mapped.
    """
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    with open(0, "rb", closefd=False) as file:
        job: JobFile = marshal.load(file)
    try:
        output = _set_up(level, job, info, mapped)
    except Exception as error:
        os.write(report, b"F" + _text(error))
        raise
    os.write(report, b"R")
    _run(job, report, output)


def _set_up(level: str, job: JobFile, info: int, mapped: int) -> int:
    """Sets up the sandbox; returns the descriptor of the output."""
    if level == "namespaces":
        enter(job["readable"], job["hidden"], info, mapped)
    for descriptor in (info, mapped):
        os.closerange(descriptor, descriptor + 1)  # ignores descriptors that are closed already
    os.environ.clear()
    output = _open_standard_files(job["input"], job["function"] is not None)
    if level != "rlimits":
        become_program(job["readable"])
    limit_resources(job["seconds"], job["memory"], job["files"], job["threads"])
    drop_capabilities()
    restrict_files([*job["readable"], os.getcwd()], DEVICES)
    restrict_calls()
    return output


def _open_standard_files(text: bytes, calls_function: bool) -> int:
    """Connects descriptor 0 to the test's input and 2 to nothing; if a function is called, also 1.

    Returns:
        The descriptor of the output.
    """
    input_file = os.memfd_create("input")
    with open(input_file, "wb", closefd=False) as file:
        file.write(text)
    os.lseek(input_file, 0, os.SEEK_SET)
    os.dup2(input_file, 0)
    os.close(input_file)
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 2)
    output = 1
    if calls_function:
        output = os.dup(1)
        os.dup2(nothing, 1)
    os.close(nothing)
    return output


def _run(job: JobFile, report: int, output: int) -> None:
    """Compiles and runs the program, and reports the outcome."""
    sys.set_int_max_str_digits(0)
    sys.argv = ["program.py"]
    sys.path = sys.path[1:]  # removes this package's folder
    builtins.exit = builtins.quit = _sitebuiltins.Quitter("exit", "Ctrl-D")  # otherwise set by `site`
    try:
        code = compile(job["source"], "program.py", "exec", dont_inherit=True)
    except (SyntaxError, ValueError, OverflowError, MemoryError, RecursionError) as error:
        os.write(report, b"E" + _text(error))
        return
    os.write(report, b"C")
    try:
        if job["function"] is None:
            exec(code, _module("__main__"))
        else:
            answer = _result_of_call(code, job["function"], job["arguments"])
            with open(output, "wb") as file:
                file.write(answer)
    except SystemExit as error:
        if job["function"] is None:
            raise
        os.write(report, b"the program ended before its function returned")
        raise SystemExit(1) from error
    except BaseException as error:
        os.write(report, _text(error))
        raise


def _module(name: str) -> dict[str, object]:
    """The namespace of a new module, registered in `sys.modules` under a name and as `__main__`."""
    module = types.ModuleType(name)
    sys.modules[name] = sys.modules["__main__"] = module
    return vars(module)


def _result_of_call(code: types.CodeType, function: str, arguments: tuple[object, ...]) -> bytes:
    """Calls a function of the program; returns the JSON of its result.

    A program that ends with status 0 (`sys.exit()` after its definitions) is treated as fully loaded.
    """
    helpers: dict[str, object] = {}
    exec(FOR_FUNCTIONS, helpers)
    names = _module("program")
    # As builtins, so that `count` in `names` is a function only if the program defines or imports it.
    names["__builtins__"] = helpers | vars(builtins)
    try:
        exec(code, names)
    except SystemExit as error:
        if error.code not in (None, 0) or not (function in names or "Solution" in names):
            raise
    return json_of(_call(names, function, arguments))


def _call(names: dict[str, object], name: str, arguments: tuple[object, ...]) -> object:
    """Calls a method of the program's class `Solution`, or a function of the program.

    The method comes first: `from heapq import *` above the class makes `merge` a function, too.
    """
    solution = names.get("Solution")
    if callable(solution) and (hasattr(solution, name) or name not in names):
        function = getattr(solution(), name)
    elif name in names:
        function = names[name]
    else:
        raise NameError(f"the program defines no function {name}")
    if not callable(function):
        raise TypeError(f"{name} is not a function")
    return function(*arguments)


def _text(error: BaseException) -> bytes:
    """An exception's type and text. The program may have defined both, so that anything may go wrong here."""
    try:
        return f"{type(error).__name__}: {error}"[:MAX_MESSAGE].encode(errors="replace")
    except BaseException:
        return b"an exception without a text"
