# SPDX-License-Identifier: Apache-2.0
"""English sentences with link-grammar, a parser of Debian's, in a process of its own."""

import contextlib
import json
import logging
import os
import re
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from constituent_treelib.chunker import word_pattern
from constituent_treelib.trees import Tree, TreelibError, is_sound

logger = logging.getLogger(__name__)

MAX_WORDS = 35  # marks included: time grows with the cube of the words
MAX_CHARACTERS = 1000
INSTALL = "apt-get install liblink-grammar5 link-grammar-dictionaries-en"
_WORKER = Path(__file__).with_name("link_grammar_worker.py")
_TOKEN = re.compile(r"\(([^\s()]*)|(\))|([^\s()]+)")
# What one call may take in all: most sentences need a hundredth of a second, a few reach their own timeout.
CALL_SECONDS, SENTENCE_SECONDS = 30.0, 0.05
_PART_OF_SPEECH = re.compile(r"\.([a-z]+(?:-[a-z]+)?)$")
START_SECONDS = 60.0


class LinkGrammarBackend:
    """Trees of link-grammar, for sentences; what takes too long or crashes it is not parsed, and the rest is."""

    name = "link-grammar"
    unit: Literal["sentence"] = "sentence"

    def __init__(self, language: str = "en", timeout: float = 1.0, command: Sequence[str] | None = None) -> None:
        """Starts the process.

        Args:
            language: of a dictionary of link-grammar.
            timeout: seconds that a sentence may take.
            command: another program in place of the worker, for tests.

        Raises:
            TreelibError: link-grammar or its dictionary is not installed; the message says how to install it.
        """
        if not timeout > 0:
            raise TreelibError(f"the backend link-grammar needs a timeout of more than 0 seconds, not {timeout}.")
        # Nothing but the standard library is needed: without site packages the process starts at once.
        own = [sys.executable, "-I", "-S", str(_WORKER), language, str(timeout)]
        self._worker = WorkerProcess(own if command is None else command, timeout)
        try:
            ready = self._worker.start()
        except WorkerError as error:
            raise TreelibError(f"the backend link-grammar does not run: its process {error}.") from error
        if "error" in ready:
            self.close()
            said, remedy = ready["error"], f"{INSTALL}, or use the backend chunker"
            raise TreelibError(f"the backend link-grammar is not installed ({said}): {remedy}.")
        self.version = str(ready["version"])

    def parse(self, units: Sequence[str]) -> list[Tree | None]:
        """A tree per sentence; None for those that are too long, take too long, or that it has no tree of.

        All of them together get a limited time: those that are left then are None, too.
        """
        trees: list[Tree | None] = []
        deadline = time.monotonic() + CALL_SECONDS + len(units) * SENTENCE_SECONDS
        for unit in units:
            if time.monotonic() > deadline:
                left = len(units) - len(trees)
                logger.warning("link-grammar is out of time: %d of %d sentences are left", left, len(units))
                return trees + [None] * left
            try:
                trees.append(self._parse(unit) if _is_welcome(unit) else None)
            except WorkerStartError as error:  # tried again at the next call, not for every sentence of this one
                logger.warning("link-grammar does not run any more: its process %s", error)
                return trees + [None] * (len(units) - len(trees))
            except WorkerError as error:
                logger.info("link-grammar did not parse a sentence of %d characters: its process %s", len(unit), error)
                trees.append(None)
        return trees

    def close(self) -> None:
        """Ends the process; `parse` starts another one."""
        self._worker.close()

    def _parse(self, unit: str) -> Tree | None:
        answer = self._worker.ask(unit)
        try:
            return None if answer is None else read_tree(answer["tree"], answer["words"])
        except (TypeError, KeyError, ValueError):
            self.close()  # no answer of the worker's
            return None


def _is_welcome(unit: str) -> bool:
    """Whether link-grammar may see a sentence: it aborts on nothing at all, and is slow with much."""
    if not unit.strip() or "\0" in unit or len(unit) > MAX_CHARACTERS:
        return False
    try:
        unit.encode("utf-8")
    except UnicodeEncodeError:  # half of a surrogate pair
        return False
    return len(word_pattern(unit.isascii()).findall(unit)) <= MAX_WORDS


def read_tree(brackets: str, spans: Sequence[Sequence[int]]) -> Tree | None:
    """link-grammar's brackets and the characters of its words → a tree; None if the tree does not have these words.

    A tree may be cut, and words of strange texts may overlap.

    Args:
        brackets: ``(S (NP the fox.n) …)``; round brackets among the words are written as others.
        spans: (start, end) of each word.
    """
    words = iter(spans)
    stack: list[tuple[str, list[Tree]]] = [("", [])]
    for label, closes, word in _TOKEN.findall(brackets):
        if closes:
            if len(stack) == 1:
                return None
            above, children = stack.pop()
            if children:
                stack[-1][1].append(Tree(above, children[0].start, children[-1].end, tuple(children)))
        elif word:
            span = next(words, None)
            if span is None:
                return None
            start, end = map(int, span)
            found = _PART_OF_SPEECH.search(word)
            stack[-1][1].append(Tree(found[1] if found else "", start, end))
        else:
            stack.append((label, []))
    roots = stack[0][1]
    if len(stack) > 1 or not roots or next(words, None) is not None:
        return None
    tree = roots[0] if len(roots) == 1 else Tree("S", roots[0].start, roots[-1].end, tuple(roots))
    return tree if is_sound(tree, tree.end) else None


class WorkerError(Exception):
    """The process gave no answer: it took too long, ended, or answered with no JSON. It is not running any more."""


class WorkerStartError(WorkerError):
    """The process could not be started, or was not ready in time."""


class WorkerProcess:
    """Starts the process when it is asked something and none is running; not for several threads at a time.

    The process is ended by `close`, with this object, and at the end of this interpreter. A fork of this interpreter
    starts a process of its own.
    """

    def __init__(self, command: Sequence[str], seconds: float) -> None:
        """Starts nothing yet. The first line of the command says that it is ready; an answer may take `seconds`."""
        self._command, self._seconds = list(command), seconds
        self._process: subprocess.Popen[str] | None = None
        self._owner = 0
        self._end: weakref.finalize | None = None

    @property
    def pid(self) -> int | None:
        """Of the running process; None if there is none."""
        return self._process.pid if self._process is not None and self._owner == os.getpid() else None

    def start(self) -> Any:
        """Starts the process, and ends the one that is running; returns the value of its first line.

        Raises:
            WorkerStartError: it could not be started, or was not ready in `START_SECONDS`.
        """
        self.close()
        pipe, nowhere = subprocess.PIPE, subprocess.DEVNULL
        environment = os.environ | {"LC_ALL": "C.UTF-8"}
        try:
            process = subprocess.Popen(
                self._command, stdin=pipe, stdout=pipe, stderr=nowhere, env=environment, encoding="utf-8"
            )
        except OSError as error:
            raise WorkerStartError(f"could not be started: {error}") from error
        self._process, self._owner = process, os.getpid()
        self._end = weakref.finalize(self, _end, process, self._owner)
        try:
            return self._exchange("", START_SECONDS)
        except WorkerError as error:
            raise WorkerStartError(f"did not start: {error}") from error

    def ask(self, value: Any) -> Any:
        """The answer of the process.

        Raises:
            WorkerError: there is none.
            WorkerStartError: there was no process, and none could be started.
        """
        if self.pid is None:
            self.start()
        return self._exchange(json.dumps(value) + "\n", self._seconds)

    def close(self) -> None:
        """Ends the process. The next question starts another one."""
        if self._end is not None:
            self._end()
        self._process = self._end = None

    def _exchange(self, question: str, seconds: float) -> Any:
        """Writes a question and reads a line; a process that takes too long is killed, which ends the wait."""
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        timer, deadline = threading.Timer(seconds, process.kill), time.monotonic() + seconds
        timer.start()
        try:
            process.stdin.write(question)
            process.stdin.flush()
            line = process.stdout.readline()
            if not line.endswith("\n"):
                late = time.monotonic() >= deadline
                raise TimeoutError(f"no answer in {seconds:g} s") if late else EOFError("ended without an answer")
            return json.loads(line)
        except (OSError, EOFError, ValueError) as error:
            self.close()
            raise WorkerError(f"{type(error).__name__}: {error}") from error
        except BaseException:  # an interrupted wait: what is answered later would be taken for the next answer
            self.close()
            raise
        finally:
            timer.cancel()


def _end(process: subprocess.Popen[str], owner: int) -> None:
    """Kills a process of this interpreter's; of another's, after a fork, only lets go of its pipes."""
    if owner == os.getpid():
        process.kill()
        process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):  # of a question that nobody reads any more
                pipe.close()
