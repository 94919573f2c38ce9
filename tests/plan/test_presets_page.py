# SPDX-License-Identifier: Apache-2.0
"""The memory of every preset in docs/presets.md is what `dschat.plan` says of the scripts, and fits."""

import re
from pathlib import Path

import pytest

from dschat.plan.command import plan_step
from dschat.plan.options import PlanOptions, step_name
from dschat.plan.phases import GB
from script_runs import SCRIPTS

DOCS = Path(__file__).resolve().parents[2] / "docs"
ROW = re.compile(r"^\| (`\w+`.*?) \| ([123, ]+) \| (\d.+?) \|", re.MULTILINE)


def rows() -> dict[str, tuple[list[int], str]]:
    """Script → its steps and what its row says of memory."""
    found = {}
    for scripts, steps, memory in ROW.findall((DOCS / "presets.md").read_text(encoding="utf-8")):
        for name in re.findall(r"`(\w+)`", scripts):
            found[name] = [int(step) for step in steps.split(",")], memory
    return found


def test_every_published_script_has_a_row():
    variants = ("run_gemma", "_vanilla", "_randomized", "_ppl", "_parsing", "_rloo", "_70b", "llama3", "llama_3")
    variants += ("_grpo", "_gspo", "_vapo", "_segments", "gsm8k", "pythia", "as_released")  # docs/published-runs.md
    names = {script.stem for script in SCRIPTS if not any(part in script.stem for part in variants)}
    assert set(rows()) == names


@pytest.mark.xdist_group("presets")  # one process finds each model's activations once
@pytest.mark.parametrize(
    "name",
    [name if "tldr_gemma_2b" in name else pytest.param(name, marks=pytest.mark.slow) for name in sorted(rows())],
)
def test_the_column(name):
    """GB of a GPU by step, the ZeRO stages, and the TB of main memory where states are offloaded."""
    steps, memory = rows()[name]
    plans = {step: plan_step(step_name(str(step)), PlanOptions(), file=name).plan for step in steps}
    assert all(plan.fits for plan in plans.values())
    peaks = " / ".join(f"{plan.peak / GB:.0f}" for plan in plans.values())
    assert memory.startswith(f"{peaks} GB, ZeRO {plans[1].config.engine.zero_stage}")
    last = max(steps)
    differs = plans[last].config.engine.zero_stage != plans[1].config.engine.zero_stage
    assert (f"in step {last} ZeRO {plans[last].config.engine.zero_stage}" in memory) == differs
    offloaded = re.search(r"main memory: ([\d.]+) / ([\d.]+) / ([\d.]+) TB", memory)
    assert (offloaded is not None) == plans[1].config.engine.offload
    if offloaded:
        assert list(offloaded.groups()) == [f"{plan.main_memory / 1e12:.1f}" for plan in plans.values()]
