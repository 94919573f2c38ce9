# SPDX-License-Identifier: Apache-2.0
"""Two processes make the updates of one; mutants need it. tests/distributed looks at every ZeRO stage."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from closeness import UPDATE, WEIGHT_GAP, near
from factories import largest_difference
from launches import WORKERS, run_ranks
from recorded import Case, run_case

CASE = Case(0, 1)


@pytest.mark.slow
@pytest.mark.xdist_group("launcher")
def test_two_processes_make_the_updates_of_one(group: None, tmp_path: Path) -> None:
    """All three steps: weights within 1e-5 after each update, and the same losses and gradient norms."""
    (tmp_path / "cases.json").write_text(json.dumps([vars(CASE)]))
    for rank in run_ranks(WORKERS, [str(tmp_path), "updates"], tmp_path):
        rank.expect(0)
    expected, metrics = run_case(Case(), tmp_path / "alone")
    assert largest_difference(load_file(tmp_path / f"updates-{CASE.name}-0.safetensors"), expected) < WEIGHT_GAP
    for rank in (0, 1):
        found = json.loads((tmp_path / f"updates-{CASE.name}-{rank}.json").read_text())
        assert {name: found[name] for name in metrics} == near(metrics, UPDATE, scale=0.1)
