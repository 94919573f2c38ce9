# SPDX-License-Identifier: Apache-2.0
"""Models, prompts and seeds to draw responses with."""

from collections.abc import Sequence
from typing import Any

import torch
import transformers

from closeness import FORWARD, assert_near
from dschat.rollouts.engine import Generation
from dschat.rollouts.sampling import Sampling, row_seed, uniforms
from factories import BOS, EOS, PAD, hf_logprobs, random_ids
from model_families import MODEL_FAMILIES

LENGTHS = [3, 20, 9, 1, 24, 14, 5, 5]
ENDS = (EOS, *range(3, 10))  # of 100 ids, so that a response has about 12 tokens
FAMILIES = sorted(set(MODEL_FAMILIES) - {"bloom"})


def model_of(family: str) -> Any:
    """A random model of a family, of 100 ids."""
    made = MODEL_FAMILIES[family]
    ids = {"pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS}
    config = getattr(transformers, made.config)(vocab_size=100, **ids, **made.sizes)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return transformers.AutoModelForCausalLM.from_config(config).float().eval()


def prompts_of(lengths: Sequence[int] = LENGTHS) -> list[list[int]]:
    return [random_ids(length, row) for row, length in enumerate(lengths)]


def seeds_of(count: int) -> list[int]:
    return [row_seed(5, row) for row in range(count)]


def by_hand(causal_lm: Any, prompt: Sequence[int], sampling: Sampling, seed: int) -> list[int]:
    """Token by token, each from a forward pass over the whole unpadded row and a running sum over the vocabulary."""
    response: list[int] = []
    for number in uniforms(torch.tensor([seed]), sampling.max_new_tokens)[0].tolist():
        with torch.no_grad():
            logits = causal_lm(input_ids=torch.tensor([[*prompt, *response]]), use_cache=False).logits[0, -1].double()
        logits[sorted(sampling.forbidden)] = -torch.inf
        running = (logits / sampling.temperature).softmax(-1).cumsum(-1)
        response.append(int((running <= number * running[-1]).sum()))
        if response[-1] in sampling.end_ids:
            break
    return response


def check_logprobs(
    causal_lm: Any,
    prompts: Sequence[list[int]],
    drawn: Generation,
    temperature: float = 1.0,
    roundings: float = FORWARD,
) -> None:
    """They are those of the model's own logits, row by row; 0 off the response."""
    assert drawn.logprobs is not None and drawn.logprobs.dtype == torch.float32
    assert not bool(drawn.logprobs[~drawn.rollout.response_mask].any())
    for row, response in enumerate(drawn.rollout.response_rows()):
        expected, _ = hf_logprobs(causal_lm, (prompts[row], response), temperature)
        assert_near(drawn.logprobs[row, : len(response)], expected, roundings)
