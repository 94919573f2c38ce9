# SPDX-License-Identifier: Apache-2.0
"""The flags that change what steps 1 and 2 do, and those of all steps: forked, a few updates each."""

import json

from cli_runs import training_rows
from closeness import UPDATE, near


def test_accumulation_and_checkpointing_change_nothing(sft, sft_flags, run, tmp_path):
    """The other losses: tests/training, and test_equivalence.py."""
    plain = training_rows(sft)
    changed = {"per_device_train_batch_size": 2, "global_batch_size": 8, "gradient_checkpointing": True}
    run("sft", sft_flags | changed).expect(0)
    rows = training_rows(tmp_path / "out")
    assert len(rows) == len(plain) == 4
    for row, other in zip(rows, plain, strict=True):
        assert row["samples"] == other["samples"] and row["lr"] == other["lr"]
        for key in ("loss/sft", "grad_norm"):
            assert row[key] == near(other[key], 16 * UPDATE, scale=0), key
    batches = json.loads((tmp_path / "out" / "run.json").read_text())["batches"]
    assert (batches["micro_batch"], batches["accumulation"], batches["global_batch"]) == (2, 4, 8)
