# SPDX-License-Identifier: Apache-2.0
"""Heads in half precision that give float32: against products of the same values in float64."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from closeness import assert_near
from dschat.models.heads import keep_float32
from dschat.models.policy import PolicyModel
from factories import make_causal_lm, pad_rows, ragged_rows

ROWS = ragged_rows([5], [40])
TOLERANCE = 1e-5
BF16_STEP = 2**-8  # relative distance of a number to the nearest one in bf16, at most


def make_head(bias: bool, dtype: torch.dtype = torch.bfloat16) -> tuple[nn.Linear, nn.Linear, Tensor]:
    """An ordinary head, the same one made to give float32, and an input (3, 7, 64)."""
    generator = torch.Generator().manual_seed(0)
    plain = nn.Linear(64, 500, bias=bias)
    for parameter in plain.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator)
    plain = plain.to(dtype)
    head = copy.deepcopy(plain)
    keep_float32(head)
    return plain, head, torch.randn(3, 7, 64, generator=generator).to(dtype)


def exact(head: nn.Linear, x: Tensor) -> Tensor:
    """What the head's values give in float64."""
    product = x.detach().double() @ head.weight.detach().double().t()
    return product if head.bias is None else product + head.bias.detach().double()


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Largest difference, in units of the largest expected number."""
    return float((found.detach().double() - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize(("bias", "dtype"), [(False, torch.bfloat16), (True, torch.float16)])
def test_a_head_in_half_precision_gives_the_product_of_its_values(bias, dtype):
    plain, head, x = make_head(bias, dtype)
    expected = exact(plain, x)
    found = head(x)
    assert found.dtype == torch.float32 and found.shape == (3, 7, 500)
    assert relative_error(found, expected) < TOLERANCE
    assert relative_error(plain(x), expected) > 10 * TOLERANCE


class Made(TorchDispatchMode):
    """Notes the shape of every tensor that an operation makes."""

    def __init__(self):
        super().__init__()
        self.shapes = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.shapes += [tuple(x.shape) for x in [result] if isinstance(x, Tensor)]
        return result


@pytest.mark.parametrize("frozen", ["weight", "bias", "input", "nothing", "no bias"])
def test_gradients_that_nothing_needs_are_not_computed(frozen):
    """In the backward pass no tensor of the frozen one's shape comes up; the others are those of the product."""
    plain, head, x = make_head(bias=frozen != "no bias")
    twin, twin_x = copy.deepcopy(plain).double(), x.double().requires_grad_()
    own = dict(head.named_parameters()) | {"input": x.requires_grad_()}
    exact_ones = dict(twin.named_parameters()) | {"input": twin_x}
    shapes = {"weight": {(500, 64), (64, 500)}, "bias": {(500,)}, "input": {(21, 64), (3, 7, 64)}}
    if frozen in own:
        own[frozen].requires_grad_(False)
    twin(twin_x).sin().sum().backward()
    loss = head(x).sin().sum()
    with Made() as made:
        loss.backward()
    for name in own.keys() - {frozen}:
        assert shapes[name] & set(made.shapes) and own[name].grad.dtype == torch.bfloat16, name
        assert relative_error(own[name].grad, exact_ones[name].grad) < 2 * BF16_STEP
    if frozen in own:
        assert not shapes[frozen] & set(made.shapes) and own[frozen].grad is None


def test_a_policy_in_bf16_gives_log_probs_of_logits_that_are_not_rounded():
    model = make_causal_lm("llama").bfloat16()
    prompt, response = ROWS[0]
    ids, attention_mask, mask = pad_rows(ROWS)
    with torch.no_grad():
        found, entropy = PolicyModel(model)(ids, attention_mask, mask.shape[1])
        states = model.get_decoder()(ids, use_cache=False).last_hidden_state[0, len(prompt) - 1 : -1]
    logits = exact(model.get_output_embeddings(), states)
    assert found.dtype == entropy.dtype == torch.float32
    assert_near(found[0].double(), logits.log_softmax(-1)[range(len(response)), response])
