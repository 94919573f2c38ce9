# SPDX-License-Identifier: Apache-2.0
"""The memory of every preset in docs/presets.md is what `dschat.plan` says of the scripts, and fits."""

import re
from pathlib import Path

import pytest
from transformers import LlamaConfig

from dschat.plan.command import plan_step
from dschat.plan.options import PlanOptions, step_name
from dschat.plan.phases import GB, Machine
from dschat.plan.plan import make_plan
from dschat.settings.ppo import PPOConfig
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


@pytest.mark.slow
def test_the_largest_actor_of_step_3():
    """bf16, 80 GB: 2.5 are CUDA's, and actor and critic have a bucket of 5 · 10⁸ elements each, so that 75.5 GB hold
    at most 37.7 · 10⁹ weights. With keys and values of 4 responses fewer fit."""
    sentence = r"the largest actor of step 3\s+has about (\d+) billion\s+parameters"
    (told,) = re.findall(sentence, (DOCS / "support.md").read_text("utf-8"))
    fitting = []
    for layers in (10, 11):
        sizes = {"hidden_size": 16384, "intermediate_size": 57344, "num_attention_heads": 128}
        config = LlamaConfig(num_hidden_layers=layers, num_key_value_heads=8, **sizes)
        memory = {"zero_stage": 3, "offload": True, "offload_reference_model": True, "dtype": "bf16"}
        memory |= {"actor_gradient_checkpointing": True, "critic_gradient_checkpointing": True}
        batches = {"per_device_generation_batch_size": 4, "per_device_training_batch_size": 2}
        names = {"actor_model_name_or_path": "a", "critic_model_name_or_path": "c"}
        run = PPOConfig(data_path=["tldr"], output_dir="o", **names, **memory, **batches)
        plan = make_plan(run, Machine(256, 80 * GB), lambda path, flag, config=config: config)
        fitting.append((plan.roles[0].weights.parameters / 1e9, plan.fits_device))
    (small, fits), (large, too_large) = fitting
    assert fits and not too_large and small <= int(told) <= 37.7 < large


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
