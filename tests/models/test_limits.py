# SPDX-License-Identifier: Apache-2.0
"""How long a text a model can read: what plain transformers reads, and what a run is told."""

import logging

import pytest
import torch
import transformers

from dschat.base.errors import UserError
from dschat.models.limits import check_length, position_limit
from factories import make_causal_lm, make_config, save_folder

SIZES = {"vocab_size": 100, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
OPT = {"hidden_size": 32, "word_embed_proj_dim": 32, "ffn_dim": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
GPT = {"vocab_size": 100, "n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 48}
TABLES = {
    "gpt2": (make_config("gpt2", n_positions=48), 48),
    "opt": (transformers.OPTConfig(**SIZES, **OPT, max_position_embeddings=40), 40),
    "gptj": (transformers.GPTJConfig(**GPT, rotary_dim=4), 48),
    "mpt": (transformers.MptConfig(vocab_size=100, d_model=32, n_layers=1, n_heads=2, max_seq_len=48), 48),
}


@pytest.mark.parametrize("kind", TABLES)
def test_a_longer_text_than_a_table_of_positions_is_refused(kind, tokenizer, tmp_path, caplog):
    """The limit is the longest text that transformers reads."""
    config, limit = TABLES[kind]
    model = transformers.AutoModelForCausalLM.from_config(config)
    assert position_limit(model) == limit
    model(torch.full((1, limit), 5))
    with pytest.raises((IndexError, RuntimeError)):
        model(torch.full((1, limit + 1), 5))
    folder = save_folder(tmp_path, model, tokenizer)
    with caplog.at_level(logging.INFO, logger="dschat"):
        for tokens in (1, limit):
            check_length(folder, "--model_name_or_path", tokens, "--max_seq_len")
    assert not caplog.messages
    message = f"--model_name_or_path {folder} reads at most {limit} tokens, but --max_seq_len is {limit + 1}: lower it"
    with pytest.raises(UserError, match=message):
        check_length(folder, "--model_name_or_path", limit + 1, "--max_seq_len")


def test_a_longer_text_than_a_model_was_made_for_is_a_warning(tokenizer, tmp_path, caplog):
    folder = save_folder(tmp_path, make_causal_lm("llama", max_position_embeddings=64), tokenizer)
    with caplog.at_level(logging.INFO, logger="dschat"):
        check_length(folder, "--m", 64, "--max_seq_len")
        assert not caplog.messages
        check_length(folder, "--m", 65, "--max_seq_len")
    assert caplog.messages == [f"--m {folder} was made for at most 64 tokens, but --max_seq_len is 65"]
    assert caplog.records[0].levelno == logging.WARNING


def test_an_encoder_decoder_is_refused_by_name(tmp_path):
    """From its config alone: there are no weights."""
    transformers.T5Config(vocab_size=100).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=f"--m {tmp_path}: a t5 model is an encoder-decoder, which"):
        check_length(str(tmp_path), "--m", 10, "--max_seq_len")
