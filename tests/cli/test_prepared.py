# SPDX-License-Identifier: Apache-2.0
"""The mains on published sets, a prepared folder and the cache: there the losses of the source itself, bit for bit."""

import json
from pathlib import Path

import pytest

from cli_runs import run_forked, training_rows
from data_cases import look_at_data as main
from published_set_copies import write_all

KEEP_ALL = ["--minimum_response_length", "0", "--validation_percentage", "0"]


def prepare(source: Path, model: Path, folder: Path, *flags: str) -> Path:
    assert main(["prepare", str(source), "--output", str(folder), "--tokenizer", str(model), *KEEP_ALL, *flags]) == 0
    return folder


def run_cached(step, flags, tmp_path):
    """What a main says."""
    return run_forked(step, flags, tmp_path / "printed").expect(0).stderr


def test_step_1(run, sft, sft_flags, tmp_path):
    """As from the source."""
    source, model = sft_flags["data_path"], sft_flags["model_name_or_path"]
    folder = prepare(source, model, tmp_path / "prepared", "--data_split", "1,0,0")
    result = run("sft", sft_flags | {"data_path": folder, "output_dir": tmp_path / "from_folder"}).expect(0)
    assert "prepared and holds its own splits: --data_split does not cut it" in result.stderr
    losses = [[row["loss/sft"] for row in training_rows(folder)] for folder in (sft, tmp_path / "from_folder")]
    assert losses[0] == losses[1] and len(losses[0]) == 4


def test_a_second_run_reads_the_cache(sft, sft_flags, tmp_path, monkeypatch):
    monkeypatch.setenv("MA_RLHF_CACHE", str(tmp_path / "cache"))
    for name, told in (("first", "are kept for the next run"), ("second", "of an earlier run are used")):
        assert told in run_cached("sft", sft_flags | {"output_dir": tmp_path / name}, tmp_path)
    folders = [sft, tmp_path / "first", tmp_path / "second"]
    losses = [[row["loss/sft"] for row in training_rows(folder)] for folder in folders]
    assert losses[0] == losses[1] == losses[2]


@pytest.mark.slow
def test_step_3(run, ppo_flags, sft, tmp_path):
    """Prompts of a folder of pairs, and from the cache: the same rollouts, with the rows' columns."""
    flags = ppo_flags | {"data_split": "0,1,1"}
    source = flags["data_path"]
    folder = prepare(source, sft, tmp_path / "prepared", "--stage", "preference", "--data_split", "1,1")
    flags |= {"per_device_eval_batch_size": 4} if "per_device_eval_batch_size" in flags else {}
    run("ppo", flags | {"data_path": folder, "output_dir": tmp_path / "folder"}).expect(0)
    run("ppo", flags | {"output_dir": tmp_path / "plain"}).expect(0)
    run_cached("ppo", flags | {"output_dir": tmp_path / "cached"}, tmp_path)
    plain, cached = (training_rows(tmp_path / name) for name in ("plain", "cached"))
    assert [row["objective/scores"] for row in plain] == [row["objective/scores"] for row in cached]
    assert len(training_rows(tmp_path / "folder")) > 0


def test_step_1_on_four_sets_at_once(run, sft_flags, tmp_path, monkeypatch):
    monkeypatch.setenv("MA_RLHF_DATA", str(tmp_path / "copies"))
    write_all(tmp_path / "copies", rows=20, eval_rows=6)
    names = ["openai/summarize_from_feedback", "hh-rlhf", "webgpt", "apps"]
    flags = sft_flags | {"data_path": names, "max_seq_len": 400}
    run("sft", flags).expect(0)
    data = json.loads((tmp_path / "out" / "run.json").read_text())["data"]
    assert [(source["name"], source["train"], source["eval"]) for source in data["sources"]] == [
        ("tldr", 20, 6),
        ("hh", 20, 6),
        ("webgpt", 19, 1),
        ("apps", 20, 6),
    ]
    # rows 1 and 4 of both files of apps
    assert data["dropped"] == {"train": {"no reference solution": 2}, "eval": {"no reference solution": 2}}
    assert len(data["sha256"]) == 7 and "hub" not in data["sources"][0]
