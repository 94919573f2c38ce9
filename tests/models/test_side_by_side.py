# SPDX-License-Identifier: Apache-2.0
"""Linear layers whose weights are neighbours in memory become one matrix product; others stay as they are."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._dynamo.backends.debugging import aot_eager

from closeness import assert_near
from compiler_state import fresh_compiler
from dschat.models.compiled import Compiler
from dschat.models.side_by_side import common_layout, lay_side_by_side, merging_backend


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    with fresh_compiler():
        yield


class ThreeProjections(nn.Module):
    """Two projections of one input, of which one has a bias, and one of another input."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 3)
        self.second = nn.Linear(4, 2, bias=False)
        self.last = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.second(x), self.first(x), self.last(x.exp())


def lay_out(linears: list[nn.Linear]) -> None:
    """Puts weights into one buffer in this order."""
    buffer = torch.cat([linear.weight.detach().flatten() for linear in linears])
    pieces = buffer.split([linear.weight.numel() for linear in linears])
    for linear, piece in zip(linears, pieces, strict=True):
        linear.weight.data = piece.view_as(linear.weight)


def compiled(module: nn.Module, counts: list[int]) -> Callable[..., Any]:
    """A module that runs through `merging_backend`, which notes how many layers of each graph were replaced."""

    def backend(graph: fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        targets = [node.target for node in graph.graph.nodes]
        counts.append(targets.count(torch._C._nn.linear))
        return aot_eager(graph, inputs)

    return torch.compile(module, backend=merging_backend(backend))


@torch.no_grad()
@pytest.mark.parametrize(
    ("order", "products"),
    [
        (["first", "second", "last"], 2),
        (["last", "second", "first"], 2),
        (["first", "last", "second"], 3),  # a weight that reads another input is between the two
        ([], 3),
    ],
)
def test_neighbours_of_one_input_are_one_product(order: list[str], products: int) -> None:
    torch.manual_seed(0)
    module = ThreeProjections()
    x = torch.randn(2, 7, 4)
    expected = module(x)
    if order:
        lay_out([getattr(module, name) for name in order])
    counts: list[int] = []
    for ours, theirs in zip(compiled(module, counts)(x), expected, strict=True):
        assert_near(ours, theirs, 2**4)
    assert counts == [products]


def test_layouts_that_differ_are_not_one() -> None:
    layers = [ThreeProjections(), ThreeProjections()]
    assert common_layout(layers) is None
    before = [parameter.detach().clone() for parameter in layers[0].parameters()]
    lay_side_by_side(layers)
    assert all(map(torch.equal, layers[0].parameters(), before))
    # Elements 0–11, 12–19 and 20–39 of the buffer, by hand.
    assert common_layout(layers) == (0, 12, 20)
    lay_out([layers[1].second, layers[1].first, layers[1].last])
    assert common_layout(layers) is None
    layers[1].second.weight.data = layers[1].second.weight.clone()
    assert common_layout(layers) is None


def test_a_layout_other_than_the_compiled_one_is_not_merged() -> None:
    """Also where all layers have it: the graph reads memory as it was laid out when it was compiled."""
    layers = [ThreeProjections(), ThreeProjections()]
    compiler = Compiler("toy", "aot_eager")
    compiler.layers = layers
    assert not compiler.may_merge()
    assert "do not lie side by side" in compiler.words
    lay_side_by_side(layers)
    assert compiler.may_merge()
    assert compiler.words == "compiled"
    for layer in layers:
        lay_out([layer.second, layer.first, layer.last])
    assert common_layout(layers) is not None
    assert not compiler.may_merge()
    assert "have moved in memory" in compiler.words


def test_matrices_that_others_read_are_not_moved() -> None:
    """Adapters that are trained beside frozen weights, and views of a buffer that an optimiser or a layer owns."""
    partly_trained = ThreeProjections()
    partly_trained.second.requires_grad_(False)
    in_a_buffer = ThreeProjections()
    lay_out([in_a_buffer.first, in_a_buffer.second])
    for module in (partly_trained, in_a_buffer):
        before = [parameter.data_ptr() for parameter in module.parameters()]
        lay_side_by_side([module])
        assert [parameter.data_ptr() for parameter in module.parameters()] == before
