# SPDX-License-Identifier: Apache-2.0
"""Files of a run that are missing, cut or malformed: a clear message that names them."""

import json
import logging

import pytest

from dschat.base.errors import UserError
from dschat.evaluation.options import ReportOptions
from dschat.evaluation.report import report
from dschat.evaluation.run_data import read_run
from dschat.evaluation.runs import build_report
from handmade_runs import make_run, tables_of


def test_a_cut_last_line_is_skipped_with_a_warning(two_runs, tmp_path, caplog, no_pictures):
    for path in (two_runs["PPO"] / "metrics.jsonl", two_runs["PPO"] / "samples" / "update-000010.jsonl"):
        path.write_text(path.read_text() + '{"update": 11, "sam')
    with caplog.at_level(logging.WARNING):
        outcome = build_report(two_runs, tmp_path / "out")
    for place in ("metrics.jsonl:13", "update-000010.jsonl:3"):
        assert f"{place}: not valid JSON" in caplog.text and "skipped: the run may still be writing" in caplog.text
    assert tables_of(outcome)["training"].rows[0][1] == "10"


def test_rows_logged_twice_count_once(two_runs):
    path = two_runs["PPO"] / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines[:5], *lines[3:]]))
    assert read_run("PPO", two_runs["PPO"]).train["update"].tolist() == list(range(1, 11))


LAST = "samples/update-000010.jsonl"
START = '{"update": 0, "samples": 0, "seconds": 0'


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("run.json", '{"step": "generate"}', "run.json: step is 'generate': give the output folder of a training run"),
        (LAST, '{"prompt": "p"}\n', "update-000010.jsonl:1: not a sample"),
    ],
)
def test_a_malformed_file_is_named(two_runs, tmp_path, name, content, message):
    (two_runs["PPO"] / name).write_text(content)
    with pytest.raises(UserError, match=message):
        build_report(two_runs, tmp_path / "out")


@pytest.mark.parametrize(
    ("metrics", "lack"),
    [
        (START + ', "objective/scores": 1}\n', "metrics.jsonl has no evaluation of update 0, the SFT model"),
        (START + ', "eval/scores": 1}\n', "metrics.jsonl has no evaluation after update 0: let the run finish"),
        (None, "samples/update-000010.jsonl is missing"),
    ],
)
def test_runs_without_responses_to_compare_are_compared_by_their_metrics(
    two_runs, tmp_path, metrics, lack, no_pictures
):
    """A run that is still training, one without evaluations, and one whose samples were not copied."""
    if metrics is None:
        (two_runs["PPO"] / LAST).unlink()
    else:
        (two_runs["PPO"] / "metrics.jsonl").write_text(metrics)
        (two_runs["PPO"] / "run.json").write_text('{"step": "ppo"}')
    outcome = build_report(two_runs, tmp_path / "out")
    assert tables_of(outcome).keys() == {"results", "settings", "evaluations"}
    assert f"Responses are not compared. PPO: {lack}" in outcome.text()
    assert ("PPO has not finished: update 0 is its last so far." in outcome.text()) == (metrics is not None)
    with pytest.raises(UserError, match=lack):
        read_run("PPO", two_runs["PPO"])


def written(files, output):
    return report(ReportOptions(files=files, output=output))


def test_the_command_takes_folders_and_their_metrics(two_runs, tmp_path, no_pictures):
    """Runs are named after their folders, by the paths that tell them apart."""
    (tmp_path / "again").mkdir()
    other = two_runs["MA-PPO"].rename(tmp_path / "again" / "ppo")
    said = written([two_runs["PPO"], other / "metrics.jsonl"], tmp_path / "out")
    words = [line.split() for line in said.splitlines()]
    assert ["flag", "ppo", "again/ppo"] in words and ["--ngram", '"1"', '"2"'] in words
    assert said.endswith(f"report: {tmp_path / 'out' / 'report.html'}, {tmp_path / 'out' / 'report.json'}")
    content = json.loads((tmp_path / "out" / "report.json").read_text())
    assert [run["evaluations"]["last, best"]["eval/scores"] for run in content["runs"]] == [5.0, 7.0]


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (["ppo", "ppo/metrics.jsonl"], "A run is given twice"),
        (["."], "holds no metrics.jsonl, .* Give the runs in it: ma, ppo"),
        (["ppo", "sft"], r"ppo \(step 3\) and sft \(SFT\) are runs of different steps"),
        (["ppo", "verdicts.jsonl"], "Runs, files of programs, .*: give each kind in a report of its own"),
    ],
)
def test_what_is_no_run_or_cannot_be_compared_is_said(two_runs, tmp_path, files, message):
    if "sft" in files:
        sft = make_run(tmp_path / "sft", [0.4, 0.6])
        (sft / "run.json").write_text('{"step": "sft"}')
    (tmp_path / "verdicts.jsonl").write_text('{"verdict": "A"}\n')
    with pytest.raises(UserError, match=message):
        written([tmp_path / file for file in files], tmp_path / "out")
    assert not (tmp_path / "out").exists()
