# SPDX-License-Identifier: Apache-2.0
"""The chat in a terminal."""

import os
import signal
import sys

import pytest

from cli_runs import environment, run_command
from demo_cases import make_session, save_endless, save_reward, save_taught
from dschat.cli import main
from dschat.demo.models import GrowingAnswer
from dschat.demo.terminal import chat_in_terminal

GREEDY = ("--temperature", 0, "--max_new_tokens", 30)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("terminal")
    save_taught(folder / "ends", " fine,\x1b[31m thanks")
    save_endless(folder / "endless")
    save_reward(folder / "reward")
    return folder


@pytest.fixture
def chat(monkeypatch, capsys):
    """Everything that is printed while these lines are typed."""

    def run(session, *lines):
        typed = iter(lines)

        def read(_):
            line = next(typed, None)
            if line is None:
                raise EOFError
            return line

        monkeypatch.setattr("builtins.input", read)
        chat_in_terminal(session)
        return capsys.readouterr().out.splitlines()

    return run


def test_a_chat_streams_goes_on_after_an_error_forgets_and_ends(chat, models):
    typed = ("how are you?", "", "no " * 600, "/clear", "/exit", "no")
    lines = chat(make_session(models / "ends", *GREEDY), *typed)
    assert lines[0].startswith(f"{models}/ends: 0.0") and "/exit" in lines[1]
    assert lines[2] == "fine,\\x1b[31m thanks" and lines[3].startswith("[") and lines[3].endswith("ended]")
    assert lines[4].startswith("error: the conversation has") and lines[5:] == ["New conversation."]


def test_a_whole_answer_that_differs_from_its_pieces_is_printed_again(chat, models, monkeypatch):
    session = make_session(models / "ends", *GREEDY)
    drafts = [[GrowingAnswer("half")], [GrowingAnswer("other", "ended")]]
    monkeypatch.setattr(session, "chat", lambda *_: iter(drafts))
    assert chat(session, "hm")[2:4] == ["half", "other"]


def test_ctrl_c_stops_the_answer_and_not_the_program(chat, models):
    session = make_session(models / "endless", "--temperature", 0, "--max_new_tokens", 4000)
    count = []

    def interrupt(*_):
        count.append(1)
        if len(count) == 20:
            os.kill(os.getpid(), signal.SIGINT)

    session.models[0].causal_lm.register_forward_hook(interrupt)
    lines = chat(session, "how are you?", "/clear")
    assert lines[-2:] == ["[stopped]", "New conversation."] and len(count) < 1000


def test_two_models_answer_one_after_the_other(chat, models):
    words = ("--other", models / "endless", "--reward_model", models / "reward")
    lines = chat(make_session(models / "ends", *GREEDY, *words), "how are you?")
    first, second = lines.index(f"[{models}/ends]"), lines.index(f"[{models}/endless]")
    assert lines[first + 1].startswith("fine,") and lines[second - 1].startswith("[score ")
    assert lines[-1].startswith("[score ")


def test_a_missing_gradio_is_named_with_its_extra(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "gradio", None)
    assert main(["demo", "chat", "--model", "m"]) == 2
    assert "demo chat needs Gradio" in caplog.text and "pip install 'ma-rlhf[ui]'" in caplog.text


@pytest.mark.slow
def test_it_works_in_pipes(models, tmp_path):
    command = [sys.executable, "-m", "dschat", "demo", "chat", "--terminal", "--model", models / "ends"]
    script = tmp_path / "in.txt"
    script.write_text("how are you?\n/exit\n")
    words = " ".join(map(str, [*command, "--temperature", 0, "--device", "cpu"]))
    done = run_command(["bash", "-o", "pipefail", "-c", f"{words} < {script} | cat"], **environment()).expect(0)
    assert done.stdout.splitlines()[2] == "fine,\\x1b[31m thanks" and "> " not in done.stdout
    assert "Loading weights" not in done.stderr
