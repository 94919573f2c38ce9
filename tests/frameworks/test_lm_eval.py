# SPDX-License-Identifier: Apache-2.0
"""`dschat evaluate` with the real lm-evaluation-harness: `make test-frameworks FRAMEWORK=lm_eval`."""

import json
import math

import numpy as np
import pytest

pytest.importorskip("lm_eval", reason="needs lm_eval: make test-frameworks FRAMEWORK=lm_eval")

import torch
from lm_eval.tasks import TaskManager
from transformers import AutoModelForCausalLM, AutoTokenizer

from dschat.base.errors import UserError
from dschat.cli import main
from dschat.evaluation.benchmarks import load_tasks
from dschat.models.tiny import make_model

COLOURS = ("blue", "green", "a deep red", "white as snow")
THINGS = ("The sky", "Grass", "Blood", "Snow", "The sea", "A rose", "Salt", "A leaf", "Ice", "Moss")
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"
TASK = """
task: {name}
dataset_path: json
dataset_kwargs:
  data_files: {{test: {file}}}
test_split: test
output_type: {kind}
doc_to_text: "{{{{question}}}}"
doc_to_target: {target}
metadata: {{version: 3}}
"""
CHOICES = 'doc_to_choice: "{{choices}}"\nmetric_list: [{metric: acc}]\n'


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "tiny"
    texts = [f"{thing} is {colour}." for thing in THINGS for colour in COLOURS]
    return make_model(folder, texts, vocab_size=300, chat_template=TEMPLATE)


@pytest.fixture(scope="module")
def rows():
    made = []
    for number, thing in enumerate(THINGS):
        answer = number % len(COLOURS)
        made.append({"question": f"{thing} is", "choices": COLOURS, "answer": answer, "right": COLOURS[answer]})
    return made


@pytest.fixture(scope="module")
def tasks(tmp_path_factory, rows):
    """Multiple choice, likelihoods, a task that runs programs, and one whose data are missing."""
    folder = tmp_path_factory.mktemp("tasks")
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    choice = TASK.format(name="colours", file=file, kind="multiple_choice", target="answer") + CHOICES
    likelihood = TASK.format(name="answers", file=file, kind="loglikelihood", target='" {{right}}"')
    (folder / "colours.yaml").write_text(choice)
    (folder / "answers.yaml").write_text(likelihood + "metric_list: [{metric: perplexity}]\n")
    (folder / "unsafe.yaml").write_text(choice.replace("task: colours", "task: runs_programs") + "unsafe_code: true\n")
    (folder / "both.yaml").write_text("group: both\ntask: [colours, answers]\n")
    (folder / "helper.py").write_text("import no_such_package\n")
    lacks = choice.replace("task: colours", "task: lacks_package")
    (folder / "lacks.yaml").write_text(lacks + "process_docs: !function helper.f\n")
    (folder / "lost.yaml").write_text(choice.replace("task: colours", "task: lost").replace("rows.jsonl", "no.jsonl"))
    return folder


@pytest.fixture
def evaluate(model, tasks, tmp_path):
    """Runs the command; returns its status, and the rows that it wrote."""

    def run(*words):
        status = main(["evaluate", str(model), "--include_path", str(tasks), "--output_dir", str(tmp_path), *words])
        file = tmp_path / "tiny.jsonl"
        return status, [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    return run


def logprob(causal_lm, tokenizer, context, continuation):
    """Sum of the log-softmax over the tokens of " continuation", in float64."""
    start = len(tokenizer(context)["input_ids"])
    ids = tokenizer(f"{context} {continuation}")["input_ids"]
    with torch.no_grad():
        logits = causal_lm(torch.tensor([ids])).logits[0].double().numpy()
    total = 0.0
    for place in range(start, len(ids)):
        row = logits[place - 1]
        total += row[ids[place]] - row.max() - math.log(np.exp(row - row.max()).sum())
    return total


def test_values_are_those_of_a_log_softmax_by_hand(evaluate, model, rows, capsys):
    """Accuracy, its standard error, and perplexity; the harness computes in batches with padding."""
    status, written = evaluate("--tasks", "colours,answers", "--batch_size", "4", "--dtype", "fp32", "--device", "cpu")
    assert status == 0
    causal_lm = AutoModelForCausalLM.from_pretrained(model).eval()
    tokenizer = AutoTokenizer.from_pretrained(model)
    right = []
    losses = []
    for row in rows:
        scores = [logprob(causal_lm, tokenizer, row["question"], choice) for choice in COLOURS]
        right.append(int(np.argmax(scores)) == row["answer"])
        losses.append(-scores[row["answer"]])
    share = np.mean(right)
    assert 0 < share < 1
    answers, colours = written
    assert colours["value"] == pytest.approx(share)
    assert colours["standard_error"] == pytest.approx(math.sqrt(share * (1 - share) / (len(rows) - 1)))
    assert answers["value"] == pytest.approx(math.exp(np.mean(losses)), rel=1e-4)  # about 30 nats, float32
    for name, row in {"colours": colours, "answers": answers}.items():
        assert (row["model"], row["task"], row["version"], row["rows"], row["shots"]) == ("tiny", name, "3", 10, 0)
        assert row["harness"].startswith("lm_eval 0.") and row["part_of"] == "" and not row["chat_template"]
    assert (colours["higher_is_better"], answers["higher_is_better"]) == (True, False)
    out = capsys.readouterr().out
    assert "acc ↑" in out and "perplexity ↓" in out


def test_limit_and_chat_template_change_what_is_asked(evaluate):
    plain = ["--tasks", "answers", "--limit", "4"]
    _, (first,) = evaluate(*plain)
    _, (second,) = evaluate(*plain, "--apply_chat_template", "--overwrite")
    assert first["rows"] == second["rows"] == 4
    assert second["chat_template"] and first["value"] != second["value"]


@pytest.fixture(scope="module")
def manager(tasks):
    return TaskManager(include_path=tasks)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["coloours"], "--tasks coloours: there is no such task. Did you mean colours"),
        (["runs_programs"], "--tasks runs_programs: .*; `dschat programs` runs programs in one"),
        (["lost"], "--tasks lost: the task's data cannot be read: .*no.jsonl"),
        (["lacks_package"], "--tasks lacks_package: No module named 'no_such_package'. .* pip install 'lm_eval"),
        (["both", "colours"], "Duplicate task 'colours': .* Give one of the two"),
    ],
)
def test_tasks_that_cannot_be_used_are_named(manager, names, message):
    with pytest.raises(UserError, match=message):
        load_tasks(manager, names)


def test_a_finished_result_is_kept(evaluate, tmp_path, caplog):
    (tmp_path / "tiny.jsonl").write_text("{}\n")
    assert evaluate("--tasks", "answers")[0] == 2
    assert "tiny.jsonl exists, finished. Give --overwrite" in caplog.text
