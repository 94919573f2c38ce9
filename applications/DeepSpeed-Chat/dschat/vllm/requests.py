# SPDX-License-Identifier: Apache-2.0
"""What vLLM is asked for, and its answers as a `Generation`; the engine and the servers share it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch.nn.utils.rnn import pad_sequence

from dschat.rollouts.engine import Generation, assemble, pad_prompts
from dschat.rollouts.sampling import Sampling
from dschat.run.distributed import device

BATCHED_TOKENS = 8192  # prompt tokens of one step, unless the longest sequence has more


@dataclass(frozen=True)
class ResponseRequest:
    """One response to sample."""

    prompt: list[int]
    parameters: dict[str, object]  # arguments of vLLM's SamplingParams


@dataclass(frozen=True)
class VllmResponse:
    """A response as vLLM returns it."""

    tokens: list[int]
    logprobs: list[float]  # one per token


def make_requests(
    prompts: Sequence[Sequence[int]], sampling: Sampling, seeds: Sequence[int], limits: Sequence[int] | None
) -> list[ResponseRequest]:
    """One request per prompt; see `dschat.rollouts.engine.ResponseSampler` for the arguments."""
    requests = []
    max_tokens = sampling.limits(len(prompts), limits)
    for prompt, seed, limit in zip(prompts, seeds, max_tokens, strict=True):
        requests.append(ResponseRequest(list(prompt), sampling_parameters(sampling, seed, limit)))
    return requests


def sampling_parameters(sampling: Sampling, seed: int, max_tokens: int) -> dict[str, object]:
    """Arguments of vLLM's SamplingParams for one response. The model itself divides by the temperature."""
    return {
        "temperature": 1.0 if sampling.temperature else 0.0,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "seed": seed,
        "max_tokens": max_tokens,
        "stop_token_ids": list(sampling.end_ids),
        "ignore_eos": True,  # only stop_token_ids end a response
        "logit_bias": dict.fromkeys(sampling.forbidden, -math.inf),
        "logprobs": 0,  # of the sampled token alone
        "flat_logprobs": True,
        "detokenize": False,
    }


def to_generation(
    prompts: Sequence[Sequence[int]],
    responses: Sequence[VllmResponse],
    sampling: Sampling,
    limits: Sequence[int] | None = None,
) -> Generation:
    """Pads the responses, one per prompt, into tensors on this process's device."""
    tokens = [torch.tensor(response.tokens) for response in responses]
    padded_tokens = pad_sequence(tokens, True, sampling.end_ids[0]).to(device())
    rollout = assemble(pad_prompts(prompts, sampling.pad_id, device()), padded_tokens, sampling, limits)

    logprobs = [torch.tensor(response.logprobs) for response in responses]
    padded_logprobs = pad_sequence(logprobs, True).to(device())
    bad_rows = ~padded_logprobs.isfinite().all(1)
    return Generation(replace(rollout, drawn_logprobs=padded_logprobs), None, bad_rows)
