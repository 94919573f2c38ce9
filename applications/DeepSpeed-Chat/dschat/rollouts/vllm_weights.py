# SPDX-License-Identifier: Apache-2.0
"""The actor's weights as vLLM reads them: one after another, under the names of the plain Hugging Face model."""

import re
from collections.abc import Iterator
from itertools import groupby

from torch import Tensor

from dschat.models.engines import TrainedPolicy
from dschat.models.lora import lora_config, merged_state

ADAPTED = re.compile(r"\.(base_layer|lora_A|lora_B)\.")  # parts of a layer with adapters


def plain_weights(actor: TrainedPolicy) -> Iterator[tuple[str, Tensor]]:
    """Whole weights of the model that the actor computes with, adapters merged in. Every rank must go through it.

    Each tensor is a copy: vLLM keeps those of a fused layer (q, k and v, for instance) until it has them all, while
    those of `whole_weights` are gone when the next is asked for.
    """
    own = ((name.removeprefix("inner."), tensor.clone()) for name, tensor in actor.whole_weights())
    inner = actor.module.inner
    if lora_config(inner) is None:
        yield from own
        return
    for _, layer in groupby(own, key=lambda weight: ADAPTED.split(weight[0])[0]):
        yield from merged_state(inner, dict(layer)).items()
