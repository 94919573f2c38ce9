# SPDX-License-Identifier: Apache-2.0
"""The actor's weights under their published names, and the check that vLLM's layers compute with them.

`plain_weights` gives what is sent. While vLLM loads it, `record_columns` keeps a sample of each matrix, and
`wrong_layers` compares the sample with what the layers then compute. The engine in the training processes (engine.py)
and the worker of a server (worker.py) call them; only these two import vLLM.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from dschat.models.adapters import lora_config
from dschat.models.engines import TrainedPolicy
from dschat.models.lora import merged
from dschat.models.save import as_published

logger = logging.getLogger("dschat")


class Temperature:
    """Divides the logits of vLLM's model, so that its raw log-probs are those of softmax(logits / temperature).

    The logits of `missing` ids, which have no token (`dschat.models.vocabulary`), become −inf.
    """

    def __init__(self, model: nn.Module) -> None:
        self.value = 1.0
        self.missing: Tensor | None = None  # (K,) long
        compute_logits: Callable[[Tensor], Tensor] = model.compute_logits  # type: ignore[assignment]

        def divided_logits(hidden: Tensor) -> Tensor:
            logits = compute_logits(hidden).float().div_(self.value)
            if self.missing is not None:
                self.missing = self.missing.to(logits.device)
                logits.index_fill_(-1, self.missing, -torch.inf)
            return logits

        model.compute_logits = divided_logits  # type: ignore[assignment]


def repack_weights(model: nn.Module) -> None:
    """Renews the packed copies that layers compute with on a CPU; to be called after new weights.

    vLLM itself does not renew that of a head tied to the embedding, since no weight has the head's name, nor those of
    experts.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for layer in model.modules():
        if isinstance(layer, ParallelLMHead) or hasattr(layer, "w13_weight"):
            kernel = getattr(layer.quant_method, "moe_kernel", None)
            method = layer.quant_method if kernel is None else kernel.fused_experts
            method.process_weights_after_loading(layer)  # type: ignore[union-attr,operator]


def plain_weights(actor: TrainedPolicy) -> Iterator[tuple[str, Tensor]]:
    """Names and whole weights of the model that the actor computes with, adapters merged in.

    Every rank must iterate over all of them. Each tensor is a copy: vLLM keeps the parts of a fused layer (q, k and v)
    until it has them all, while those of `whole_weights` are freed when the next one is gathered.
    """
    inner = actor.module.inner
    copies = ((name.removeprefix("inner."), tensor.clone()) for name, tensor in actor.whole_weights())
    return as_published(inner, copies if lora_config(inner) is None else merged(inner, copies))


def transposed_matrices(actor: TrainedPolicy) -> frozenset[str]:
    """Names of the matrices stored as (inputs, outputs), as in GPT-2, instead of (outputs, inputs)."""
    names = set()
    for name, module in actor.module.inner.named_modules():
        if isinstance(module, Conv1D):
            names.add(f"{name.removesuffix('.base_layer')}.weight")
    return frozenset(names)


def record_columns(
    weights: Iterable[tuple[str, Tensor]], columns: dict[str, Tensor], transposed: frozenset[str], shards: int
) -> Iterator[tuple[str, Tensor]]:
    """Passes weights on, and records for `wrong_layers` the column of each matrix that multiplies its first input.

    Matrices of experts are left out.

    Args:
        weights: names and tensors, see `plain_weights`.
        columns: receives, by name, a tensor (shards, outputs): the weights of the first input of each shard, if the
            inputs were divided among `shards` ranks.
        transposed: see `transposed_matrices`.
        shards: ranks that share the model.
    """
    for name, tensor in weights:
        if tensor.dim() == 2 and ".experts." not in name:
            by_input = tensor if name in transposed else tensor.T
            shard_size = max(1, len(by_input) // shards)
            columns[name] = by_input[::shard_size][:shards].clone()
        yield name, tensor


def _all_gather(part: Tensor) -> Tensor:
    """Concatenates the parts of all ranks that share the engine."""
    from vllm.distributed import tensor_model_parallel_all_gather

    gathered: Tensor = tensor_model_parallel_all_gather(part)
    return gathered


@torch.no_grad()
def wrong_layers(
    model: nn.Module, columns: Mapping[str, Tensor], shard: int = 0, gather: Callable[[Tensor], Tensor] = _all_gather
) -> list[str]:
    """Names of the layers of vLLM's model that compute with other weights than they were given.

    A layer whose first input is 1 and all others 0 returns the weights of that input, without rounding and however it
    stores them. They are compared after sorting, since some families reorder rows. Layers with numbers that are not
    finite, and those whose weights have other names, are skipped.

    Args:
        model: this rank's part of vLLM's model; all ranks that share it must call this function.
        columns: the weights that were sent, see `record_columns`.
        shard: this rank's number among those that share the model. Where a layer's inputs are divided, each rank
            compares its own first input.
        gather: concatenates the parts of all ranks; for layers whose outputs are divided.
    """
    first_names: dict[int, str] = {}
    wrong = []
    compared_count = 0
    for name, layer in model.named_modules():
        method = getattr(layer, "quant_method", None)
        weight = getattr(layer, "weight", None)
        # A tied head has the embedding's weight and name.
        parts = _published_names(model, first_names.setdefault(id(weight), name))
        if method is None or weight is None or not columns.keys() >= set(parts):
            continue

        # Weights of this rank's first input, as the layer computes with them.
        input_size = getattr(layer, "input_size", None) or layer.embedding_dim
        local_input_size = getattr(layer, "input_size_per_partition", input_size)
        inputs_are_divided = local_input_size < input_size
        first_input = torch.eye(1, local_input_size).to(weight)
        outputs = method.apply(layer, first_input)[0]
        if getattr(layer, "tp_size", 1) > 1 and not inputs_are_divided:
            outputs = gather(outputs)

        row = shard if inputs_are_divided else 0
        expected = torch.cat([columns[part][row] for part in parts]).to(outputs)
        if getattr(layer, "num_kv_head_replicas", 1) > 1:  # several ranks hold the same keys and values
            outputs = outputs.unique()
            expected = expected.unique()
        compared_count += 1
        # vLLM fills a vocabulary up with further outputs at the end.
        same = torch.equal(outputs[: len(expected)].sort()[0], expected.sort()[0])
        if outputs.isfinite().all() and not same:
            wrong.append(name)
    if not compared_count:
        logger.warning("--rollout_engine vllm: its layers have other names than the actor's and are not compared.")
    return wrong


def _published_names(model: nn.Module, layer_name: str) -> list[str]:
    """Names of the weights that a layer of vLLM's model holds; a fused layer holds several."""
    parent, dot, last = layer_name.rpartition(".")
    fused: Mapping[str, Sequence[str]] = getattr(model, "packed_modules_mapping", {})
    return [f"{parent}{dot}{part}.weight" for part in fused.get(last, [last])]
