# SPDX-License-Identifier: Apache-2.0
"""Linear layers that read the same input, merged into one matrix product in decoding steps.

Query, key and value projections read the same hidden states, and so do the two inner projections of a gated MLP. With
one token per row each product is small, and a GPU reads the weights faster in one piece. If the weights are contiguous
in memory, the merged matrix is a view: nothing is copied, and training is unaffected. DeepSpeed lays weights out like
that at ZeRO 1 and 2; `lay_side_by_side` does it for other models.

Layers are found in the traced graph as calls of torch's own `linear`. At ZeRO 3 DeepSpeed replaces that function for
the whole process, see `plain_linear_problem`.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, fx, nn

ALIGNMENT = 16  # bytes; the compiler copies misaligned inputs, so a misaligned matrix would be copied alone
Backend = Callable[[fx.GraphModule, list[Tensor]], Callable[..., object]]


@dataclass(frozen=True)
class Linear:
    """A linear layer in a graph."""

    node: fx.Node
    source: fx.node.Argument  # its input
    weight_node: fx.Node
    weight: Tensor  # fake tensor: the weight's shape and position in memory
    bias: fx.node.Argument

    @property
    def start(self) -> int:
        """Offset of the weight in its buffer, in elements."""
        return int(self.weight.storage_offset())

    @property
    def end(self) -> int:
        """Offset of the first element after the weight."""
        return self.start + self.weight.numel()


def plain_linear_problem() -> str | None:
    """Why linear layers are not recognised in traced graphs; None if they are."""
    if torch.nn.functional.linear is torch._C._nn.linear:
        return None
    return "DeepSpeed replaced torch's linear function, as it does where a model of the process runs at ZeRO 3"


def lay_side_by_side(layers: Iterable[nn.Module]) -> None:
    """Moves the matrices of each layer into one buffer, in the order of the layer's parameters.

    The parameters remain the same objects. Layers for which `can_be_moved` is false are left as they are.
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
    """Whether the matrices of a layer can be moved into one buffer.

    They cannot if DeepSpeed partitions them (ZeRO 3), or if one is part of a buffer of an optimiser, another layer or
    another model. A layer with adapters is left alone: some of its matrices are trained, others are not. Every matrix
    must begin at a multiple of ALIGNMENT.
    """
    dtypes = {matrix.dtype for matrix in matrices}
    trained = {matrix.requires_grad for matrix in matrices}
    if len(dtypes) != 1 or len(trained) != 1:
        return False
    for matrix in matrices:
        is_partitioned = hasattr(matrix, "ds_id")
        owns_storage = matrix.untyped_storage().nbytes() == matrix.nbytes
        if is_partitioned or not owns_storage or matrix.nbytes % ALIGNMENT:
            return False
    return True


def common_layout(layers: Iterable[nn.Module]) -> tuple[int, ...] | None:
    """Offsets of a layer's matrices from its first matrix, in elements, if they are the same in every layer.

    A compiled graph serves all layers, so what it assumes about the memory of one layer must hold for all of them.

    Returns:
        None if the layers differ, a layer's matrices are in several buffers, or a matrix does not begin at a multiple
        of ALIGNMENT.
    """
    layouts: set[tuple[int, ...]] = set()
    for layer in layers:
        matrices = matrices_of(layer)
        storages = {matrix.untyped_storage().data_ptr() for matrix in matrices}
        if len(storages) != 1 or any(matrix.data_ptr() % ALIGNMENT for matrix in matrices):
            return None
        first_offset = matrices[0].storage_offset()
        layouts.add(tuple(int(matrix.storage_offset() - first_offset) for matrix in matrices))
    return layouts.pop() if len(layouts) == 1 else None


def matrices_of(layer: nn.Module) -> list[nn.Parameter]:
    """A layer's parameters of two dimensions."""
    return [parameter for parameter in layer.parameters() if parameter.ndim == 2]


def merging_backend(backend: Backend) -> Backend:
    """A backend of torch.compile that merges linear layers before another backend compiles the graph."""

    def compile_merged(module: fx.GraphModule, inputs: list[Tensor]) -> Callable[..., object]:
        merge_linears(module)
        return backend(module, inputs)

    return compile_merged


def merge_linears(module: fx.GraphModule) -> int:
    """Replaces linear layers of one input with adjacent weights by one linear layer with all their rows.

    Args:
        module: a graph as dynamo traces it; the weights are among its inputs and need no gradient.

    Returns:
        The number of linear layers that were replaced.
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
    """A node as a linear layer; None for other nodes and for computed weights."""
    if node.target is not torch._C._nn.linear:
        return None
    source = node.args[0]
    weight_node = node.args[1]
    bias = node.args[2] if len(node.args) > 2 else node.kwargs.get("bias")
    if not isinstance(weight_node, fx.Node) or weight_node.op != "placeholder":
        return None
    weight = weight_node.meta.get("example_value")
    if not isinstance(weight, Tensor) or not weight.is_contiguous():
        return None
    return Linear(node, source, weight_node, weight, bias)


def neighbours(linears: list[Linear]) -> list[list[Linear]]:
    """Runs of at least two linear layers in which each weight begins where the previous one ends."""
    ordered = sorted(linears, key=lambda linear: linear.start)
    runs = [ordered[:1]]
    for previous, linear in pairwise(ordered):
        previous_storage = previous.weight.untyped_storage()
        shares_storage = previous_storage._cdata == linear.weight.untyped_storage()._cdata
        if shares_storage and linear.start == previous.end:
            runs[-1].append(linear)
        else:
            runs.append([linear])
    return [run for run in runs if len(run) > 1]


def merge_run(graph: fx.Graph, run: list[Linear], first: Linear) -> None:
    """Computes a run of linear layers at the position of the one that comes first in the graph."""
    rows = [int(linear.weight.shape[0]) for linear in run]
    columns = int(run[0].weight.shape[1])
    with graph.inserting_before(first.node):
        # No explicit offset: the view then begins at the first weight in every layer that the graph serves.
        size = (sum(rows), columns)
        matrix = graph.call_function(torch.as_strided, (run[0].weight_node, size, (columns, 1)))
        merged = graph.call_function(torch._C._nn.linear, (run[0].source, matrix))
        pieces = graph.call_function(torch.split, (merged, rows, -1))
    for number, linear in enumerate(run):
        with graph.inserting_before(linear.node):
            piece = graph.call_function(operator.getitem, (pieces, number))
            if linear.bias is not None:
                piece = graph.call_function(operator.add, (piece, linear.bias))
        linear.node.replace_all_uses_with(piece)
        graph.erase_node(linear.node)
