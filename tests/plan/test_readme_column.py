# SPDX-License-Identifier: Apache-2.0
"""The memory of every preset in the README is what `dschat.plan` says of the scripts, and fits."""

import re
from pathlib import Path

import pytest

from dschat.plan.__main__ import plan_preset
from dschat.plan.machine import GB, Machine
from dschat.plan.presets import find_presets
from script_runs import SCRIPTS, VARIABLES

README = Path(__file__).resolve().parents[2] / "README.md"
ROW = re.compile(r"^\| (`\w+\.sh`.*?) \| ([\d, ]+) \| (.+?) \|", re.MULTILINE)


def rows() -> dict[str, tuple[list[int], str]]:
    """Script → its steps and what its row says of memory."""
    found = {}
    for scripts, steps, memory in ROW.findall(README.read_text(encoding="utf-8")):
        for name in re.findall(r"`(\w+)\.sh`", scripts):
            found[name] = [int(step) for step in steps.split(",")], memory
    return found


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch, tmp_path):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)


def test_every_published_script_has_a_row():
    variants = ("run_gemma", "_vanilla", "_randomized", "_ppl", "_parsing", "_rloo")
    names = {script.stem for script in SCRIPTS if not any(part in script.stem for part in variants)}
    assert set(rows()) == names


@pytest.mark.xdist_group("presets")  # one process finds each model's activations once
@pytest.mark.parametrize("name", sorted(rows()))
def test_the_column(name):
    """GB of a GPU by step, the ZeRO stages, and the TB of main memory where states are offloaded."""
    steps, memory = rows()[name]
    plans = {step: plan_preset(find_presets(name, step)[0], Machine(8, 80 * GB)).plan for step in steps}
    assert all(plan.fits for plan in plans.values())
    peaks = " / ".join(f"{plan.peak / GB:.0f}" for plan in plans.values())
    assert memory.startswith(f"{peaks} GB, ZeRO {plans[1].config.zero_stage}")
    last = max(steps)
    differs = plans[last].config.zero_stage != plans[1].config.zero_stage
    assert (f"in step {last} ZeRO {plans[last].config.zero_stage}" in memory) == differs
    offloaded = re.search(r"main memory: ([\d.]+) / ([\d.]+) / ([\d.]+) TB", memory)
    assert (offloaded is not None) == plans[1].config.offload
    if offloaded:
        assert list(offloaded.groups()) == [f"{plan.main_memory / 1e12:.1f}" for plan in plans.values()]
