# SPDX-License-Identifier: Apache-2.0
"""transformers' generate draws what the flags say, whatever a checkpoint brings along."""

import pytest
from transformers import GenerationConfig

from dschat.rollouts.generate import generate
from factories import EOS, favouring, make_causal_lm, random_ids, same_rollout, sampling_of

LEAKS = {
    "do_sample": True,
    "top_k": 2,
    "top_p": 0.3,
    "min_p": 0.5,
    "typical_p": 0.2,
    "epsilon_cutoff": 0.02,
    "eta_cutoff": 0.02,
    "temperature": 0.1,
    "repetition_penalty": 5.0,
    "no_repeat_ngram_size": 1,
    "min_length": 100,
    "min_new_tokens": 7,
    "max_length": 5,
    "suppress_tokens": list(range(3, 90)),
    "begin_suppress_tokens": list(range(3, 95)),
    "bad_words_ids": [[i] for i in range(3, 80)],
    "forced_eos_token_id": 9,
    "forced_bos_token_id": 8,
    "exponential_decay_length_penalty": (1, 3.0),
    "renormalize_logits": True,
    "num_return_sequences": 2,
    "eos_token_id": list(range(3, 60)),
}


@pytest.mark.parametrize("temperature", [0.8, 0.0])
@pytest.mark.parametrize("leak", LEAKS)
def test_the_checkpoints_generation_config_does_not_leak(leak: str, temperature: float) -> None:
    causal_lm, prompts = favouring([EOS], bias=2.0), [random_ids(3 + row, row) for row in range(4)]
    sampling = sampling_of(8, temperature=temperature)
    clean = generate(causal_lm, prompts, sampling, range(4), 4).rollout
    causal_lm.generation_config = GenerationConfig(**{"do_sample": True, leak: LEAKS[leak]})
    saved = causal_lm.generation_config
    assert same_rollout(generate(causal_lm, prompts, sampling, range(4), 4).rollout, clean)
    assert causal_lm.generation_config is saved


def test_the_generation_config_comes_back_after_an_error() -> None:
    causal_lm = make_causal_lm()
    saved = causal_lm.generation_config
    with pytest.raises(IndexError):
        generate(causal_lm, [[1000, 5]], sampling_of(), [0], 1)
    assert causal_lm.generation_config is saved
