# SPDX-License-Identifier: Apache-2.0
"""Opening models: what does not exist, what does not fit, grown embeddings, generation configs."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, BertConfig, BertModel

from dschat.errors import UserError
from dschat.models.load import load_causal_lm, load_scalar
from dschat.models.save import save_model
from dschat.models.tokenizer import load_tokenizer
from factories import KINDS, make_causal_lm, make_tokenizer, save_folder


@pytest.mark.parametrize("load", [load_causal_lm, load_scalar])
@pytest.mark.parametrize("name", ["./nowhere", "/nowhere/at/all"])
def test_a_folder_that_does_not_exist_is_named_with_its_flag(load, name, tokenizer):
    with pytest.raises(UserError, match=f"--actor_model_name_or_path {name}: no such folder"):
        load(name, "--actor_model_name_or_path", torch.float32, tokenizer)


@pytest.mark.parametrize("load", [load_causal_lm, load_scalar])
def test_a_folder_without_a_model_is_named(load, tokenizer, tmp_path):
    with pytest.raises(UserError, match="this folder holds no model"):
        load(str(tmp_path), "--m", torch.float32, tokenizer)


def test_a_folder_without_weights_is_named(tokenizer, tmp_path):
    folder = save_folder(tmp_path, make_causal_lm(), tokenizer)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(UserError, match="this folder holds no model"):
        load_causal_lm(folder, "--m", torch.float32, tokenizer)


def test_a_model_without_a_score_head_is_refused(tokenizer, tmp_path):
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    folder = save_folder(tmp_path, BertModel(BertConfig(vocab_size=100, **sizes)), tokenizer)
    with pytest.raises(UserError, match="--critic .*has no `score` layer"):
        load_scalar(folder, "--critic", torch.float32, tokenizer)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_data_type_is_the_one_asked_for(dtype, tokenizer, tmp_path):
    folder = save_folder(tmp_path, make_causal_lm(), tokenizer)
    for load in (load_causal_lm, load_scalar):
        assert {p.dtype for p in load(folder, "--m", dtype, tokenizer).parameters()} == {dtype}


@pytest.mark.parametrize("kind", KINDS)
def test_embeddings_grow_by_an_added_pad_and_the_model_reopens(kind, tmp_path):
    plain = make_tokenizer(pad_token=None)
    base = save_folder(tmp_path / "base", make_causal_lm(kind, vocab_size=100), plain)
    (tmp_path / "base" / "tokenizer.json").write_text(
        (tmp_path / "base" / "tokenizer.json").read_text().replace("<pad>", "<nul>")
    )
    tokenizer = load_tokenizer(base, "--m", may_add_pad=True)
    assert len(tokenizer) == 101 and tokenizer.pad_token_id == 100
    for load in (load_causal_lm, load_scalar):
        model = load(base, "--m", torch.float32, tokenizer)
        assert model.get_input_embeddings().num_embeddings == 101
        assert model.config.pad_token_id == 100
    model = load_causal_lm(base, "--m", torch.float32, tokenizer)
    save_model(model, model.state_dict(), tokenizer, tmp_path / "grown")
    reopened = AutoModelForCausalLM.from_pretrained(tmp_path / "grown")
    ids = torch.tensor([[1, 5, 6]])
    assert reopened(ids).logits.shape == (1, 3, 101)
    torch.testing.assert_close(reopened(ids).logits, model(ids).logits, rtol=0, atol=1e-5)


def test_special_ids_of_the_tokenizer_are_saved_with_the_model(tokenizer, tmp_path):
    lm = make_causal_lm(pad_token_id=None, bos_token_id=None, eos_token_id=None)
    model = load_causal_lm(save_folder(tmp_path, lm, tokenizer), "--m", torch.float32, tokenizer)
    for place in (model.config, model.generation_config):
        assert (place.pad_token_id, place.bos_token_id, place.eos_token_id) == (0, 1, 2)


def test_a_checkpoint_with_a_generation_config_that_transformers_refuses_to_save_is_saved_at_the_end(
    tokenizer, tmp_path
):
    """As published with Llama-2 and others: sampling parameters without do_sample."""
    folder = save_folder(tmp_path / "base", make_causal_lm(), tokenizer)
    (tmp_path / "base" / "generation_config.json").write_text(json.dumps({"temperature": 0.9, "top_p": 0.6}))
    model = load_causal_lm(folder, "--m", torch.float32, tokenizer)
    save_model(model, model.state_dict(), tokenizer, tmp_path / "trained")
    AutoModelForCausalLM.from_pretrained(tmp_path / "trained")
