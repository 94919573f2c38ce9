# SPDX-License-Identifier: Apache-2.0
"""--teacher_model_name_or_path from the command line: what is loaded, sharded, refused and logged."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from cli_runs import copy_model, message_of, read_jsonl, training_rows
from closeness import near


@pytest.fixture
def flags(prompt_flags, sft, tmp_path):
    """A model with the tokenizer of the actor and other weights teaches it."""
    teacher = copy_model(sft, tmp_path / "teacher")
    model = AutoModelForCausalLM.from_pretrained(teacher)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    model.save_pretrained(teacher)
    return prompt_flags | {
        "actor_model_name_or_path": sft,
        "teacher_model_name_or_path": teacher,
        "advantage_estimator": "distillation",
        "kl_ctl": 0,
        "ngram": 1,
        "eval_interval": 2,
    }


def test_a_teacher_alone(run, flags, tmp_path):
    """No reward model, no critic."""
    run("ppo", flags).expect(0)
    assert not (tmp_path / "out" / "critic").exists()
    first, *_ = rows = training_rows(tmp_path / "out")
    assert first["teacher/kl"] > 1 and "loss/value" not in first
    for row in rows:
        assert row["objective/scores"] == near(-row["teacher/kl"], scale=100.0)
    samples = read_jsonl(tmp_path / "out" / "samples" / "update-000004.jsonl")
    evaluations = [row for row in read_jsonl(tmp_path / "out" / "metrics.jsonl") if "eval/teacher_kl" in row]
    mean = sum(sample["score"] for sample in samples) / len(samples)
    assert evaluations[-1]["eval/teacher_kl"] == near(-mean, scale=100.0)


def test_a_teacher_needs_the_actors_vocabulary(run, flags, sft, tmp_path):
    folder = copy_model(sft, tmp_path / "other")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["<|unused|>"])
    tokenizer.save_pretrained(folder)
    result = run("ppo", flags | {"teacher_model_name_or_path": folder})
    words = (
        f"--teacher_model_name_or_path {folder} and --actor_model_name_or_path",
        "1 of their tokens differ, such as '<|unused|>': missing and",
        "with the same tokenizer",
    )
    message_of(result, *words)
