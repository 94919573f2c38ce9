# SPDX-License-Identifier: Apache-2.0
"""What is trained of a model in each mode, and that the rest stays as it is."""

import pytest
import torch

from dschat.errors import UserError
from dschat.models.finetuning import EVERYTHING, Finetuning, choose_trained
from dschat.models.lora import lora_config
from dschat.models.policy import PolicyModel
from dschat.models.scalar import last_scores
from factories import engine_of, hf_logprobs, make_causal_lm, make_classifier, pad_rows, ragged_rows, weights_of

ROWS = ragged_rows([2, 4, 3], [5, 1, 3])
UNTIED = {"tie_word_embeddings": False}


def changed_by_an_update(model):
    """Names of the weights that an update on a few rows changes."""
    engine = engine_of(model, learning_rate=1e-2)
    before = weights_of(engine)
    ids, attention_mask, mask = pad_rows(ROWS)
    if isinstance(engine.module, PolicyModel):
        numbers, _ = engine(ids, attention_mask, mask.shape[1])
        loss = numbers[mask].sum()
    else:
        loss = last_scores(engine(ids, attention_mask), attention_mask).square().sum()
    engine.backward(loss)
    engine.step()
    after = weights_of(engine)
    return {name.removeprefix("inner.") for name in before if not torch.equal(before[name], after[name])}


def chosen(model, *args, **fields):
    choose_trained(model, Finetuning(*args, **fields), "base")
    return model


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_last_layer_is_the_head_alone(kind, group):
    assert changed_by_an_update(chosen(make_causal_lm(kind, **UNTIED), last_layer=True)) == {"lm_head.weight"}
    assert changed_by_an_update(chosen(make_classifier(kind), last_layer=True)) == {"score.weight"}


@pytest.mark.parametrize(
    ("kind", "name"), [("gemma", "model.embed_tokens.weight"), ("gpt2", "transformer.wte.weight")]
)
def test_a_head_that_is_the_embedding_trains_as_both(kind, name, group):
    """Its gradient is that of all of the model's uses of it."""
    model = chosen(make_causal_lm(kind), last_layer=True)
    assert [n for n, p in model.named_parameters() if p.requires_grad] == [name]
    whole = make_causal_lm(kind)
    ids = torch.tensor([ROWS[0][0] + ROWS[0][1]])
    for each in (model, whole):
        each.zero_grad()
        each(input_ids=ids).logits.square().mean().backward()
    torch.testing.assert_close(model.get_parameter(name).grad, whole.get_parameter(name).grad)
    assert changed_by_an_update(model) == {name}


def test_everything_is_everything():
    model = make_causal_lm()
    choose_trained(model, EVERYTHING, "base")
    assert all(p.requires_grad for p in model.parameters())


def test_adapters_of_several_targets_with_their_own_scale():
    model = chosen(make_causal_lm(), rank=4, targets=("q_proj", "v_proj"), alpha=2, dropout=0.25)
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    assert {name.split(".")[4] for name in names} == {"q_proj", "v_proj"} and len(names) == 8
    config = lora_config(model)
    assert (config.r, config.lora_alpha, config.lora_dropout) == (4, 2, 0.25)
    assert lora_config(chosen(make_causal_lm(), rank=4)).lora_alpha == 8
    with pytest.raises(UserError, match="--lora_module_name query: no linear layer of base"):
        chosen(make_causal_lm(), rank=4, targets=("q_proj", "query"))


def test_dropout_acts_in_training_mode_alone():
    model = chosen(make_causal_lm(), rank=4, dropout=0.5)
    for name, p in model.named_parameters():
        if "lora_B" in name:
            p.data.normal_(generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        first, again = (hf_logprobs(model.eval(), ROWS[0])[0] for _ in range(2))
        model.train()
        dropped, other = (hf_logprobs(model, ROWS[0])[0] for _ in range(2))
    assert torch.equal(first, again)
    assert not torch.allclose(dropped, other) and not torch.allclose(first, dropped)


def test_a_model_without_a_known_head_is_refused():
    model = make_causal_lm()
    model.get_output_embeddings = lambda: None
    with pytest.raises(UserError, match="--finetune_mode last_layer: it is not known which layer of base"):
        chosen(model, last_layer=True)
