# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that are damaged, and disks that are full: a clear message, and the checkpoint before is used."""

import json
import shutil
from functools import partial

import pytest

from cli_runs import message_of
from fault_runs import RESUME, Trial, contents, expect_same, outcome, small_files_only, without_override

WEIGHTS = "actor/mp_rank_00_model_states.pt"


def flip(file):
    """Turns one bit over."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def cut(file):
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def flip_the_update(file):
    """A manifest that is still JSON."""
    text = file.read_text()
    assert '"update": 6' in text
    file.write_text(text.replace('"update": 6', '"update": 9'))


def delete(file):
    file.unlink()


def add(file):
    file.write_bytes(b"pickle")


STRANGE = "actor/mp_rank_01_model_states.pt"
# What becomes of the newest checkpoint and of the one before it: how, which file, and what is said.
DAMAGES = {
    "weights": ((flip, WEIGHTS, "damaged"), (delete, WEIGHTS, "missing")),
    "files": ((add, STRANGE, "was not written by the run"), (cut, "metrics.jsonl", "damaged")),
    "manifests": (
        (cut, "manifest.json", "has no readable manifest.json"),
        (flip_the_update, "manifest.json", "damaged"),
    ),
}


@pytest.fixture(scope="session")
def finished(shared, whole):
    """The folder of a finished step 3."""
    whole("ppo")
    return shared / "fault-ppo" / "out"


@pytest.fixture
def copied(trial, finished):
    """A copy of a finished step 3, with checkpoints after 2 updates, the best, and after 6 and 8."""
    run = trial("ppo")
    shutil.copytree(finished, run.out)
    assert run.checkpoints() == [2, 6, 8]
    return run


SLOW = ("files", "manifests")
CASES = [pytest.param(*DAMAGES[x], id=x, marks=[pytest.mark.slow] if x in SLOW else []) for x in DAMAGES]


@pytest.mark.parametrize(("newest", "before"), CASES)
def test_the_checkpoint_before_damaged_ones_is_used(newest, before, copied, whole):
    """The newest two are damaged, each in its own way."""
    checkpoints = copied.out / "checkpoints"
    for name, (damage, file, _) in (("step-8", newest), ("step-6", before)):
        damage(checkpoints / name / file)
    result = copied.run(**RESUME).expect(0)
    warnings = [line for line in result.stderr.splitlines() if "is not used" in line]
    for warning, name, (_, file, said) in zip(warnings, ("step-8", "step-6"), (newest, before), strict=True):
        assert name in warning and file in warning and said in warning
    assert f"going on from {checkpoints}/step-2" in result.stderr
    expect_same(whole("ppo"), outcome(copied.out))
    assert copied.checkpoints() == [2, 6, 8]


def test_a_note_beside_a_checkpoint_is_no_damage(copied, whole):
    """Neither what a user writes down nor what an editor or a file system leaves there. A finished run goes on with
    nothing, and nothing changes.
    """
    place = copied.out / "checkpoints" / "step-8"
    (place / "notes.txt").write_text("the good one")
    (place / "actor" / ".nfs0001").touch()
    result = copied.run(**RESUME).expect(0)
    assert "is not used" not in result.stderr and f"going on from {place}" in result.stderr
    expect_same(whole("ppo"), outcome(copied.out))
    assert json.loads((copied.out / "run.json").read_text())["resumed_at"] == [8]


def test_a_damaged_checkpoint_that_is_named_is_an_error(copied):
    named = copied.out / "checkpoints" / "step-8"
    flip(named / WEIGHTS)
    before = contents(copied.out)
    message_of(copied.run(resume_from_checkpoint=named), str(named), WEIGHTS, "latest")
    assert contents(copied.out) == before


def test_without_a_whole_checkpoint_nothing_is_begun_anew(copied):
    for number in (2, 6, 8):
        cut(copied.out / "checkpoints" / f"step-{number}" / WEIGHTS)
    before = contents(copied.out)
    message_of(copied.run(**RESUME), "no checkpoint in", "can be used", WEIGHTS, "--overwrite_output_dir")
    assert contents(copied.out) == before


def test_a_finished_run_without_checkpoints_is_not_begun_anew(copied):
    shutil.rmtree(copied.out / "checkpoints")
    before = contents(copied.out)
    message_of(copied.run(**RESUME), "finished run without a checkpoint", "--overwrite_output_dir")
    assert contents(copied.out) == before


def test_going_on_in_another_folder(copied, trial, whole):
    """The rows until then come along; samples of earlier evaluations stay where they are."""
    other = trial("ppo", "-other")
    other.run(resume_from_checkpoint=copied.out / "checkpoints" / "step-6").expect(0)
    expected, found = whole("ppo"), outcome(other.out)
    assert found["metrics.jsonl"] == expected["metrics.jsonl"]
    assert found["actor/model.safetensors"] == expected["actor/model.safetensors"]


def test_going_back_gives_up_what_came_later(copied, whole):
    """The newest checkpoints are those of the run that goes on, even where a later one is damaged."""
    shutil.copytree(copied.out / "checkpoints" / "step-8", copied.out / "checkpoints" / "step-90")
    copied.run(resume_from_checkpoint=copied.out / "checkpoints" / "step-6").expect(0)
    expect_same(whole("ppo"), outcome(copied.out))
    assert copied.checkpoints() == [2, 6, 8]


def test_a_checkpoint_lost_between_two_renames_comes_back(copied, whole):
    """The folder that makes way for a newer one of its name, and a process that is killed there."""
    shutil.rmtree(copied.out / "checkpoints" / "step-6")
    newest = copied.out / "checkpoints" / "step-8"
    newest.rename(newest.with_name(".step-8.replaced-by-a-newer-one"))
    (copied.out / ".writing" / "step-8").mkdir(parents=True)
    result = copied.run(**RESUME).expect(0)
    assert f"going on from {newest}" in result.stderr
    expect_same(whole("ppo"), outcome(copied.out))
    assert not list(copied.out.glob("**/.*"))


def interrupted(run: Trial) -> None:
    """Leaves a run as it was after 6 updates."""
    shutil.rmtree(run.out / "checkpoints" / "step-8")
    for name in ("actor", "actor_ema", "critic"):
        shutil.rmtree(run.out / name)
    record = json.loads((run.out / "run.json").read_text())
    (run.out / "run.json").write_text(json.dumps(record | {"finished": False}))


@pytest.mark.parametrize("room", ["none for weights", "none for a row"])
def test_a_full_disk(room, copied, whole):
    """Nothing of what was there is lost, and with room the run goes on."""
    interrupted(copied)
    kept = copied.out / "checkpoints" / "step-6" / "metrics.jsonl"
    limit = 50_000 if room == "none for weights" else kept.stat().st_size + 20
    result = copied.run(partial(small_files_only, limit), **RESUME)
    named = f"{copied.out}/checkpoints/step-8" if room == "none for weights" else f"--output_dir {copied.out}"
    message_of(result, named, " could not be written", "resume with --resume_from_checkpoint")
    assert copied.checkpoints() == [2, 6] and not (copied.out / ".writing").exists()
    copied.run(**RESUME).expect(0)
    expect_same(whole("ppo"), outcome(copied.out))


@pytest.mark.slow
def test_models_on_a_full_disk(copied, whole):
    """Without checkpoints along the way the models are the first large files."""
    interrupted(copied)
    result = copied.run(partial(small_files_only, 15_000), save_steps=0, **RESUME)
    message_of(result, f"the models could not be written into {copied.out}", "Make room")
    assert copied.checkpoints() == [2, 6] and not (copied.out / "actor").exists()
    copied.run(**RESUME).expect(0)
    expect_same(whole("ppo"), outcome(copied.out))


def test_an_output_that_cannot_be_written(copied):
    before = contents(copied.out)
    folders = [copied.out, *(folder for folder in copied.out.rglob("*") if folder.is_dir())]
    for folder in folders:
        folder.chmod(0o555)
    try:
        message_of(copied.run(without_override, **RESUME), f"--output_dir {copied.out}", "cannot be written")
        assert contents(copied.out) == before
    finally:
        for folder in folders:
            folder.chmod(0o755)
