# SPDX-License-Identifier: Apache-2.0
"""`dschat plan --recommend`: what it recommends fits, and gives up no more than it must."""

import json
from dataclasses import replace

import pytest
from transformers import LlamaConfig

from cli_runs import STEPS
from dschat.cli import main as dschat
from dschat.plan.command import plan_step
from dschat.plan.models import find_config
from dschat.plan.phases import GB, Machine
from dschat.plan.recommend import Recommendation, recommend
from dschat.settings.parse import parse
from dschat.settings.plan import PlanOptions
from dschat.settings.ppo import PPOConfig
from dschat.settings.presets import find_preset


def main(words):
    """`dschat plan`."""
    return dschat(["plan", *words])


PPO = STEPS["ppo"] / "training_scripts"
OURS, COLOCATED, SERVERS = range(3)


def ppo_flags(model: str, *more: str) -> list[str]:
    names = ["--actor_model_name_or_path", model, "--critic_model_name_or_path", model]
    return ["--step", "3", *names, "--dtype", "bf16", "--prompts", "4096", *more]


def planned(capsys, *words: str) -> dict:
    """What a command says in JSON."""
    assert main([*words, "--json"]) in (0, 1)
    (plan,) = json.loads(capsys.readouterr().out)
    return plan


def fed_back(capsys, words: list[str], way: dict) -> dict:
    """The plan with the flags of a way, on the GPUs that train."""
    sizes = [*words, *way["flags"].split(), "--gpus", str(way["training_gpus"])]
    return planned(capsys, *sizes)


@pytest.mark.parametrize(
    ("model", "gpus", "memory", "best", "engine"),
    [
        ("meta-llama/Llama-3.1-8B", "4", "40", OURS, 2),
        pytest.param("google/gemma-2-27b", "8", "80", OURS, 2, marks=pytest.mark.slow),
        pytest.param("meta-llama/Llama-3.1-70B", "16", "80", COLOCATED, 4, marks=pytest.mark.slow),
    ],
)
def test_what_is_recommended_fits(model, gpus, memory, best, engine, capsys):
    """States of 18 bytes for each weight of two models are more than the GPUs hold, so that they go to main memory.

    Each GPU holds 16 or 54 GB of an actor whole, but not 141, nor their half beside a cache.
    """
    words = ppo_flags(model, "--gpu_memory", memory)
    found = planned(capsys, *words, "--gpus", gpus, "--recommend")
    ways = found["recommendation"]["ways"]
    assert found["fits"] and found["recommendation"]["best"] == best
    assert ways[OURS]["fits"] == (best == OURS) and ways[COLOCATED]["gpus_of_an_engine"] == engine
    assert not any(way["trains_adapters_instead"] for way in ways)
    assert "--offload --zero_stage 3" in ways[best]["flags"]
    for way in ways:
        if way["fits"]:
            same = fed_back(capsys, words, way)
            assert same["fits"] and (same["peak"], same["host"]["total"]) == (way["peak"], way["main_memory"])
            assert same["counts"]["updates"] == found["counts"]["updates"], "updates are as large"
            assert same["peak"] <= 0.97 * float(memory) * GB
    assert main([*words, "--gpus", gpus, *ways[best]["flags"].split()]) == 0
    assert "Fits: a GPU holds at most" in capsys.readouterr().out


def test_a_gpu_by_gpu_table(capsys):
    """Engines of 4 on two machines of 8, and on two of 4, with one sentence for each way."""
    words = [*ppo_flags("meta-llama/Llama-3.1-70B"), "--recommend", "--gpu_memory", "80"]
    places = planned(capsys, *words, "--gpus", "16")["recommendation"]["places"]
    assert [(place["gpus"], place["node"]) for place in places] == [("0-3", 0), ("4-7", 0), ("8-11", 1), ("12-15", 1)]
    assert main([*words, "--gpus", "16"]) == 0
    out = capsys.readouterr().out
    assert "Recommended: vLLM in the training processes, 4 to an engine. Flags to add:" in out
    assert "our own loop: does not fit: at least 1" in out and "vLLM servers, 2 of 4 GPUs each, beside 8" in out


@pytest.fixture(name="model")
def _model(tmp_path):
    """A folder with nothing but a config: 2 · 32,000 · 4096 + 4 · (2 · 4096² + 2 · 4096 · 1024 + 3 · 4096 · 14,336)
    weights and 9 norms, 1.14 · 10⁹."""
    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 4, "num_attention_heads": 32}
    LlamaConfig(vocab_size=32_000, num_key_value_heads=8, **sizes).save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


@pytest.mark.parametrize(
    ("memory", "main_memory", "flags"),
    [
        ("80", "100", set()),
        ("47", "100", {"actor_gradient_checkpointing"}),
        ("40", "100", {"offload"}),
        ("40", "30", {"lora_dim"}),
    ],
)
def test_what_is_trained_is_given_up_last(memory, main_memory, flags, model, capsys):
    """Two models of 1.1 · 10⁹ weights at 18 bytes are 40 GB of a GPU, at 22 in main memory 50; adapters nothing."""
    words = ["--gpus", "1", "--gpu_memory", memory, "--main_memory", main_memory]
    words += ["--per_device_training_batch_size", "4"]
    found = planned(capsys, *ppo_flags(model, *words), "--recommend")
    (way,) = found["recommendation"]["ways"]
    named = {word.removeprefix("--") for word in way["flags"].split() if word.startswith("--")}
    told = {"actor_gradient_checkpointing", "offload", "lora_dim"}
    assert found["fits"] and named & told == flags
    assert way["trains_adapters_instead"] == ("lora_dim" in flags)
    main([*ppo_flags(model, *words), "--recommend"])
    assert ("ANOTHER TRAINING" in capsys.readouterr().out) == ("lora_dim" in flags)


def test_the_way_that_gives_up_least(model):
    """Not the one that does not fit; of those alike the first."""
    words = ppo_flags(model)[2:-2]
    config = parse(PPOConfig, [*words, "--data_path", "tldr", "--output_dir", "o"], runs_here=False)
    fitting = recommend(config, Machine(1, 80 * GB), find_config).best
    assert fitting is not None
    outcomes = [replace(fitting, level=level) for level in (2, 1, 1, 0)]
    outcomes[3] = replace(outcomes[3], plan=None)
    assert Recommendation(tuple(outcomes), 8).best is outcomes[1]


def test_where_nothing_fits(model, capsys):
    """A GPU of 4 GB holds no 2.3 GB beside CUDA's 2.5, and half of them only without a cache."""
    assert main([*ppo_flags(model), "--gpus", "2", "--gpu_memory", "4", "--recommend"]) == 1
    out = capsys.readouterr().out
    assert "Recommended: nothing" in out and out.count("does not fit: at least") == 3


def test_servers_that_are_there(model, capsys):
    """They draw, all GPUs train, and the plan says what a server needs: 2.3 GB, a cache, 2 GB and CUDA's 2.5."""
    words = ["--rollout_engine", "vllm", "--vllm_url", "http://a:8000", "--gpus", "2", "--gpu_memory", "80"]
    found = planned(capsys, *ppo_flags(model, *words), "--recommend")
    (way,) = found["recommendation"]["ways"]
    assert (way["training_gpus"], way["servers"]) == (2, 1)
    assert main(ppo_flags(model, *words)) in (0, 1)
    cache = 16 * 1024 * 2 * 4 * 1024 * 2
    parameters = 2 * 32_000 * 4096 + 4 * (2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14_336) + 9 * 4096
    needed = (2 * parameters + cache + 4.5 * GB) / GB
    assert f"with --tensor_parallel 1 at least {needed:.1f} GB of each GPU (the actor, and" in capsys.readouterr().out


def test_our_own_loop_instead_of_vllm(model, capsys):
    """Flags that ask for vLLM are taken back by those that are added."""
    words = ppo_flags(model, "--gpu_memory", "80", "--rollout_engine", "vllm", "--vllm_tensor_parallel", "2")
    ways = planned(capsys, *words, "--gpus", "2", "--recommend")["recommendation"]["ways"]
    for way in ways:
        assert fed_back(capsys, words, way)["fits"]


def test_other_steps_are_refused(model, caplog):
    assert main(["--step", "1", "--model_name_or_path", model, "--recommend"]) == 2
    assert "--recommend is for step 3 alone: add --step 3, or leave it out" in caplog.messages[-1]


@pytest.mark.slow
@pytest.mark.parametrize(("script", "processes", "parts"), [("tldr_gemma2_27b", 8, 2), ("tldr_llama31_70b", 16, 4)])
def test_the_scripts_with_tensor_parallelism(script, processes, parts):
    """The flags in the head of the one, and those of the other, fit 80 GB, with what the heads say of memory."""
    head = find_preset("ppo", script).read_text(encoding="utf-8")
    line = next((line for line in head.splitlines() if "--vllm_tensor_parallel" in line), "")
    flags = line[line.index("--") :].split() if line else []
    plan = plan_step("ppo", PlanOptions(gpus=processes), flags, script).plan
    assert plan.fits and plan.config.vllm.vllm_tensor_parallel == parts and plan.worst.name == "generate"
    assert not flags or f"with {plan.peak / GB:.0f} GB of each" in head
    assert flags or f"machines of {plan.main_memory / 1e12 + 0.05:.1f} TB" in head
