# SPDX-License-Identifier: Apache-2.0
"""Several policies on the same prompts: what each answers, its score, and its KL to a reference."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from dschat.data.encoding import decode_response
from dschat.data.examples import PromptExample
from dschat.models.layout import PassSize, layouts
from dschat.models.policy import PolicyModel
from dschat.rollouts.generate import choose_engine
from dschat.rollouts.sampling import Sampling, row_seed
from dschat.scoring.source import ResponseTexts, Scores, scores_of
from macro_actions.types import Rollout


@dataclass(frozen=True)
class Answer:
    """A response to a prompt."""

    text: str  # without special tokens
    score: float
    kl: float  # log π(y|x) − log π_ref(y|x) in nats, whose mean is the KL to the reference
    tokens: int  # the end token included


def measure(
    policy: PolicyModel,
    reference: PolicyModel,
    score: Callable[[Rollout, ResponseTexts], Tensor | Scores],
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[PromptExample],
    sampling: Sampling,
    seed: int,
    draws: int = 1,
    rows: int = 64,
) -> list[list[Answer]]:
    """So many responses of the policy to each prompt, the same draws whatever policy it is, `rows` at a time.

    Scores are (B,). The KL is to the reference, which has the same tokenizer.

    Returns:
        Per prompt its answers.
    """
    draw = choose_engine("continuous", rows, policy.inner, "measure").sampler_for(policy.inner)
    wanted = [(example, number) for example in prompts for number in range(draws)]
    seeds = [row_seed(seed, example.index, number) for example, number in wanted]
    rollout = draw([example.prompt_ids for example, _ in wanted], sampling, seeds).rollout
    texts = [decode_response(tokenizer, ids) for ids in rollout.response_rows()]
    examples = [example for example, _ in wanted]
    said = ResponseTexts([e.prompt_text for e in examples], texts, [e.row for e in examples])
    scores = scores_of(score(rollout, said)).values.tolist()
    kl = log_ratios(policy, reference, rollout, sampling.temperature or 1.0, rows).tolist()
    lengths = rollout.response_mask.sum(1).tolist()
    answers = [Answer(*of_row) for of_row in zip(texts, scores, kl, lengths, strict=True)]
    return [answers[first : first + draws] for first in range(0, len(answers), draws)]


@torch.no_grad()
def log_ratios(policy: PolicyModel, reference: PolicyModel, rollout: Rollout, temperature: float, most: int) -> Tensor:
    """Σ log π(y_j | x, y_<j) − log π_ref(y_j | x, y_<j) over each response's tokens, (B,) float32."""
    ratios = torch.zeros(len(rollout.input_ids), device=rollout.input_ids.device)
    for rows in layouts(rollout, PassSize(most)):
        own, others = (
            model(rows.input_ids, None, rows.targets, temperature, False)[0] for model in (policy, reference)
        )
        ratios[rows.rows] = rows.spread(own - others).sum(1)
    return ratios


def best_of(answers: Sequence[Answer], count: int) -> Answer:
    """The best of the first so many by score; its ``kl`` is the bound log N − (N − 1) / N of any best-of-N policy.

    The bound (Beirami et al. 2024) is close for small KL and responses that are each unlikely.
    """
    best = max(answers[:count], key=lambda answer: answer.score)
    return Answer(best.text, best.score, math.log(count) - (count - 1) / count, best.tokens)
