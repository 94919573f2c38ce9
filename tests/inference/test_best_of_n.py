# SPDX-License-Identifier: Apache-2.0
"""The sweep over numbers of responses and temperatures: what it draws, and what a kill leaves."""

import json
import signal
import subprocess
import sys
import time
from statistics import fmean

import pytest

from cli_runs import ROOT, TIMEOUT, environment, message_of, read_jsonl, run_command
from closeness import near
from dschat.errors import UserError
from dschat.inference import best_of_n as module
from dschat.inference.best_of_n import run_best_of_n
from dschat.inference.options import BestOfOptions, parse_flags
from dschat.inference.run import run_inference

SCRIPT = "inference/best_of_n.py"
SHORT = {"best_of": (2, 3), "temperatures": (0.5, 1.2), "single_temperatures": (0.0, 0.5), "num_samples": 7}


@pytest.fixture
def sweep(options):
    """sweep(**changes): options of a short sweep."""

    def make(**changes):
        plain = options()
        names = ("proj_path", "dataset", "model", "reward_model", "max_new_tokens", "device")
        return BestOfOptions(**({name: getattr(plain, name) for name in names} | SHORT | changes))

    return make


def files_of(path):
    """name → bytes of everything in the folder of a result."""
    return {file.name: file.read_bytes() for file in path.parent.iterdir()}


def test_defaults_are_the_papers():
    words = ["--proj-path", "P", "--dataset", "summarize", "--model", "M", "--reward-model", "R"]
    parsed = parse_flags(BestOfOptions, words, "about")
    assert list(parsed.best_of) == [4, 8, 16, 32]
    assert list(parsed.temperatures) == [0.2, 0.4, 0.6, 0.8, 1.0, 1.2]
    assert list(parsed.single_temperatures) == [0, 0.2, 0.4, 0.6, 0.8, 1.0]
    assert parsed.draws == {0: 1} | dict.fromkeys((0.2, 0.4, 0.6, 0.8, 1.0, 1.2), 32)
    given = ["--best_of", "2", "5", "--temperatures", "1", "--single-temperatures"]
    parsed = parse_flags(BestOfOptions, [*words, *given], "about")
    assert (list(parsed.best_of), parsed.draws) == ([2, 5], {1.0: 5})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"best_of": (0, 4)}, "--best-of 0: must be at least 1"),
        ({"best_of": (4, 4)}, "--best-of 4 4: give each number once, the smallest first"),
        ({"best_of": (8, 4)}, "--best-of 8 4: give each number once, the smallest first"),
        ({"temperatures": (0.4, 0.2)}, "--temperatures 0.4 0.2: give each number once"),
        ({"single_temperatures": (0.4, 0.4)}, "--single-temperatures 0.4 0.4: give each number once"),
        ({"temperatures": (-1.0,)}, "--temperatures -1: must be 0 .greedy. or a positive number"),
        ({"single_temperatures": (float("nan"),)}, "--single-temperatures nan: must be 0 .greedy. or a positive"),
        ({"temperatures": (0.0, 1.0)}, "--temperatures 0: .*--best-of 3.*--single-temperatures"),
        ({"temperatures": (), "single_temperatures": ()}, "--temperatures and --single-temperatures: give at least"),
        ({"dataset": "c4"}, "--dataset c4"),
    ],
)
def test_senseless_flags_are_refused(changes, message, sweep):
    with pytest.raises(UserError, match=message):
        sweep(**changes)


def test_greedy_is_allowed_where_nothing_is_chosen(sweep):
    assert sweep(best_of=(1,), temperatures=(0.0, 1.0)).draws == {0.0: 1, 0.5: 1, 1.0: 1}


def test_draws_are_those_of_single_runs(sweep, options):
    """The responses at a temperature are those that inference with --num-return draws; more begin with the same."""
    chosen = sweep(num_samples=5)
    table = run_best_of_n(chosen)
    path = chosen.result_path
    assert path.parts[-3:] == ("summarize", "best-of-n", "run.jsonl")
    assert sorted(files_of(path)) == ["run.json", "run.jsonl", "run.md", "run.png"]
    rows = read_jsonl(path)
    by_temperature = {t: [row for row in rows if row["temperature"] == t] for t in (0.0, 0.5, 1.2)}
    assert [row["temperature"] for row in rows] == [0.0] * 5 + [0.5] * 5 + [1.2] * 5
    for temperature, draws in ((0.0, 1), (0.5, 3), (1.2, 2)):
        alone = options(temperature=str(temperature), num_return=draws, num_samples=5, overwrite=True)
        run_inference(alone)
        for row, single in zip(by_temperature[temperature], read_jsonl(alone.result_path), strict=True):
            assert list(row) == ["prompt", "temperature", "responses", "rewards", "finished"]
            assert row["prompt"] == single["prompt"]
            rewards = row["rewards"][:draws]
            assert rewards == near(single.get("rewards", [single["reward"]]))
            best = rewards.index(max(rewards))
            assert row["responses"][best] == single["response"] and row["finished"][best] == single["finished"]
    assert all(len(row["rewards"]) == (3 if row["temperature"] else 1) for row in rows)
    written = json.loads(path.with_name("run.json").read_text())["rows"]
    (of_two,) = [row for row in written if (row["temperature"], row["n"]) == (1.2, 2)]
    assert of_two["first"]["value"] == pytest.approx(fmean(max(row["rewards"][:2]) for row in by_temperature[1.2]))
    assert f"{of_two['first']['value']:.3f} [" in table


def test_models_are_opened_once_and_not_for_a_finished_sweep(sweep, monkeypatch):
    opened = []
    original = module.open_models
    monkeypatch.setattr(module, "open_models", lambda *given, **named: opened.append(1) or original(*given, **named))
    chosen = sweep(num_samples=2)
    run_best_of_n(chosen)
    assert len(opened) == 1
    with pytest.raises(UserError, match="run.jsonl exists, finished"):
        run_best_of_n(chosen)
    before = files_of(chosen.result_path)

    def fails(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(module, "write_best_of", fails)
        run_best_of_n(sweep(num_samples=2, overwrite=True))
    assert len(opened) == 2
    run_best_of_n(sweep(num_samples=2, overwrite=True))
    assert len(opened) == 2, "everything had been drawn; only table and curves were missing"
    assert files_of(chosen.result_path) == before


def test_killed_between_two_temperatures_and_started_again_gives_the_same_files(project, sweep, tmp_path):
    flags = {"dataset": "hh-rlhf", "max_new_tokens": 16, "batch_size": 2, "num_samples": 8, "name": "killed"}
    uninterrupted = sweep(**flags)
    run_best_of_n(uninterrupted)
    whole = files_of(uninterrupted.result_path)
    again = sweep(proj_path=tmp_path / "killed", **flags)
    words = [f"--{name}={value}" for name, value in flags.items()]
    words += [f"--proj-path={again.proj_path}", f"--model={project / 'run'}", f"--reward-model={project / 'rm'}"]
    words += [
        "--device=cpu",
        "--best-of",
        "2",
        "3",
        "--temperatures",
        "0.5",
        "1.2",
        "--single-temperatures",
        "0",
        "0.5",
    ]
    partial = again.result_path.with_name("killed.jsonl.partial")
    command, given = [sys.executable, SCRIPT, *words], environment(MA_RLHF_DATA=str(project / "data"))
    process = subprocess.Popen(command, cwd=ROOT, env=given, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + TIMEOUT
        while not (partial.exists() and partial.read_bytes().count(b"\n") > 11):  # settings, 8 rows at 0, 2 at 0.5
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    assert 11 < partial.read_bytes().count(b"\n") < 25
    with pytest.raises(UserError, match="was begun with --best-of .2, 3., now it is .2, 4."):
        run_best_of_n(sweep(proj_path=again.proj_path, **flags | {"best_of": (2, 4)}))
    done = subprocess.run(command, cwd=ROOT, env=given, capture_output=True, text=True, timeout=TIMEOUT)
    assert done.returncode == 0, done.stderr
    assert "| killed " in done.stdout and "N = 3" in done.stdout and "8 prompts: " in done.stdout
    assert files_of(again.result_path) == whole


def test_bad_flags_of_the_script(tmp_path):
    words = ["--proj_path", tmp_path, "--dataset", "summarize", "--model", "m", "--reward_model", "r"]
    message_of(
        run_command([sys.executable, SCRIPT, *words, "--best-of", 0], cwd=ROOT), "--best-of 0: must be at least 1"
    )
