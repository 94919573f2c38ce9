# SPDX-License-Identifier: Apache-2.0
"""TensorBoard, an offline W&B run and Trackio hold what metrics.jsonl holds; a tracker that fails ends nothing."""

import json
import logging
import math
from types import SimpleNamespace

import pytest

from cli_runs import read_jsonl
from dschat.base.errors import UserError
from dschat.run.metrics import MetricsLog
from dschat.run.trackers import TensorBoard, wandb_problem
from dschat.settings.flags import flags_on_resume
from dschat.settings.parse import parse
from dschat.settings.supervised import SFTConfig
from factories import ppo_config, run_of

SAMPLES = [
    {"prompt": "p|1", "response": "two\nlines", "score": 0.123456, "finished": True, "tokens": [{"token": "two"}]},
    {"prompt": "p2", "response": "r2", "score": -1.0, "finished": False, "scores": [1.0, 2.0]},
]


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    """W&B stays on this machine."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    for name in ("WANDB_DIR", "WANDB_API_KEY", "WANDB_PROJECT", "WANDB_NAME"):
        monkeypatch.delenv(name, raising=False)


def run_on(folder, **flags):
    config = ppo_config(folder, report_to=["tensorboard", "wandb"], **flags)
    return run_of("ppo", config)


class RecordedRun:
    """A W&B run that notes what it gets."""

    dir = "wandb/files"
    settings = SimpleNamespace(mode="offline")

    def __init__(self):
        self.rows = []
        self.log = self.rows.append

    def define_metric(self, *_, **__):
        pass

    def finish(self):
        pass


@pytest.fixture
def wandb_runs(monkeypatch):
    """(options, run) of every W&B run that is begun."""
    wandb = pytest.importorskip("wandb")
    runs = []

    def init(**options):
        runs.append((options, RecordedRun()))
        return runs[-1][1]

    monkeypatch.setattr(wandb, "init", init)
    return runs


def events_of(folder):
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    return event_accumulator.EventAccumulator(str(folder)).Reload()


def scalars_of(folder):
    events = events_of(folder)
    return {name: [(e.step, e.value) for e in events.Scalars(name)] for name in events.Tags()["scalars"]}


def test_both_hold_the_rows_of_metrics_jsonl(tmp_path, group):
    """W&B itself writes them, offline."""
    pytest.importorskip("wandb")
    run = run_on(tmp_path)
    run.metrics.log(0, 0, {"eval/loss": 2.5})
    run.metrics.log(1, 8, {"loss": 1.0 / 3, "grad_norm": math.nan})
    run.metrics.log(1, 8, {"eval/loss": 2.25})
    run.metrics.show_samples(1, SAMPLES)
    run.finish()
    assert scalars_of(tmp_path / "tensorboard") == {
        "eval/loss": [(0, 2.5), (1, 2.25)],
        "loss": [(1, pytest.approx(1.0 / 3))],
    }
    (file,) = tmp_path.glob(f"wandb/offline-run-*/run-{run.record.tracker_runs['wandb']}.wandb")
    assert b"grad_norm" not in file.read_bytes() and b"eval/loss" in file.read_bytes()
    (table,) = tmp_path.glob("wandb/offline-run-*/files/media/table/*.json")
    content = json.loads(table.read_text())
    assert content["columns"] == ["prompt", "response", "score", "finished", "scores"]
    assert content["data"][1] == ["p2", "r2", -1.0, False, "[1.0, 2.0]"]


@pytest.mark.parametrize("had_wandb", [True, False])
def test_a_run_that_goes_on(had_wandb, tmp_path, group, wandb_runs):
    """W&B's run keeps its id and is told no row twice; one that begins later gets all rows so far."""
    run = run_on(tmp_path) if had_wandb else run_of("ppo", ppo_config(tmp_path, report_to=["tensorboard"]))
    run.metrics.log(1, 8, {"loss": 3.0})
    state, text = run.state_dict(), run.metrics.text()
    run.metrics.log(2, 16, {"loss": 2.0})  # after the checkpoint
    run.finish()
    again = run_on(tmp_path, resume_from_checkpoint="latest")
    again.load_state_dict(state, text, 1)
    again.metrics.log(2, 16, {"loss": 2.0})
    again.finish()
    options, later = wandb_runs[-1]
    assert options["id"] == json.loads((tmp_path / "run.json").read_text())["tracker_runs"]["wandb"]
    assert not had_wandb or options["id"] == wandb_runs[0][0]["id"]
    assert [row["update"] for row in later.rows] == ([2] if had_wandb else [1, 2])
    assert scalars_of(tmp_path / "tensorboard")["loss"] == [(1, 3.0), (2, 2.0)]


def test_tensorboard_gets_the_rows_of_a_part_that_ran_without_it(tmp_path, group):
    run = run_of("ppo", ppo_config(tmp_path, report_to=["tensorboard"]))
    run.metrics.log(1, 8, {"loss": 3.0})
    for trackers, updates in (([], (2, 3)), (["tensorboard"], (4,))):
        state, text = run.state_dict(), run.metrics.text()
        run.finish()
        run = run_of("ppo", ppo_config(tmp_path, report_to=trackers, resume_from_checkpoint="latest"))
        run.load_state_dict(state, text, updates[0] - 1)
        for update in updates:
            run.metrics.log(update, 8 * update, {"loss": 4.0 - update})
    run.finish()
    assert scalars_of(tmp_path / "tensorboard")["loss"] == [(1, 3.0), (2, 2.0), (3, 1.0), (4, 0.0)]


@pytest.fixture(scope="module")
def trackio_runs(tmp_path_factory):
    """Reads what the real Trackio keeps; its folder is fixed when it is imported."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRACKIO_DIR", str(tmp_path_factory.mktemp("trackio")))
        for name in ("TRACKIO_PROJECT", "TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"):
            patch.delenv(name, raising=False)
        pytest.importorskip("trackio")
        from trackio.sqlite_storage import SQLiteStorage

        yield SQLiteStorage


def test_trackio_continues_the_run_of_its_folder(tmp_path, group, trackio_runs, capsys):
    """Although another folder of the same name has begun a run in between; Trackio itself writes them."""

    def begin(folder, **flags):
        return run_of("ppo", ppo_config(tmp_path / folder / "ppo", report_to=["trackio"], **flags))

    first = begin("a")
    first.metrics.log(1, 8, {"loss": 3.0, "grad_norm": math.nan})
    first.metrics.show_samples(1, SAMPLES)
    state, text = first.state_dict(), first.metrics.text()
    first.metrics.log(2, 16, {"loss": 2.0})  # after the checkpoint
    first.finish()
    second = begin("b")
    second.metrics.log(1, 8, {"loss": 9.0})
    second.finish()
    again = begin("a", resume_from_checkpoint="latest")
    again.load_state_dict(state, text, 1)
    again.metrics.log(2, 16, {"loss": 2.5})
    again.finish()

    names = [json.loads((tmp_path / x / "ppo" / "run.json").read_text())["tracker_runs"]["trackio"] for x in "ab"]
    assert all(name.startswith("ppo-") for name in names)
    assert set(trackio_runs.get_runs("ma-rlhf")) == {*names}
    rows = trackio_runs.get_logs("ma-rlhf", names[0])
    losses = [(row["step"], row["loss"]) for row in rows if "loss" in row]
    assert losses == [(1, 3.0), (2, 2.0), (2, 2.5)]
    (table,) = [row["samples_table"] for row in rows if "samples_table" in row]
    shown = {"prompt": "p2", "response": "r2", "score": -1.0, "finished": False, "scores": "[1.0, 2.0]"}
    assert table["_value"][1] == shown and not any("grad_norm" in row for row in rows)
    assert trackio_runs.get_run_config("ma-rlhf", names[0])["gamma"] == 1.0
    assert "rackio" not in capsys.readouterr().out


def test_a_tracker_that_fails_is_left_out_after_one_warning(tmp_path, caplog):
    class Broken(TensorBoard):
        name = "broken"

        def log(self, row):
            raise OSError("no room")

    log = MetricsLog(tmp_path, [Broken(tmp_path / "a"), TensorBoard(tmp_path / "b")])
    with caplog.at_level(logging.WARNING):
        for update in (1, 2):
            log.log(update, update, {"loss": 1.0})
    log.close()
    (message,) = (record.getMessage() for record in caplog.records)
    assert "--report_to broken" in message and "no room" in message and "the run continues" in message
    assert len(read_jsonl(tmp_path / "metrics.jsonl")) == 2
    assert scalars_of(tmp_path / "b") == {"loss": [(1, 1.0), (2, 1.0)]}


def test_a_tracker_that_failed_gets_all_rows_when_a_run_goes_on(tmp_path):
    """Only those that have every row so far are taken up where they were."""

    class Broken(TensorBoard):
        name = "broken"
        run_id = "r1"

        def open(self, earlier_rows, update):
            raise OSError("network unreachable")

    working = TensorBoard(tmp_path / "b")
    working.run_id = "r2"
    log = MetricsLog(tmp_path, [Broken(tmp_path / "a"), working])
    assert log.tracked_runs() == ["tensorboard"]
    log.close()


def test_samples_as_text_in_tensorboard(tmp_path):
    board = TensorBoard(tmp_path)
    board.open([], None)
    board.show(4, SAMPLES)
    board.close()
    (event,) = events_of(tmp_path).Tensors("samples/text_summary")
    lines = event.tensor_proto.string_val[0].decode().splitlines()
    assert event.step == 4 and len(lines) == 4
    assert "p\\|1" in lines[2] and "two<br>lines" in lines[2] and "0.1235" in lines[2]


@pytest.fixture
def command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return ["--data_path", "rows.jsonl", "--output_dir", "out", "--model_name_or_path", "m", "--report_to"]


def test_flags(command, monkeypatch):
    assert parse(SFTConfig, [*command, "tensorboard", "--enable_tensorboard"]).trackers == ("tensorboard",)
    assert parse(SFTConfig, [*command[:-1], "--enable_tensorboard"]).trackers == ("tensorboard",)
    assert parse(SFTConfig, command[:-1]).trackers == ()
    with pytest.raises(UserError, match="--report_to mlflow: there is no such tracker; give tensorboard or wandb or"):
        parse(SFTConfig, [*command, "mlflow"])
    monkeypatch.setattr("dschat.settings.common.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"--report_to wandb: the package .* pip install 'ma-rlhf\[wandb\]'"):
        parse(SFTConfig, [*command, "wandb"])
    assert {"report_to", "push_to_hub"} <= flags_on_resume(SFTConfig, "free")


def test_without_a_key_wandb_is_refused_before_anything_is_loaded(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.setenv("WANDB_MODE", "online")
    wandb.teardown()
    assert "WANDB_MODE=offline" in (wandb_problem() or "")
    monkeypatch.setenv("WANDB_MODE", "offline")
    wandb.teardown()
    assert wandb_problem() is None
    wandb.teardown()
