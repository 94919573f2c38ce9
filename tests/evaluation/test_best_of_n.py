# SPDX-License-Identifier: Apache-2.0
"""The sweep over numbers of responses and temperatures: what it draws, and what a kill leaves."""

import json
from statistics import fmean

import pytest

from cli_runs import read_jsonl
from closeness import near
from dschat.evaluation import prompts
from dschat.evaluation.generate import run_best_of_n, run_inference
from dschat.evaluation.generate_options import BestOfOptions
from dschat.settings.parse import parse as parse_flags

SHORT = {"best_of": (2, 3), "temperatures": (0.5, 1.2), "single_temperatures": (0.0, 0.5), "num_samples": 7}


@pytest.fixture
def sweep(plain, monkeypatch):
    """sweep(**changes): options of a short sweep; its curves are drawn in test_best_of.py."""
    monkeypatch.setattr("dschat.evaluation.best_of.draw_best_of", lambda means: b"curves")
    return lambda **changes: BestOfOptions(**(plain | SHORT | changes))


def files_of(path):
    """name → bytes of everything in the folder of a result."""
    return {file.name: file.read_bytes() for file in path.parent.iterdir()}


def test_defaults_are_the_papers():
    words = ["--proj_path", "P", "--dataset", "summarize", "--model", "M", "--reward_model", "R"]
    parsed = parse_flags(BestOfOptions, words)
    assert list(parsed.sweep.best_of) == [4, 8, 16, 32]
    assert list(parsed.sweep.temperatures) == [0.2, 0.4, 0.6, 0.8, 1.0, 1.2]
    assert list(parsed.sweep.single_temperatures) == [0, 0.2, 0.4, 0.6, 0.8, 1.0]
    assert parsed.sweep.responses_per_prompt == {0: 1} | dict.fromkeys((0.2, 0.4, 0.6, 0.8, 1.0, 1.2), 32)


def test_draws_are_those_of_single_runs(sweep, options, interrupt):
    """The responses at a temperature are those that inference with --num_return draws; more begin with the same."""
    opened = interrupt(prompts, "load_policy")
    chosen = sweep(num_samples=5)
    table = run_best_of_n(chosen)
    assert len(opened) == 1
    path = chosen.result_path
    assert path.parts[-3:] == ("summarize", "best-of-n", "run.jsonl")
    assert sorted(files_of(path)) == ["run.json", "run.jsonl", "run.md", "run.png"]
    rows = read_jsonl(path)
    by_temperature = {t: [row for row in rows if row["temperature"] == t] for t in (0.0, 0.5, 1.2)}
    assert [row["temperature"] for row in rows] == [0.0] * 5 + [0.5] * 5 + [1.2] * 5
    for temperature, draws in ((0.5, 3), (1.2, 2)):
        alone = options(temperature=str(temperature), num_return=draws, num_samples=5, overwrite=True)
        run_inference(alone)
        for row, single in zip(by_temperature[temperature], read_jsonl(alone.result_path), strict=True):
            assert list(row) == ["prompt", "temperature", "responses", "rewards", "finished", "scorer"]
            assert row["prompt"] == single["prompt"]
            rewards = row["rewards"][:draws]
            assert rewards == near(single["rewards"])
            best = rewards.index(max(rewards))
            assert row["responses"][best] == single["response"] and row["finished"][best] == single["finished"]
    assert all(len(row["rewards"]) == (3 if row["temperature"] else 1) for row in rows)
    written = json.loads(path.with_name("run.json").read_text())["rows"]
    (of_two,) = [row for row in written if (row["temperature"], row["n"]) == (1.2, 2)]
    assert of_two["first"]["value"] == pytest.approx(fmean(max(row["rewards"][:2]) for row in by_temperature[1.2]))
    assert f"{of_two['first']['value']:.3f} [" in table
