# SPDX-License-Identifier: Apache-2.0
"""The mains as processes, one after the other on a small model: files, metrics, records, saved models."""

import hashlib
import json
import math
import re

import pytest

from cli_runs import (
    COMPARISONS,
    DEMONSTRATIONS,
    HELD_OUT,
    STEPS,
    check_names,
    evaluation_rows,
    files_under,
    prompt_of,
    read_jsonl,
    rows_of,
    run_forked,
    training_rows,
)
from closeness import FORMULA, UPDATE, near
from dschat.base.glossary import HEAD
from dschat.quickstart.synthetic import gold_score
from metric_conditions import CRITIC, OWN_SAMPLING, SEVERAL

CLASSIFIER = {"README.md", "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
CAUSAL_LM = CLASSIFIER | {"generation_config.json"}
SAMPLE = {"prompt", "response", "score", "finished", "gold_scores", "tokens"}
TOKEN = {"text", "macro_action", "value", "reward", "advantage", "logprob", "ref_logprob"}


def under(folder, names):
    """The names, inside a folder."""
    return {f"{folder}/{name}" for name in names}


def checkpoints(steps, names):
    """What --save_models leaves."""
    return {f"models/step-{step}/{name}" for step in steps for name in names | {"run.json"}}


# -- files


OWN = {"metrics.jsonl", "run.json", "train_config.json", "config.yaml", "tensorboard/events"}
REFERENCE = under("reference", {"train.safetensors", f"eval-{HELD_OUT // 2}.safetensors"})


@pytest.mark.parametrize(
    ("step", "model", "more"),
    [("sft", CAUSAL_LM, set()), ("reward", CLASSIFIER, set()), ("dpo", CAUSAL_LM, REFERENCE)],
)
def test_files_of_steps_1_and_2(step, model, more, request):
    assert files_under(request.getfixturevalue(step)) == model | OWN | more | checkpoints((2, 4), model)


def test_files_of_step_3(ppo):
    models = under("actor", CAUSAL_LM | {"run.json"}) | under("critic", CLASSIFIER | {"run.json"})
    saved = {f"models/step-{step}/{name}" for step in (2, 4) for name in models}
    samples = {f"samples/update-{update:06d}.jsonl" for update in (0, 2, 4)}
    assert files_under(ppo) == models | OWN | samples | saved


# -- metrics


@pytest.mark.parametrize("step", ["sft", "reward", "dpo"])
def test_metrics_of_steps_1_and_2(step, request):
    folder = request.getfixturevalue(step)
    trained, evaluated = training_rows(folder), evaluation_rows(folder)
    assert [(row["update"], row["samples"]) for row in trained] == [(1, 8), (2, 16), (3, 24), (4, 32)]
    assert [row["update"] for row in evaluated] == [0, 2, 4]
    check_names(folder)
    if step != "sft":
        for row in evaluated:
            assert row["eval/margin"] == near(row["eval/chosen"] - row["eval/rejected"])
    if step == "reward":
        assert evaluated[0]["eval/margin"] != 0  # a drawn head gives numbers at once
    if step == "dpo":
        assert evaluated[0]["eval/loss"] == near(math.log(2), FORMULA)  # the policy is the reference
        assert evaluated[0]["eval/chosen"] == near(0, UPDATE)
    if step != "reward":
        assert evaluated[-1]["eval/loss"] < evaluated[0]["eval/loss"]


def test_metrics_of_step_3(ppo):
    trained, evaluated = training_rows(ppo), evaluation_rows(ppo)
    assert [(row["update"], row["samples"]) for row in trained] == [(2, 16), (4, 32)]
    assert [(row["update"], row["samples"]) for row in evaluated] == [(0, 0), (2, 16), (4, 32)]
    check_names(ppo, CRITIC, SEVERAL, OWN_SAMPLING, source=["gold_scores"])
    seconds = [row["seconds"] for row in read_jsonl(ppo / "metrics.jsonl")]
    assert seconds == sorted(seconds) and seconds[0] > 0


def test_the_first_metrics_of_step_3_add_up(ppo):
    row, before = training_rows(ppo)[0], evaluation_rows(ppo)[0]
    assert row["objective/kl"] == near(0, UPDATE) and before["eval/kl"] == near(0, UPDATE)
    assert row["val/ratio"] == pytest.approx(1, abs=0.05)
    expected = row["objective/scores"] - 0.05 * row["objective/kl"]
    assert row["objective/rlhf_reward"] == near(expected, FORMULA)
    assert row["macro/length"] * row["macro/count"] == near(row["response/length"], FORMULA)
    assert row["macro/lambda_eff"] == near(0.95 ** (1 / row["macro/length"]), FORMULA)
    assert 1 < row["macro/length"] <= 5 and row["response/length"] <= 16
    assert row["val/num_eos_tokens"] == pytest.approx(16 * row["response/eos_rate"])
    assert (row["lr/actor"], row["lr/critic"]) == (1e-3, 1e-3)


def test_the_screen_shows_evaluations_and_where_models_are(shared, sft, reward, dpo, ppo):
    """Each line has the time. Runs of less than a minute have no bar in a file; DeepSpeed's lines are not there."""
    shown = {"sft": ["perplexity"], "reward": ["accuracy"], "dpo": ["accuracy", "margin"], "ppo": ["scores", "kl"]}
    for step, words in shown.items():
        screen = (shared / f"{step}.stderr").read_text()
        *_, last = (line for line in screen.splitlines() if " after 4 updates, " in line)
        assert all(f"{word} " in last for word in words) and ("(+" in last or "(−" in last)
        assert f"models saved in {shared / step}\n" in screen and "%|" not in screen
        assert re.search(r"after 0 updates, \d+ held-out rows: .* ± ", screen)
        assert re.search(r": \d+ of \d+ (rows to train on|training rows), \d+ ", screen)
        assert "global batch 8 = 8 per process x 1 processes" in screen and "4 updates" in screen
        assert re.search(r" the .+ starts from .*: trains ([\d,]+) of \1 parameters\n", screen)
        assert all(re.match(r"20\d\d-\d\d-\d\d \d\d:\d\d:\d\d ", line) for line in screen.splitlines()), screen


# -- samples


def test_samples_of_step_3(ppo, inputs):
    prompts = [prompt_of(row) for row in rows_of(inputs, 2)]
    for evaluated in evaluation_rows(ppo):
        samples = read_jsonl(ppo / "samples" / f"update-{evaluated['update']:06d}.jsonl")
        assert [sample["prompt"] for sample in samples] == prompts
        assert all(set(sample) >= SAMPLE - {"tokens"} for sample in samples)
        mean = sum(sample["score"] for sample in samples) / len(samples)
        assert evaluated["eval/scores"] == near(mean, FORMULA)
        for sample in samples:
            assert sample["gold_scores"] == near(gold_score(sample["response"]), FORMULA)
        detailed = [sample for sample in samples if "tokens" in sample]
        assert len(detailed) == min(8, len(samples))
        for sample in detailed:
            assert all(set(token) == TOKEN for token in sample["tokens"])
            actions = [token["macro_action"] for token in sample["tokens"]]
            assert actions == [position // 5 for position in range(len(actions))]


# -- records


@pytest.mark.parametrize(
    ("step", "train", "held_out"),
    [("sft", DEMONSTRATIONS, HELD_OUT), ("reward", COMPARISONS // 2, HELD_OUT // 2)]
    + [("dpo", COMPARISONS // 2, HELD_OUT // 2), ("ppo", COMPARISONS // 2, HELD_OUT // 2)],
)
def test_run_json_and_the_flags_that_are_kept(step, train, held_out, request, inputs):
    folder = request.getfixturevalue(step)
    record = json.loads((folder / "run.json").read_text())
    name = "demonstrations" if step == "sft" else "comparisons"
    assert record["step"] == step and record["finished"] is True and record["seeds"] == {"seed": 1234}
    assert record["command"][0] == str(STEPS[step] / "main.py") and "--data_path" in record["command"]
    (source,) = record["data"]["sources"]
    assert (source["name"], source["train"], source["eval"], source["dropped"]) == (name, train, held_out, {})
    files = [inputs / "data" / name / file for file in ("train.jsonl", "validation.jsonl")]
    assert record["data"]["sha256"] == {str(file): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}
    assert record["batches"]["global_batch"] == 8 and record["batches"]["total_updates"] == 4
    last = {key: value for key, value in evaluation_rows(folder)[-1].items() if key not in HEAD}
    assert record["metrics"] == pytest.approx(last)
    flags = json.loads((folder / "train_config.json").read_text())
    assert flags["output_dir"] == str(folder) and flags["save_models"] == 2 and flags["compile"] == "auto"
    assert set(record["layers"].values()) == {"eager"}


TRAIN_TWICE = """
import sys
from dschat import SFTConfig, train

losses = []
for folder in sys.argv[3:]:
    config = SFTConfig(
        data_path=[sys.argv[1]], data_split="1,0,0", model_name_or_path=sys.argv[2], output_dir=folder,
        max_seq_len=192, per_device_train_batch_size=8, max_steps=1,
    )
    losses.append(train(config)["eval/loss"])
assert losses[0] == losses[1], losses
"""


def test_a_program_trains_twice(sft_flags, tmp_path):
    """DeepSpeed keeps process groups, which must end with the run that made them."""
    script = tmp_path / "twice.py"
    script.write_text(TRAIN_TWICE)
    words = [str(sft_flags[name]) for name in ("data_path", "model_name_or_path")]
    run_forked(script, [*words, str(tmp_path / "first"), str(tmp_path / "second")], tmp_path / "log").expect(0)
