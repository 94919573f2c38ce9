# SPDX-License-Identifier: Apache-2.0
"""What the steps learn from and what of a model they train, through the mains: packing, losses, modes, adapters."""

import json
import re

import pytest
import torch
from peft import AutoPeftModelForCausalLM
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from cli_runs import evaluation_rows, training_rows
from closeness import UPDATE, assert_near, near
from real_size import as_large_as

LAST = {"finetune_mode": "last_layer"}


def weights_in(folder):
    return load_file(folder / "model.safetensors")


def changed(before, after):
    """Names of the weights that differ between two folders, in sets of the same names."""
    first, second = weights_in(before), weights_in(after)
    assert first.keys() == second.keys()
    return {name for name in first if not torch.equal(first[name], second[name])}


def test_packing_changes_nothing_of_step_1(sft, run, sft_flags, tmp_path):
    changes = {"packing": True, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "eval_interval": 2}
    run("sft", sft_flags | changes).expect(0)
    for rows in (training_rows, evaluation_rows):
        for row, plain in zip(rows(tmp_path / "out"), rows(sft), strict=True):
            assert row["samples"] == plain["samples"]
            for name in {"loss/sft", "grad_norm", "eval/loss"} & plain.keys():
                assert row[name] == near(plain[name], UPDATE), name


def test_a_last_layer_of_step_1_is_the_tied_embedding(inputs, sft, run, sft_flags, tmp_path):
    """And label smoothing changes the loss that is trained on, not the one that is measured."""
    run("sft", sft_flags | LAST | {"label_smoothing": 0.2}).expect(0)
    assert changed(inputs / "model", tmp_path / "out") == {"model.embed_tokens.weight"}
    assert abs(training_rows(tmp_path / "out")[0]["loss/sft"] - training_rows(sft)[0]["loss/sft"]) > 1e-4
    assert evaluation_rows(tmp_path / "out")[0]["eval/loss"] == pytest.approx(evaluation_rows(sft)[0]["eval/loss"])


@pytest.mark.parametrize("stage", [0, 3])
def test_a_last_layer_of_step_2_is_the_score(stage, sft, run, reward_flags, tmp_path):
    sharding = {"zero_stage": stage, "deepspeed_config": as_large_as(7e9, sft)}
    run("reward", reward_flags | LAST | sharding | {"reward_gain": True}).expect(0)
    first, second = weights_in(sft), weights_in(tmp_path / "out")
    assert all(torch.equal(first[name], second[name]) for name in first.keys() & second.keys())
    assert second["score.weight"].any() and not any("gain" in name for name in second)
    _, loading = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not loading["missing_keys"] and not loading["unexpected_keys"]


def test_the_seed_decides_how_a_reward_model_starts(run, reward_flags, tmp_path):
    """Scores differ before the first update, and step 2 says at its end that a margin is too small for step 3."""
    flags = reward_flags | {"learning_rate": 1e-7}
    first = {}
    for name, seed in (("first", 1), ("again", 1), ("other", 2)):
        result = run("reward", flags | {"seed": seed, "output_dir": tmp_path / name})
        result.expect(0)
        first[name] = {key: value for key, value in evaluation_rows(tmp_path / name)[0].items() if key != "seconds"}
        width = json.loads((tmp_path / name / "config.json").read_text())["hidden_size"]
        assert f"a new score head, initialised from N(0, 1 / {width + 1})" in result.stderr
        assert re.search("the scores of a pair differ by only|the rejected response of a pair scores", result.stderr)
    assert first["first"] == first["again"] and first["first"]["eval/margin"] != 0
    assert first["first"]["eval/margin"] != first["other"]["eval/margin"]


@pytest.mark.parametrize("loss", ["last_token", "per_sample", "average"])
def test_reward_losses(loss, run, reward_flags, tmp_path):
    flags = {"reward_loss": loss, "center_rewards_coefficient": 0.01, "end_of_conversation_token": "e"}
    result = run("reward", reward_flags | flags)
    result.expect(0)
    before_end = loss != "per_sample"
    assert ("eval/end_accuracy" in evaluation_rows(tmp_path / "out")[-1]) == before_end
    assert (f"--reward_loss {loss} does not train the number at the last token" in result.stderr) == before_end
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["reward_loss"], config["end_of_response"]) == (loss, "e")


def test_a_margin_that_is_missing_names_the_row(run, reward_flags):
    message = run("reward", reward_flags | {"margin_key": "gap"}).expect(2).stderr.strip().splitlines()[-1]
    assert re.search(r"train\.jsonl:\d+: --margin_key gap: the column is missing; .* a number of at least 0", message)


def test_adapters_alone_are_opened_by_peft(run, sft_flags, tmp_path):
    flags = {"finetune_mode": "lora", "lora_module_name": ["q_proj", "v_proj"], "lora_alpha": 4, "lora_dropout": 0.1}
    run("sft", sft_flags | flags).expect(0)
    opened = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "out" / "adapter", dtype=torch.float32).eval()
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    ids = torch.tensor([[3, 9, 4, 17]])
    with torch.no_grad():
        assert_near(opened(input_ids=ids).logits, merged(input_ids=ids).logits, UPDATE)
    config = json.loads((tmp_path / "out" / "adapter" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["lora_dropout"]) == (8, 4, 0.1)
    assert {name.split(".")[-1] for name in config["target_modules"]} == {"q_proj", "v_proj"}


def test_last_layers_of_step_3(sft, reward, run, ppo_flags, tmp_path):
    run("ppo", ppo_flags | LAST).expect(0)
    assert changed(sft, tmp_path / "out" / "actor") == {"model.embed_tokens.weight"}
    assert changed(reward, tmp_path / "out" / "critic") <= {"score.weight"}
