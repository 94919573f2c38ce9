# SPDX-License-Identifier: Apache-2.0
"""The mains on published sets, a prepared folder and the cache: there the losses of the source itself, bit for bit."""

from cli_runs import run_forked, training_rows


def run_cached(step, flags, tmp_path):
    """What a main says."""
    return run_forked(step, flags, tmp_path / "printed").expect(0).stderr


def test_a_second_run_reads_the_cache(sft, sft_flags, tmp_path, monkeypatch):
    monkeypatch.setenv("MA_RLHF_CACHE", str(tmp_path / "cache"))
    for name, told in (("first", "are kept for the next run"), ("second", "of an earlier run are used")):
        assert told in run_cached("sft", sft_flags | {"output_dir": tmp_path / name}, tmp_path)
    folders = [sft, tmp_path / "first", tmp_path / "second"]
    losses = [[row["loss/sft"] for row in training_rows(folder)] for folder in folders]
    assert losses[0] == losses[1] == losses[2]
