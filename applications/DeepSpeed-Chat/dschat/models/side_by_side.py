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
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, fx, nn

Backend = Callable[[fx.GraphModule, list[Tensor]], Callable[..., object]]


def lay_side_by_side(layers: Iterable[nn.Module]) -> None:
    """Moves the matrices of each layer into one buffer, in the order of the layer's parameters.

    Parameters stay the objects they are. Parameters that DeepSpeed partitions (ZeRO 3), and layers whose matrices are
    in one buffer already, are left alone.
    """
    for layer in layers:
        matrices = matrices_of(layer)
        if len({matrix.dtype for matrix in matrices}) != 1 or any(hasattr(matrix, "ds_id") for matrix in matrices):
            continue
        if len({matrix.untyped_storage().data_ptr() for matrix in matrices}) == 1:
            continue
        buffer = torch.cat([matrix.detach().flatten() for matrix in matrices])
        pieces = buffer.split([matrix.numel() for matrix in matrices])
        for matrix, piece in zip(matrices, pieces, strict=True):
            matrix.data = piece.view_as(matrix)


def have_one_layout(layers: Iterable[nn.Module]) -> bool:
    """Whether the matrices of every layer lie in one buffer, at the same distances from each other in all layers.

    A compiled graph serves all layers, so that what it assumes of one layer's memory must hold for all of them.
    """
    layouts = set()
    for layer in layers:
        matrices = matrices_of(layer)
        if not matrices or len({matrix.untyped_storage().data_ptr() for matrix in matrices}) != 1:
            return False
        first = matrices[0].storage_offset()
        layouts.add(tuple(matrix.storage_offset() - first for matrix in matrices))
    return len(layouts) == 1


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
    by_input: dict[fx.Node, list[fx.Node]] = defaultdict(list)
    for node in module.graph.nodes:
        if node.target is torch._C._nn.linear and _is_weight(node.args[1]):
            by_input[node.args[0]].append(node)
    replaced = 0
    for linears in by_input.values():
        for run in _neighbours(linears):
            _merge(module.graph, run, first=next(node for node in linears if node in run))
            replaced += len(run)
    module.graph.lint()
    module.recompile()
    return replaced


def _is_weight(node: object) -> bool:
    if not isinstance(node, fx.Node) or node.op != "placeholder":
        return False
    weight = node.meta.get("example_value")
    return isinstance(weight, Tensor) and weight.is_contiguous()


def _neighbours(linears: list[fx.Node]) -> list[list[fx.Node]]:
    """Runs of at least two linear layers, each of whose weights begins where the one before it ends."""
    weights = {node: node.args[1].meta["example_value"] for node in linears}
    ordered = sorted(linears, key=lambda node: int(weights[node].storage_offset()))
    runs = [ordered[:1]]
    for before, node in zip(ordered, ordered[1:], strict=False):
        end = weights[before].storage_offset() + weights[before].numel()
        same_buffer = weights[before].untyped_storage()._cdata == weights[node].untyped_storage()._cdata
        if same_buffer and weights[node].storage_offset() == end:
            runs[-1].append(node)
        else:
            runs.append([node])
    return [run for run in runs if len(run) > 1]


def _merge(graph: fx.Graph, run: list[fx.Node], first: fx.Node) -> None:
    """Computes a run of linear layers before the first of them in the graph's order."""
    source = run[0].args[0]
    weights = [node.args[1].meta["example_value"] for node in run]
    rows = [int(weight.shape[0]) for weight in weights]
    columns = int(weights[0].shape[1])
    with graph.inserting_before(first):
        # Without an offset the view begins where the first weight begins, in every layer that the graph serves.
        matrix = graph.call_function(torch.as_strided, (run[0].args[1], (sum(rows), columns), (columns, 1)))
        merged = graph.call_function(torch._C._nn.linear, (source, matrix))
        pieces = graph.call_function(torch.split, (merged, rows, -1))
    for number, node in enumerate(run):
        bias = node.args[2] if len(node.args) > 2 else node.kwargs.get("bias")
        with graph.inserting_before(node):
            piece = graph.call_function(operator.getitem, (pieces, number))
            if bias is not None:
                piece = graph.call_function(operator.add, (piece, bias))
        node.replace_all_uses_with(piece)
        graph.erase_node(node)
