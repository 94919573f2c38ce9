# SPDX-License-Identifier: Apache-2.0
"""The judge's scripts as processes: killed, interrupted, with a wrong key; and where the key goes."""

import signal
import sys
from pathlib import Path

import pytest

from cli_runs import message_of, read_jsonl, run_command
from dschat.cli import main
from dschat.judge.command import run_judge
from dschat.judge.options import JudgeOptions
from dschat.settings.parse import parse
from fake_judge import EVALUATION, WAIT, start, two_files, until

KEY = "sk-proj-Zq7x_0123456789-abcdefghij"
SCRIPT = EVALUATION / "gpt4-eval.py"
MANY_A = [f"good {number}" if number % 3 else f"fine {number}" for number in range(10)]
MANY_B = [f"good {number} good" if number % 4 == 0 else f"{number}" for number in range(10)]


def words(server, folder, *more, output="o.jsonl"):
    """The command on the files of `two_files`, which are made where they are missing."""
    a, b = (folder / "a.jsonl", folder / "b.jsonl") if (folder / "a.jsonl").exists() else two_files(folder)
    files = [SCRIPT, "--model_name_a", a, "--model_name_b", b, "--output", folder / output, "--dataset", "summarize"]
    return [str(word) for word in (sys.executable, *files, *server.words(), *more)]


@pytest.mark.parametrize("end", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_nothing_is_judged_twice_after_an_end_half_way(server, tmp_path, end):
    """The server answers seven of the twenty questions, and no more until the process is dead.

    After Ctrl-C it waits for the three answers on their way, here in vain.
    """
    two_files(tmp_path, MANY_A, MANY_B)
    server.answers_before_gate = 7
    process = start(words(server, tmp_path, "--concurrency", "3", "--timeout", "2"))
    partial = tmp_path / "o.jsonl.partial"
    cached = tmp_path / ".judge-cache"
    try:
        until(lambda: len(list(cached.rglob("*.json"))) == 7 and server.busy >= 3, process)
        process.send_signal(end)
        stderr = process.communicate(timeout=WAIT)[1]
    finally:
        process.kill()
    assert "Traceback" not in stderr
    if end == signal.SIGINT:
        assert process.returncode == 130
        assert stderr.splitlines()[-1].startswith("interrupted; what was finished is kept")
    assert not (tmp_path / "o.jsonl").exists()
    server.gate.set()
    server.answers_before_gate = None
    assert "13 requests" in run_judge(parse(JudgeOptions, words(server, tmp_path)[2:]))
    assert len(server.answered) == 20 and set(server.answered.values()) == {1}
    assert not partial.exists()
    server.answered.clear()
    run_judge(parse(JudgeOptions, words(server, tmp_path, "--cache", tmp_path / "new", output="whole.jsonl")[2:]))
    assert len(server.answered) == 20
    assert (tmp_path / "whole.jsonl").read_bytes() == (tmp_path / "o.jsonl").read_bytes()


def files_with(folder: Path, text: str) -> list[Path]:
    """Files under a folder with a text in their content or name."""
    found = [file for file in folder.rglob("*") if file.is_file()]
    assert found
    return [file for file in found if text.encode() in file.read_bytes() or text in str(file)]


def test_the_key_is_nowhere_but_in_the_header(server, tmp_path):
    """Even from a server that repeats it in errors and answers. First from --sk, then from the environment."""
    server.answer = lambda messages: f'{{"comparison": "you sent {KEY}", "verdict": "tie"}}'
    echo = {"error": {"message": f"{KEY} is busy", "code": KEY}}
    server.plan.extend([(500, echo, {}), (429, echo, {"Retry-After": "0"}), "ok", "ok", "ok", (400, echo, {})])
    server.plan.extend(["ok", "ok", (403, echo, {})])
    command = words(server, tmp_path, "--concurrency", "1")
    first = run_command([*command, "--sk", KEY], JUDGE_API_KEY=None, HOME=str(tmp_path))
    message_of(first, "does not allow")
    assert "better set JUDGE_API_KEY" in first.stderr
    assert files_with(tmp_path, KEY) == []  # the journal and the cache
    second = run_command(command, JUDGE_API_KEY=KEY, HOME=str(tmp_path)).expect(0)
    assert "better set" not in second.stderr
    assert (tmp_path / "o.jsonl").exists()
    assert files_with(tmp_path, KEY) == []
    assert KEY not in first.stdout + first.stderr + second.stdout + second.stderr
    assert "[key]" in read_jsonl(tmp_path / "o.jsonl")[0]["orders"][0]["reply"]
    assert set(server.keys) == {f"Bearer {KEY}"}


@pytest.mark.parametrize("words", [["--key", KEY], ["--seed", "hunter2"], [f"--overwrite={KEY}"]])
def test_a_key_at_a_wrong_place_is_not_repeated(words, capsys, caplog):
    flags = ["--model_name_a", "a", "--model_name_b", "b", "--output", "o"]
    with pytest.raises(SystemExit) as end:
        main(["judge", *flags, *words])
    printed = capsys.readouterr()
    said = printed.out + printed.err + caplog.text
    assert end.value.code == 2 and "error: " in said and KEY not in said and "hunter2" not in said


def test_the_webgpt_script_judges_by_no_other_rubric(tmp_path):
    """How it judges by its own is in tests/cli/test_commands.py."""
    refused = run_command([sys.executable, EVALUATION / "gpt4-webgpt-eval.py", "--rubric=own.toml"], cwd=tmp_path)
    assert refused.status != 0 and "--rubric" in refused.stderr and "gpt4-eval.py" in refused.stderr
