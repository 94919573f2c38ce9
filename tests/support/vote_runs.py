# SPDX-License-Identifier: Apache-2.0
"""Responses to vote on, the command line of `dschat vote`, and a reader of its votes."""

import sys
from pathlib import Path
from typing import Any

from cli_runs import ROOT, read_jsonl, write_jsonl
from dschat.evaluation.responses import read_pairs
from dschat.evaluation.vote.sessions import Study, VoteFile

SCRIPT = ROOT / "evaluation" / "human-eval.py"
MODELS = ("kestrel", "osprey")  # nothing else in a test says these words, so that they can be looked for


def write_responses(folder: Path, count: int, **changes: str) -> tuple[Path, Path]:
    """Responses of two models to `count` prompts, "prompt 0" and so on: "good 0" and "bad 0".

    Args:
        folder: for the two files.
        count: rows of each.
        changes: "good0" or "bad2" → another text for that response.
    """
    files = []
    for model, word in zip(MODELS, ("good", "bad"), strict=True):
        rows = [{"prompt": f"prompt {i}", "response": changes.get(f"{word}{i}", f"{word} {i}")} for i in range(count)]
        files.append(write_jsonl(folder / f"{model}-sampled.jsonl", rows))
    return files[0], files[1]


def make_study(folder: Path, count: int) -> Study:
    """A study of `count` pairs with the votes in votes.jsonl."""
    files = write_responses(folder, count)
    return Study(read_pairs(files[0], "--model_a", files[1], "--model_b"), VoteFile(folder / "votes.jsonl"), MODELS)


def command(folder: Path, *flags: str) -> list[str]:
    """The command line as documented, on the files of `write_responses`."""
    files = {
        f"--model_name_{letter}": folder / f"{model}-sampled.jsonl" for letter, model in zip("ab", MODELS, strict=True)
    }
    words = [str(word) for pair in files.items() for word in pair]
    return [sys.executable, str(SCRIPT), *words, "--output", str(folder / "votes.jsonl"), *flags]


def votes(folder: Path) -> list[dict[str, Any]]:
    """The rows of votes.jsonl; none if it is not there."""
    file = folder / "votes.jsonl"
    return read_jsonl(file) if file.exists() else []


def places(row: dict[str, Any]) -> tuple[str, str]:
    """A row's responses as its rater saw them: at the first and the second place."""
    texts = (row["response_a"], row["response_b"])
    return texts if row["first"] == "A" else texts[::-1]
