# SPDX-License-Identifier: Apache-2.0
"""Linear layers that read the same input, computed as one matrix product.

Query, key and value projections, and the two inner projections of a gated MLP, read the same hidden states. With one
token per row each of these products is small, and a GPU reads their weights faster in one piece. Where the weights lie
one behind the other in memory, the larger matrix is a view: nothing is copied, and training does not notice. DeepSpeed
lays them out like that at ZeRO 1 and 2; `lay_side_by_side` does it for other models.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx, nn

ALIGNMENT = 16  # bytes; the compiler copies inputs that begin elsewhere, and would copy one matrix alone
Backend = Callable[[fx.GraphModule, list[Tensor]], Callable[..., object]]


@dataclass(frozen=True)
class Linear:
    """A linear layer in a graph."""

    node: fx.Node
    source: fx.node.Argument  # what it reads
    weight_node: fx.Node
    weight: Tensor  # the weight's sizes and place in memory, without numbers
    bias: fx.node.Argument

    @property
    def start(self) -> int:
        """Where the weight begins in its buffer, in elements."""
        return int(self.weight.storage_offset())


def lay_side_by_side(layers: Iterable[nn.Module]) -> None:
    """Moves the matrices of each layer into one buffer, in the order of the layer's parameters.

    Parameters stay the objects they are. A layer is left alone where its matrices must stay where they are or would
    gain nothing; see `can_be_moved`.
    """
    for layer in layers:
        matrices = matrices_of(layer)
        if not can_be_moved(matrices):
            continue
        buffer = torch.cat([matrix.detach().flatten() for matrix in matrices])
        pieces = buffer.split([matrix.numel() for matrix in matrices])
        for matrix, piece in zip(matrices, pieces, strict=True):
            matrix.data = piece.view_as(matrix)


def can_be_moved(matrices: Sequence[nn.Parameter]) -> bool:
    """Whether the matrices of a layer can share a buffer of their own.

    They cannot where DeepSpeed partitions them (ZeRO 3), or where some are in the buffer of an optimiser, of another
    layer or of another model. With adapters, whose matrices are trained while the layer's are not, they are never
    neighbours. Every matrix must begin at a multiple of ALIGNMENT.
    """
    kinds = {(matrix.dtype, matrix.requires_grad) for matrix in matrices}
    if len(kinds) != 1 or any(hasattr(matrix, "ds_id") for matrix in matrices):
        return False
    own_storage = all(matrix.untyped_storage().nbytes() == matrix.nbytes for matrix in matrices)
    return own_storage and all(matrix.nbytes % ALIGNMENT == 0 for matrix in matrices)


def common_layout(layers: Iterable[nn.Module]) -> tuple[int, ...] | None:
    """Where the matrices of every layer lie in one buffer: their distances in elements from the layer's first matrix.

    A compiled graph serves all layers, so that what it assumes of one layer's memory must hold for all of them.

    Returns:
        None where the layers differ, where a layer's matrices are in several buffers, or where one of them does not
        begin at a multiple of ALIGNMENT.
    """
    layouts: set[tuple[int, ...]] = set()
    for layer in layers:
        matrices = matrices_of(layer)
        storages = {matrix.untyped_storage().data_ptr() for matrix in matrices}
        if len(storages) != 1 or any(matrix.data_ptr() % ALIGNMENT for matrix in matrices):
            return None
        first = matrices[0].storage_offset()
        layouts.add(tuple(int(matrix.storage_offset() - first) for matrix in matrices))
    return layouts.pop() if len(layouts) == 1 else None


def matrices_of(layer: nn.Module) -> list[nn.Parameter]:
    """A layer's parameters of two dimensions."""
    return [parameter for parameter in layer.parameters() if parameter.ndim == 2]


def merging(backend: Backend) -> Backend:
    """A backend of torch.compile that merges linear layers before another backend compiles the graph."""

    def compile_merged(module: fx.GraphModule, inputs: list[Tensor]) -> Callable[..., object]:
        merge_linears(module)
        return backend(module, inputs)

    return compile_merged


def merge_linears(module: fx.GraphModule) -> int:
    """Replaces linear layers of one input whose weights are neighbours in memory by one of all their rows.

    Args:
        module: a graph as dynamo traces it, whose weights are among its inputs and need no gradient.

    Returns:
        how many linear layers were replaced.
    """
    by_input: dict[fx.node.Argument, list[Linear]] = defaultdict(list)
    for node in module.graph.nodes:
        linear = linear_of(node)
        if linear is not None:
            by_input[linear.source].append(linear)
    replaced = 0
    for linears in by_input.values():
        for run in neighbours(linears):
            first = next(linear for linear in linears if linear in run)
            merge_run(module.graph, run, first)
            replaced += len(run)
    module.graph.lint()
    module.recompile()
    return replaced


def linear_of(node: fx.Node) -> Linear | None:
    """A node as a linear layer; None of other nodes, and of weights that are computed."""
    if node.target is not torch._C._nn.linear:
        return None
    source, weight_node, *bias = node.args
    if not isinstance(weight_node, fx.Node) or weight_node.op != "placeholder":
        return None
    weight = weight_node.meta.get("example_value")
    if not isinstance(weight, Tensor) or not weight.is_contiguous():
        return None
    return Linear(node, source, weight_node, weight, bias[0] if bias else node.kwargs.get("bias"))


def neighbours(linears: list[Linear]) -> list[list[Linear]]:
    """Runs of at least two linear layers, each of whose weights begins where the one before it ends."""
    ordered = sorted(linears, key=lambda linear: linear.start)
    runs = [ordered[:1]]
    for before, linear in zip(ordered, ordered[1:], strict=False):
        same_buffer = before.weight.untyped_storage()._cdata == linear.weight.untyped_storage()._cdata
        if same_buffer and linear.start == before.start + before.weight.numel():
            runs[-1].append(linear)
        else:
            runs.append([linear])
    return [run for run in runs if len(run) > 1]


def merge_run(graph: fx.Graph, run: list[Linear], first: Linear) -> None:
    """Computes a run of linear layers in the place of the one that comes first in the graph."""
    rows = [int(linear.weight.shape[0]) for linear in run]
    columns = int(run[0].weight.shape[1])
    with graph.inserting_before(first.node):
        # Without an offset the view begins where the first weight begins, in every layer that the graph serves.
        matrix = graph.call_function(torch.as_strided, (run[0].weight_node, (sum(rows), columns), (columns, 1)))
        merged = graph.call_function(torch._C._nn.linear, (run[0].source, matrix))
        pieces = graph.call_function(torch.split, (merged, rows, -1))
    for number, linear in enumerate(run):
        with graph.inserting_before(linear.node):
            piece = graph.call_function(operator.getitem, (pieces, number))
            if linear.bias is not None:
                piece = graph.call_function(operator.add, (piece, linear.bias))
        linear.node.replace_all_uses_with(piece)
        graph.erase_node(linear.node)
