# SPDX-License-Identifier: Apache-2.0
"""A project folder as users have it: data sets, a policy and a reward model, all small."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from data_fixtures import write_all
from factories import make_causal_lm, make_classifier, save_folder

EVAL_ROWS = 24  # of summarize and hh-rlhf; more than one batch of 16


@pytest.fixture(scope="session")
def project(tmp_path_factory: pytest.TempPathFactory, bytes_tokenizer: Any) -> Path:
    """data/{tldr,hh,webgpt,apps}, run/actor (with step 3's flags in run/train_config.json) and rm."""
    folder = tmp_path_factory.mktemp("project")
    write_all(folder / "data", 40, EVAL_ROWS)
    size = {"vocab_size": len(bytes_tokenizer)}
    save_folder(folder / "run" / "actor", make_causal_lm("gemma", **size), bytes_tokenizer)
    (folder / "run" / "train_config.json").write_text(json.dumps({"seed": 1, "ngram": 5}))
    save_folder(folder / "rm", make_classifier("gemma", seed=1, **size), bytes_tokenizer)
    return folder


@pytest.fixture
def options(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """options(**changes): a short run on the CPU that writes below tmp_path."""
    from dschat.inference.options import InferenceOptions

    monkeypatch.setenv("MA_RLHF_DATA", str(project / "data"))

    def make(**changes: Any) -> InferenceOptions:
        plain = {
            "proj_path": tmp_path,
            "dataset": "summarize",
            "model": str(project / "run"),
            "reward_model": str(project / "rm"),
            "max_new_tokens": 12,
            "device": "cpu",
        }
        return InferenceOptions(**(plain | changes))

    return make


@pytest.fixture
def run(options: Callable[..., Any]) -> Callable[..., Path]:
    """run(**changes): does the run of `options(**changes)`; its file."""
    from dschat.inference.run import run_inference

    def go(**changes: Any) -> Path:
        chosen = options(**changes)
        run_inference(chosen)
        return chosen.result_path

    return go
