# SPDX-License-Identifier: Apache-2.0
"""The processes of a run on this machine: signals, the first failure, exit statuses, what is left behind."""

import os
import signal
import subprocess
import sys
import time
from threading import Timer
from types import SimpleNamespace

import psutil
import pytest

from dschat import ranks
from dschat.base import signals
from dschat.ranks import passing_on_signals, run_ranks

# A rank that notes the signals that it gets, takes some seconds to save, and ends as a stopped run does.
SAVES = """
trap 'echo TERM >> $NOTE; sleep $SECONDS_TO_SAVE; echo saved >> $NOTE; exit 143' TERM
touch $NOTE
while :; do sleep 0.05; done
"""


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr(ranks, "TERM_AFTER", 0.3)
    monkeypatch.setattr(ranks, "KILL_AFTER", 0.5)


def run(*scripts, first_rank=0):
    """The exit status of ranks, each of which is a script of a shell."""
    environments = [os.environ | {"SCRIPT": script} for script in scripts]
    with passing_on_signals() as signals:
        return run_ranks(["sh", "-c", 'eval "$SCRIPT"'], environments, signals, first_rank)


@pytest.mark.parametrize(
    ("scripts", "status"),
    [
        (["exit 0", "exit 0"], 0),
        (["exit 0", "sleep 0.2; exit 7"], 7),
        (["exit 143", "exit 143"], 143),  # ranks that a signal reached directly, as under Slurm
        (["kill -KILL $$"], 137),
    ],
)
def test_the_status(scripts, status):
    assert run(*scripts) == status


def test_the_first_failure_ends_the_others(capsys):
    begun = time.monotonic()
    assert run("exit 0", "exit 3", "exec sleep 60", first_rank=8) == 3
    assert time.monotonic() - begun < 20
    assert "rank 9 has ended with status 3; the others get SIGTERM" in capsys.readouterr().err


def test_a_rank_that_ignores_sigterm_is_killed(capsys):
    assert run("exit 3", "trap '' TERM; while :; do sleep 0.05; done") == 3
    assert "the others get SIGKILL" in capsys.readouterr().err


def test_a_rank_that_was_killed_is_named_even_if_the_others_end_by_themselves(capsys):
    assert run("kill -KILL $$", "sleep 0.2; exit 1") == 137
    assert "rank 0 was ended by SIGKILL" in capsys.readouterr().err


def test_a_failure_during_a_stop_is_the_status(tmp_path):
    """Status 143 would say that the run was saved."""
    fails = f"trap 'exit 2' TERM; touch {tmp_path}/there; while :; do sleep 0.05; done"
    Timer(1.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
    assert run(fails) == 2


def test_a_killed_rank_is_the_cause_of_failures_that_are_seen_with_it():
    """Rank 0 has noticed at once that rank 1 was killed; rank 2 has been stopped after its checkpoint."""
    ended = [SimpleNamespace(returncode=status) for status in (1, -signal.SIGKILL, 128 + signal.SIGTERM, None, 0)]
    assert ranks._first_failed(ended, None) == 1
    assert ranks._first_failed([ended[0], ended[2]], None) == 0
    assert ranks._first_failed(ended[2:], None) is None


@pytest.mark.parametrize("ranks_too", [False, True])
def test_a_save_is_never_cut(ranks_too, tmp_path, monkeypatch):
    """However long it takes, and also where a cluster sends the signal to every process, and again."""
    notes = [tmp_path / "0", tmp_path / "1"]
    environments = []
    for note, seconds in zip(notes, ("0.3", "2"), strict=True):  # the second one after the first has ended
        environments.append(os.environ | {"NOTE": str(note), "SECONDS_TO_SAVE": seconds})

    def stop():
        while not all(note.exists() for note in notes):
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)
        if ranks_too:
            for child in psutil.Process().children():
                if child.name() == "sh":
                    child.terminate()
            time.sleep(0.3)
            os.kill(os.getpid(), signal.SIGTERM)

    Timer(0, stop).start()
    with passing_on_signals() as signals:
        assert run_ranks(["sh", "-c", SAVES], environments, signals) == 143
    for note in notes:
        assert note.read_text().splitlines()[0] == "TERM" and "saved" in note.read_text()


def test_a_second_ctrl_c_ends_a_rank_that_does_not_notice_it(tmp_path, monkeypatch, capsys):
    """As one that waits for another inside of a library; the other has ended as a stopped run does."""
    monkeypatch.setattr(signals, "SAME_CTRL_C", 0.5)
    waits = f"trap '' INT; touch {tmp_path}/there; while :; do sleep 0.05; done"

    pauses = [0.0, 0.1, 1.5]  # seconds; the second Ctrl-C is the first one again

    def interrupt():
        while not (tmp_path / "there").exists():
            time.sleep(0.05)
        while pauses:
            time.sleep(pauses[0])
            os.kill(os.getpid(), signal.SIGINT)
            del pauses[0]

    Timer(0, interrupt).start()
    assert run("trap 'exit 130' INT; while :; do sleep 0.05; done", waits) == 130
    assert not pauses
    assert "Ctrl-C; the others get SIGTERM" in capsys.readouterr().err


def test_a_signal_before_the_ranks_have_set_their_handlers():
    assert run(f"kill -TERM {os.getpid()}; exec sleep 60", "exec sleep 60") == 143


def test_the_latest_signal_is_kept_until_there_are_ranks():
    command = ["sh", "-c", "trap 'exit 8' TERM; trap 'exit 7' INT; echo ready; while :; do sleep 0.05; done"]
    with passing_on_signals() as signals:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        rank = subprocess.Popen(command, process_group=0, stdout=subprocess.PIPE)
        assert rank.stdout.readline() == b"ready\n"
        signals.pass_to([rank])
        assert rank.wait(30) == 7 and signals.last == signal.SIGINT


@pytest.mark.parametrize("how", ["", "trap '' TERM; "])
def test_what_ranks_leave_behind_is_ended(how, monkeypatch, capsys):
    """At SIGTERM, or by SIGKILL where it takes no notice; the rank's status counts."""
    monkeypatch.setattr(ranks, "STRAYS_TERM_AFTER", 0.3)
    monkeypatch.setattr(ranks, "STRAYS_KILL_AFTER", 0.5)
    begun = time.monotonic()
    assert run(f'sh -c "{how}while :; do sleep 0.1; done" & exit 7') == 7
    assert time.monotonic() - begun < 20
    said = capsys.readouterr().err
    assert "the ranks have ended, but not their processes" in said and "they get SIGTERM" in said
    assert ("they get SIGKILL" in said) == bool(how)


def test_a_strangers_group_of_the_same_number_is_left_alone(monkeypatch, capsys):
    """The number of a rank that has ended may be used again."""
    monkeypatch.setattr(ranks, "STRAYS_TERM_AFTER", 0.3)
    stranger = subprocess.Popen(["sleep", "60"], start_new_session=True)
    ranks._end_strays([stranger.pid])
    assert stranger.poll() is None and not capsys.readouterr().err
    stranger.kill()
    stranger.wait()


def test_a_file_of_each_ranks_output(tmp_path, capfd):
    """Both streams, with what a process that outlives its rank writes; also on the terminal. Nothing is lost."""
    (tmp_path / "rank-4.log").write_text("earlier\n")
    scripts = ["echo out; echo err >&2; (sleep 0.3; echo late) &", "echo other"]
    environments = [os.environ | {"SCRIPT": script} for script in scripts]
    with passing_on_signals() as signals:
        assert run_ranks(["sh", "-c", 'eval "$SCRIPT"'], environments, signals, 4, tmp_path) == 0
    assert (tmp_path / "rank-4.log").read_text() == "earlier\nout\nerr\nlate\n"
    assert (tmp_path / "rank-5.log").read_text() == "other\n"
    assert sorted(capfd.readouterr().err.split()) == ["err", "late", "other", "out"]


def test_a_terminals_signals_do_not_reach_ranks_by_themselves():
    """Each has a process group of its own."""
    group = [sys.executable, "-c", "import os, sys; sys.exit(os.getpgid(0) != os.getpid())"]
    with passing_on_signals() as signals:
        assert run_ranks(group, [dict(os.environ)] * 2, signals) == 0


STARTS_TWO = """
import os, sys
from dschat.ranks import passing_on_signals, run_ranks
with passing_on_signals() as signals:
    environments = [os.environ | {"NOTE": note} for note in sys.argv[1:]]
    run_ranks(["sh", "-c", "touch $NOTE; cat; touch $NOTE.ended"], environments, signals)
"""


def test_the_input_of_ranks_ends_with_what_started_them(tmp_path):
    """Although it had no time to say anything."""
    notes = [tmp_path / "0", tmp_path / "1"]
    starter = subprocess.Popen([sys.executable, "-c", STARTS_TWO, *map(str, notes)])
    wait_for(notes)
    time.sleep(0.2)
    ended = [tmp_path / "0.ended", tmp_path / "1.ended"]
    assert not any(note.exists() for note in ended)
    starter.kill()
    starter.wait()
    wait_for(ended)


def wait_for(files):
    end = time.monotonic() + 30
    while not all(file.exists() for file in files):
        assert time.monotonic() < end
        time.sleep(0.05)
