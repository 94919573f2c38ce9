# SPDX-License-Identifier: Apache-2.0
"""The actor's weights as vLLM reads them: one after another, under the names of the family's folders."""

import logging
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from dschat.errors import UserError
from dschat.models.engines import TrainedPolicy
from dschat.models.lora import lora_config, merged
from dschat.models.save import as_published

logger = logging.getLogger("dschat")


def plain_weights(actor: TrainedPolicy, columns: dict[str, Tensor] | None = None) -> Iterator[tuple[str, Tensor]]:
    """Whole weights of the model that the actor computes with, adapters merged in. Every rank must go through it.

    Each tensor is a copy: vLLM keeps those of a fused layer (q, k and v, for instance) until it has them all, while
    those of `whole_weights` are gone when the next is asked for.

    `columns` gets the weights of the first input of every matrix outside experts, by name; see `check_layers`.
    """
    inner = actor.module.inner
    own = ((name.removeprefix("inner."), tensor.clone()) for name, tensor in actor.whole_weights())
    whole = own if lora_config(inner) is None else merged(inner, own)
    conv1d = {name.removesuffix(".base_layer") for name, m in inner.named_modules() if isinstance(m, Conv1D)}
    for name, tensor in as_published(inner, whole):
        if columns is not None and tensor.dim() == 2 and ".experts." not in name:
            columns[name] = (tensor if name.removesuffix(".weight") in conv1d else tensor.T)[0].clone()
        yield name, tensor


@torch.no_grad()
def check_layers(model: nn.Module, columns: Mapping[str, Tensor]) -> None:
    """Compares the weights that layers of vLLM's model compute with to those that it was given.

    A layer whose first input is 1 and all others 0 returns the weights of that input: without rounding, and however it
    keeps them. They are compared in the order of their size, since some families' rows are moved. Layers with numbers
    that are not finite, and those whose weights have other names, are left out.

    Raises:
        UserError: a layer computes with other weights.
    """
    names: dict[int, str] = {}
    compared = 0
    for name, layer in model.named_modules():
        method, weight = getattr(layer, "quant_method", None), getattr(layer, "weight", None)
        parent, dot, last = names.setdefault(id(weight), name).rpartition(".")  # a tied head's is the embedding's
        fused = getattr(model, "packed_modules_mapping", {}).get(last, [last])
        parts = [f"{parent}{dot}{part}.weight" for part in fused]
        if method is not None and weight is not None and columns.keys() >= set(parts):
            inputs = torch.eye(1, getattr(layer, "input_size", None) or layer.embedding_dim).to(weight)
            found = method.apply(layer, inputs)[0]
            compared += 1
            given = torch.cat([columns[part] for part in parts]).to(found)
            if found.isfinite().all() and not torch.equal(found[: len(given)].sort()[0], given.sort()[0]):
                raise UserError(
                    f"--rollout_engine vllm: {name} computes with other weights than the actor's, which vLLM was "
                    "given. Use --rollout_engine compacting, and please report the model."
                )
    if not compared:
        logger.warning("--rollout_engine vllm: its layers have other names than the actor's and are not compared.")
