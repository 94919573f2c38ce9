# SPDX-License-Identifier: Apache-2.0
"""What may change between a run and its continuation, and what is refused without touching the folder."""

import hashlib
import json

import pytest

from cli_runs import message_of
from dschat.run.checkpoint import digest
from fault_runs import FUNCTIONS, MOMENTS, RESUME, Trial, contents, expect_same, flags_of, make_inputs, outcome


@pytest.fixture(scope="session")
def finished_own(tmp_path_factory):
    """A finished step 3 on files of its own, and those files."""
    inputs, place = tmp_path_factory.mktemp("own-inputs"), tmp_path_factory.mktemp("own")
    make_inputs(inputs)
    run = Trial("ppo", flags_of("ppo", inputs), place)
    run.run().expect(0)
    return run, inputs


@pytest.fixture
def own(finished_own):
    """The same; afterwards its files are what they were."""
    run, inputs = finished_own
    before = contents(inputs)
    yield run, inputs
    for name, content in before.items():
        (inputs / name).write_bytes(content)


def change_data(inputs):
    with open(inputs / "data" / "comparisons" / "train.jsonl", "a") as file:
        file.write("\n")


def change_model(inputs):
    file = inputs / "model" / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def change_tokenizer(inputs):
    file = inputs / "model" / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": "{{ messages[0].content }}"}))


def change_function(inputs):
    (inputs / "own.py").write_text(FUNCTIONS.replace("float(len(response))", "2.0 * len(response)"))


CHANGES = [
    (change_data, {}, ["the data has changed (", "/data/comparisons/train.jsonl)"]),
    (
        change_model,
        {},
        ["the model of actor_model_name_or_path has changed", "the model of critic_model_name_or_path"],
    ),
    (change_tokenizer, {}, ["the tokenizer has changed"]),
    (change_function, {}, ["the file of --reward_function has changed"]),
    (None, {"kl_coef": 0.5, "seed": 7}, ["--kl_coef was 0.05, is 0.5", "--seed was 1234, is 7"]),
    (None, {"enable_ema": None}, ["--enable_ema was true, is false"]),
]
NAMES = ["data", "model", "tokenizer", "function", "flags", "ema"]


@pytest.mark.parametrize(("change", "flags", "said"), CHANGES, ids=NAMES)
def test_a_change_is_refused_and_nothing_is_touched(change, flags, said, own):
    run, inputs = own
    if change is not None:
        change(inputs)
    before = contents(run.out)
    message_of(run.run(**RESUME, **flags), "--resume_from_checkpoint", "belongs to another run", *said)
    assert contents(run.out) == before
    assert not [folder for folder in run.out.rglob(".*")]


def test_a_checkpoint_of_another_step_is_refused(trial, whole, shared):
    whole("sft")
    other = shared / "fault-sft" / "out" / "checkpoints" / "step-4"
    run = trial("ppo")
    message_of(run.run(resume_from_checkpoint=other), str(other), "it is of the sft step")


def as_of_two_processes(folder, more=None):
    """Rewrites a checkpoint's manifest, with one more file."""
    file = folder / "manifest.json"
    manifest = json.loads(file.read_text()) | {"world_size": 2}
    if more is not None:
        (folder / more).parent.mkdir()
        (folder / more).touch()
        manifest["files"][more] = {"size": 0, "sha256": hashlib.sha256().hexdigest()}
    manifest["sha256"] = digest({name: value for name, value in manifest.items() if name != "sha256"})
    file.write_text(json.dumps(manifest))


REFUSED = "2 processes offloaded their optimisers' states to NVMe in it, here are 1"
PASSED_OVER = "is not used: it was written inside a rollout, after 1 of its 2 updates, by 2 processes, and here are 1"


@pytest.mark.parametrize("shared_out", ["states", "rollout", "nothing"])
def test_another_number_of_processes(shared_out, trial, whole, monkeypatch):
    """States on a disk are refused, since nothing cuts their parts anew; a rollout that is in use is passed over."""
    run = trial("ppo", enable_ema=None)  # how an average is cut anew: run/test_average_parts.py
    with monkeypatch.context() as hurt:
        hurt.setenv("FAULT", f"{MOMENTS['training' if shared_out == 'rollout' else 'generation']}|15")
        run.run().expect(143)
    newest = run.out / "checkpoints" / f"step-{run.checkpoints()[-1]}"
    assert not list(newest.rglob("*.py")), "DeepSpeed's converters are not kept"
    as_of_two_processes(newest, "actor/offloaded_tensors/0" if shared_out == "states" else None)
    result = run.run(**RESUME)
    if shared_out == "states":
        message_of(result, str(newest), REFUSED)
    else:
        assert (PASSED_OVER in result.expect(0).stderr) == (shared_out == "rollout")
        expected, found = whole("ppo"), outcome(run.out)
        assert all(found[name] == expected[name] for name in found if name.endswith(".safetensors"))


@pytest.mark.parametrize("step", ["sft", "ppo"])
def test_a_finished_run_goes_on_with_more_epochs(step, trial):
    """With a constant schedule it becomes the straight longer run, but for the evaluation that ended it."""
    straight, continued = trial(step, "-straight", num_train_epochs=2), trial(step, "-continued")
    for run in (straight, continued):
        run.flags |= {"lr_scheduler_type": "constant"}
    straight.run().expect(0)
    continued.run().expect(0)
    continued.run(num_train_epochs=2, **RESUME).expect(0)
    expect_same(outcome(straight.out), outcome(continued.out))
    record = json.loads((continued.out / "run.json").read_text())
    assert record["finished"] is True and record["resumed_at"] == [8 if step == "ppo" else 4]


def test_a_finished_run_that_goes_on_with_nothing_changes_nothing(trial, whole):
    run = trial("ppo")
    for more in ({}, RESUME, RESUME):
        run.run(**more).expect(0)
        expect_same(whole("ppo"), outcome(run.out))
    assert json.loads((run.out / "run.json").read_text())["resumed_at"] == [8, 8]


LOSS, SCORES = ("sft", "eval/loss", min), ("ppo", "eval/scores", max)


@pytest.mark.parametrize(
    ("step", "key", "choose", "limit"), [(*LOSS, 1), (*SCORES, 2), (*SCORES, 0)], ids=["sft-1", "ppo-2", "ppo-0"]
)
def test_the_newest_and_the_best_checkpoint_stay(step, key, choose, limit, trial):
    """Of those before the end: the evaluation that ends the run comes after its last checkpoint."""
    run = trial(step, save_total_limit=limit, eval_interval=1, learning_rate=None)
    if step == "sft":
        run.flags["learning_rate"] = 1.0  # the loss rises
    run.run().expect(0)
    rows = outcome(run.out)["metrics.jsonl"]
    marks = {row["update"]: row[key] for row in rows if key in row}
    every = [1, 2, 3, 4] if step == "sft" else [2, 4, 6, 8]
    earlier = {update: marks[update] for update in every[:-1]}
    best = choose(earlier, key=lambda update: earlier[update])
    assert run.checkpoints() == (sorted({*every[-limit:], best}) if limit else every)
