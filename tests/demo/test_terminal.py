# SPDX-License-Identifier: Apache-2.0
"""The chat in a terminal."""

import os
import shutil
import signal
import sys

import pytest

from cli_runs import environment, message_of, run_command
from demo_cases import as_run, make_session, save_endless, save_reward, save_taught
from dschat.base.errors import UserError
from dschat.cli import main
from dschat.demo.session import ShownAnswer
from dschat.demo.terminal import TerminalChat


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run whose last model ends its answers, and one before that does not."""
    run = as_run(tmp_path_factory.mktemp("terminal") / "run")
    save_taught(run, " fine,\x1b[31m thanks")
    save_endless(run / "models" / "step-5")
    save_reward(run / "critic")
    return run


def chat(session, lines, place, write=None):
    """Everything that is written while these lines are typed."""
    lines, written = iter(lines), []

    def ask():
        line = next(lines, None)
        if line is None:
            raise EOFError
        if line is KeyboardInterrupt:
            raise KeyboardInterrupt
        return line

    def note(text):
        written.append(text)
        if write is not None:
            write(text)

    TerminalChat(session, ask, note, False, str(place)).run()
    return "".join(written)


def test_a_chat_streams_forgets_loads_and_ends(run):
    session = make_session(run, temperature=0.0, max_new_tokens=30)
    output = chat(session, ["how are you?", "", "/load", "/load models/step-5", "hm", "/clear", "/exit", "no"], run)
    lines = output.splitlines()
    assert lines[0].startswith(f"Loaded {run}:") and "/exit ends" in lines[1]
    assert lines[2] == "fine,\\x1b[31m thanks" and lines[3].startswith("[") and "ended]" in lines[3]
    assert lines[4:6] == ["final model", "models/step-5"] and lines[6].startswith(f"Loaded {run}/models/step-5:")
    assert "30 tokens" in lines[-2] and lines[-1] == "New conversation."


def test_a_model_of_another_run_is_loaded_by_its_path(run, tmp_path):
    other = shutil.copytree(run, tmp_path / "other")
    output = chat(make_session(run), [f"/load {other}/models/step-5", "/exit"], run)
    assert f"Loaded {other}/models/step-5:" in output


def test_mistakes_are_said_and_the_chat_goes_on(run):
    session = make_session(run, temperature=0.0, max_new_tokens=30)
    output = chat(
        session, ["/load nowhere/at/all", "/what\x1b", KeyboardInterrupt, "/load critic", "how are you?"], run
    )
    assert "error: nowhere/at/all: no such folder" in output and "There is no command /what\\x1b." in output
    assert "/exit ends the chat." in output and "error: critic: no such folder" in output
    assert "fine," in output.splitlines()[-2]


def test_after_an_answer_that_fails_half_way_the_next_one_is_written(run, monkeypatch):
    session = make_session(run, temperature=0.0, max_new_tokens=30)
    answer, failing = session.answer, ["half", ""]

    def answer_or_fail(*arguments):
        if not failing:
            yield from answer(*arguments)
            return
        yield [ShownAnswer(failing.pop(0))]
        raise UserError("it broke.")

    monkeypatch.setattr(session, "answer", answer_or_fail)
    lines = chat(session, ["how are you?"] * 3, run).splitlines()
    assert lines[2:5] == ["half", "error: it broke.", "error: it broke."] and lines[5].startswith("fine,")


def test_ctrl_c_stops_the_answer_and_not_the_program(run):
    session = make_session(run / "models" / "step-5", temperature=0.0, max_new_tokens=4000)
    interrupted = []

    def write(text):
        if "tokens" not in text and "Loaded" not in text and len(text) < 12 and not interrupted:
            interrupted.append(text)
            os.kill(os.getpid(), signal.SIGINT)

    output = chat(session, ["how are you?", "/clear"], run, write)
    assert interrupted and "· stopped]" in output and output.endswith("New conversation.\n")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_two_models_answer_one_after_the_other(run):
    session = make_session(
        run, other=str(run / "models" / "step-5"), reward_model=str(run / "critic"), temperature=0.0, max_new_tokens=6
    )
    lines = chat(session, ["how are you?"], run).splitlines()
    first, second = lines.index("[model]"), lines.index("[other]")
    assert lines[first + 1].startswith("fine,") and lines[first + 2].count("|") == 2  # 6 tokens, 3 in each
    assert lines[second - 1].startswith("[score ") and lines[-1].startswith("[score ")


def command(*words):
    return [sys.executable, "-m", "dschat", "demo", *map(str, words)]


def test_a_missing_gradio_is_named_with_its_extra(monkeypatch, caplog):
    """As a process: `evaluation/human-eval.py --web`, tests/evaluation/vote."""
    monkeypatch.setitem(sys.modules, "gradio", None)
    assert main(["demo", "chat"]) == 2
    assert "demo chat needs Gradio" in caplog.text and "pip install 'ma-rlhf[ui]'" in caplog.text


@pytest.mark.slow
def test_it_works_in_pipes(run, tmp_path):
    words = command("chat", "--model", run, "--terminal", "--temperature", 0, "--device", "cpu")
    script = tmp_path / "in.txt"
    script.write_text("how are you?\n/exit\n")
    shell = f"{' '.join(words)} < {script} | cat"
    done = run_command(["bash", "-o", "pipefail", "-c", shell], **environment()).expect(0)
    assert done.stdout.splitlines()[2] == "fine,\\x1b[31m thanks" and "> " not in done.stdout
    assert "Loading weights" not in done.stderr
    message_of(run_command(command("chat", "--model", tmp_path / "away", "--terminal")), "away: no such folder")
    shutil.copytree(run / "critic", tmp_path / "reward")
    message_of(run_command(command("chat", "--model", tmp_path / "reward", "--terminal")), "reward model or critic")
