# SPDX-License-Identifier: Apache-2.0
"""Small chat models, dialogues and rewards, and runs of the `dschat refuel-data` commands."""

import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

from cli_runs import TRAINING, Result, arguments, run_command, run_forked, write_jsonl
from dialogue_cases import chat_tokenizer, dialogue
from factories import make_causal_lm, make_classifier, save_folder

REFUEL = TRAINING / "refuel"
POSITIONS = 4096  # the user's prompt is long in these tokens


def script(name: str, flags: dict[str, Any], cwd: Path) -> Result:
    """A script of the folder refuel as its users start it."""
    return run_command(command(name, flags), cwd=cwd)


def forked(name: str, flags: dict[str, Any], cwd: Path) -> Result:
    """The same without the seconds of start, see `run_forked`."""
    return run_forked(REFUEL / f"{name}.py", flags, cwd / f"printed-{name}", partial(os.chdir, cwd))


def command(name: str, flags: dict[str, Any]) -> list[str]:
    """Its command line."""
    return [sys.executable, str(REFUEL / f"{name}.py"), *arguments(flags)]


def make_models(folder: Path) -> None:
    """Folders policy, user and rm, all with the same template."""
    tokenizer = chat_tokenizer("llama-3")
    for seed, name in enumerate(("policy", "user")):
        model = make_causal_lm("llama", seed, len(tokenizer), max_position_embeddings=POSITIONS)
        save_folder(folder / name, model, tokenizer)
    model = make_classifier("llama", 5, len(tokenizer), max_position_embeddings=POSITIONS)
    save_folder(folder / "rm", model, tokenizer)


def make_prompts(folder: Path, count: int) -> Path:
    """prompts.jsonl of different questions."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    rows = [{"prompt": f"question {letters[i % 26]}{letters[i // 26]}"} for i in range(count)]
    return write_jsonl(folder / "prompts.jsonl", rows)


def row(turn: int = 1, last: int = 1, rewards: Any = ((1.0, 2.0, 3.0), (1.0, 5.0, 4.0)), **changes: Any) -> Any:
    """A scored row of two dialogues of three turns that leave each other at a turn."""
    texts = ["ask", "first", "more", "second", "again", "third"]
    other = [text if place <= 2 * turn else f"{text} b" for place, text in enumerate(texts)]
    made = {
        "trajectory": dialogue(*texts),
        "trajectory_sampled_h_from_sampled_len": dialogue(*other),
        "sampled_len_from_5": last,
        "sampled_h_from_sampled_len": turn,
        "trajectory_reward": list(rewards[0]),
        "trajectory_sampled_h_from_sampled_len_reward": list(rewards[1]),
    }
    return made | changes
