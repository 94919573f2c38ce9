# SPDX-License-Identifier: Apache-2.0
"""Step 3 with --termination_condition parsing."""

import json

import pytest

from cli_runs import check_names, training_rows
from metric_conditions import CRITIC, OWN_SAMPLING, PARSING

CUT = {"termination_condition": "parsing", "per_device_generation_batch_size": 8, "per_device_training_batch_size": 8}
SHORT = {"num_train_epochs": 1, "data_split": "0,48,16"}  # two rollouts of eight


def check_run(folder, name):
    """Two updates; their metrics and records. Returns the rows of the metrics."""
    rows = training_rows(folder)
    assert len(rows) == 2
    for row in rows:
        assert row["parsing/sentences"] == row["parsing/parsed"] + row["parsing/fell_back"] > 0
        assert row["parsing/seconds"] > 0 and row["macro/length"] > 1
    record = json.loads((folder / "run.json").read_text())
    assert record["parser"]["name"] == name and record["parser"]["version"]
    return rows


@pytest.fixture
def flags(ppo_flags):
    return ppo_flags | CUT | SHORT | {"self_checks": None}


def test_the_chunker(run, flags, tmp_path):
    run("ppo", flags | {"parser": "chunker", "max_answer_seq_len": 32}).expect(0)
    rows = check_run(tmp_path / "out", "chunker")
    check_names(tmp_path / "out", CRITIC, PARSING, OWN_SAMPLING)
    assert all(row["parsing/fell_back"] == 0 for row in rows)


def test_benepar_with_a_users_model(run, flags, tmp_path, benepar_model):
    run("ppo", flags | {"parser": "benepar", "parser_model": benepar_model, "parser_cutoff": 4}).expect(0)
    rows = check_run(tmp_path / "out", "benepar")
    assert sum(row["parsing/parsed"] for row in rows) > 0
    assert json.loads((tmp_path / "out" / "train_config.json").read_text())["parsing_cutoff"] == 4
