# SPDX-License-Identifier: Apache-2.0
"""The small corpus, model and the chain of steps 1, 2 and 3, made once for all test processes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cli_runs import (
    COMPARISONS,
    DEMONSTRATIONS,
    GOLD,
    HELD_OUT,
    SPLIT,
    Result,
    built_once,
    read_jsonl,
    run_forked,
    run_process,
    sft_flags_of,
)

FUNCTIONS = """
import torch

def length(prompts, responses, rows):
    assert len(prompts) == len(responses) == len(rows)
    return torch.tensor([float(len(response)) for response in responses])

def subreddit(prompts, responses, rows):
    return [float(len(row["info"]["subreddit"])) for row in rows]

def thirds(trajectory, tokenizer):
    assert tokenizer.eos_token == "<eos>"
    mask = trajectory.response_mask
    return mask & (mask.cumsum(1) % 3 == 0)
"""


@pytest.fixture(scope="session")
def inputs(shared: Path) -> Path:
    """data/demonstrations, data/comparisons and model: what the quickstart makes, smaller."""

    def build(folder: Path) -> None:
        from dschat.models.tiny import make_model
        from dschat.quickstart.synthetic import make_rows, row_texts, write_corpus

        write_corpus(folder / "data", DEMONSTRATIONS, COMPARISONS, HELD_OUT, seed=1)
        texts = row_texts(make_rows(200, 1, "demonstrations"))
        make_model(folder / "model", texts, seed=1, hidden_size=32, layers=1, vocab_size=400)

    return built_once(shared, "inputs", build)


@pytest.fixture(scope="session")
def sft_flags(inputs: Path) -> dict[str, Any]:
    """Step 1: 4 updates of 8 demonstrations."""
    return sft_flags_of(inputs)


@pytest.fixture(scope="session")
def sft(shared: Path, sft_flags: dict[str, Any]) -> Path:
    """Output of step 1."""
    return _chain(shared, "sft", sft_flags)


@pytest.fixture(scope="session")
def reward_flags(inputs: Path, sft: Path) -> dict[str, Any]:
    """Step 2: 4 updates of 8 pairs."""
    return {
        "data_path": inputs / "data" / "comparisons",
        "data_split": SPLIT,
        "model_name_or_path": sft,
        "max_seq_len": 192,
        "per_device_train_batch_size": 8,
        "learning_rate": 3e-3,
    }


@pytest.fixture(scope="session")
def reward(shared: Path, reward_flags: dict[str, Any]) -> Path:
    """Output of step 2."""
    return _chain(shared, "reward", reward_flags)


@pytest.fixture(scope="session")
def dpo_flags(reward_flags: dict[str, Any]) -> dict[str, Any]:
    """DPO: 4 updates of 8 pairs, from step 1's model."""
    return reward_flags | {"learning_rate": 1e-3}


@pytest.fixture(scope="session")
def dpo(shared: Path, dpo_flags: dict[str, Any]) -> Path:
    """Output of DPO."""
    return _chain(shared, "dpo", dpo_flags)


@pytest.fixture(scope="session")
def prompt_flags(inputs: Path) -> dict[str, Any]:
    """Step 3 without models: 2 rollouts of 16 prompts, 2 updates each."""
    return {
        "data_path": inputs / "data" / "comparisons",
        "data_split": SPLIT,
        "max_prompt_seq_len": 160,
        "max_answer_seq_len": 16,
        "per_device_generation_batch_size": 16,
        "per_device_training_batch_size": 8,
        "actor_learning_rate": 1e-3,
        "critic_learning_rate": 1e-3,
    }


@pytest.fixture(scope="session")
def ppo_flags(prompt_flags: dict[str, Any], sft: Path, reward: Path) -> dict[str, Any]:
    """Step 3 with the models of the chain."""
    return prompt_flags | {"actor_model_name_or_path": sft, "critic_model_name_or_path": reward}


@pytest.fixture(scope="session")
def ppo(shared: Path, ppo_flags: dict[str, Any]) -> Path:
    """Output of step 3."""
    return _chain(shared, "ppo", ppo_flags | {"metric_function": f"{GOLD}:gold_scores"})


def _chain(shared: Path, step: str, flags: dict[str, Any]) -> Path:
    """A step's output with evaluations and models on the way.

    Step 3 runs in a new Python, which notices a missing import.
    """

    def build(folder: Path) -> None:
        extra = {"save_models": 2, "eval_interval": 2, "enable_tensorboard": True, "output_dir": folder}
        if step == "ppo":
            result = run_process(step, flags | extra)
        else:
            result = run_forked(step, flags | extra, shared / f"printed-{step}")
        result.expect(0)
        (shared / f"{step}.stderr").write_text(result.stderr, encoding="utf-8")

    return built_once(shared, step, build)


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., Result]:
    """run(step, flags): a main, forked; its output_dir is tmp_path/"out" unless given."""

    def forked(step: str, flags: dict[str, Any]) -> Result:
        return run_forked(step, {"output_dir": tmp_path / "out"} | flags, tmp_path / "printed")

    return forked


@pytest.fixture
def functions(tmp_path):
    """A file of reward functions and a termination condition."""
    file = tmp_path / "own.py"
    file.write_text(FUNCTIONS)
    return file


@pytest.fixture(scope="session")
def texts(inputs):
    """Prompt, better and worse response of every training comparison, without leading spaces."""
    rows = read_jsonl(inputs / "data" / "comparisons" / "train.jsonl")
    return [
        {
            "prompt": row["info"]["post"],
            "chosen": row["summaries"][row["choice"]]["text"],
            "rejected": row["summaries"][1 - row["choice"]]["text"],
        }
        for row in rows
    ]
