# SPDX-License-Identifier: Apache-2.0
"""Sampling: prompts → Rollout; and scoring: Rollout → Trajectory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList

from dschat.models.tokenizer import end_token_id
from dschat.rl.types import Rollout, Trajectory, select_rows


@dataclass(frozen=True)
class Sampling:
    """How responses are drawn."""

    max_new_tokens: int
    end_ids: tuple[int, ...]  # any of them ends a response
    pad_id: int
    bos_id: int | None = None
    temperature: float = 1.0  # 0 = greedy
    top_k: int = 0  # 0 = all
    top_p: float = 1.0

    @classmethod
    def from_config(cls, config: Any, tokenizer: Any) -> Sampling:
        """The sampling of a PPOConfig. EOS always ends a response; --end_of_conversation_token does, too."""
        end_ids = {end_token_id(tokenizer, config.end_of_conversation_token), tokenizer.eos_token_id}
        return cls(
            max_new_tokens=config.max_answer_seq_len,
            end_ids=tuple(sorted(end_ids)),
            pad_id=tokenizer.pad_token_id,
            bos_id=tokenizer.bos_token_id,
            temperature=config.temperature,
            top_k=config.top_k,
            top_p=config.top_p,
        )

    @property
    def forbidden(self) -> frozenset[int]:
        """Ids that are never sampled: pad and BOS, unless one of them ends responses (GPT-2's BOS is its EOS)."""
        return frozenset(i for i in (self.pad_id, self.bos_id) if i is not None) - frozenset(self.end_ids)

    def generation_config(self) -> GenerationConfig:
        """The same for transformers, every field that could leak in from a checkpoint given explicitly."""
        options: dict[str, Any] = {"do_sample": False}
        if self.temperature > 0:
            options = {
                "do_sample": True,
                "temperature": self.temperature,
                "top_k": self.top_k,
                "top_p": self.top_p,
            }
        return GenerationConfig(
            max_new_tokens=self.max_new_tokens,
            eos_token_id=list(self.end_ids),
            pad_token_id=self.pad_id,
            bos_token_id=self.bos_id,
            suppress_tokens=sorted(self.forbidden),
            num_beams=1,
            repetition_penalty=1.0,
            use_cache=True,
            **options,
        )


class _ResponseRecorder(StoppingCriteria):
    """Notes, as tokens are sampled, which the policy produced: one bool column a step. It stops nothing itself."""

    def __init__(self, batch_size: int, end_ids: Tensor) -> None:
        self._end_ids = end_ids
        self._columns: list[Tensor] = []
        self.done = torch.zeros(batch_size, dtype=torch.bool, device=end_ids.device)

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self._columns.append(~self.done)
        self.done = self.done | torch.isin(input_ids[:, -1], self._end_ids)
        return torch.zeros_like(self.done)

    def response_mask(self, width: int) -> Tensor:
        """(B, width) bool."""
        return torch.stack(self._columns[:width], dim=1)


@torch.no_grad()
def generate(causal_lm: Any, prompts: dict[str, Any], sampling: Sampling, seed: int) -> Rollout:
    """Samples one response per prompt.

    Args:
        causal_lm: Hugging Face model, whole weights, in evaluation mode.
        prompts: input_ids (B, P) long and attention_mask (B, P) bool, padded on the left; index (B,) long.
        sampling: how to draw.
        seed: of the draws; the global random state is left as it was.

    Returns:
        Rollout; R is the longest response of the batch.
    """
    input_ids, attention_mask = prompts["input_ids"], prompts["attention_mask"]
    recorder = _ResponseRecorder(len(input_ids), torch.tensor(sampling.end_ids, device=input_ids.device))
    devices = [input_ids.device] if input_ids.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), _own_generation_config(causal_lm):
        torch.manual_seed(seed)
        sequences = causal_lm.generate(
            input_ids=input_ids,
            attention_mask=attention_mask.long(),
            generation_config=sampling.generation_config(),
            stopping_criteria=StoppingCriteriaList([recorder]),
        )
    response_mask = recorder.response_mask(sequences.shape[1] - input_ids.shape[1])
    return Rollout(
        input_ids=sequences,
        attention_mask=torch.cat([attention_mask, response_mask], dim=1),
        response_mask=response_mask,
        prompt_index=prompts["index"],
        finished=recorder.done,
    )


@contextmanager
def _own_generation_config(causal_lm: Any) -> Iterator[None]:
    """Hides the checkpoint's generation config, whose fields would fill whatever is None in the one passed."""
    saved = causal_lm.generation_config
    causal_lm.generation_config = GenerationConfig()
    try:
        yield
    finally:
        causal_lm.generation_config = saved


def concatenate(rollouts: list[Rollout], pad_id: int) -> Rollout:
    """One rollout of all rows: prompts padded further on the left, responses on the right."""
    response_width = max(r.response_mask.shape[1] for r in rollouts)
    prompt_width = max(r.input_ids.shape[1] - r.response_mask.shape[1] for r in rollouts)

    def widen(rollout: Rollout) -> Rollout:
        right = response_width - rollout.response_mask.shape[1]
        left = prompt_width + response_width - right - rollout.input_ids.shape[1]
        return Rollout(
            input_ids=F.pad(rollout.input_ids, (left, right), value=pad_id),
            attention_mask=F.pad(rollout.attention_mask, (left, right), value=False),
            response_mask=F.pad(rollout.response_mask, (0, right), value=False),
            prompt_index=rollout.prompt_index,
            finished=rollout.finished,
        )

    wide = [widen(rollout) for rollout in rollouts]
    names = ("input_ids", "attention_mask", "response_mask", "prompt_index", "finished")
    return Rollout(**{name: torch.cat([getattr(rollout, name) for rollout in wide]) for name in names})


@torch.no_grad()
def score(
    rollout: Rollout,
    scores: Tensor,
    actor: Callable[..., tuple[Tensor, Tensor]],
    reference: Callable[..., tuple[Tensor, Tensor]],
    critic: Callable[..., Tensor],
    temperature: float,
    batch_size: int,
) -> Trajectory:
    """Log-probs, reference log-probs and values of every response token.

    Args:
        rollout: B responses.
        scores: (B,) from the reward source.
        actor, reference: PolicyModel or its engine.
        critic: ScalarModel or its engine.
        temperature: that of sampling (1 for greedy).
        batch_size: rows per forward pass.

    Returns:
        Trajectory, float32, 0 off the response.
    """
    width = rollout.response_mask.shape[1]
    columns: tuple[list[Tensor], list[Tensor], list[Tensor]] = ([], [], [])
    for rows in torch.arange(len(rollout.input_ids), device=rollout.input_ids.device).split(batch_size):
        part = select_rows(rollout, rows)
        tokens = (part.input_ids, part.attention_mask)
        columns[0].append(actor(*tokens, width, temperature)[0])
        columns[1].append(reference(*tokens, width, temperature)[0])
        columns[2].append(response_values(critic(*tokens), width))
    logprobs, ref_logprobs, values = (torch.where(rollout.response_mask, torch.cat(column), 0.0) for column in columns)
    return Trajectory(rollout, logprobs, ref_logprobs, values, scores.float())


def response_values(values: Tensor, num_response: int) -> Tensor:
    """V(x, y_<j) for every response token j: the critic's number one position earlier. (B, P+R) → (B, R)."""
    return values[:, -num_response - 1 : -1]
