# SPDX-License-Identifier: Apache-2.0
"""What the mains save, opened and measured with plain transformers; and second runs into the same folder."""

import json
import math

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from cli_runs import (
    GOLD,
    STEPS,
    evaluation_rows,
    prompt_of,
    read_jsonl,
    rows_of,
    run_process,
)
from closeness import UPDATE, near

# -- saved models in plain transformers


@torch.no_grad()
def test_step_1_saves_the_model_it_measured(sft, inputs):
    model, tokenizer = AutoModelForCausalLM.from_pretrained(sft).eval(), AutoTokenizer.from_pretrained(sft)
    total, count = 0.0, 0
    for row in rows_of(inputs, 0):
        prompt = tokenizer(prompt_of(row), add_special_tokens=False).input_ids
        response = tokenizer(row["summaries"][row["choice"]]["text"], add_special_tokens=False).input_ids
        ids = [tokenizer.bos_token_id, *prompt, *response, tokenizer.eos_token_id][:192]
        logprobs = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
        own = logprobs.gather(-1, torch.tensor(ids[1:])[:, None])[len(prompt) :, 0]
        total, count = total + float(own.sum()), count + len(own)
    assert evaluation_rows(sft)[-1]["eval/perplexity"] == near(math.exp(-total / count), UPDATE)


@torch.no_grad()
def test_step_2_saves_the_model_it_measured(reward, inputs):
    model = AutoModelForSequenceClassification.from_pretrained(reward).eval()
    tokenizer = AutoTokenizer.from_pretrained(reward)
    scores: dict[str, list[float]] = {"chosen": [], "rejected": []}
    for row in rows_of(inputs, 1):
        prompt = tokenizer(prompt_of(row), add_special_tokens=False).input_ids
        for name, place in (("chosen", row["choice"]), ("rejected", 1 - row["choice"])):
            response = tokenizer(row["summaries"][place]["text"], add_special_tokens=False).input_ids
            ids = [tokenizer.bos_token_id, *prompt, *response, tokenizer.eos_token_id][:192]
            scores[name].append(float(model(torch.tensor([ids])).logits[0, 0]))
    evaluated = evaluation_rows(reward)[-1]
    means = {name: sum(values) / len(values) for name, values in scores.items()}
    assert evaluated["eval/chosen"] == near(means["chosen"])
    assert evaluated["eval/rejected"] == near(means["rejected"])
    better = [c > r for c, r in zip(scores["chosen"], scores["rejected"], strict=True)]
    assert evaluated["eval/accuracy"] == pytest.approx(sum(better) / len(better))


def test_step_3_saves_both_models(ppo, sft, reward):
    actor, critic = ppo / "actor", ppo / "critic"
    tokenizer = AutoTokenizer.from_pretrained(actor)
    assert tokenizer.get_vocab() == AutoTokenizer.from_pretrained(sft).get_vocab()
    model = AutoModelForCausalLM.from_pretrained(actor).eval()
    ids = tokenizer("POST\n", return_tensors="pt")
    assert ids.input_ids[0, 0] == tokenizer.bos_token_id
    assert model.generate(**ids, max_new_tokens=4).shape[1] > ids.input_ids.shape[1]
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    head = AutoModelForSequenceClassification.from_pretrained(critic).score
    assert head.out_features == 1
    assert not torch.equal(head.weight, AutoModelForSequenceClassification.from_pretrained(reward).score.weight)
    before = AutoModelForCausalLM.from_pretrained(sft).get_input_embeddings().weight
    assert not torch.equal(before, model.get_input_embeddings().weight)


def test_a_checkpoint_opens_and_differs_from_the_end(sft, reward, ppo):
    for auto_class, folder in (
        (AutoModelForCausalLM, sft),
        (AutoModelForSequenceClassification, reward),
        (AutoModelForCausalLM, ppo),
    ):
        name = "actor" if folder == ppo else "."
        early, late, end = (
            auto_class.from_pretrained(folder / place / name).get_input_embeddings().weight
            for place in ("models/step-2", "models/step-4", ".")
        )
        assert torch.equal(late, end) and not torch.equal(early, end)
        AutoTokenizer.from_pretrained(folder / "models" / "step-2" / name)


# -- a second run into the same folder


def test_a_finished_output_dir_is_refused_then_overwritten(run, sft_flags, tmp_path):
    assert run("sft", sft_flags).status == 0
    weights = (tmp_path / "out" / "model.safetensors").read_bytes()
    again = run("sft", sft_flags).expect(2)
    assert "--overwrite_output_dir" in again.stderr and "Traceback" not in again.stderr
    assert json.loads((tmp_path / "out" / "run.json").read_text())["finished"] is True
    assert run("sft", sft_flags | {"overwrite_output_dir": True, "seed": 2}).status == 0
    assert (tmp_path / "out" / "model.safetensors").read_bytes() != weights


def test_an_unfinished_output_dir_is_used_again(run, sft_flags, tmp_path):
    assert run("sft", sft_flags | {"data_path": tmp_path / "absent.jsonl"}).status == 2
    assert run("sft", sft_flags).status == 0


def test_overwriting_leaves_nothing_of_the_earlier_run(run, ppo_flags, tmp_path):
    longer = ppo_flags | {"save_models": 2, "eval_interval": 2}
    shorter = ppo_flags | {"per_device_training_batch_size": 16, "overwrite_output_dir": True}
    assert run("ppo", longer).status == 0
    assert run("ppo", shorter).status == 0
    names = {file.name for file in (tmp_path / "out" / "samples").iterdir()}
    assert names == {"update-000000.jsonl", "update-000002.jsonl"}
    assert not (tmp_path / "out" / "models").exists()


# -- the same seed


@pytest.mark.parametrize("step", STEPS)
def test_a_run_repeats_exactly(step, request, run, tmp_path):
    first = request.getfixturevalue(step)
    extra = {"metric_function": f"{GOLD}:gold_scores"} if step == "ppo" else {}
    run(step, request.getfixturevalue(f"{step}_flags") | extra | {"eval_interval": 2}).expect(0)
    rows = zip(read_jsonl(first / "metrics.jsonl"), read_jsonl(tmp_path / "out" / "metrics.jsonl"), strict=True)
    for one, other in rows:
        timed = {"seconds", "time/generation", "time/scoring", "time/training"}
        assert {k: v for k, v in one.items() if k not in timed} == {k: v for k, v in other.items() if k not in timed}


def test_help_as_a_process():
    for step in STEPS:
        result = run_process(step, {"help": True}).expect(0)
        assert "--data_path" in result.stdout and "--output_dir" in result.stdout and not result.stderr
