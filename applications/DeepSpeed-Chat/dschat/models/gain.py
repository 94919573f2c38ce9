# SPDX-License-Identifier: Apache-2.0
"""A learnable factor of a score head's output, which goes into the head's weights when the model is saved.

There is no learnable offset beside it: it cancels in every difference of scores, so that pairs do not teach it, and
Hugging Face's score heads have no bias that could hold it.
"""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from dschat.models.float32_linear import Float32Linear

HEAD, GAIN = "score.", "score.gain"  # names in a Hugging Face classifier


class GainedLinear(Float32Linear):
    """A linear layer in float32 times one learnable number, 1 at the start."""

    gain: nn.Parameter  # (1,)

    def forward(self, x: Tensor) -> Tensor:
        """(…, H) → (…, V) float32."""
        return super().forward(x) * self.gain.float()


def add_gain(head: nn.Linear) -> None:
    """Gives a score head its factor; the head is changed in place."""
    head.__class__ = GainedLinear
    head.gain = nn.Parameter(torch.ones(1, dtype=head.weight.dtype, device=head.weight.device))


def folded(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Weights of a plain classifier: those of its head times the factor.

    Args:
        weights: name and whole tensor, one at a time; a head's gain comes after its other weights. Without a gain,
            they stay as they are.
    """
    waiting: dict[str, Tensor] = {}
    for name, tensor in weights:
        if name == GAIN:
            yield from ((own, (x.float() * tensor.float()).to(x.dtype)) for own, x in waiting.items())
            waiting.clear()
        elif name.startswith(HEAD):
            waiting[name] = tensor.clone()
        else:
            yield name, tensor
    yield from waiting.items()
