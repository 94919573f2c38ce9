# SPDX-License-Identifier: Apache-2.0
"""Processes that import what a step needs while an earlier one runs, and then become `python -m dschat …`."""

import sys

import pytest

from cli_runs import ENVIRONMENT_AT_IMPORT, warm_programs
from dschat.base.errors import UserError
from dschat.quickstart.subcommands import Processes, Standbys, run_step, run_steps

REFUSED = ["--no_such_flag"]


@pytest.fixture(autouse=True)
def warm_commands(monkeypatch):
    """Commands that start without the seconds of imports."""
    monkeypatch.setattr(sys, "executable", str(warm_programs() / "python"))
    for name, value in ENVIRONMENT_AT_IMPORT.items():
        monkeypatch.setenv(name, value)


def test_a_waiting_process_runs_the_command(capfd):
    with Standbys(Processes()) as standbys:
        standbys.start("sft")
        (process,) = standbys._waiting["sft"]
        with pytest.raises(UserError, match="sft ended with status 2"):
            run_step("sft", REFUSED, Processes(), standbys)
        assert process.returncode == 2 and standbys.take("sft") is None
    printed = capfd.readouterr()
    assert "== dschat sft --no_such_flag" in printed.out
    assert "--no_such_flag" in printed.err and "Traceback" not in printed.err


def test_captured_output_of_a_waiting_process(capfd):
    with Standbys(Processes()) as standbys:
        standbys.start("sft", is_captured=True)
        (process,) = standbys._waiting["sft"]
        with pytest.raises(UserError, match="sft ended with status 2"):
            run_steps([("sft", REFUSED)], standbys=standbys)
        assert process.returncode == 2
    printed = capfd.readouterr()
    title, *output = printed.out.splitlines()
    assert title.startswith("== dschat sft ") and "--no_such_flag" in output[-1]
    assert "--no_such_flag" not in printed.err


def test_a_process_without_words_ends():
    with Standbys(Processes()) as standbys:
        standbys.start("sft", count=2)
        unused = list(standbys._waiting["sft"])
        first = unused[0]
        assert first.communicate() == (None, None) and first.returncode == 0, "standard input ended without words"
    assert all(process.returncode is not None for process in unused)


def test_several_processes_are_left_to_the_launcher():
    with Standbys(Processes(count=2)) as standbys:
        standbys.start("sft")
        assert standbys.take("sft") is None
