# SPDX-License-Identifier: Apache-2.0
"""What is trained of a model in each mode, also of its topmost layers alone, and that the rest stays as it is."""

import pytest
import torch
from transformers.modeling_layers import GradientCheckpointingLayer

from dschat.base.errors import UserError
from dschat.models.adapters import lora_config
from dschat.models.finetuning import (
    EVERYTHING,
    Finetuning,
    choose_trained,
    describe_trained,
    enable_gradient_checkpointing,
    require_trainable_tokens,
    train_top_layers,
)
from dschat.models.load import load_causal_lm
from dschat.models.opening import SingleDevice
from dschat.models.policy import PolicyModel
from dschat.models.scalar import last_scores
from factories import (
    engine_of,
    make_causal_lm,
    make_classifier,
    make_tokenizer,
    pad_rows,
    ragged_rows,
    save_folder,
    weights_of,
)

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


def names_of(model):
    return [name for name, _ in model.named_parameters()]


def trained_of(model):
    return [name for name, p in model.named_parameters() if p.requires_grad]


def chosen(model, *args, **fields):
    choose_trained(model, Finetuning(*args, **fields), "base")
    return model


def test_what_is_trained_in_words():
    layer = torch.nn.Linear(3000, 2)
    assert describe_trained(layer) == "trains 6,002 of 6,002 parameters"
    layer.weight.requires_grad_(False)
    assert describe_trained(layer) == "trains 2 of 6,002 parameters"


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_last_layer_is_the_head_alone(kind, group):
    assert changed_by_an_update(chosen(make_causal_lm(kind, **UNTIED), last_layer=True)) == {"lm_head.weight"}
    assert changed_by_an_update(chosen(make_classifier(kind), last_layer=True)) == {"score.weight"}


@pytest.mark.parametrize("kind", ["gemma2", "gpt2"])
def test_of_a_critic_the_mlps_and_the_head_alone(kind, group):
    names = names_of(make_classifier(kind))
    expected = {name for name in names if ".mlp." in name or name.startswith("score.")}
    changed = changed_by_an_update(chosen(make_classifier(kind), mlps=True))
    assert changed == expected and len(changed) > 4


def test_layers_whose_mlps_are_not_known_are_refused():
    model = make_classifier()
    for layer in model.model.layers:
        layer.mixer = layer.mlp
        del layer.mlp
    with pytest.raises(UserError, match="--critic_trains mlp: it is not known which modules of base are MLPs"):
        chosen(model, mlps=True)


def test_adapters_of_several_targets_with_their_own_scale():
    model = chosen(make_causal_lm(), rank=4, targets=("q_proj", "v_proj"), alpha=2, dropout=0.25)
    names = trained_of(model)
    assert {name.split(".")[4] for name in names} == {"q_proj", "v_proj"} and len(names) == 8
    config = lora_config(model)
    assert (config.r, config.lora_alpha, config.lora_dropout) == (4, 2, 0.25)
    assert lora_config(chosen(make_causal_lm(), rank=4)).lora_alpha == 8
    with pytest.raises(UserError, match="--lora_module_name query: no linear layer of base"):
        chosen(make_causal_lm(), rank=4, targets=("q_proj", "query"))
    with pytest.raises(UserError, match="--lora_module_name lm_head: .* that can have an adapter .*head never has"):
        chosen(make_causal_lm(), rank=4, targets=("lm_head",))


@pytest.mark.parametrize(
    ("kind", "top"),
    [("llama", ("model.layers.1.", "model.norm.")), ("gpt2", ("transformer.h.1.", "transformer.ln_f."))],
)
def test_the_last_layer_and_the_norm_behind_it(kind, top):
    model = make_causal_lm(kind)
    train_top_layers(model, 1, "--trained_layers")
    assert len(trained_of(model)) > 5 and trained_of(model) == [n for n in names_of(model) if n.startswith(top)]


def test_every_kth_layer_is_recomputed():
    """Of five layers the first, the third and the fifth."""
    model = make_causal_lm("llama", num_hidden_layers=5)
    enable_gradient_checkpointing(model, 2)
    layers = [layer for layer in model.modules() if isinstance(layer, GradientCheckpointingLayer)]
    assert [layer.gradient_checkpointing for layer in layers] == [True, False, True, False, True]


def test_layers_that_are_not_recomputed_one_by_one_are_refused():
    model = make_causal_lm()
    for layer in model.model.layers:
        layer.__class__ = type("Layer", (torch.nn.Module,), {"forward": type(layer).forward})
    with pytest.raises(UserError, match="--gradient_checkpointing_every 2: the layers of a GemmaForCausalLM are"):
        enable_gradient_checkpointing(model, 2)


# -- tokens that were added to a tokenizer: ids 100 and 101
LORA = Finetuning(rank=2)
TEXTS = [[1, 5, 7], [1, 100, 6, 2]]


def with_added_tokens(folder, kind, **options):
    """A tokenizer with two tokens more than the model beside it has rows; the model's path."""
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["<think>", "<tool>"])
    return tokenizer, save_folder(folder, make_causal_lm(kind, **options), tokenizer)


def checked(model, tokenizer, what, texts=TEXTS):
    choose_trained(model, what, "base")
    require_trainable_tokens(model, tokenizer, texts, SingleDevice(), "--m base")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("place", ["mean", "zero"])
def test_also_with_rows_that_another_program_has_added(place, dtype):
    """As transformers' resize_token_embeddings leaves them; or as the reserved tokens of some published models."""
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["<think>", "<tool>"])
    model = make_causal_lm("gemma").to(dtype)
    model.resize_token_embeddings(102)
    if place == "zero":
        with torch.no_grad():
            model.get_input_embeddings().weight[100:] = 1e-9
    with pytest.raises(UserError, match="<think>, <tool>"):
        checked(model, tokenizer, LORA, [[101], [100]])


def test_tokens_that_are_or_will_be_trained_or_do_not_occur_are_accepted(tmp_path):
    """The third model's rows are somewhere else; the last one's output layer is its embedding."""
    tokenizer, base = with_added_tokens(tmp_path / "llama", "llama", **UNTIED)
    checked(load_causal_lm(base, "--m", torch.float32, tokenizer), tokenizer, EVERYTHING)
    checked(load_causal_lm(base, "--m", torch.float32, tokenizer), tokenizer, LORA, [[1, 5, 7, 99, 0, 2]])
    trained = load_causal_lm(base, "--m", torch.float32, tokenizer)
    rows = trained.get_input_embeddings().weight.data
    rows[100] += 0.02 * rows[:100].norm(dim=1).mean() * torch.nn.functional.normalize(torch.ones(32), dim=0)
    checked(trained, tokenizer, LORA)
    tokenizer, base = with_added_tokens(tmp_path / "gemma", "gemma")
    checked(load_causal_lm(base, "--m", torch.float32, tokenizer), tokenizer, Finetuning(last_layer=True))
