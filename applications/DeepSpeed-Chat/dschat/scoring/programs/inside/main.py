# SPDX-License-Identifier: Apache-2.0
"""Reads a job, shuts itself in, runs the program once; the parent judges what comes out.

The job comes over standard input. The descriptor `report` gets "R" when the walls stand ("F" and a reason if they do
not), then "C" when the source compiles or "E" when it does not, all before a line of the program runs; then the text
of its exception. Standard output gets what the program prints, or the JSON of what the called function returned.
"""

from __future__ import annotations

import _sitebuiltins
import builtins
import json
import marshal
import os
import signal
import sys
import types

from .confine import drop_capabilities, limit_resources, restrict_calls, restrict_files
from .job import JobFile
from .kernel import PR_SET_PDEATHSIG, prctl
from .namespaces import DEVICES, become_program, enter

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
    program = sys.modules["__main__"] = types.ModuleType("__main__")
    names = vars(program)
    try:
        if job["function"] is not None:
            exec(FOR_FUNCTIONS, names)
        exec(code, names)
        if job["function"] is not None:
            value = _call(names, job["function"], job["arguments"])
            with open(output, "wb") as file:
                file.write(json.dumps(value).encode())
    except SystemExit:
        raise
    except BaseException as error:
        os.write(report, _text(error))
        raise


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
