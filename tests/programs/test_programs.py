# SPDX-License-Identifier: Apache-2.0
"""Right and wrong programs on tests of both kinds; what APPS's columns may hold; how outputs are compared."""

import json
import time
from dataclasses import replace

import pytest

from dschat.base.errors import UserError
from dschat.programs import ProgramOutcome, SandboxLimits, levels, run, run_tests, sandbox
from dschat.programs.inside.values import UNKNOWN, plain
from dschat.programs.levels import weakness
from dschat.programs.problem import exact_int, parse_problem, same_text, same_value
from dschat.programs.run import ProgramPool, paper_reward, ratio_reward

pytestmark = [
    pytest.mark.xdist_group("sandbox"),
    pytest.mark.skipif(bool(weakness("namespaces")), reason="no sandbox: " + weakness("namespaces")),
]

ECHO = {"inputs": ["1\n", "2\n"], "outputs": ["1\n", "2\n"]}


def outcome(*tests: str, total: int | None = None) -> ProgramOutcome:
    """An outcome made by hand."""
    return ProgramOutcome(tests, total or len(tests), "namespaces", 0.0)


@pytest.mark.parametrize(
    ("end", "seconds", "status", "message"),
    [
        ("output", 3.9, "runtime_error", "more than 1,000,000 bytes of output"),
        ("exit", 3.9, "timeout", "more than 4 s"),
        ("exit", 0.5, "runtime_error", "exit status 137"),
        ("time", 4.1, "timeout", "more than 4 s"),
    ],
)
def test_a_killed_program_is_named_by_what_it_was_killed_for(end, seconds, status, message) -> None:
    """By SIGKILL: of this process for its output or its time, of the kernel for its processor time, or of itself."""
    execution = sandbox.Execution(True, True, end, 137, b"", "", seconds)
    case = parse_problem(ECHO, "tests").cases[0]
    limits = SandboxLimits(seconds=4.0, output_bytes=1_000_000)
    assert run._status_of(execution, case, limits) == (status, message)


@pytest.mark.parametrize(
    ("program", "tests"),
    [
        ("print(input())", ("passed", "passed")),
        ("print(1)", ("passed", "wrong")),
        ("print(input()", ("compile_error",)),
        ("", ("wrong", "wrong")),
        ("x = input()\nassert x == '1'\nprint(x)", ("passed", "runtime_error")),
        ("raise SystemExit(3)", ("runtime_error",)),
        ("x = input()\nwhile x == '2': pass\nprint(x)", ("passed", "timeout")),
        ("import time\nx = input()\ntime.sleep(9 if x == '2' else 0)\nprint(x)", ("passed", "timeout")),
        ("print(input() * 10**7)", ("runtime_error",)),
    ],
)
def test_outcomes(program, tests) -> None:
    found = run_tests(program, ECHO, SandboxLimits(seconds=3 if "timeout" in tests else 30, output_bytes=2**20))
    assert (found.tests, found.total, found.level) == (tests, 2, "namespaces")
    assert found.status == next((test for test in tests if test != "passed"), "passed")


def test_a_run_to_the_end_goes_on_after_an_error() -> None:
    problem = parse_problem(ECHO, "row")
    program = "x = input()\nassert x == '2'\nprint(x)"
    assert run.run_problem(program, problem, SandboxLimits(), "namespaces").tests == ("runtime_error",)
    found = run.run_problem(program, problem, SandboxLimits(), "namespaces", to_the_end=True)
    assert found.tests == ("runtime_error", "passed") and ratio_reward(found) == 0.5


# The formula by hand: −1 | −0.6 | −0.3 + 1.3 · passed / total.
@pytest.mark.parametrize(
    ("tests", "paper", "ratio"),
    [
        (("passed",) * 4, 1.0, 1.0),
        (("passed", "wrong", "wrong", "passed"), 0.35, 0.5),
        (("wrong",) * 3, -0.3, 0.0),
        (("passed", "runtime_error"), -0.6, 0.5),
        (("timeout", "passed"), -0.6, 0.5),
        (("compile_error",), -1.0, 0.0),
        (("passed", "runtime_error", "compile_error"), -1.0, 1 / 3),
    ],
)
def test_rewards(tests, paper, ratio) -> None:
    assert paper_reward(outcome(*tests)) == pytest.approx(paper, abs=1e-12)
    assert ratio_reward(outcome(*tests)) == pytest.approx(ratio, abs=1e-12)
    # Tests that were not run any more are not passed.
    assert ratio_reward(outcome(*tests, total=2 * len(tests))) == pytest.approx(ratio / 2, abs=1e-12)


def test_no_tests_are_no_pass() -> None:
    for tests in ("", "{}", {"inputs": [], "outputs": []}):
        assert run_tests("print(1)", tests).status == "invalid"
    assert outcome("passed", total=2).status == "invalid"


@pytest.mark.parametrize(
    ("text", "expected", "same"),
    [
        ("1 2\n3", "1\n2 3\n\n", True),
        ("0.3333333", "0.33333333333", True),
        ("0.3334", "0.33333333333", False),
        ("3", "3.0", True),
        ("YES", "Yes", False),
        ("1000000.9", "1000000", False),
        ("1e999", "9e9999", False),
        ("1", "1 1", False),
        ("12345678901234567890", "12345678901234567891", False),
    ],
)
def test_texts(text, expected, same) -> None:
    assert same_text(text, expected) is same


@pytest.mark.parametrize(
    ("value", "expected", "same"),
    [
        ([1, 2], [2, 1], False),
        ([1, [2.0000000001]], [1, [2.0]], True),
        ({"1": [1]}, {1: [1]}, True),
        ({"a": 1, "b": 2}, {"a": 1}, False),
        (2, 2.0, True),
        ("1", 1, False),
        (float("nan"), float("nan"), False),
        (10**400, 1.5, False),
        (1000000.9, 1000000, False),
        (1.0000005, True, False),
    ],
)
def test_values(value, expected, same) -> None:
    assert same_value(value, expected) is same


@pytest.mark.parametrize(
    ("program", "tests", "status"),
    [
        # Lists of lines, on both sides.
        ("print(int(input()) + int(input()))", {"inputs": [["1", "2"]], "outputs": [["3"]]}, "passed"),
        # A result in a list of its own, and one that is a list.
        ("def f(a, b): return a + b", {"fn_name": "f", "inputs": [[1, 2]], "outputs": [[3]]}, "passed"),
        ("def f(a): return [a]", {"fn_name": "f", "inputs": [[1]], "outputs": [[1]]}, "passed"),
        ("def f(a): return (a, a)", {"fn_name": "f", "inputs": [[1]], "outputs": [[1, 1]]}, "passed"),
        # Keys that are whole numbers.
        (
            "def f(d): return d[1] + d[-2]",
            {"fn_name": "f", "inputs": [[{"1": 5, "-2": 6}]], "outputs": [11]},
            "passed",
        ),
        ("def f(): return {3}", {"fn_name": "f", "inputs": [[]], "outputs": [3]}, "wrong"),
        # Names that the sites of such problems give without an import; classes of the program itself.
        (
            "class Solution:\n  def f(self, x: List[int]) -> int: return heapq.nlargest(1, x)[0] + gcd(4, 6)",
            {"fn_name": "f", "inputs": [[[3, 5]]], "outputs": [7]},
            "passed",
        ),
        (
            "import pickle\nclass A: pass\nprint(type(pickle.loads(pickle.dumps(A()))).__name__)",
            {"inputs": [""], "outputs": ["A"]},
            "passed",
        ),
    ],
)
def test_quirks_of_apps(program, tests, status) -> None:
    assert run_tests(program, json.dumps(tests)).status == status


# Functions that return their argument instead of sorting it, with something about the comparison.
UNSORTED = {
    "a set": "def f(x): return set(x)",
    "a set in a list": "def f(x): return [set(x)]",
    "an object with the mark of unsupported types": 'def f(x): return {"\\0type": x}',
    "a mark in forged JSON": """
import json
def f(x):
    json.dumps = lambda value: '{"\\\\u0000set": [3, 1, 2]}'
    return x
""",
    "an abstract set": """
import collections.abc
class S(collections.abc.Set):
    def __init__(self, x): self.x = x
    def __contains__(self, value): return True
    def __iter__(self): return iter(self.x)
    def __len__(self): return len(self.x)
def f(x): return S(x)
""",
    "a list that says it is sorted": """
class L(list):
    def __getitem__(self, number): return sorted(self)[number]
    def __repr__(self): return repr(sorted(self))
def f(x): return L(x)
""",
    "numbers that say they are others": """
class I(int):
    def __eq__(self, other): return True
    def __repr__(self): return "1"
def f(x): return [I(v) for v in x]
""",
}


@pytest.mark.parametrize("name", UNSORTED)
def test_a_program_does_not_choose_how_it_is_compared(name) -> None:
    tests = {"fn_name": "f", "inputs": [[[3, 1, 2]]], "outputs": [[1, 2, 3]]}
    assert run_tests(UNSORTED[name], tests).status in ("wrong", "runtime_error")


def test_a_set_has_no_order() -> None:
    """Small integers would come out sorted."""
    assert plain([{3, 1, 2}, frozenset()]) == [{UNKNOWN: "set"}, {UNKNOWN: "frozenset"}]


def test_a_text_that_is_almost_a_number_takes_little_time() -> None:
    """Digits that can be divided in many ways would take hours: 19 s at 40,000 of them, with their square."""
    start = time.process_time()
    for text in ("1" * 2_000_000 + "x", "1" * 10**6 + "." + "1" * 10**6 + "x", "." + "1" * 2_000_000 + "x"):
        assert not same_text(text, "1.5")
    assert time.process_time() - start < 5


def test_a_response_without_a_program_is_a_compile_error() -> None:
    pool = ProgramPool("namespaces")
    (found,) = pool.run([None], [json.dumps(ECHO)], ["row"])
    assert (found.status, found.total, found.message) == ("compile_error", 2, "the response has no program")
    assert paper_reward(found) == -1 and ratio_reward(found) == 0
    assert pool.run([None], [json.dumps({"inputs": [], "outputs": []})], ["row"])[0].status == "invalid"
    assert ProgramPool("namespaces", max_tests=1).run([None], [json.dumps(ECHO)], ["row"])[0].total == 1


def test_integers_of_5000_digits() -> None:
    digits = "7" * 5000
    call = f'{{"fn_name": "f", "inputs": [[{digits}]], "outputs": [-{digits}]}}'
    assert run_tests("def f(x): return -x", call).status == "passed"
    assert run_tests("def f(x): return -x - 1", call).status == "wrong"
    printed = f'{{"inputs": [{digits}], "outputs": [["{digits}"]]}}'
    assert run_tests("import sys\nsys.set_int_max_str_digits(0)\nprint(int(input()))", printed).status == "passed"
    assert exact_int("-" + "12345" * 3000) == -(12345 * (10**15000 - 1) // (10**5 - 1))
    with pytest.raises(ValueError, match="200,000 digits"):
        exact_int("1" * 200_000)


COLUMN, ARGUMENTS = "column 'input_output'", "the arguments in column 'input_output' cannot be handed on"


@pytest.mark.parametrize(
    ("tests", "words"),
    [
        *((text, COLUMN) for text in ("no JSON", '{"inputs": [1], "outputs": []}', "[1]")),
        ({"fn_name": "f", "inputs": [1], "outputs": [1]}, "inputs of the function f must be lists"),
        ({"fn_name": "f", "inputs": [[object()]], "outputs": [1]}, ARGUMENTS),
    ],
)
def test_tests_of_another_form_name_their_row(tests, words) -> None:
    with pytest.raises(UserError, match=f"apps.jsonl:3: {words}"):
        parse_problem(tests, "apps.jsonl:3")


def test_trouble_with_a_sandbox_is_no_verdict(monkeypatch) -> None:
    calls = []

    def trouble(*arguments: object) -> object:
        calls.append(arguments)
        raise OSError("no process could be started")

    pool = ProgramPool("namespaces")
    monkeypatch.setattr(run, "execute", trouble)
    found = pool.run(["print(1)"], [json.dumps(ECHO)], ["row"])[0]
    assert (found.status, found.message, len(calls)) == ("invalid", "no process could be started", run.ATTEMPTS)
    monkeypatch.undo()
    assert pool.run(["print(1)"], [json.dumps(ECHO)], ["row"])[0].status == "wrong"


def test_a_machine_without_walls_is_refused(monkeypatch) -> None:
    monkeypatch.setattr(levels, "weakness", lambda level: "" if level == "rlimits" else "not allowed")
    with pytest.raises(UserError, match="--sandbox_level namespaces: .*not allowed.*user namespaces"):
        ProgramPool("namespaces")
    assert ProgramPool("rlimits").level == "rlimits"


def test_the_strongest_walls_are_taken(monkeypatch) -> None:
    monkeypatch.setattr(levels, "weakness", lambda level: "")
    assert levels.strongest_level("namespaces") == "bubblewrap"
    monkeypatch.setattr(levels, "weakness", lambda level: "" if level != "bubblewrap" else "no bwrap")
    assert levels.strongest_level("rlimits") == "namespaces"
    with pytest.raises(UserError, match="apt-get install bubblewrap"):
        levels.strongest_level("bubblewrap")


@pytest.mark.skipif(sandbox.bubblewrap() is None, reason="needs bubblewrap")
def test_packages_that_hold_this_one_are_hidden_but_for_it(monkeypatch) -> None:
    """As where dschat is installed beside the packages of the interpreter itself."""
    monkeypatch.setattr(sandbox, "package_folders", lambda: [str(sandbox.HERE)])
    execution = sandbox.execute(sandbox.SandboxJob("print(1)"), SandboxLimits(seconds=60.0), "bubblewrap")
    assert (execution.status, execution.output) == (0, b"1\n")


def test_a_level_with_a_hole_is_none(monkeypatch) -> None:
    levels.probe.cache_clear()
    monkeypatch.setattr(levels, "PROBE", 'import json\nprint(json.dumps(["the network", "x"]))')
    assert levels.weakness("namespaces") == "a program inside can use the network and x"
    assert levels.weakness("rlimits") == ""
    levels.probe.cache_clear()


def test_a_level_without_a_limit_of_threads_stands_and_says_so(monkeypatch, caplog) -> None:
    """As where an older kernel counts the threads of all sandboxes together, so that there is no limit."""
    levels.probe.cache_clear()
    monkeypatch.setattr(
        levels, "execute", lambda job, limits, level: sandbox.execute(job, replace(limits, threads=10_000), level)
    )
    assert levels.weakness("namespaces") == "" and levels.probe("namespaces").holes == (levels.THREADS,)
    monkeypatch.setattr("dschat.programs.run.strongest_level", lambda least: "namespaces")
    ProgramPool("namespaces")
    assert "at sandbox level namespaces a program reaches more threads than its limit" in caplog.text
    levels.probe.cache_clear()
