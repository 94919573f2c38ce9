# SPDX-License-Identifier: Apache-2.0
"""What may change between a run and its continuation, and what is refused without touching the folder."""

import hashlib
import json

import pytest

from cli_runs import message_of
from dschat.run.checkpoint import digest
from fault_runs import FUNCTIONS, MOMENTS, RESUME, Trial, contents, expect_same, flags_of, make_inputs, outcome


@pytest.fixture
def own(tmp_path):
    """A finished step 3 on files of its own, and those files."""
    inputs = tmp_path / "own-inputs"
    make_inputs(inputs)
    run = Trial("ppo", flags_of("ppo", inputs), tmp_path / "own")
    run.run().expect(0)
    return run, inputs


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


def test_changes_are_refused_and_nothing_is_touched(own):
    """All of them are named at once."""
    run, inputs = own
    for change in (change_data, change_model, change_tokenizer, change_function):
        change(inputs)
    before = contents(run.out)
    result = run.run(**RESUME, kl_coef=0.5, seed=7, enable_ema=None)
    message = message_of(result, "--resume_from_checkpoint", "belongs to another run")
    for said in (
        "the data has changed (",
        "/data/comparisons/train.jsonl)",
        "the model of actor_model_name_or_path has changed",
        "the model of critic_model_name_or_path has changed",
        "the tokenizer has changed",
        "the file of --reward_function has changed",
        "--kl_coef was 0.05, is 0.5",
        "--seed was 1234, is 7",
        "--enable_ema was true, is false",
    ):
        assert said in message
    assert contents(run.out) == before
    assert not list(run.out.rglob(".*"))


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


@pytest.mark.parametrize("shared_out", ["states", "rollout"])
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
        assert PASSED_OVER in result.expect(0).stderr
        expected, found = whole("ppo"), outcome(run.out)
        assert all(found[name] == expected[name] for name in found if name.endswith(".safetensors"))


@pytest.mark.slow
def test_a_finished_run_goes_on_with_more_epochs(trial):
    """With a constant schedule it becomes the straight longer run, but for the evaluation that ended it."""
    constant = {"lr_scheduler_type": "constant"}
    straight = trial("ppo", "-straight", num_train_epochs=2, **constant)
    continued = trial("ppo", "-continued", **constant)
    straight.run().expect(0)
    continued.run().expect(0)
    continued.run(num_train_epochs=2, **RESUME).expect(0)
    expect_same(outcome(straight.out), outcome(continued.out))
    record = json.loads((continued.out / "run.json").read_text())
    assert record["finished"] is True and record["resumed_at"] == [8]
