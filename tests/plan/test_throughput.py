# SPDX-License-Identifier: Apache-2.0
"""The speed to expect, against sums made by hand; which GPUs are known; what compiled layers take."""

import json
from typing import Any

import pytest
import torch
from transformers import GemmaConfig, LlamaConfig

from dschat.base.errors import UserError
from dschat.cli import main as dschat
from dschat.plan import shares
from dschat.plan.passes import Model, training_pass
from dschat.plan.phases import GB, Machine
from dschat.plan.plan import Plan, make_plan
from dschat.plan.throughput import Expectation, expect, expectation_text, named_gpu
from dschat.settings.common import CommonConfig
from dschat.settings.parse import parse
from dschat.settings.ppo import PPOConfig
from dschat.settings.supervised import RewardConfig, SFTConfig

# 2 layers; q and o 64 · 64 each, k and v 64 · 32 each, gate, up and down 64 · 128 each; attention of a layer takes
# 2 operations with the query and 2 with the value of each key, in 4 heads of width 16.
CONFIG = GemmaConfig(
    vocab_size=4000,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
)
LAYERS = 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128)
HEAD = 4000 * 64
GPU = "1,1"  # 10¹² operations and 10⁹ bytes in a second


def forward(tokens: int, targets: int) -> float:
    """Operations on a text."""
    return 2 * LAYERS * tokens + 2 * (4 * 4 * 16) * tokens * (tokens + 1) / 2 + 2 * HEAD * targets


def plan_of(config: CommonConfig, processes: int = 1, model: Any = CONFIG) -> Plan:
    return make_plan(config, Machine(processes, 80 * GB), lambda path, flag: model)


def ppo_plan(*words: str, processes: int = 1) -> Plan:
    """4 rows of prompts of 30 tokens and responses of 10."""
    flags = ["--data_path", "d", "--output_dir", "o", "--actor_model_name_or_path", "a"]
    flags += ["--critic_model_name_or_path", "c", "--max_prompt_seq_len", "30", "--max_answer_seq_len", "10"]
    flags += ["--per_device_generation_batch_size", "4", "--per_device_training_batch_size", "4"]
    return plan_of(parse(PPOConfig, [*flags, *words]), processes)


def expected(plan: Plan) -> Expectation:
    return expect(plan, named_gpu(GPU))


@pytest.mark.parametrize(
    ("words", "share"),
    [
        (["--compile", "off"], 0.34),
        ([], 0.52),
        (["--compile", "off", "--gradient_checkpointing"], 0.38),
        (["--gradient_checkpointing"], 0.47),
    ],
)
def test_training_by_hand(words: list[str], share: float) -> None:
    """One text of 40 tokens, all of them targets, forward and backward: 3 times a forward; two GPUs do twice that."""
    flags = ["--data_path", "d", "--output_dir", "o", "--model_name_or_path", "a", "--max_seq_len", "40"]
    found = expected(plan_of(parse(SFTConfig, [*flags, *words]), processes=2))
    assert found.sampled is None and found.iteration is None and found.trained is not None
    assert found.trained.share == pytest.approx(share)
    assert found.trained.tokens_per_second == pytest.approx(2 * 40 * share * 1e12 / (3 * forward(40, 40)))


def test_a_reward_model_has_no_head() -> None:
    flags = ["--data_path", "d", "--output_dir", "o", "--model_name_or_path", "a", "--max_seq_len", "40"]
    found = expected(plan_of(parse(RewardConfig, flags)))
    assert found.trained is not None
    assert found.trained.tokens_per_second == pytest.approx(40 * 0.52e12 / (3 * forward(40, 0)))


@pytest.mark.parametrize(
    ("words", "decoding", "scoring", "training", "epochs"),
    [
        (["--compile", "off"], 0.33, 0.54, 0.34, 1),
        (["--decode_graphs", "off", "--compile", "off"], 0.13, 0.54, 0.34, 1),
        (["--ppo_epochs", "2"], 0.56, 0.70, 0.52, 2),
    ],
)
def test_an_iteration_by_hand(words: list[str], decoding: float, scoring: float, training: float, epochs: int) -> None:
    """4 rows in bf16: 10 steps read the actor, 9 tokens see 31 to 39 keys of 2 layers × (key + value) × 32 numbers.

    With one update per rollout credit is fused, so that reference and reward model alone score.
    """
    found = expected(ppo_plan(*words))
    read = 2 * (10 * (LAYERS + HEAD) + 4 * sum(range(31, 40)) * 2 * 2 * 32)
    seconds = read / (decoding * 1e9) + 4 * forward(30, 1) / (scoring * 1e12)
    assert found.sampled is not None and found.trained is not None and found.iteration is not None
    assert (found.sampled.share, found.trained.share) == (decoding, pytest.approx(training))
    assert found.sampled.tokens_per_second == pytest.approx(40 / seconds)
    policy, scalar = 4 * forward(40, 10), 4 * forward(40, 0)
    passes = policy + scalar if epochs == 1 else 2 * (policy + scalar)
    seconds += passes / (scoring * 1e12) + epochs * 3 * (policy + scalar) / (training * 1e12)
    assert found.iteration == pytest.approx(40 / seconds)


@pytest.mark.parametrize(("rows", "share"), [("4", 0.56), ("31", 0.56), ("33", 0.47), ("128", 0.47)])
def test_the_nearest_number_of_rows(rows: str, share: float) -> None:
    found = expected(ppo_plan("--per_device_generation_batch_size", rows, "--per_device_training_batch_size", rows))
    assert found.sampled is not None and found.sampled.share == share


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--dtype", "fp32"], "measured in bf16 alone"),
        (["--zero_stage", "3"], "not measured with ZeRO 3 or offloading"),
        (["--zero_stage", "2", "--offload"], "not measured with ZeRO 3 or offloading"),
        (["--offload_reference_model"], "not measured with ZeRO 3 or offloading"),
    ],
)
def test_what_was_not_measured(words: list[str], why: str) -> None:
    found = expected(ppo_plan(*words))
    assert why in found.unknown and found.trained is None
    assert f"not known; the shares of the peaks were {why}." in expectation_text(found)


def test_other_engines_and_completions_were_not_measured() -> None:
    """Training was; with completions a whole iteration takes nobody knows how long."""
    found = expected(ppo_plan("--rollout_engine", "generate"))
    assert found.trained is not None and found.sampled is None and found.iteration is None
    found = expected(ppo_plan("--advantage_estimator", "segment_mc"))
    assert found.sampled is not None and found.iteration is None


def test_gpus_by_name_and_by_peaks() -> None:
    """What is reached of a data sheet: .81 of the operations, .88 of the bytes. Peaks that are given were measured."""
    h200 = named_gpu("H200")
    assert (h200.name, h200.memory) == ("h200", 141)
    assert h200.reached.operations_per_second == pytest.approx(0.81 * 989e12)
    assert h200.reached.bytes_per_second == pytest.approx(0.88 * 4.8e12)
    given = named_gpu("800,4200")
    assert (given.reached.operations_per_second, given.reached.bytes_per_second) == (800e12, 4.2e12)
    assert given.memory is None


@pytest.mark.parametrize("word", ["h1000", "800", "800,", "0,4200", "800,-1", "nan,1", "inf,1", "1,2,3"])
def test_an_unknown_gpu(word: str) -> None:
    with pytest.raises(UserError, match="--gpu_type .*: give one of a100-40gb, .*TFLOP/s and GB/s"):
        named_gpu(word)


def test_the_table_says_what_is_measured_and_where() -> None:
    """Each figure is a share; compiled layers are faster."""
    rows = [*shares.DECODING_GRAPHS.items(), *shares.SCORING.items(), *shares.TRAINING.items()]
    assert all(0 < share < 1 for _, share in rows)
    assert "2026-11-26" in shares.MEASURED and "H100" in shares.MEASURED
    assert all(gpu.peaks.operations_per_second > 1e13 and gpu.memory > 20 for gpu in shares.GPUS.values())


def test_the_command_says_that_it_estimates(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """A GPU by its name has its memory, unless another is given; without a name nothing is expected."""
    CONFIG.save_pretrained(tmp_path / "model")
    words = ["plan", "--step", "1", "--model_name_or_path", str(tmp_path / "model"), "--gpus", "1"]
    assert dschat([*words, "--gpu_type", "h200"]) == 0
    text = capsys.readouterr().out
    assert "1 GPUs of 141 GB, layers compiled" in text
    assert (
        "Speed to expect on h200:" in text and "tokens/s trained (52 % of the rate of large matrix products)" in text
    )
    assert "An estimate for sequences of full length, from shares of the peaks measured on one H100" in text
    assert dschat([*words, "--gpu_type", "h200", "--gpu_memory", "100", "--json"]) == 0
    (plan,) = json.loads(capsys.readouterr().out)
    assert plan["machine"]["device_memory"] == 100 * GB
    assert plan["expectation"]["gpu"] == "h200" and plan["expectation"]["trained"]["share"] == pytest.approx(0.52)
    assert plan["models"][0]["compiled"] is True
    assert dschat([*words, "--compile", "off"]) == 0
    text = capsys.readouterr().out
    assert "Speed to expect" not in text and "1 GPUs of 80 GB;" in text
    assert dschat([*words, "--gpu_type", "h1000"]) == 2


# -- compiled layers


@pytest.mark.parametrize(
    ("words", "on_gpu", "compiled"),
    [
        ([], True, True),
        ([], False, False),
        (["--zero_stage", "3"], True, False),
        (["--compile", "on"], False, True),
        (["--compile", "off"], True, False),
    ],
)
def test_where_layers_are_compiled(words: list[str], on_gpu: bool, compiled: bool) -> None:
    flags = ["--data_path", "d", "--output_dir", "o", "--model_name_or_path", "a"]
    assert parse(SFTConfig, [*flags, *words]).compiles(on_gpu) is compiled


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
    gpu = {how: plan_of(parse(SFTConfig, [*flags, "--compile", how])).peak for how in ("on", "off")}
    assert gpu["on"] < gpu["off"]
