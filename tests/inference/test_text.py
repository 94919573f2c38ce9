# SPDX-License-Identifier: Apache-2.0
"""Text metrics of whole models: equal to plain transformers row by row, for any batch size, through a kill."""

import json
import sys
from pathlib import Path

import pytest
import torch

from cli_runs import read_jsonl, run_command, write_jsonl
from dschat.errors import UserError
from dschat.inference.text import run_text
from dschat.inference.text_options import TextOptions
from factories import BOS, EOS, hf_score, make_causal_lm, make_classifier, save_folder

PROMPTS = (
    "the quick ",
    "a cat sat on a mat, and ate ",
    "we make zebra puzzles; vex ",
    "jinx ",
    "an apple at a table. ",
)
CHOSEN = ("brown fox", "an apple at a table", "jinx, quartz and whisky follow", "a cat", "the lazy dog")
REJECTED = ("dog", "a table and a mat", "the quick brown fox jumps over the lazy dog", "zebra", "vex")


@pytest.fixture
def place(tmp_path, tokenizer):
    """Two policies, a reward model, five comparisons."""
    rows = [{"prompt": p, "chosen": c, "rejected": r} for p, c, r in zip(PROMPTS, CHOSEN, REJECTED, strict=True)]
    write_jsonl(tmp_path / "data" / "train.jsonl", rows[:2])
    write_jsonl(tmp_path / "data" / "eval.jsonl", rows)
    for seed in (1, 2):
        save_folder(tmp_path / f"policy{seed}", make_causal_lm("gpt2", seed), tokenizer)
    save_folder(tmp_path / "rm", make_classifier("gemma", 3), tokenizer)
    return tmp_path


def measure(place, name="out", **flags):
    flags = {"data": str(place / "data"), "device": "cpu", "max_new_tokens": 6, "dtype": "fp32"} | flags
    run_text(TextOptions(output=place / name, **flags))
    return read_jsonl(place / name / "rows.jsonl")


def texts_of(tokenizer, all_tokens):
    """Ids of prompt and response, and the first place that is trained on."""
    for prompt, response in zip(PROMPTS, CHOSEN, strict=True):
        head = [BOS, *tokenizer(prompt, add_special_tokens=False)["input_ids"]]
        ids = [*head, *tokenizer(response, add_special_tokens=False)["input_ids"], EOS]
        yield ids, 1 if all_tokens else len(head)


@pytest.mark.parametrize("all_tokens", [False, True])
def test_losses_are_those_of_plain_transformers(place, tokenizer, all_tokens):
    """A text alone, without padding: −log softmax of the logits at the token before."""
    rows = measure(place, model=[str(place / "policy1")], no_rouge=True, all_tokens=all_tokens)
    model = make_causal_lm("gpt2", 1).eval().requires_grad_(False)
    assert len(rows) == 5 and "response" not in rows[0]
    for row, (ids, first) in zip(rows, texts_of(tokenizer, all_tokens), strict=True):
        logits = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        losses = [-float(logits[place - 1, ids[place]]) for place in range(first, len(ids))]
        assert row["loss_tokens"] == len(losses)
        assert row["loss_sum"] == pytest.approx(sum(losses), rel=1e-5)


def test_batches_of_one_and_of_sixteen_say_the_same(place):
    """Prompts of different lengths are padded on the left; responses are cut out where they are all the same."""
    flags = {"model": [str(place / "policy1")], "reward_model": [str(place / "rm")]}
    one, many = (measure(place, f"out{size}", batch_size=size, **flags) for size in (1, 16))
    for first, second in zip(one, many, strict=True):
        numbers = {name for name, value in first.items() if isinstance(value, float)}
        assert {name: first[name] for name in first if name not in numbers} == {
            name: second[name] for name in second if name not in numbers
        }
        assert {name: first[name] for name in numbers} == pytest.approx(
            {name: second[name] for name in numbers}, rel=1e-5
        )


def test_responses_are_greedy_and_compared_with_the_data(place, tokenizer):
    rows = measure(place, model=[str(place / "policy1")])
    model = make_causal_lm("gpt2", 1).eval()
    for row, prompt in zip(rows, PROMPTS, strict=True):
        ids = [BOS, *tokenizer(prompt, add_special_tokens=False)["input_ids"]]
        drawn = []
        while len(drawn) < 6 and drawn[-1:] != [EOS]:
            drawn.append(int(model(torch.tensor([ids + drawn])).logits[0, -1].argmax()))
        assert row["response"] == tokenizer.decode([number for number in drawn if number != EOS])
        assert row["response_tokens"] == len(drawn) and row["finished"] == (drawn[-1] == EOS)
        assert {"rouge1", "rouge2", "rougeL"} <= set(row)


def test_scores_are_those_of_plain_transformers(place, tokenizer):
    rows = measure(place, reward_model=[str(place / "rm")])
    classifier = make_classifier("gemma", 3).eval()
    for row, prompt, *responses in zip(rows, PROMPTS, CHOSEN, REJECTED, strict=True):
        parts = [[BOS, *tokenizer(prompt, add_special_tokens=False)["input_ids"]]]
        parts += [tokenizer(response, add_special_tokens=False)["input_ids"] for response in responses]
        better, worse = (hf_score(classifier, [*parts[0], *part, EOS]) for part in parts[1:])
        assert (row["chosen_score"], row["rejected_score"]) == pytest.approx((better, worse), rel=1e-5)


def test_an_interrupted_run_goes_on(place, monkeypatch):
    import dschat.inference.text as text

    flags = {"model": [str(place / "policy1"), str(place / "policy2")], "batch_size": 2}
    whole = measure(place, "whole", **flags)
    real, calls = text.read_and_answer, []

    def stopping(*args):
        calls.append(args)
        if len(calls) == 5:  # in the second model
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(text, "read_and_answer", stopping)
    with pytest.raises(KeyboardInterrupt):
        measure(place, **flags)
    assert not (place / "out" / "rows.jsonl").exists()
    assert measure(place, **flags) == whole and len(calls) == 5 + 2
    with pytest.raises(UserError, match="rows.jsonl exists, finished"):
        measure(place, **flags)


def test_all_models_of_a_run(place):
    """models/step-N and the final ones, by updates; the last step is the final model."""
    run = place / "run"
    for name in ("models/step-10/actor", "models/step-2/actor", "models/step-12/actor", "actor"):
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).symlink_to(place / "policy1")
    (run / "run.json").write_text(json.dumps({"step": "ppo", "batches": {"total_updates": 12}}))
    rows = measure(place, checkpoints=run, num_samples=2, no_rouge=True)
    assert [(row["model"], row["update"]) for row in rows[::2]] == [("step-2", 2), ("step-10", 10), ("final", 12)]
    assert len({row["prompt"] for row in rows}) == 2, "the same texts for every model"
    (run / "run.json").write_text(json.dumps({"step": "reward"}))
    kinds = {each.kind for each in TextOptions(data="d", output=place, checkpoints=run).subjects()}
    assert kinds == {"reward"}


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({}, "Nothing to measure: give --model"),
        ({"model": ["m"], "split": "test"}, "--split test: must be one of eval, train"),
        ({"model": ["m"], "batch_size": 0}, "--batch-size 0: must be at least 1"),
        ({"model": ["a/m", "b/m"]}, "Two of the models are called m"),
        ({"checkpoints": "nowhere"}, "--checkpoints nowhere: no run of ours"),
    ],
)
def test_bad_flags(tmp_path, flags, words):
    if "checkpoints" in flags:
        flags = {"checkpoints": Path("nowhere")}
    with pytest.raises(UserError, match=words):
        TextOptions(data="d", output=tmp_path, **flags).subjects()


def test_what_is_left_out_is_said(place, caplog):
    limit = 8
    rows = measure(place, model=[str(place / "policy1")], no_rouge=True, max_prompt_len=limit, split="eval")
    assert (
        0 < len(rows) < 5 and f"{5 - len(rows)} of 5 texts left out (prompt too long: {5 - len(rows)})" in caplog.text
    )
    with pytest.raises(UserError, match="none of the 5 texts is left"):
        measure(place, "none", model=[str(place / "policy1")], max_prompt_len=1)
    (place / "empty").mkdir()
    (place / "empty" / "run.json").write_text('{"step": "sft"}')
    with pytest.raises(UserError, match="kept no models yet. With --save_models"):
        measure(place, "none", checkpoints=place / "empty")


@pytest.mark.slow
def test_the_command(place):
    """As it is typed, on the training rows."""
    words = ["--model", place / "policy1", "--data", place / "data", "--output", place / "out", "--split", "train"]
    command = [sys.executable, "-m", "dschat.evaluation.text", *words, "--max_new_tokens", "4", "--device", "cpu"]
    done = run_command(command).expect(0)
    assert "| policy1 |" in done.stdout and len(read_jsonl(place / "out" / "rows.jsonl")) == 2
