# SPDX-License-Identifier: Apache-2.0
"""Several policies on the same prompts: responses, scores, and KL to a reference."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from dschat.data.encoding import decode_sampled
from dschat.data.examples import PromptExample
from dschat.data.rows import Row
from dschat.models.layout import PassSize, layouts
from dschat.models.policy import PolicyModel
from dschat.rollouts.continuous import choose_engine
from dschat.rollouts.sampling import Sampling, row_seed
from dschat.scoring.source import ResponseTexts, Scores, scores_of
from macro_actions.types import Rollout


@dataclass(frozen=True)
class Answer:
    """A response to a prompt.

    Attributes:
        text: without special tokens.
        score: score of the reward function.
        kl: log π(y|x) − log π_ref(y|x) in nats, whose mean is the KL to the reference.
        tokens: length, the end token included.
    """

    text: str
    score: float
    kl: float
    tokens: int


def measure(
    policy: PolicyModel,
    reference: PolicyModel,
    score: Callable[[Rollout, ResponseTexts], Tensor | Scores],
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[PromptExample],
    sampling: Sampling,
    seed: int,
    num_responses: int = 1,
    rows: int = 64,
) -> list[list[Answer]]:
    """Sample responses of a policy to each prompt and measure them; seeds do not depend on the policy.

    Args:
        policy: the measured policy.
        reference: the reference of the KL, with the same tokenizer.
        score: a rollout and its texts → scores (B,).
        tokenizer: tokenizer of both models.
        prompts: the prompts.
        sampling: sampling parameters.
        seed: seed of the run.
        num_responses: responses per prompt.
        rows: responses per batch.

    Returns:
        The answers of each prompt.
    """
    prompt_ids: list[list[int]] = []
    prompt_texts: list[str] = []
    data_rows: list[Row] = []
    seeds: list[int] = []
    for example in prompts:
        for number in range(num_responses):
            prompt_ids.append(example.prompt_ids)
            prompt_texts.append(example.prompt_text)
            data_rows.append(example.row)
            seeds.append(row_seed(seed, example.index, number))
    engine = choose_engine("continuous", rows, policy.inner, "measure")
    sample = engine.sampler_for(policy.inner)
    rollout = sample(prompt_ids, sampling, seeds).rollout

    responses = []
    finished = rollout.finished.tolist()
    for ids, has_end in zip(rollout.response_rows(), finished, strict=True):
        responses.append(decode_sampled(tokenizer, ids, has_end))
    texts = ResponseTexts(prompt_texts, responses, data_rows, finished)
    scores = scores_of(score(rollout, texts)).values.tolist()
    kl = log_ratios(policy, reference, rollout, sampling.temperature or 1.0, rows).tolist()
    lengths = rollout.response_mask.sum(1).tolist()

    answers = []
    for columns in zip(responses, scores, kl, lengths, strict=True):
        answers.append(Answer(*columns))
    answers_by_prompt = []
    for start in range(0, len(answers), num_responses):
        answers_by_prompt.append(answers[start : start + num_responses])
    return answers_by_prompt


@torch.no_grad()
def log_ratios(policy: PolicyModel, reference: PolicyModel, rollout: Rollout, temperature: float, most: int) -> Tensor:
    """Σ log π(y_j | x, y_<j) − log π_ref(y_j | x, y_<j) over each response's tokens, (B,) float32.

    Args:
        policy, reference: the two models.
        rollout: B responses.
        temperature: temperature of the log-probs.
        most: rows in one forward pass.
    """
    ratios = torch.zeros(len(rollout.input_ids), device=rollout.input_ids.device)
    for layout in layouts(rollout, PassSize(most)):
        logprobs, _ = policy(layout.input_ids, None, layout.targets, temperature, False)
        ref_logprobs, _ = reference(layout.input_ids, None, layout.targets, temperature, False)
        ratios[layout.rows] = layout.spread(logprobs - ref_logprobs).sum(1)
    return ratios


def best_of(answers: Sequence[Answer], count: int) -> Answer:
    """The best of the first `count` answers by score.

    Its ``kl`` is the bound log N − (N − 1) / N of any best-of-N policy (Beirami et al. 2024), which is close for small
    KL and responses that are each unlikely. Raises ValueError if there are fewer answers.
    """
    if len(answers) < count:
        raise ValueError(f"best of {count} needs as many answers, not {len(answers)}")
    best = max(answers[:count], key=lambda answer: answer.score)
    kl_bound = math.log(count) - (count - 1) / count
    return replace(best, kl=kl_bound)
