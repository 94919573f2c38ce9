# SPDX-License-Identifier: Apache-2.0
"""Activations as they are found on the meta device, against what the same code holds on the CPU, and by hand."""

import copy

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BertConfig,
    DebertaV2Config,
    Gemma2Config,
    GemmaConfig,
    GPT2Config,
    LlamaConfig,
)

from dschat.base.errors import UserError
from dschat.models.heads import keep_float32
from dschat.plan.passes import AliveBytes, scoring_pass, training_logits, training_pass
from dschat.plan.sizes import HeadSize, Model, shape_of
from macro_actions import logprobs

ROWS, TOKENS = 3, 40
SIZES = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0}
FAMILIES = {
    "gemma": GemmaConfig(**SIZES, head_dim=8),
    "gemma2": Gemma2Config(**SIZES, head_dim=8),
    "llama": LlamaConfig(**SIZES),
    "gpt2": GPT2Config(vocab_size=50, n_embd=32, n_layer=2, n_head=4, attn_pdrop=0, embd_pdrop=0, resid_pdrop=0),
}
BOTH_WAYS = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
BOTH_WAYS |= {"num_attention_heads": 4, "max_position_embeddings": 64}


class Saved:
    """Bytes that autograd keeps for the backward pass, each storage once; parameters do not count."""

    def __init__(self, model: nn.Module) -> None:
        self.sizes: dict[int, int] = {}
        self._known = {p.untyped_storage()._cdata for p in (*model.parameters(), *model.buffers())}
        self.hooks = torch.autograd.graph.saved_tensors_hooks(self._note, lambda tensor: tensor)

    def _note(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._known:
            self.sizes[storage._cdata] = storage.nbytes()
        return tensor


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_held_is_what_autograd_saves(family):
    """An independent count on the CPU: the tensors that autograd saves. What else is held (cosines, masks, the tokens,
    the output) is small."""
    config = FAMILIES[family]
    model = AutoModelForCausalLM.from_config(config)
    backbone = getattr(model, model.base_model_prefix)
    saved = Saved(model)
    with saved.hooks:
        output = backbone(input_ids=torch.zeros(ROWS, TOKENS, dtype=torch.long), use_cache=False).last_hidden_state
    expected = sum(saved.sizes.values())
    found = training_pass(Model(config, "policy", torch.float32), ROWS, TOKENS, recomputed=0)
    assert found.held == pytest.approx(expected, rel=0.08)
    assert found.forward >= found.held and found.backward >= found.held - output.nbytes


@pytest.mark.parametrize("family", ["gemma", "gemma2"])
def test_checkpointing_of_some_layers_is_in_between(family):
    """A layer more that keeps its activations adds what one of four layers holds beyond its input, by hand.

    Layers of Gemma-2 with a sliding window hold a little more than the others.
    """
    config = copy.deepcopy(FAMILIES[family])
    config.num_hidden_layers = 4
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types * 2
    model = Model(config, "policy", torch.float32)
    held = {every: training_pass(model, ROWS, TOKENS, every).held for every in (0, 1, 2, 3, 4)}
    of_a_layer = (held[0] - held[1]) / 4
    for every, kept_layers in ((2, 2), (3, 2), (4, 3)):
        assert held[every] == pytest.approx(held[1] + kept_layers * of_a_layer, rel=2e-2)
    assert of_a_layer > ROWS * TOKENS * 32 * 4


@pytest.mark.parametrize(
    "config",
    [
        BertConfig(**BOTH_WAYS),
        DebertaV2Config(**BOTH_WAYS, relative_attention=True, pos_att_type=["p2c", "c2p"], position_buckets=16),
    ],
    ids=lambda config: config.model_type,
)
def test_a_classifier_that_reads_both_ways(config):
    """Its weights and what a pass takes, against the same model on the CPU; DeBERTa's attention holds its scores."""
    config.num_labels = 1
    model = AutoModelForSequenceClassification.from_config(config).eval()
    ids, mask = torch.zeros(ROWS, TOKENS, dtype=torch.long), torch.ones(ROWS, TOKENS, dtype=torch.long)
    with torch.no_grad(), AliveBytes([*model.parameters(), *model.buffers(), ids, mask]) as alive:
        model(input_ids=ids, attention_mask=mask)
    found = Model(config, "classifier", torch.float32)
    shape = shape_of(found)
    assert shape.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert shape.limit == 64
    assert scoring_pass(found, ROWS, TOKENS).forward == pytest.approx(alive.peak, rel=0.05)


def test_the_topmost_layers_keep_nothing_of_those_below():
    """Of 2 Llama layers one."""
    whole, top = (Model(FAMILIES["llama"], "policy", torch.float32, top_layers=count) for count in (0, 1))
    assert not shape_of(top).head.trained and shape_of(whole).head.trained
    held = [training_pass(model, ROWS, TOKENS, 0).held for model in (top, whole)]
    assert held[0] == pytest.approx(held[1] / 2, rel=0.15)


def test_gradients_are_handed_over(monkeypatch):
    """A gradient counts while it is made: with weights far larger than activations, about the largest of them."""
    config = GemmaConfig(**(SIZES | {"vocab_size": 40_000}), head_dim=8)
    backward = training_pass(Model(config, "policy", torch.float32), 1, 2, 0).backward
    largest = 4 * 40_000 * 32
    assert largest < backward < 1.1 * largest
    model = Model(config, "policy", torch.float32).make()
    monkeypatch.setattr(Model, "make", lambda self: model)
    training_pass(Model(config, "policy", torch.float32), 1, 3, 0)  # another length, that nothing is remembered
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(
    ("trained", "dtype", "positions"),
    [(True, torch.float32, 40), (True, torch.bfloat16, 400), (False, torch.float32, 400)],
)
def test_the_heads_backward_pass_holds_what_is_planned(trained, dtype, positions, monkeypatch):
    """In one chunk, and in four: 0.4 MB of logits, and a head of 1.6 or 3.2 MB. Beside what is planned there are the
    states' gradients, in parts and put together, and a few numbers of each position."""
    vocab, hidden = 1000, 800
    monkeypatch.setattr(logprobs, "CPU_LOGITS", 100 * vocab)
    head = nn.Linear(hidden, vocab, bias=False, dtype=dtype).requires_grad_(trained)
    keep_float32(head)
    states = torch.randn(positions, hidden, dtype=dtype, requires_grad=True)
    targets = torch.arange(positions)
    with AliveBytes([head.weight, states, targets]) as alive:
        found, _ = logprobs.token_logprobs(states, targets, logprobs.Head(head, [head.weight], vocab))
        alive.start_peak()
        found.sum().backward()
    plan = training_logits(HeadSize(vocab, vocab * hidden, False, trained, dtype.itemsize), positions, states.device)
    assert plan.backward <= alive.peak < plan.backward + 2 * states.nbytes + 20 * positions


def test_a_model_that_looks_at_numbers_cannot_be_planned(monkeypatch):
    planned = Model(FAMILIES["gpt2"], "policy", torch.float32)
    model = planned.make()
    monkeypatch.setattr(Model, "make", lambda self: model)
    model.transformer.register_forward_pre_hook(lambda module, args: torch.zeros(1, device="meta").item())
    with pytest.raises(UserError, match="the memory of a gpt2 model cannot be planned"):
        training_pass(planned, 1, 9, 0)
