# SPDX-License-Identifier: Apache-2.0
"""Files of a run that are missing, cut or malformed: a clear message that names them."""

import logging

import pytest

from dschat.base.errors import UserError
from dschat.lab.run_data import read_run
from dschat.lab.runs import build_report
from handmade_runs import table_of


def test_a_cut_last_line_is_skipped_with_a_warning(two_runs, tmp_path, caplog, no_pictures):
    for path in (two_runs["PPO"] / "metrics.jsonl", two_runs["PPO"] / "samples" / "update-000010.jsonl"):
        path.write_text(path.read_text() + '{"update": 11, "sam')
    with caplog.at_level(logging.WARNING):
        outcome = build_report(two_runs, tmp_path / "out")
    for place in ("metrics.jsonl:13", "update-000010.jsonl:3"):
        assert f"{place}: not valid JSON" in caplog.text and "skipped: the run may still be writing" in caplog.text
    assert table_of(outcome, "training").rows[0][1] == "10"


def test_rows_logged_twice_count_once(two_runs):
    path = two_runs["PPO"] / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines[:5], *lines[3:]]))
    assert read_run("PPO", two_runs["PPO"]).train["update"].tolist() == list(range(1, 11))


@pytest.mark.parametrize("name", ["metrics.jsonl", "train_config.json", "samples/update-000000.jsonl"])
def test_a_missing_file_is_named(two_runs, tmp_path, name):
    (two_runs["PPO"] / name).unlink()
    with pytest.raises(UserError, match=f"{name} is missing"):
        build_report(two_runs, tmp_path / "out")
    (two_runs["PPO"] / name).mkdir()
    with pytest.raises(UserError, match=f"{name} cannot be read"):
        build_report(two_runs, tmp_path / "out")
    assert not (tmp_path / "out").exists()


LAST = "samples/update-000010.jsonl"
SAMPLE = '{"prompt": "p", "score": 1, "finished": true, "gold_scores": 1, "kl": 0, "length": 1, '
START = '{"update": 0, "samples": 0, "seconds": 0'


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("train_config.json", "{", "train_config.json: not valid JSON"),
        ("train_config.json", "[]", "train_config.json does not hold a JSON object"),
        ("metrics.jsonl", "", "metrics.jsonl holds no complete row"),
        ("metrics.jsonl", "{}x\n{}\n", "metrics.jsonl:1: not valid JSON"),
        ("metrics.jsonl", "[]\n", "metrics.jsonl:1 does not hold a JSON object"),
        ("metrics.jsonl", '{"update": 0}\n', "metrics.jsonl:1: no samples"),
        ("metrics.jsonl", START + ', "lr": "x"}\n', "metrics.jsonl:1: lr is 'x', not a number"),
        ("metrics.jsonl", START + "}\n", "no evaluation of update 0"),
        ("metrics.jsonl", START + ', "eval/scores": 1}\n', "lower --eval_interval"),
        (LAST, '{"prompt": "p"}\n', "update-000010.jsonl:1: not a sample"),
        (LAST, SAMPLE + '"tokens": [{"text": "a"}]}\n', "'macro_action'. is wrong or missing"),
        (LAST, SAMPLE + '"tokens": [{"text": "a", "macro_action": "x"}]}\n', "invalid literal"),
        (LAST, "\n", "update-000010.jsonl holds no complete row"),
    ],
)
def test_a_malformed_file_is_named(two_runs, tmp_path, name, content, message):
    (two_runs["PPO"] / name).write_text(content)
    with pytest.raises(UserError, match=message):
        build_report(two_runs, tmp_path / "out")


def test_no_run_at_all_is_an_error(tmp_path):
    with pytest.raises(UserError, match="at least one run"):
        build_report({}, tmp_path)
