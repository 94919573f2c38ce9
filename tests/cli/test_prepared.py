# SPDX-License-Identifier: Apache-2.0
"""The mains on published sets, a prepared folder and the cache: there the losses of the source itself, bit for bit."""

from pathlib import Path

from cli_runs import run_forked, training_rows
from data_cases import look_at_data as main

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
