# SPDX-License-Identifier: Apache-2.0
"""The output folder: an earlier run's files are moved aside, and only one run writes there."""

import errno
import json
import logging

import pytest

from dschat.base.errors import UserError
from dschat.base.lock import close_all
from dschat.main import report_error
from dschat.run.model_folders import ModelFolders, SavedModel
from dschat.run.output import RunOutput
from dschat.run.state import Progress
from factories import checkpoints_of, engine_of, make_causal_lm, ppo_config, run_of


@pytest.fixture
def place(tmp_path):
    """The folder of a finished run, with a file of the user's."""
    for name in ("actor/model.safetensors", "critic/config.json", "samples/update-000004.jsonl", "notes.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("old")
    (tmp_path / "metrics.jsonl").write_text('{"update": 0}\n')
    (tmp_path / "run.json").write_text(json.dumps({"finished": True}))
    return tmp_path


def files(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def run_on(folder, **flags):
    config = ppo_config(folder, overwrite_output_dir=True, **flags)
    return config, run_of("ppo", config)


def test_an_earlier_run_is_moved_aside_when_the_new_one_begins(place, group):
    """As often as it is asked for; files of the user's stay."""
    for name in ("config.json", "tokenizer.json", "tensorboard/events.out.1", "wandb/offline"):  # step 1's model
        (place / name).parent.mkdir(exist_ok=True)
        (place / name).write_text("old")
    before = {name: (place / name).read_text() for name in files(place)}
    config = ppo_config(place, overwrite_output_dir=True)
    run = RunOutput("ppo", config, config.plan_batches(1))
    assert before.items() <= {name: (place / name).read_text() for name in files(place)}.items()
    run.begin()
    stay = {"notes.txt", "wandb/offline"}
    aside = {name: (place / "earlier-1" / name).read_text() for name in files(place / "earlier-1")}
    assert aside == {name: text for name, text in before.items() if name not in stay}
    assert stay < {*files(place)} and (place / "metrics.jsonl").read_text() == ""
    run.finish()
    close_all()
    run_on(place)
    assert {*files(place / "earlier-2")} == {"config.yaml", "metrics.jsonl", "run.json", "train_config.json"}


def test_a_run_that_resumes_moves_nothing(place, group):
    before = files(place)
    run_on(place, resume_from_checkpoint="latest")
    assert {*before} <= {*files(place)} and not (place / "earlier-1").exists()


def test_a_warm_up_longer_than_the_run_is_said(tmp_path, group, caplog):
    caplog.set_level(logging.WARNING)
    _, run = run_on(tmp_path, num_warmup_steps=5)
    run.announce(6, 48)
    assert "--num_warmup_steps" not in caplog.text
    run.announce(5, 40)
    assert "--num_warmup_steps 5: the run makes 5 updates" in caplog.text


def test_only_models_that_are_whole_count_as_saved(tmp_path, group, tokenizer, monkeypatch, capsys):
    """Ctrl-C in the middle of a save."""
    config, run = run_on(tmp_path)
    models = [SavedModel(engine_of(make_causal_lm(), 8), "policy", "base", "actor")]
    folders = ModelFolders(models, tokenizer, config, run)
    folders.save_after(2)

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("dschat.run.model_folders.save_model", interrupted)
    with pytest.raises(KeyboardInterrupt):
        folders.save_final()
    assert run.record.saved == [str(tmp_path / "models" / "step-2")] and not (tmp_path / "actor").exists()
    assert not (tmp_path / ".writing").exists()
    assert report_error(KeyboardInterrupt(), run.record.saved) == 130
    assert f"the models saved last are in {run.record.saved[0]}" in capsys.readouterr().err
    assert report_error(KeyboardInterrupt(), []) == 130
    assert "no models were saved yet" in capsys.readouterr().err


def test_a_beginning_that_a_full_disk_ends_names_the_flag(place, group, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device", "run.json")

    config = ppo_config(place, overwrite_output_dir=True)
    run = RunOutput("ppo", config, config.plan_batches(1))
    monkeypatch.setattr(run.record, "save", full)
    with pytest.raises(UserError, match=f"--output_dir {place}: cannot be written: .*No space left"):
        run.begin()
    assert (place / "earlier-1" / "actor" / "model.safetensors").read_text() == "old"


def test_two_runs_that_start_in_a_new_folder_do_not_share_it(tmp_path, group):
    config = ppo_config(tmp_path / "out")
    first, second = (RunOutput("ppo", config, config.plan_batches(1)) for _ in range(2))
    assert not (tmp_path / "out").exists(), "nothing is written before a run begins"
    first.begin()
    with pytest.raises(UserError, match="another process is writing it") as refusal:
        second.begin()
    assert refusal.value.on_every_rank


@pytest.mark.parametrize(("local_rank", "shown"), [("0", True), ("1", False)])
def test_what_every_process_refuses_is_said_once_on_each_machine(local_rank, shown, monkeypatch, capsys):
    """On the second of two machines with four processes each."""
    for name, value in {"WORLD_SIZE": "8", "RANK": str(4 + int(local_rank)), "LOCAL_RANK": local_rank}.items():
        monkeypatch.setenv(name, value)
    error = UserError("--output_dir out holds a run")
    error.on_every_rank = True
    assert report_error(error, []) == 2
    assert ("holds a run" in capsys.readouterr().err) == shown


def test_a_run_that_lost_its_folder_leaves_what_the_next_one_is_writing(place, group):
    _, run = run_on(place)
    lose_the_lock(place)
    (place / ".writing").mkdir()
    (place / ".writing" / "weights").write_text("of the next run")
    with pytest.raises(UserError, match=f"this run has lost its lock {place}/.lock"):
        run.writing(place)
    assert (place / ".writing" / "weights").exists()


def test_a_run_that_ended_since_the_flags_were_checked_is_not_replaced(tmp_path, group):
    config = ppo_config(tmp_path / "out")  # a new folder
    run_on(tmp_path / "out")[1].finish()
    before = {name: (tmp_path / name).read_text() for name in files(tmp_path)}
    with pytest.raises(UserError, match="holds a run: add --resume_from_checkpoint"):
        run_of("ppo", config)
    del before["out/.lock"]
    after = {name: (tmp_path / name).read_text() for name in files(tmp_path) if not name.endswith(".lock")}
    assert after == before


def test_a_user_s_file_among_the_samples_stays(tmp_path, group):
    """Only samples of updates after the checkpoint are removed."""
    run = run_on(tmp_path / "out")[1]
    samples = tmp_path / "out" / "samples"
    samples.mkdir(exist_ok=True)
    for name in ("update-000002.jsonl", "update-000003.jsonl", "update-00003-best.jsonl", ".update-000001.jsonl"):
        (samples / name).write_text("{}\n")
    run._cut("", 0.0, 2)
    assert sorted(file.name for file in samples.iterdir()) == ["update-000002.jsonl", "update-00003-best.jsonl"]


def lose_the_lock(folder):
    """Another run removes the lock and acquires it."""
    (folder / ".lock").unlink()
    (folder / ".lock").touch()


def lose_rows(folder):
    (folder / "metrics.jsonl").write_bytes(bytes(10))


@pytest.mark.parametrize(
    ("lose", "said"), [(lose_the_lock, "has lost its lock"), (lose_rows, "is not what this run wrote")]
)
def test_a_run_that_is_not_alone_in_its_folder_saves_nothing_more(lose, said, tmp_path, group, tokenizer):
    config = ppo_config(tmp_path)
    run, engine = run_of("ppo", config), engine_of(make_causal_lm(), 8)
    folders = ModelFolders([SavedModel(engine, "policy", "base", "actor")], tokenizer, config, run)
    checkpoints = checkpoints_of(config, run, actor=engine)
    run.metrics.log(1, 8, {"loss": 1.0})
    folders.save_after(1)
    checkpoints.save(Progress(1, {}, {}))
    lose(tmp_path)
    for save in (lambda: folders.save_after(2), folders.save_final, lambda: checkpoints.save(Progress(2, {}, {}))):
        with pytest.raises(UserError, match=said):
            save()
    left = {name.split("/")[1] for name in files(tmp_path) if name.startswith(("models/", "checkpoints/", "actor/"))}
    assert left == {"step-1"} and not (tmp_path / ".writing").exists()
