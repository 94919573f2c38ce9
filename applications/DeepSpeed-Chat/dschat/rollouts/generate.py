# SPDX-License-Identifier: Apache-2.0
"""Sampling by transformers' own `generate`: prompts → Rollout."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from dschat.rl.types import Rollout
from dschat.rollouts.sampling import Sampling


class CausalLM(Protocol):
    """A Hugging Face causal LM, as far as sampling needs it."""

    generation_config: GenerationConfig

    def generate(self, **options: object) -> Tensor: ...


class _ResponseRecorder(StoppingCriteria):
    """Notes, as tokens are sampled, which the policy produced: one bool column a step. It stops nothing itself."""

    def __init__(self, batch_size: int, end_ids: Tensor) -> None:
        self._end_ids = end_ids
        self._columns: list[Tensor] = []
        self.done = torch.zeros(batch_size, dtype=torch.bool, device=end_ids.device)

    def __call__(self, input_ids: Tensor, scores: object, **kwargs: object) -> Tensor:
        self._columns.append(~self.done)
        self.done = self.done | torch.isin(input_ids[:, -1], self._end_ids)
        return torch.zeros_like(self.done)

    def response_mask(self, width: int) -> Tensor:
        """(B, width) bool."""
        return torch.stack(self._columns[:width], dim=1)


@torch.no_grad()
def generate(
    causal_lm: CausalLM, prompts: dict[str, Tensor], sampling: Sampling, seed: int, *processors: LogitsProcessor
) -> Rollout:
    """Samples one response per prompt.

    Args:
        causal_lm: Hugging Face model, whole weights, in evaluation mode.
        prompts: input_ids (B, P) long and attention_mask (B, P) bool, padded on the left; index (B,) long.
        sampling: how to draw.
        seed: of the draws; the global random state is left as it was.
        processors: see the logits before temperature and truncation.

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
            logits_processor=LogitsProcessorList(processors),
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
def _own_generation_config(causal_lm: CausalLM) -> Iterator[None]:
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
    prompt_width = max(r.prompt_width for r in rollouts)

    def widen(rollout: Rollout) -> Rollout:
        right = response_width - rollout.response_mask.shape[1]
        left = prompt_width - rollout.prompt_width
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
