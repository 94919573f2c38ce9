# SPDX-License-Identifier: Apache-2.0
"""How commands end."""

import logging
import os
import re
import subprocess
import sys
from functools import partial

import pytest

from dschat.base.errors import UserError
from dschat.cli import main
from dschat.main import run_main, run_script


def failing(error):
    def run():
        raise error

    return run


def test_how_scripts_end(caplog, capsys):
    assert run_script(lambda: "all is well") == 0
    assert run_script(lambda: "") == 0
    assert run_script(failing(UserError("--x: bad"))) == 2
    assert run_script(failing(KeyboardInterrupt())) == 130
    assert run_script(failing(KeyboardInterrupt()), resumable=True) == 130
    assert capsys.readouterr().out == "all is well\n"
    bad, stopped, kept = caplog.messages
    assert (bad, stopped) == ("error: --x: bad", "interrupted")
    assert kept.startswith("interrupted; ") and kept.endswith("the same command continues from there")


def test_a_path_that_the_system_refuses_is_named_without_a_traceback(tmp_path, caplog):
    """A name of 300 letters, whoever asks for it; any other OSError keeps its traceback."""
    long = tmp_path / ("a" * 300)
    assert run_script(lambda: long.is_file()) == 2
    assert caplog.messages == [f"error: {long}: File name too long; give another path, or change its permissions."]
    assert run_script(partial(run_main, "sft", lambda: long.is_file(), lambda: None)) == 2
    with pytest.raises(FileNotFoundError):
        run_script(lambda: (tmp_path / "absent").read_text())


def test_a_reader_that_has_gone_is_no_error():
    """As `head` goes when it has its lines."""
    reader, writer = os.pipe()
    os.close(reader)
    ended = subprocess.run([sys.executable, "-m", "dschat", "sft", "--help"], stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (0, b"")


def test_a_closed_stream_is_no_error(monkeypatch):
    """The shell's `>&-`."""
    monkeypatch.setattr(sys, "stdout", None)
    assert run_script(lambda: "all is well") == 0


def test_a_run_in_the_process_of_its_command_has_time_stamps(capsys, monkeypatch):
    """On one GPU no rank is started: the command has set up the log already, without time stamps."""
    monkeypatch.setattr(logging.getLogger(), "handlers", [])

    def read_config():
        logging.getLogger("dschat").warning("a line")
        raise UserError("--x: bad")

    assert run_script(partial(run_main, "sft", read_config, lambda: None)) == 2
    line, error = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"20\d\d-\d\d-\d\d \d\d:\d\d:\d\d a line", line) and error == "error: --x: bad"


def test_a_group_of_commands_is_listed_and_an_unknown_second_word_is_named(capsys):
    assert main(["refuel-data", "--help"]) == 0 and "  refuel-data rank" in capsys.readouterr().out
    assert main(["refuel-data"]) == 2 and "there is no command" not in capsys.readouterr().err
    assert main(["refuel-data", "gen"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("dschat: error: there is no command refuel-data gen\nusage: dschat refuel-data")
    assert "refuel-data generate" in said.err and "refuel-data tokenize" in said.err


def test_flags_before_the_command(capsys):
    assert main(["--seed", "1", "ppo"]) == 2
    assert "flags come behind the command: dschat ppo --help" in capsys.readouterr().err
