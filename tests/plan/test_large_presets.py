# SPDX-License-Identifier: Apache-2.0
"""The presets of 27 and 70 billion weights fit the machines that they are recommended for."""

import pytest

from cli_runs import ROOT
from dschat.plan.command import plan_step
from dschat.plan.options import PlanOptions
from dschat.plan.phases import GB
from dschat.settings.presets import find_preset

PAGE = ROOT / "docs" / "performance.md"
ACCURACY = 0.03  # of a GPU's memory: as much as the plan may be wrong


@pytest.mark.slow
@pytest.mark.parametrize(
    ("preset", "processes", "neighbours", "flags"),
    [
        ("tldr_gemma2_27b", 8, 1, ""),
        ("tldr_gemma2_27b", 8, 2, "--rollout_engine vllm --vllm_tensor_parallel 2 --vllm_gpu_memory 0.45"),
        ("tldr_llama31_70b", 16, 4, ""),
    ],
)
def test_large_presets_fit_gpus_of_80_gb(preset, processes, neighbours, flags):
    """The preset, and the flags in its head, fit with room for the plan's error, and need what its head says."""
    head = find_preset("ppo", preset).read_text(encoding="utf-8")
    plan = plan_step("ppo", PlanOptions(gpus=processes), flags.split(), preset).plan
    assert plan.peak <= (1 - ACCURACY) * 80 * GB and plan.worst.name == "generate"
    assert plan.config.vllm.vllm_tensor_parallel == neighbours
    if flags:
        assert flags in head and f"with {plan.peak / GB:.0f} GB of each" in head
    elif processes == 8:
        assert (
            f"{plan.main_memory / 1e12:.2f} TB of main memory" in head and f"{plan.peak / GB:.0f} GB of each" in head
        )
    else:
        assert f"machines of {plan.main_memory / 1e12 + 0.05:.1f} TB" in head
    figures = f"| {plan.peak / GB:.0f} | {plan.main_memory / GB:,.0f} GB |"
    rows = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith(f"| `{preset}`")]
    assert any(row.endswith(figures) and flags in row for row in rows), figures
