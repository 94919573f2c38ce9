# SPDX-License-Identifier: Apache-2.0
"""Reads a job, shuts itself in, runs the program once; the parent judges what comes out.

The job comes over standard input. The descriptor `report` gets "R" when the walls stand ("F" and a reason if they do
not), then "C" when the source compiles or "E" when it does not, all before a line of the program runs; then the text
of its exception. Standard output gets what the program prints, or the JSON of what the called function returned, see
`dschat.scoring.programs.inside.values`.

A program that reads standard input is the module `__main__`. One whose function is called is the module `program`, as
if it were imported, so that code below `if __name__ == "__main__"` (reading input, `unittest.main()`) does not run.
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

MESSAGE = 300  # bytes of an exception's text
# Names that programs of functions use without an import: the sites whose problems these are have them.
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
    """One test of one program."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    with open(0, "rb", closefd=False) as file:
        job: JobFile = marshal.load(file)
    try:
        output = _shut_in(level, job, info, mapped)
    except Exception as error:
        os.write(report, b"F" + _text(error))
        raise
    os.write(report, b"R")
    _run(job, report, output)


def _shut_in(level: str, job: JobFile, info: int, mapped: int) -> int:
    """Puts up the walls; returns the descriptor of the output."""
    if level == "namespaces":
        enter(job["readable"], job["hidden"], job["file_bytes"], info, mapped)
    for end in (info, mapped):
        os.closerange(end, end + 1)  # some are closed already
    os.environ.clear()
    output = _open_standard_files(job["input"], job["function"] is not None)
    if level != "rlimits":
        become_program(job["readable"])
    limit_resources(job["seconds"], job["memory"], job["file_bytes"], job["files"], job["threads"])
    drop_capabilities()
    restrict_files(job["readable"], DEVICES, os.getcwd())
    restrict_calls()
    return output


def _open_standard_files(text: bytes, of_function: bool) -> int:
    """The test's input on descriptor 0, nothing on 2; returns where the output goes, which is not 1 of a function."""
    place = os.memfd_create("input")
    with open(place, "wb", closefd=False) as file:
        file.write(text)
    os.lseek(place, 0, os.SEEK_SET)
    os.dup2(place, 0)
    os.close(place)
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 2)
    output = 1
    if of_function:
        output = os.dup(1)
        os.dup2(nothing, 1)
    os.close(nothing)
    return output


def _run(job: JobFile, report: int, output: int) -> None:
    sys.set_int_max_str_digits(0)
    sys.argv, sys.path = ["program.py"], sys.path[1:]  # without the folder of this package
    builtins.exit = builtins.quit = _sitebuiltins.Quitter("exit", "Ctrl-D")  # which `site` would have set
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
    """The names of a new module that `sys.modules` has as this name and as `__main__`."""
    module = types.ModuleType(name)
    sys.modules[name] = sys.modules["__main__"] = module
    return vars(module)


def _result_of_call(code: types.CodeType, function: str, arguments: tuple[object, ...]) -> bytes:
    """The JSON of what a function of the program returns.

    A program that ends itself with status 0 (`sys.exit()` behind its definitions) has been read to its end.
    """
    helpers: dict[str, object] = {}
    exec(FOR_FUNCTIONS, helpers)
    names = _module("program")
    # Behind the program's own names, so that `count` is a function of the program only where the program defines it.
    names["__builtins__"] = helpers | vars(builtins)
    try:
        exec(code, names)
    except SystemExit as error:
        if error.code not in (None, 0) or not (function in names or "Solution" in names):
            raise
    return json_of(_call(names, function, arguments))


def _call(names: dict[str, object], name: str, arguments: tuple[object, ...]) -> object:
    """What a function of the program returns, or a method of its class `Solution`."""
    solution = names.get("Solution")
    function = getattr(solution(), name) if name not in names and callable(solution) else names[name]
    if not callable(function):
        raise TypeError(f"{name} is no function")
    return function(*arguments)


def _text(error: BaseException) -> bytes:
    try:
        return f"{type(error).__name__}: {error}".encode(errors="replace")[:MESSAGE]
    except Exception:
        return b"an exception without a text"
