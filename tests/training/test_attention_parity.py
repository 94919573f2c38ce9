# SPDX-License-Identifier: Apache-2.0
"""An attention that --attn_implementation names is compared with eager attention before it trains anything."""

import pytest
import torch
from torch import nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from dschat.base.errors import UserError
from dschat.run.state import random_states
from dschat.training import selfcheck
from dschat.training.scalar_check import check_scalar
from dschat.training.selfcheck import check_policy, ragged_rows
from factories import PAD, engine_of, frozen_engine_of, make_causal_lm, make_classifier, pad_rows, to_device
from factories import ragged_rows as rows_of

pytestmark = pytest.mark.usefixtures("group")
NAME = "kernels-community/toy"
CAPPED = {"attn_logit_softcapping": 0.7}


def attend(query, key, value, mask, scaling, cap=None):
    """Attention by the textbook, over (rows, heads, tokens, width)."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    logits = query @ key.transpose(2, 3) * scaling
    if cap is not None:
        logits = cap * torch.tanh(logits / cap)
    return ((logits + mask).softmax(-1) @ value).transpose(1, 2).contiguous()


def right(module, q, k, v, mask, scaling, **others):
    return attend(q, k, v, mask, scaling, others.get("softcap")), None


def without_cap(module, q, k, v, mask, scaling, **_):
    return attend(q, k, v, mask, scaling), None


def without_gradient_of_keys(module, q, k, v, mask, scaling, **_):
    """Right forward, wrong backward."""
    return attend(q, k.detach(), v.detach(), mask, scaling), None


@pytest.fixture
def register(monkeypatch):
    """Makes a function known to transformers as the attention NAME, with the masks of eager attention."""

    def registered(function):
        masks = ALL_MASK_ATTENTION_FUNCTIONS["eager"]
        monkeypatch.setitem(type(ALL_ATTENTION_FUNCTIONS)._global_mapping, NAME, function)
        monkeypatch.setitem(type(ALL_MASK_ATTENTION_FUNCTIONS)._global_mapping, NAME, masks)

    return registered


def with_attention(model, name=NAME):
    model.config._attn_implementation = name
    return model


def check(engine):
    ids, attention_mask, mask = (to_device(x) for x in pad_rows(rows_of([2, 5, 9], [7, 3, 4])))
    if hasattr(engine.module.inner, "score"):
        check_scalar(engine, (ids, attention_mask), PAD)
    else:
        check_policy(engine, (ids, attention_mask), mask.shape[1], 1.0, PAD)


@pytest.mark.parametrize("make", [make_causal_lm, make_classifier])
@pytest.mark.parametrize(("kind", "options"), [("llama", {}), ("gemma2", CAPPED)])
def test_an_attention_with_the_right_numbers_passes(kind, options, make, register):
    register(right)
    states = random_states()
    engine = engine_of(with_attention(make(kind, **options)))
    engine.eval()
    check(engine)
    assert not engine.module.training
    assert engine.module.inner.config._attn_implementation == NAME
    assert all(parameter.grad is None for parameter in engine.module.parameters())
    assert torch.equal(random_states()["torch"], states["torch"])
    check(frozen_engine_of(with_attention(make(kind, **options))))


def test_a_new_critic_with_a_zero_head_passes(register):
    register(right)
    model = with_attention(make_classifier("llama"))
    nn.init.zeros_(model.score.weight)
    check(engine_of(model))


WRONG = [
    ("gemma2", CAPPED, without_cap, "with kernels-community/toy differ from those with eager attention by up to"),
    ("llama", {}, without_gradient_of_keys, "norms of gradients with kernels-community/toy"),
]


@pytest.mark.parametrize("make", [make_causal_lm, make_classifier])
@pytest.mark.parametrize(("kind", "options", "function", "message"), WRONG)
def test_an_attention_with_wrong_numbers_is_refused(kind, options, function, message, make, register):
    register(function)
    with pytest.raises(UserError, match=message) as raised:
        check(engine_of(with_attention(make(kind, **options))))
    assert "rounding explains 0.00" in str(raised.value)
    assert "use --attn_implementation sdpa or eager. --no_self_checks skips this check." in str(raised.value)


def test_rows_begin_in_different_columns_and_are_not_long(monkeypatch):
    ids = torch.arange(12).reshape(2, 6)
    mask = torch.tensor([[0, 1, 1, 1, 1, 0]] * 2).bool()
    assert ragged_rows(ids, mask)[1].tolist() == [[0, 1, 1, 1, 1, 0], [0, 0, 1, 1, 1, 0]]
    monkeypatch.setattr(selfcheck, "ATTENTION_TOKENS", 4)
    short, seen = ragged_rows(ids, mask)
    assert short.tolist() == [[2, 3, 4, 5], [8, 9, 10, 11]]
    assert seen.tolist() == [[1, 1, 1, 0], [0, 1, 1, 0]]


# -- flex_attention, of which torch computes the forward pass on a CPU


@pytest.mark.slow
@pytest.mark.parametrize("make", [make_causal_lm, make_classifier])
def test_flex_attention_has_the_numbers_of_eager_attention(make):
    check(frozen_engine_of(make("gemma2", attn_implementation="flex_attention", **CAPPED)))
