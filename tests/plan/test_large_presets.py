# SPDX-License-Identifier: Apache-2.0
"""The presets of 27 and 70 billion weights fit the machines that they are recommended for."""

import pytest
from transformers import LlamaConfig

from cli_runs import ROOT
from dschat.base.errors import UserError
from dschat.cli import main as dschat
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


def test_a_presets_setting_of_another_engine_is_refused_with_its_default():
    with pytest.raises(UserError, match=r"--vllm_gpu_memory 0.55 .* \(if a file sets it: --vllm_gpu_memory 0.3\)"):
        plan_step("ppo", PlanOptions(gpus=16), ["--rollout_engine", "continuous"], "tldr_llama31_70b")


@pytest.mark.slow
def test_our_own_loop_does_not_hold_an_actor_of_70_billion_weights():
    """Each GPU would hold all 2 · 70.6 · 10⁹ bytes; the preset lets four GPUs share them."""
    flags = ["--rollout_engine", "continuous", "--vllm_tensor_parallel", "1", "--vllm_gpu_memory", "0.3"]
    report = plan_step("ppo", PlanOptions(gpus=16), flags, "tldr_llama31_70b")
    assert not report.plan.fits and report.plan.peak > 141 * GB
    assert "--vllm_tensor_parallel 2" in report.text()


def test_servers_that_are_there(tmp_path, capsys):
    """The plan says what a server needs: 2.3 GB of weights, a cache, 2 GB for vLLM and CUDA's 2.5.

    2 · 32,000 · 4096 + 4 · (2 · 4096² + 2 · 4096 · 1024 + 3 · 4096 · 14,336) weights and 9 norms are 1.14 · 10⁹.
    """
    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 4, "num_attention_heads": 32}
    LlamaConfig(vocab_size=32_000, num_key_value_heads=8, **sizes).save_pretrained(tmp_path / "model")
    model = str(tmp_path / "model")
    flags = ["--step", "3", "--actor_model_name_or_path", model, "--critic_model_name_or_path", model]
    flags += ["--dtype", "bf16", "--prompts", "4096", "--gpus", "2", "--gpu_memory", "80"]
    flags += ["--rollout_engine", "vllm", "--vllm_url", "http://a:8000"]
    assert dschat(["plan", *flags]) in (0, 1)
    cache = 16 * 1024 * 2 * 4 * 1024 * 2
    parameters = 2 * 32_000 * 4096 + 4 * (2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14_336) + 9 * 4096
    needed = (2 * parameters + cache + 4.5 * GB) / GB
    assert f"with --tensor_parallel 1 at least {needed:.1f} GB of each GPU (the actor, and" in capsys.readouterr().out
