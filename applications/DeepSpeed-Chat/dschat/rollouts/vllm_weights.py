# SPDX-License-Identifier: Apache-2.0
"""The actor's weights as vLLM reads them: one after another, under the names of the plain Hugging Face model."""

from collections.abc import Iterator

from torch import Tensor

from dschat.models.engines import TrainedPolicy
from dschat.models.lora import lora_config, merged


def plain_weights(actor: TrainedPolicy) -> Iterator[tuple[str, Tensor]]:
    """Whole weights of the model that the actor computes with, adapters merged in. Every rank must go through it.

    Each tensor is a copy: vLLM keeps those of a fused layer (q, k and v, for instance) until it has them all, while
    those of `whole_weights` are gone when the next is asked for.
    """
    inner = actor.module.inner
    own = ((name.removeprefix("inner."), tensor) for name, tensor in actor.whole_weights())
    for name, tensor in own if lora_config(inner) is None else merged(inner, own):
        yield name, tensor.clone()
