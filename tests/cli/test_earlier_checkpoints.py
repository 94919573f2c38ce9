# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of an earlier version are gone on from, to the end that that version would have come to.

`tests/fixtures/checkpoints.tar.xz` holds, of commit d9f517e: in/ (models, data), flags.json (of each run), cut/ (runs
that were stopped by SIGTERM in the middle of an update or a rollout) and whole/ (what those that were not ended with).
"""

import json
import os
import shutil
from functools import partial
from pathlib import Path

import pytest
from safetensors.torch import load_file

from cli_runs import STEPS, TRAINING, built_once, read_jsonl, run_forked
from closeness import UPDATE, WEIGHT_GAP, near
from factories import largest_difference

ARCHIVE = Path(__file__).resolve().parents[1] / "fixtures" / "checkpoints.tar.xz"
SCRIPTS = {name: folder / "main.py" for name, folder in STEPS.items()}
SCRIPTS |= {"pairs": TRAINING / "refuel" / "refuel.py", "online": TRAINING / "refuel" / "online.py"}


@pytest.fixture(scope="session")
def earlier(shared: Path) -> Path:
    """What the archive holds."""

    def build(folder: Path) -> None:
        shutil.unpack_archive(ARCHIVE, folder)

    return built_once(shared, "earlier", build)


@pytest.mark.parametrize("name", ["sft", "reward", "dpo", "ppo", "rloo", "refuel_online", "refuel"])
def test_a_run_goes_on_to_the_same_end(name, earlier, tmp_path):
    step, flags = json.loads((earlier / "flags.json").read_text())[name]
    out, whole = earlier / "cut" / name, earlier / "whole" / name
    before = len(read_jsonl(out / "metrics.jsonl"))
    words = [*flags.split(), "--output_dir", f"cut/{name}", "--save_steps", "100", "--resume_from_checkpoint"]
    run_forked(SCRIPTS[step], words, tmp_path, partial(os.chdir, earlier)).expect(0)

    rows, expected = (
        [
            {key: x for key, x in row.items() if "seconds" not in key and not key.startswith("time/")}
            for row in read_jsonl(folder / "metrics.jsonl")
        ]
        for folder in (out, whole)
    )
    assert 0 < before < len(rows) == len(expected)
    for row, other in zip(rows, expected, strict=True):
        assert row == near(other, 8 * UPDATE, scale=0.1)
    files = [file.relative_to(whole) for file in whole.rglob("*.safetensors")]
    assert files
    for file in files:
        assert largest_difference(load_file(out / file), load_file(whole / file)) < WEIGHT_GAP
