# SPDX-License-Identifier: Apache-2.0
"""A rollout, what step 3 makes of it, what adapters of other trainers are given of it, and what these trainers said:
fixtures/frameworks.json, written anew with RECORD=1. Needs torch alone, but for `words`, which needs tokenizers.
"""

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch
from torch import Tensor

from macro_actions.conditions import ends_from_lengths, fixed, make_row_seeds, ppl, randomized
from macro_actions.constituents import ParsingCondition
from macro_actions.estimators import EstimatorSettings, gae_batch
from macro_actions.frameworks import MacroActionsConfig
from macro_actions.segments import segment
from macro_actions.types import Rollout, Trajectory

RECORDED = Path(__file__).resolve().parents[1] / "fixtures" / "frameworks.json"
WORDS = "the quick fox , which saw a lazy dog , slept . did it ? no !".split()
VALUE_FUNCTIONS = ("equal", "unit", "position", "first")
GAMMA, LAM = 0.97, 0.9
LENGTHS = (16, 9, 5, 2, 16, 12)
PROMPTS = (7, 7, 8, 8, 9, 9)  # two samples of each
UIDS = ("3e8f", "3e8f", "9c01", "9c01", "f00d", "f00d")  # what verl and SkyRL call them


@dataclass(frozen=True)
class Case:
    """A rollout of step 3, its token rewards, and the advantages and returns of its estimator; (B, R) each."""

    config: MacroActionsConfig
    ids: Tensor
    mask: Tensor
    values: Tensor
    ref_logprobs: Tensor
    rewards: Tensor
    advantages: Tensor  # not whitened
    returns: Tensor
    ends: Tensor

    def whitened(self) -> Tensor:
        """The advantages with mean 0 and unbiased variance 1 over the response's tokens, 0 off it."""
        own = self.advantages[self.mask]
        return torch.where(self.mask, (self.advantages - own.mean()) * torch.rsqrt(own.var() + 1e-8), 0.0)


def words() -> object:
    """A tokenizer whose tokens are words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {word: number for number, word in enumerate(["<pad>", "<eos>", "<unk>", *dict.fromkeys(WORDS)])}
    inner = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
    )


def make_case(condition: str, value_function: str, ngram: float = 3, uids: Sequence[str] | None = None) -> Case:
    """The rollout and what step 3 makes of it with these settings; with uids, their hashes number its prompts."""
    tokenizer = words() if condition == "parsing" else None
    config = MacroActionsConfig(
        condition,
        ngram,
        (1, 2, 3),
        4,
        tokenizer=tokenizer,  # type: ignore[arg-type]
        parser="chunker",
        value_function=value_function,
    )
    width, rows = max(LENGTHS), len(LENGTHS)
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(4, rows, width, generator=generator)
    ids = torch.randint(3, 3 + len(set(WORDS)), (rows, width), generator=generator)
    mask = torch.arange(width) < torch.tensor(LENGTHS)[:, None]
    ids = ids.masked_fill(~mask, 0)
    prompts = PROMPTS if uids is None else [_hashed(uid) for uid in uids]
    rollout = Rollout(ids, mask, mask, torch.tensor(prompts), torch.ones(rows, dtype=torch.bool))
    trajectory = Trajectory(
        rollout, -noise[0].abs(), -noise[1].abs(), noise[2].masked_fill(~mask, 0), noise[3, :, 0].clone()
    )
    ends = _ends(config, trajectory, tokenizer)
    settings = EstimatorSettings(0.1, gamma=GAMMA, lam=LAM, value_function=value_function)
    batch = gae_batch(trajectory, segment(ends, mask), settings)
    assert trajectory.values is not None and batch.returns is not None
    return Case(
        config,
        ids,
        mask,
        trajectory.values,
        trajectory.ref_logprobs,
        batch.rewards,
        batch.advantages,
        batch.returns,
        ends,
    )


def recorded(framework: str) -> dict[str, Tensor]:
    """What a framework said when it was recorded."""
    numbers = json.loads(RECORDED.read_text(encoding="utf-8"))[framework]["numbers"]
    return {name: torch.tensor(value) for name, value in numbers.items()}


def record(framework: str, **numbers: Tensor) -> None:
    """With RECORD=1, writes what the framework says."""
    if os.environ.get("RECORD"):
        known = json.loads(RECORDED.read_text(encoding="utf-8")) if RECORDED.exists() else {}
        rows = {name: x.double().round(decimals=7).tolist() for name, x in numbers.items()}
        known[framework] = {"version": version(framework), "numbers": rows}
        RECORDED.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")


def assert_recorded(framework: str, **numbers: Tensor) -> None:
    """The framework says what it said before; with RECORD=1, writes what it says."""
    record(framework, **numbers)
    for name, expected in recorded(framework).items():
        torch.testing.assert_close(numbers[name].double(), expected.double(), atol=1e-6, rtol=0)


def right(x: Tensor) -> Tensor:
    """(B, R) with every row's response at its right end, 0 before it."""
    moved = torch.zeros_like(x)
    for row, length in enumerate(LENGTHS):
        moved[row, x.shape[1] - length :] = x[row, :length]
    return moved


def _hashed(uid: str) -> int:
    """The upper 55 of the first 56 bits of its BLAKE2."""
    return int(hashlib.blake2b(uid.encode(), digest_size=7).hexdigest(), 16) // 2


def _ends(config: MacroActionsConfig, trajectory: Trajectory, tokenizer: object) -> Tensor:
    """Where step 3 ends macro actions: by the functions that it calls, on a mask that is a prefix of each row."""
    mask, prompts = trajectory.response_mask, trajectory.rollout.prompt_index
    if config.termination_condition == "randomized":
        samples = torch.tensor([row % 2 for row in range(len(mask))])
        return randomized(
            mask, config.ngram_lengths, config.repeat_times, make_row_seeds(config.seed, prompts, 0, samples)
        )
    if config.termination_condition == "ppl":
        return ppl(mask, trajectory.ref_logprobs, config.ppl_mode)
    if config.termination_condition == "parsing":
        from constituent_treelib.parsing import make_backend

        condition = ParsingCondition(tokenizer, make_backend("chunker"), config.parsing_cutoff)  # type: ignore[arg-type]
        return ends_from_lengths(condition(trajectory.rollout.response_rows()).lengths, mask)
    return fixed(mask, config.ngram)
