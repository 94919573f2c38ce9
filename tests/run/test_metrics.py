# SPDX-License-Identifier: Apache-2.0
"""Weighted means, metrics.jsonl, and evaluations as lines above a progress bar."""

import logging
import math
import statistics

import pytest
import torch

from cli_runs import read_jsonl
from closeness import FORMULA, near
from dschat.base.errors import UserError
from dschat.base.progress import LinesAboveBars
from dschat.main import run_script
from dschat.run.metrics import Means, MetricsLog, RowMeans, evaluation_line, few_rows_warning


def test_means_are_weighted():
    means = Means()
    means.add("loss", torch.tensor(6.0, requires_grad=True), 2)
    means.add("loss", 3, 1)
    means.add("other", torch.tensor(5), torch.tensor(4))
    means.add("a", 1.0, 4)
    means.add("b", torch.tensor(2.0), 4)
    means.add("a", 1.0, 4)
    means.add("no weight", torch.tensor(0.0), torch.tensor(0))
    assert means.reduce() == {"loss": 3.0, "other": 1.25, "a": 0.25, "b": 0.5, "no weight": 0.0}
    assert Means().reduce() == {}


def test_lines(tmp_path):
    log = MetricsLog(tmp_path / "run")
    log.log(0, 0, {"eval/loss": 2.5})
    log.log(3, 24, {"loss": float("nan"), "lr": 1e-3, "up": float("inf"), "count": 2})
    first, second = read_jsonl(tmp_path / "run" / "metrics.jsonl")  # before close: each line is flushed
    log.close()
    assert second.pop("seconds") >= first.pop("seconds") >= 0
    assert first == {"update": 0, "samples": 0, "eval/loss": 2.5}
    assert second == {"update": 3, "samples": 24, "loss": None, "lr": 1e-3, "up": None, "count": 2}


def test_the_file_of_a_full_disk_is_named(tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.symlink_to("/dev/full")
    log = MetricsLog(tmp_path)
    with pytest.raises(OSError, match="No space left") as caught:
        log.log(1, 8, {"loss": 2.0})
    assert caught.value.filename == str(file)
    with pytest.raises(OSError, match="No space left"):
        log.close()


def test_rows_are_cut_back_to_those_of_a_checkpoint(tmp_path):
    """Whatever the file holds: more rows, fewer, others, or half of one."""
    log = MetricsLog(tmp_path)
    log.log(1, 8, {"loss": 2.0})
    kept = log.text()
    log.log(2, 16, {"loss": 1.0})
    log.close()
    whole = (tmp_path / "metrics.jsonl").read_text()
    for found in (whole, kept, "", kept[:-5], whole[:-5], "x" * 500):
        (tmp_path / "metrics.jsonl").write_text(found)
        log = MetricsLog(tmp_path, keep=True)
        assert (tmp_path / "metrics.jsonl").read_text() == found, "until it is clear what stays"
        log.cut(kept, 100.0, 1)
        log.log(2, 16, {"loss": 1.0})
        log.close()
        rows = read_jsonl(tmp_path / "metrics.jsonl")
        assert [(row["update"], row["loss"]) for row in rows] == [(1, 2.0), (2, 1.0)]
        assert rows[1]["seconds"] >= 100.0


@pytest.mark.parametrize("change", ["a row of another run", "null bytes", "no UTF-8", "cut"])
def test_rows_that_somebody_changed_are_not_read_as_this_run_s(change, tmp_path):
    log, file = MetricsLog(tmp_path), tmp_path / "metrics.jsonl"
    log.log(1, 8, {"loss": 2.0})
    log.log(2, 16, {"loss": 1.0})
    assert [row["update"] for row in log.rows()] == [1, 2]
    whole = file.read_bytes()
    changed = {"a row of another run": whole + b'{"update": 2}\n', "cut": whole[:-5]}
    changed |= {"no UTF-8": whole.replace(b"loss", b"los\xff"), "null bytes": b"\0" * 9 + whole[9:]}
    file.write_bytes(changed[change])
    for read in (log.text, log.rows):
        with pytest.raises(UserError, match=r"metrics\.jsonl is not what this run wrote.*--resume_from_checkpoint"):
            read()
    log.close()
    log = MetricsLog(tmp_path, keep=True)
    log.cut(whole.decode(), 0.0, 2)
    assert file.read_bytes() == whole and [row["update"] for row in log.rows()] == [1, 2]


def test_a_run_that_lost_its_folder_writes_nothing_into_the_next_one_s(tmp_path):
    """Where a disk's locks are each machine's own, both run for a while."""
    first = MetricsLog(tmp_path)
    first.log(1, 8, {"loss": 1.0})
    second = MetricsLog(tmp_path, keep=True)
    second.cut(first.text(), 0.0, 1)
    first.log(2, 16, {"loss": 2.0})
    second.log(2, 16, {"loss": 3.0})
    assert [row["loss"] for row in second.rows()] == [1.0, 3.0]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2


def test_an_evaluation_is_a_line():
    first = {"eval/length": 12345.6, "eval/eos_rate": 0.5, "eval/kl": 0.0, "eval/scores": -1.23456}
    line = "after 0 updates: scores -1.235, kl 0.000, length 12346, eos rate 0.5000"
    assert evaluation_line(0, first, {}, {}) == line
    second = {"eval/scores": -1.0, "eval/kl": 0.5, "eval/new": 2.0}
    line = "after 10 updates: scores -1.000 (+0.23), kl 0.5000 (+0.5), new 2.000"
    assert evaluation_line(10, second, first, first) == line
    loss = {"eval/loss": 2.25}
    assert evaluation_line(1, {"eval/loss": 2.0}, loss, loss) == "after 1 update: loss 2.000 (−0.25)"
    counted = {"eval/loss": 2.0, "eval/loss_stderr": 0.0321, "eval/rows": 95.0}
    line = "after 1 update, 95 held-out rows: loss 2.000 ± 0.032 (−0.25)"
    assert evaluation_line(1, counted, loss, loss) == line


def test_a_later_evaluation_has_the_change_since_the_first_one_too():
    """A score that fell to 0 at once, and stays there."""
    first, previous = {"eval/scores": 0.7, "eval/kl": 0.0}, {"eval/scores": 0.0, "eval/kl": 27.0, "eval/new": 1.0}
    line = evaluation_line(9, {"eval/scores": 0.0, "eval/kl": 74.0, "eval/new": 2.0}, previous, first)
    changes = "(changes since the previous and the first evaluation)"
    assert line == f"after 9 updates {changes}: scores 0.000 (+0, −0.7), kl 74.00 (+47, +74), new 2.000"


def test_standard_errors_over_rows(group):
    """Of plain numbers s / √n by the library; of a ratio by hand: totals 2, 6, 4 over weights 1, 2, 1 have the mean
    12 / 4 = 3 and the residuals −1, 0, 1, so that the error is √(3 / 2 · 2) / 4 = √3 / 4. The row of weight 0 does not
    count.
    """
    numbers = torch.tensor([1.0, 4.0, 2.0, 7.0])
    means = RowMeans()
    for part in numbers.split(3):
        means.add("scores", part, torch.ones_like(part))
    means.add("loss", torch.tensor([2.0, 6.0, 0.0, 4.0]), torch.tensor([1.0, 2.0, 0.0, 1.0]))
    means.add("single", torch.tensor([5.0]), torch.tensor([1]))
    means.add_mean("passed", 3.0, 4)
    assert means.reduce() == near(
        {
            "scores": 3.5,
            "scores_stderr": statistics.stdev(numbers.tolist()) / 2,
            "loss": 3.0,
            "loss_stderr": math.sqrt(3) / 4,
            "single": 5.0,
            "passed": 0.75,
        },
        FORMULA,
    )


def test_a_mean_over_no_row_is_left_out(group):
    """An evaluation in which no response has a score: 0 could be the best score of the run."""
    means = RowMeans()
    means.add("scores", torch.zeros(3), torch.zeros(3))
    means.add("length", torch.ones(3), torch.ones(3))
    assert means.reduce() == {"length": 1.0, "length_stderr": 0.0}


def test_few_rows_are_said():
    assert few_rows_warning({"eval/rows": 30.0}) is None and few_rows_warning({}) is None
    said = few_rows_warning({"eval/rows": 2.0})
    assert said.startswith("evaluations are on 2 held-out rows: differences within")
    assert "--eval_share" in said and "--eval_iters or --eval_prompts" in said


def test_lines_go_above_the_bar_without_a_launcher(monkeypatch):
    """`dschat ppo` on one GPU reads its flags and trains in one process, which sets up logging once."""
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    assert run_script(lambda: "") == 0
    handlers = logging.getLogger().handlers
    assert [type(handler) for handler in handlers] == [LinesAboveBars]
