# SPDX-License-Identifier: Apache-2.0
"""REFUEL from prompts to a trained policy with the documented commands, and again where each was killed."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cli_runs import check_names, evaluation_rows, read_jsonl, training_rows, untimed
from closeness import UPDATE, near
from killed_commands import kill_when, rows_kept
from refuel_cases import command, forked, make_models, make_prompts, script

SLOW_SCORE = """
import time
def score(dialogues, rows):
    time.sleep(0.2)
    return [len(d) + 0.01 * len(d[-1]["content"]) + 0.1 * d[-1]["content"].count("e") for d in dialogues]
"""
GENERATE: dict[str, Any] = {
    **{"model": "policy", "output_dir": "work", "output_repo": "./dialogues", "num_data": 0},
    **{"prompts": "prompts.jsonl", "user_model": "user", "num_turns": 2, "max_new_tokens": 8, "batch_size": 3},
}
RANK: dict[str, Any] = {"prompts": "./dialogues", "output_repo": "./ranked", "reward_model": "rm"}
MASKS: dict[str, Any] = {"input_repo": "./ranked", "output_repo": "./pairs", "model": "policy", "total_length": 128}
TRAIN: dict[str, Any] = {
    **{"task.query_dataset": "./pairs", "task.cluster": "box", "task.total_length": 128, "task.temperature": 0.8},
    **{"lr": 1e-3, "refuel.eta": 1e1, "warmup_ratio": 0.1, "total_episodes": 24, "output_dir": "out"},
    **{"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4, "per_device_eval_batch_size": 1},
    **{"print_sample_output_freq": 3, "base_model": "policy", "dtype": "fp32"},
}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    make_models(tmp_path)
    return tmp_path


def content(folder: Path) -> dict[str, bytes]:
    """The files of a data set."""
    return {file.name: file.read_bytes() for file in folder.iterdir() if not file.name.startswith(".")}


def test_the_documented_commands(place):
    """Each reads what the one before wrote."""
    make_prompts(place, 12)
    said = forked("generate", GENERATE, place).expect(0)
    assert said.stdout == "12 dialogues of 2 turns, 0 prompts were repeated: dialogues\n", said.stderr
    said = forked("rank", RANK, place).expect(0)
    assert said.stdout == "48 rewards of 12 pairs of dialogues: ranked\n", said.stderr
    said = forked("tokenize_masks", MASKS, place).expect(0)
    assert said.stdout.startswith("11 pairs to train on and 1 held out: pairs"), said.stdout
    forked("refuel", TRAIN, place).expect(0)
    out = place / "out"
    rows, held_out = training_rows(out), evaluation_rows(out)
    assert [row["samples"] for row in rows] == [4, 8, 12, 16, 20, 24]  # episodes
    assert [row["update"] for row in held_out] == [0, 3, 6]
    differences = [
        row["chosen_reward"] - row["reject_reward"] for row in read_parquet(place / "pairs" / "test.parquet")
    ]
    expected = sum((10 * x) ** 2 for x in differences) / len(differences)
    assert held_out[0]["eval/loss"] == near(expected, 8 * UPDATE, scale=0.01)
    assert held_out[0]["eval/log_ratio"] == near(0, UPDATE) and held_out[0]["eval/ratio"] == pytest.approx(1, 1e-3)
    assert (
        rows[0]["lr"] > 0 and max(row["lr"] for row in rows) == 1e-3 and rows[0]["train/log_ratio"] == near(0, UPDATE)
    )
    check_names(out)
    assert "REFUEL" in (out / "README.md").read_text()
    assert json.loads((out / "run.json").read_text())["step"] == "refuel"
    assert (place / "pairs" / "pairs_box.safetensors").exists()


def read_parquet(file: Path) -> list[dict[str, Any]]:
    """Its rows."""
    from pyarrow import parquet

    return parquet.read_table(file).to_pylist()


@pytest.mark.slow
def test_after_a_kill_in_each_step_the_same_command_comes_to_the_same_bytes(place):
    make_prompts(place, 72)
    (place / "own.py").write_text(SLOW_SCORE)
    rank = {"prompts": "./dialogues", "output_repo": "./ranked", "reward_function": "own.py:score"}
    train = TRAIN | {"save_steps": 1, "resume_from_checkpoint": "latest", "total_episodes": 64}
    steps: list[tuple[str, dict[str, Any], Path, Callable[[], bool]]] = [
        ("generate", GENERATE, Path("dialogues"), lambda: rows_kept(place / "work" / "train.jsonl.partial") > 9),
        ("rank", rank, Path("ranked"), lambda: rows_kept(place / "ranked" / "train.jsonl.partial") > 30),
        ("tokenize_masks", MASKS, Path("pairs"), lambda: (place / "pairs").exists()),
        ("refuel", train, Path("out"), lambda: (place / "out" / "checkpoints" / "step-5").exists()),
    ]
    for name, flags, folder, now in steps:
        kill_when(command(name, flags), now, place)
        script(name, flags, place).expect(0)
        whole = place / f"whole-{name}"
        flags = flags | ({"output_dir": str(whole)} if name != "generate" else {"output_dir": str(place / "work3")})
        if name != "refuel":
            flags = flags | {"output_repo": f"{whole}"}
        script(name, flags, place).expect(0)
        if name == "refuel":
            assert (whole / "model.safetensors").read_bytes() == (place / folder / "model.safetensors").read_bytes()
            assert not (whole / "reference").exists()
            first, second = (
                [untimed(row) for row in read_jsonl(out / "metrics.jsonl")] for out in (whole, place / folder)
            )
            assert first == second
            assert json.loads((place / folder / "run.json").read_text())["resumed_at"]
            again = GENERATE | {"model": "out", "output_dir": "work4", "output_repo": "./second", "num_data": 2}
            assert script("generate", again, place).expect(0).stdout.startswith("2 dialogues")  # the next round
        else:
            assert content(place / folder) == content(whole), name
