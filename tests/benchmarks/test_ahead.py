# SPDX-License-Identifier: Apache-2.0
"""The vLLM server of `ahead.py`: the error if it does not start, and that it ends. Shell scripts stand in for it."""

from pathlib import Path

import pytest

import ahead
from dschat.base.errors import UserError


def stand_in(folder: Path, script: str) -> Path:
    """A program that is started in place of a Python with vLLM."""
    program = folder / "python"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return program


def test_a_server_that_ends_at_once_is_named_with_its_log(tmp_path: Path) -> None:
    program = stand_in(tmp_path, "echo no module named vllm >&2; exit 3")
    with (
        pytest.raises(UserError, match=r"ended with status 3[\s\S]*server\.log[\s\S]*no module named vllm"),
        ahead.start_server(program, tmp_path, tmp_path / "server.log"),
    ):
        pytest.fail("a server that has ended was used")


def test_a_server_that_never_answers_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "START_SECONDS", 0.5)
    program = stand_in(tmp_path, "echo loading; exec sleep 60")
    with (
        pytest.raises(UserError, match=r"did not answer within 0\.5 seconds[\s\S]*loading"),
        ahead.start_server(program, tmp_path, tmp_path / "server.log"),
    ):
        pytest.fail("a server that does not answer was used")


def test_a_server_that_ignores_sigterm_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The signal that a shell ignores is also ignored by the program that replaces it."""

    async def healthy(url: str) -> bool:
        return (tmp_path / "pid").exists()

    monkeypatch.setattr(ahead, "is_healthy", healthy)
    monkeypatch.setattr(ahead, "STOP_SECONDS", 0.2)
    pid_file = tmp_path / "pid"
    write_pid = f"echo $$ > {pid_file}.new; mv {pid_file}.new {pid_file}"
    program = stand_in(tmp_path, f"trap '' TERM; {write_pid}; exec sleep 60")
    with ahead.start_server(program, tmp_path, tmp_path / "server.log"):
        pid = int(pid_file.read_text())
    assert not Path(f"/proc/{pid}").exists()
