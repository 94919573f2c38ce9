# SPDX-License-Identifier: Apache-2.0
"""Policies of the reviews, measured: gold score, reward-model score, KL to the SFT model, length."""

from collections.abc import Sequence
from pathlib import Path

import torch
import transformers

from dschat.data.examples import prompt_examples
from dschat.data.sources import load_source
from dschat.data.splits import split_part
from dschat.data.synthetic import gold_score
from dschat.inference.measure import Answer, best_of, measure
from dschat.models.load import load_causal_lm, load_scalar
from dschat.models.policy import PolicyModel
from dschat.models.scalar import ScalarModel
from dschat.models.tokenizer import load_tokenizer
from dschat.rollouts.sampling import Sampling
from dschat.run_report.learners import Point
from dschat.scoring.reward_model import RewardModelScores

PROMPT_TOKENS, RESPONSE_TOKENS = 128, 64
ROWS = 64  # computed together


class Measure:
    """Measures policies on the same held-out prompts with the same draws."""

    def __init__(self, sft: Path, reward: Path, pairs: Path, data_split: str, seed: int) -> None:
        """Opens what all have in common.

        Args:
            sft: the model of step 1, reference of the KL.
            reward: the model of step 2.
            pairs: comparisons, whose held-out rows of step 3's share are answered.
            data_split: shares of the steps.
            seed: of the split and the draws.
        """
        transformers.utils.logging.disable_progress_bar()
        torch.set_num_threads(1)  # the models are small: threads would wait for each other
        self._tokenizer, self._seed = load_tokenizer(str(sft), "sft"), seed
        rows = split_part(load_source(pairs, None, seed).eval, data_split, 2, seed)
        self._prompts, _ = prompt_examples(rows, self._tokenizer, PROMPT_TOKENS)
        end, pad, bos = (getattr(self._tokenizer, f"{name}_token_id") for name in ("eos", "pad", "bos"))
        self._sampling = Sampling(RESPONSE_TOKENS, (end,), pad, bos)
        self._reference = self._open(sft)
        classifier = load_scalar(str(reward), "reward", torch.float32, self._tokenizer)
        self._score = RewardModelScores(ScalarModel(classifier).eval(), ROWS)  # type: ignore[arg-type]

    def __call__(self, model: Path) -> Point:
        """One answer of the model to each prompt."""
        return _point([answers[0] for answers in self._answers(self._open(model), 1)])

    def best_of(self, counts: Sequence[int]) -> tuple[Point, list[Point]]:
        """The SFT model's first answers, and the best by the reward model of so many."""
        drawn = self._answers(self._reference, max(counts))
        best = [_point([best_of(answers, count) for answers in drawn]) for count in counts]
        return _point([answers[0] for answers in drawn]), best

    def _answers(self, policy: PolicyModel, draws: int) -> list[list[Answer]]:
        return measure(
            policy,
            self._reference,
            self._score,
            self._tokenizer,
            self._prompts,
            self._sampling,
            self._seed,
            draws,
            ROWS,
        )

    def _open(self, model: Path) -> PolicyModel:
        return PolicyModel(load_causal_lm(str(model), "model", torch.float32, self._tokenizer)).eval()


def _point(answers: Sequence[Answer]) -> Point:
    return Point(
        [gold_score(answer.text) for answer in answers],
        [answer.score for answer in answers],
        [answer.kl for answer in answers],
        [float(answer.tokens) for answer in answers],
    )
