# SPDX-License-Identifier: Apache-2.0
"""The actor's weights on their way into vLLM's model, and whether they have arrived.

Both ways of drawing with vLLM use it: the engine in the training processes (rollouts/vllm.py) and the worker of a
server (rollouts/vllm_worker.py), which alone import vLLM.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from dschat.models.engines import TrainedPolicy
from dschat.models.lora import lora_config, merged
from dschat.models.save import as_published

logger = logging.getLogger("dschat")


class Temperature:
    """Divides the logits of vLLM's model, so that its raw log-probs are those of softmax(logits / temperature).

    The logits of `missing` ids, which are no tokens (`dschat.models.vocabulary`), become −inf.
    """

    def __init__(self, model: nn.Module) -> None:
        self.value = 1.0
        self.missing: Tensor | None = None  # (K,) long
        compute_logits: Callable[[Tensor], Tensor] = model.compute_logits  # type: ignore[assignment]

        def divided(hidden: Tensor) -> Tensor:
            logits = compute_logits(hidden).float().div_(self.value)
            if self.missing is not None:
                self.missing = self.missing.to(logits.device)
                logits.index_fill_(-1, self.missing, -torch.inf)
            return logits

        model.compute_logits = divided  # type: ignore[assignment]


def pack_again(model: nn.Module) -> None:
    """To be called on a CPU after new weights, where layers compute with a packed copy of theirs.

    That of a head tied to the embedding is not made anew, since no weight of the head's own name comes; and new
    weights of experts are not packed.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for layer in model.modules():
        if isinstance(layer, ParallelLMHead) or hasattr(layer, "w13_weight"):
            kernel = getattr(layer.quant_method, "moe_kernel", None)
            method = layer.quant_method if kernel is None else kernel.fused_experts
            method.process_weights_after_loading(layer)  # type: ignore[union-attr,operator]


def plain_weights(actor: TrainedPolicy) -> Iterator[tuple[str, Tensor]]:
    """Whole weights of the model that the actor computes with, adapters merged in. Every rank must go through it.

    Each tensor is a copy: vLLM keeps those of a fused layer (q, k and v, for instance) until it has them all, while
    those of `whole_weights` are gone when the next is asked for.
    """
    inner = actor.module.inner
    own = ((name.removeprefix("inner."), tensor.clone()) for name, tensor in actor.whole_weights())
    return as_published(inner, own if lora_config(inner) is None else merged(inner, own))


def inputs_first(actor: TrainedPolicy) -> frozenset[str]:
    """Names of the matrices whose weights are (inputs, outputs), as GPT-2's are, and not (outputs, inputs)."""
    modules = actor.module.inner.named_modules()
    return frozenset(f"{name.removesuffix('.base_layer')}.weight" for name, m in modules if isinstance(m, Conv1D))


def noting(
    weights: Iterable[tuple[str, Tensor]], columns: dict[str, Tensor], inputs_first: frozenset[str], shares: int
) -> Iterator[tuple[str, Tensor]]:
    """The same weights. By name, `columns` gets weights (shares, outputs) of every matrix outside experts: those of
    the first input of each share, where inputs are divided; see `wrong_layers`.
    """
    for name, tensor in weights:
        if tensor.dim() == 2 and ".experts." not in name:
            inputs = tensor if name in inputs_first else tensor.T
            columns[name] = inputs[:: max(1, len(inputs) // shares)][:shares].clone()
        yield name, tensor


def _gathered(part: Tensor) -> Tensor:
    """The parts of all ranks that share the engine, beside each other."""
    from vllm.distributed import tensor_model_parallel_all_gather

    whole: Tensor = tensor_model_parallel_all_gather(part)
    return whole


@torch.no_grad()
def wrong_layers(
    model: nn.Module, columns: Mapping[str, Tensor], place: int = 0, gathered: Callable[[Tensor], Tensor] = _gathered
) -> list[str]:
    """Layers of vLLM's model, this rank's part of it, by name, that compute with other weights than they were given.

    All ranks that share it must call it; `place` is this one's number. A layer whose first input is 1 and all others 0
    returns the weights of that input: without rounding, and however it keeps them. They are compared with `columns`,
    see `noting`, in the order of their size, since some families' rows are moved. Of a layer whose inputs are divided
    among ranks, each compares its own first one; where outputs (N,) are, all parts are `gathered`. Layers with numbers
    that are not finite, and those whose weights have other names, are left out.
    """
    names: dict[int, str] = {}
    wrong, compared = [], 0
    for name, layer in model.named_modules():
        method, weight = getattr(layer, "quant_method", None), getattr(layer, "weight", None)
        parent, dot, last = names.setdefault(id(weight), name).rpartition(".")  # a tied head's is the embedding's
        fused = getattr(model, "packed_modules_mapping", {}).get(last, [last])
        parts = [f"{parent}{dot}{part}.weight" for part in fused]
        if method is None or weight is None or not columns.keys() >= set(parts):
            continue
        size = getattr(layer, "input_size", None) or layer.embedding_dim
        own_inputs = getattr(layer, "input_size_per_partition", size)
        found = method.apply(layer, torch.eye(1, own_inputs).to(weight))[0]
        given = torch.cat([columns[part][place * (own_inputs < size)] for part in parts])
        if getattr(layer, "tp_size", 1) > 1 and own_inputs == size:
            found = gathered(found)
        if getattr(layer, "num_kv_head_replicas", 1) > 1:  # several ranks hold the same keys and values
            found, given = found.unique(), given.unique()
        compared += 1
        given = given.to(found)
        if found.isfinite().all() and not torch.equal(found[: len(given)].sort()[0], given.sort()[0]):
            wrong.append(name)
    if not compared:
        logger.warning("--rollout_engine vllm: its layers have other names than the actor's and are not compared.")
    return wrong
