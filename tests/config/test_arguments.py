# SPDX-License-Identifier: Apache-2.0
"""Configurations that are made in Python: other spellings, paths, and values of other types."""

from pathlib import Path

import numpy as np
import pytest

from dschat import PPOConfig

REQUIRED = {"actor_model_name_or_path": "m", "data_path": ["rows.jsonl"], "output_dir": "out"}


def made(**values):
    return PPOConfig(**(REQUIRED | values))


def test_spellings_of_a_command_line():
    assert made(kl_ctl=0.1) == made(kl_coef=0.1)
    assert made(kl_ctl=0.1).changed(kl_coef=0.2).flat()["kl_coef"] == 0.2
    with pytest.raises(TypeError, match="kl_coef is given twice, under two of its names"):
        made(kl_ctl=0.1, kl_coef=0.1)
    with pytest.raises(TypeError, match="PPOConfig has no flag learning_rate; did you mean --actor_learning_rate"):
        made(learning_rate=1e-5)


def test_paths(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    flags = made(output_dir=Path("~/out"), data_path="~/rows.jsonl", actor_model_name_or_path=Path("m")).flat()
    assert (flags["output_dir"], flags["data_path"]) == ("/home/me/out", ["/home/me/rows.jsonl"])
    assert flags["actor_model_name_or_path"] == "m" and type(flags["output_dir"]) is str


def test_numbers():
    flags = made(max_steps=2.0, kl_coef=1, seed=np.int64(3), actor_learning_rate=np.float32(0.5)).flat()
    assert flags["max_steps"] == 2 and type(flags["max_steps"]) is int
    assert type(flags["kl_coef"]) is float and type(flags["seed"]) is int
    assert flags["actor_learning_rate"] == 0.5


def test_the_newest_checkpoint():
    """As the flag without a value on a command line."""
    assert made(resume_from_checkpoint=True).flat()["resume_from_checkpoint"] == "latest"
    assert made(resume_from_checkpoint=False).flat()["resume_from_checkpoint"] is None


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"actor_learning_rate": "1e-5"}, "actor_learning_rate must be a number, not '1e-5' of type str"),
        ({"seed": True}, "seed must be a whole number, not True of type bool"),
        ({"max_steps": 2.5}, "max_steps must be a whole number, not 2.5 of type float"),
        ({"output_dir": None}, "output_dir needs a value, not None"),
        ({"data_path": [3]}, "data_path must be a text, not 3"),
        ({"ngram": True}, "ngram must be a number, not True of type bool"),
    ],
)
def test_another_type_is_named(values, message):
    with pytest.raises(TypeError, match=f"PPOConfig: {message}"):
        made(**values)
