# SPDX-License-Identifier: Apache-2.0
"""Step 3 with --reward_source programs: problems in APPS's columns, scores by execution."""

import json

import pytest

from cli_runs import check_names, evaluation_rows, read_jsonl, training_rows, write_jsonl
from dschat.programs.levels import weakness
from metric_conditions import CRITIC, OWN_SAMPLING, PROGRAMS
from published_set_copies import make_rows

pytestmark = [
    pytest.mark.xdist_group("sandbox"),
    pytest.mark.skipif(bool(weakness("namespaces")), reason="no sandbox: " + weakness("namespaces")),
]

STATUSES = ("invalid", "compile_error", "runtime_error", "timeout", "wrong", "passed")


@pytest.fixture
def flags(ppo_flags, tmp_path):
    """Step 3 on 20 odd and ordinary rows of APPS; two rollouts of eight."""
    write_jsonl(tmp_path / "apps" / "train.jsonl", make_rows("apps", 20))
    write_jsonl(tmp_path / "apps" / "test.jsonl", make_rows("apps", 6, "test"))
    own = {
        "data_path": tmp_path / "apps",
        "data_split": "0,0,1",
        "max_prompt_seq_len": 400,
        "num_train_epochs": 1,
        "per_device_generation_batch_size": 8,
        "per_device_training_batch_size": 8,
        "reward_source": "programs",
        "sandbox_workers": 2,
        "decode_graphs": "on",
    }
    rest = {k: v for k, v in ppo_flags.items() if k not in ("critic_model_name_or_path", "metric_function")}
    return rest | own


@pytest.mark.slow
def test_scores_by_execution(run, flags, tmp_path):
    run("ppo", flags | {"drop_unsolvable": True}).expect(0)
    rows = training_rows(tmp_path / "out")
    assert len(rows) == 2
    check_names(tmp_path / "out", CRITIC, PROGRAMS, OWN_SAMPLING, outcome=STATUSES)
    for row in rows:
        assert sum(row[f"programs/{status}"] for status in STATUSES) == pytest.approx(1)
        assert row["programs/tests_per_second"] > 0
    # Every response of this model is text, which Python does not take, or nothing, which prints nothing.
    scores = {round(sample["score"], 6) for sample in read_jsonl(tmp_path / "out" / "samples" / "update-000002.jsonl")}
    assert scores <= {-1.0, -0.6, -0.3}
    evaluation = evaluation_rows(tmp_path / "out")[-1]
    assert sum(evaluation[f"eval/programs/{status}"] for status in STATUSES) == pytest.approx(1)
    record = json.loads((tmp_path / "out" / "run.json").read_text())
    assert record["sandbox"] in ("bubblewrap", "namespaces") and record["decoding"] == "of fixed shapes"
    # Row 1 has no tests; the solutions of row 2 read an integer of 5,000 digits, which Python does not convert, and
    # that of row 3 defines no function.
    assert record["data"]["dropped"]["train"] == {"no tests": 1, "its own solution fails its tests": 2}
