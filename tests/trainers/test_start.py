# SPDX-License-Identifier: Apache-2.0
"""Step 3 from a model that has no token to pad with, or several that end a response."""

import torch

from dschat.builders.ppo import build_ppo_models, load_ppo_tokenizer
from dschat.rollouts.sampling import Sampling
from factories import EOS, PAD, make_causal_lm, make_tokenizer, ppo_config, save_folder


def a_score(prompts, responses, rows):
    """0 for all."""
    return [0.0] * len(responses)


def test_new_rows_of_actor_and_reference_are_the_same(group, tmp_path):
    """Vocabulary 100 and no token in reserve: both grow by the same row, so that the KL begins at 0."""
    folder = save_folder(tmp_path / "instruct", make_causal_lm(), make_tokenizer(pad_token=None))
    file = tmp_path / "instruct" / "tokenizer.json"
    file.write_text(file.read_text().replace("<pad>", "<nul>"))
    scored = {"reward_function": [f"{__file__}:a_score"], "actor_model_name_or_path": folder, "dtype": "fp32"}
    config = ppo_config(tmp_path / "out", **scored)
    tokenizer = load_ppo_tokenizer(config)
    assert len(tokenizer) == 101 == tokenizer.pad_token_id + 1
    models = build_ppo_models(config, config.plan_batches(1), tokenizer, 1)
    rows = [model.module.inner.get_input_embeddings().weight for model in (models.actor, models.reference)]
    assert rows[0].shape[0] == 101 and torch.equal(*rows)


def test_a_models_own_end_tokens_end_responses_but_padding_does_not(tokenizer, tmp_path):
    """As of Qwen, whose generation config names the token that it pads with, too."""
    config = ppo_config(tmp_path, end_of_conversation_token="a")
    (own,) = tokenizer.encode("a", add_special_tokens=False)
    sampling = Sampling.from_config(config, tokenizer, [EOS, 50, PAD])
    assert sampling.end_ids == tuple(sorted({EOS, 50, own})) and PAD in sampling.forbidden
    assert Sampling.from_config(config, tokenizer).end_ids == tuple(sorted({EOS, own}))
