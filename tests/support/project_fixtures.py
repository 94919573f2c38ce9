# SPDX-License-Identifier: Apache-2.0
"""Fixtures of tests of commands on finished models, for the conftest.py of their folders: a project folder as users
have it (data sets, a policy, a reward model), models that talk, and runs that are interrupted.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from factories import make_causal_lm, make_classifier, save_folder
from published_set_copies import write_all
from refuel_cases import make_models

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


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """policy, user and rm, which talk."""
    folder = tmp_path_factory.mktemp("models")
    make_models(folder)
    return folder


@pytest.fixture
def plain(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Flags of a short run with a reward model on the CPU that writes below tmp_path."""
    monkeypatch.setenv("MA_RLHF_DATA", str(project / "data"))
    flags = {"proj_path": tmp_path, "dataset": "summarize", "max_new_tokens": 12, "device": "cpu"}
    return flags | {"model": str(project / "run"), "reward_model": str(project / "rm")}


@pytest.fixture
def interrupt(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """interrupt(owner, name, count): from then on that function raises KeyboardInterrupt after so many calls.

    Without a count it raises no longer. Returns the positional arguments of each call to come.
    """
    originals: dict[str, Any] = {}

    def after(owner: Any, name: str, count: int | None = None) -> list[Any]:
        original = originals.setdefault(name, getattr(owner, name))
        calls: list[Any] = []

        def work(*arguments: Any, **keywords: Any) -> Any:
            if len(calls) == count:
                raise KeyboardInterrupt
            calls.append(arguments)
            return original(*arguments, **keywords)

        monkeypatch.setattr(owner, name, work)
        return calls

    return after
