# SPDX-License-Identifier: Apache-2.0
"""The speed to expect, against sums made by hand; which GPUs are known; what compiled layers take."""

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import GemmaConfig, LlamaConfig

from dschat.base.errors import UserError
from dschat.cli import main as dschat
from dschat.plan.passes import training_pass
from dschat.plan.phases import GB, Machine
from dschat.plan.plan import Plan, make_plan
from dschat.plan.sizes import Model
from dschat.plan.states import Weights, Zero
from dschat.plan.throughput import bytes_of_update, expect, expectation_text, moving_seconds, named_gpu, together
from dschat.run.peaks import GPUS, Gpu
from dschat.settings.common import CommonConfig
from dschat.settings.parse import parse
from dschat.settings.ppo import PPOConfig
from dschat.settings.supervised import SFTConfig

# 2 layers; q and o 64 · 64 each, k and v 64 · 32 each, gate, up and down 64 · 128 each.
CONFIG = GemmaConfig(
    vocab_size=4000,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
)
# N, with five norms; for a scalar model without the embedding, but with a row of 64.
POLICY = 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128) + 5 * 64 + 4000 * 64
SCALAR = POLICY - 4000 * 64 + 64
GPU = "1,1"  # 10¹² operations and 10⁹ bytes in a second


def forward(weights: int, tokens: int) -> float:
    """Operations on a text."""
    return 2 * weights * tokens + 4 * 2 * 64 * tokens**2


def plan_of(config: CommonConfig, processes: int = 1, model: Any = CONFIG) -> Plan:
    return make_plan(config, Machine(processes, 80 * GB), lambda path, flag: model)


def ppo_plan(*words: str, processes: int = 1) -> Plan:
    """4 rows of prompts of 30 tokens and responses of 10."""
    flags = ["--data_path", "d", "--output_dir", "o", "--actor_model_name_or_path", "a"]
    flags += ["--critic_model_name_or_path", "c", "--max_prompt_seq_len", "30", "--max_answer_seq_len", "10"]
    flags += ["--per_device_generation_batch_size", "4", "--per_device_training_batch_size", "4"]
    return plan_of(parse(PPOConfig, [*flags, *words]), processes)


@pytest.mark.parametrize(("words", "share"), [(["--compile", "off"], 0.29), (["--gradient_checkpointing"], 0.40)])
def test_training_by_hand(words: list[str], share: float) -> None:
    """One text of 40 tokens, forward and backward: 3 times a forward."""
    flags = ["--data_path", "d", "--output_dir", "o", "--model_name_or_path", "a", "--max_seq_len", "40"]
    found = expect(plan_of(parse(SFTConfig, [*flags, *words])), GPU)
    assert found.sampled is None and found.iteration is None
    assert found.trained == pytest.approx(40 * share * 1e12 / (3 * forward(POLICY, 40)))


@pytest.mark.parametrize(
    ("words", "decoding", "scoring", "training", "epochs"),
    [
        (["--compile", "off"], 0.29, 0.46, 0.29, 1),
        (["--decode_graphs", "off", "--compile", "off"], 0.11, 0.46, 0.29, 1),
        (["--ppo_epochs", "2"], 0.49, 0.60, 0.44, 2),
    ],
)
def test_an_iteration_by_hand(words: list[str], decoding: float, scoring: float, training: float, epochs: int) -> None:
    """4 rows in bf16: 10 steps read the actor, 9 tokens see 31 to 39 keys of 2 layers × (key + value) × 32 numbers.

    With one update per rollout credit is fused, so that reference and reward model alone score.
    """
    found = expect(ppo_plan(*words), GPU)
    read = 2 * (10 * POLICY + 4 * sum(range(31, 40)) * 2 * 2 * 32)
    seconds = read / (decoding * 1e9) + 4 * forward(POLICY, 30) / (scoring * 1e12)
    assert found.sampled == pytest.approx(40 / seconds)
    both = 4 * (forward(POLICY, 40) + forward(SCALAR, 40))
    seconds += epochs * both / (scoring * 1e12) + epochs * 3 * both / (training * 1e12)
    assert found.iteration == pytest.approx(40 / seconds)


ZERO_3 = Weights(10**9, 10**9, 10**6, 2, Zero(stage=3))


def test_bytes_of_updates() -> None:
    """2 GB of weights on 4 processes, 3 passes. ZeRO 3: each pass gathers twice and scatters gradients. ZeRO 2: it
    scatters, and weights come once. Below: 4 GB of gradients once, there and back, and the weights."""
    assert bytes_of_update(ZERO_3, 4, 3) == 3 * (2 * 2e9 + 2e9) * 3 / 4
    adapters = replace(ZERO_3, trained=10**6)
    assert bytes_of_update(adapters, 4, 3) == 3 * (2 * 2e9 + 2e6) * 3 / 4
    assert bytes_of_update(replace(ZERO_3, zero=Zero(stage=2)), 4, 3) == (3 * 2e9 + 2e9) * 3 / 4
    assert bytes_of_update(replace(ZERO_3, zero=Zero(stage=1)), 4, 3) == (2 * 4e9 + 2e9) * 3 / 4
    assert bytes_of_update(ZERO_3, 1, 3) == 0


def test_seconds_of_communication() -> None:
    """720 GB: 2 s over NVLink; half of them enter each of two nodes, at 8 × 40 GB/s. Half of the shorter is hidden."""
    assert moving_seconds(720e9, Machine(8, None)) == 2
    assert moving_seconds(720e9, Machine(16, None)) == 2
    assert moving_seconds(720e9, Machine(16, None, gpus_per_node=4)) == pytest.approx(720e9 * 0.75 / 160e9)
    assert together(10, 4) == together(4, 10) == 12


def test_zero_3_by_hand() -> None:
    """Two GPUs, two passes of one text: each gathers what the other GPU has. Layers are not compiled."""
    flags = ["--data_path", "d", "--output_dir", "o", "--model_name_or_path", "a", "--max_seq_len", "40"]
    words = ["--zero_stage", "3", "--per_device_train_batch_size", "1", "--gradient_accumulation_steps", "2"]
    found = expect(plan_of(parse(SFTConfig, [*flags, *words]), processes=2), GPU)
    computing = 2 * 3 * forward(POLICY, 40) / (0.29 * 1e12)
    moving = 2 * 3 * 2 * POLICY / 2 / 360e9
    assert found.trained == pytest.approx(2 * 80 / together(computing, moving))


@pytest.mark.parametrize(("rows", "share"), [(31, 0.49), (33, 0.41)])
def test_the_nearest_number_of_rows(rows: int, share: float) -> None:
    flags = ["--per_device_generation_batch_size", str(rows), "--per_device_training_batch_size", str(rows)]
    read = 2 * (10 * POLICY + rows * sum(range(31, 40)) * 2 * 2 * 32)
    seconds = read / (share * 1e9) + rows * forward(POLICY, 30) / (0.60 * 1e12)
    assert expect(ppo_plan(*flags), GPU).sampled == pytest.approx(10 * rows / seconds)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--dtype", "fp32"], "measured in bf16 alone"),
        (["--zero_stage", "2", "--offload"], "not measured with offloading"),
        (["--offload_reference_model"], "not measured with offloading"),
    ],
)
def test_what_was_not_measured(words: list[str], why: str) -> None:
    found = expect(ppo_plan(*words), GPU)
    assert why in found.unknown and found.trained is None
    assert f"not known; the shares of the peaks were {why}." in expectation_text(found)


@pytest.mark.parametrize("word", ["h1000", "800", "0,4200", "nan,1", "1,2,3"])
def test_gpus_by_name_and_by_peaks(word: str) -> None:
    assert named_gpu("H200") is GPUS["h200"]
    assert named_gpu("989,4800") == Gpu(80, 989e12, 4.8e12)
    with pytest.raises(UserError, match="--gpu_type .*: give one of a100-40gb, .*TFLOP/s .* and GB/s"):
        named_gpu(word)


def test_the_command_says_that_it_estimates(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """A GPU by its name has its memory, unless another is given; without a name nothing is expected."""
    CONFIG.save_pretrained(tmp_path / "model")
    words = ["plan", "--step", "1", "--model_name_or_path", str(tmp_path / "model"), "--gpus", "1"]
    assert dschat([*words, "--gpu_type", "h200"]) == 0
    text = capsys.readouterr().out
    assert "1 GPUs of 141 GB, layers compiled" in text and "Speed to expect on h200:" in text
    assert "Assumed, not measured: 360 GB/s between the GPUs of a node, 40 GB/s per GPU between nodes" in text
    assert dschat([*words, "--gpu_type", "h200", "--gpu_memory", "100", "--json"]) == 0
    (plan,) = json.loads(capsys.readouterr().out)
    assert plan["machine"]["device_memory"] == 100 * GB
    assert plan["expectation"]["trained"] > 0 and plan["models"][0]["compiled"] is True
    assert dschat([*words, "--compile", "off"]) == 0
    text = capsys.readouterr().out
    assert "Speed to expect" not in text and "1 GPUs of 80 GB;" in text
    assert dschat([*words, "--gpu_type", "h1000"]) == 2


# -- compiled layers


def test_compiled_layers_hold_a_measured_share() -> None:
    """All that a layer makes counts as 65 %, but its result; what is outside of the layers is as it was.

    Bytes of a float32 Llama of 2 layers: states (B, T, H) are 3 · 40 · 32 · 4.
    """
    sizes = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0}
    model, states = Model(LlamaConfig(**sizes), "policy", torch.float32), 3 * 40 * 32 * 4
    one = Model(LlamaConfig(**(sizes | {"num_hidden_layers": 1})), "policy", torch.float32)
    eager, compiled = (training_pass(model, 3, 40, False, how).held for how in (False, True))
    layer = eager - training_pass(one, 3, 40, False).held
    assert compiled == pytest.approx(eager - 0.35 * 2 * (layer - states), rel=0.01)


def test_compiled_layers_are_smaller_when_they_are_made_again() -> None:
    """With checkpointing the layers' results are what is held: as many bytes. The peak shrinks by 35 % of one layer at
    most, which is not there as a whole at the worst moment."""
    sizes = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 512, "num_hidden_layers": 2}
    model = Model(LlamaConfig(**sizes, num_attention_heads=2), "policy", torch.bfloat16)
    eager, compiled = (training_pass(model, 64, 200, True, how) for how in (False, True))
    layer = training_pass(model, 64, 200, False).held / 2
    assert compiled.held == eager.held
    assert compiled.forward < eager.forward
    assert 0.2 * layer < eager.backward - compiled.backward < 0.35 * layer


def test_a_plan_on_a_cpu_is_not_compiled() -> None:
    flags = ["--data_path", "d", "--output_dir", "o", "--model_name_or_path", "a"]
    plan = make_plan(parse(SFTConfig, flags), Machine(1, None), lambda path, flag: CONFIG)
    assert not plan.roles[0].compiled
