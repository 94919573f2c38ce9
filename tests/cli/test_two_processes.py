# SPDX-License-Identifier: Apache-2.0
"""A run of two processes checks how gradients are reduced; test_equivalence.py has what such runs train."""

from cli_runs import arguments
from launches import run_ranks
from reduction_cases import halve_reduced_gradients


def test_a_run_checks_how_its_gradients_are_reduced(inputs, sft_flags, tmp_path):
    """By default; the check reads half of every gradient here."""
    flags = sft_flags | {"per_device_train_batch_size": 4, "output_dir": tmp_path / "out", "dtype": "fp32"}
    first, second = run_ranks("sft", arguments(flags), tmp_path / "printed", first=halve_reduced_gradients)
    assert "self-check: before the first update, DeepSpeed" in first.expect(2).stderr
    assert "than the 2 processes computed together" in first.stderr and "Traceback" not in first.stderr
    second.expect(2)
