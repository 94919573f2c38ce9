# SPDX-License-Identifier: Apache-2.0
"""The flags that change what steps 1 and 2 do, and those of all steps: forked, a few updates each."""

import json
import shutil

from transformers import AutoModelForSequenceClassification, AutoTokenizer

from cli_runs import training_rows
from closeness import UPDATE, near

# -- flags of steps 1 and 2


def test_accumulation_and_checkpointing_change_nothing(sft, sft_flags, run, tmp_path):
    """The other losses: tests/training, and test_equivalence.py."""
    plain = training_rows(sft)
    changed = {"per_device_train_batch_size": 2, "global_batch_size": 8, "gradient_checkpointing": True}
    run("sft", sft_flags | changed).expect(0)
    rows = training_rows(tmp_path / "out")
    assert len(rows) == len(plain) == 4
    for row, other in zip(rows, plain, strict=True):
        assert row["samples"] == other["samples"] and row["lr"] == other["lr"]
        for key in ("loss/sft", "grad_norm"):
            assert row[key] == near(other[key], 16 * UPDATE, scale=0), key
    batches = json.loads((tmp_path / "out" / "run.json").read_text())["batches"]
    assert (batches["micro_batch"], batches["accumulation"], batches["global_batch"]) == (2, 4, 8)


def test_a_model_without_pad_goes_through_all_steps(run, inputs, sft_flags, reward_flags, prompt_flags, tmp_path):
    base = tmp_path / "base"
    shutil.copytree(inputs / "model", base)
    tokenizer = AutoTokenizer.from_pretrained(base)
    vocabulary = len(tokenizer)
    tokenizer.pad_token = "<eos>"  # as for Llama and GPT-2, though <pad> is held in reserve here
    tokenizer.save_pretrained(base)
    run("sft", sft_flags | {"model_name_or_path": base, "output_dir": tmp_path / "sft"}).expect(0)
    made = AutoTokenizer.from_pretrained(tmp_path / "sft")
    assert (made.pad_token, made.eos_token) == ("<pad>", "<eos>") and len(made) == vocabulary
    model = {"model_name_or_path": tmp_path / "sft", "output_dir": tmp_path / "reward"}
    run("reward", reward_flags | model).expect(0)
    models = {"actor_model_name_or_path": tmp_path / "sft", "critic_model_name_or_path": tmp_path / "reward"}
    run("ppo", prompt_flags | models | {"output_dir": tmp_path / "ppo"}).expect(0)
    config = AutoModelForSequenceClassification.from_pretrained(tmp_path / "ppo" / "critic").config
    assert config.pad_token_id == made.pad_token_id != config.eos_token_id
