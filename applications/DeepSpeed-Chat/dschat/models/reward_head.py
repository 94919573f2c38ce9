# SPDX-License-Identifier: Apache-2.0
"""The score head of a reward model that step 2 trains: its random start, and its learnable gain.

The gain is folded into the head's weights when the model is saved (`heads.folded`). There is no learnable offset: it
cancels in every difference of scores, so preference pairs do not train it, and Hugging Face's score heads have no bias
to store it.
"""

import math

import torch
from torch import Tensor, nn

from dschat.models.heads import Float32Linear


def draw_head(head: nn.Linear, seed: int) -> None:
    """Initialises a reward model's head of width H from N(0, 1 / (H + 1)), and its bias with 0.

    Hidden states have about unit variance after the last norm, so the first scores are of order 1, and gradients reach
    the layers below from the first update on. Starting from zeros, both must first grow, which takes hundreds of
    updates at the learning rates of large models. The values are the same on every process and device, and in every
    dtype up to rounding.

    Source: Stiennon et al. 2020, appendix B.1; Huang et al. 2024, "The N+ Implementation Details of RLHF with PPO".
    """
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(head.weight.shape, generator=generator) / math.sqrt(head.in_features + 1)
    with torch.no_grad():
        head.weight.copy_(weight)
        if head.bias is not None:
            head.bias.zero_()


class GainedLinear(Float32Linear):
    """A linear layer in float32 whose output is multiplied by a learnable number, initially 1."""

    gain: nn.Parameter  # (1,)

    def forward(self, x: Tensor) -> Tensor:
        """(…, H) → (…, V) float32."""
        return super().forward(x) * self.gain.float()


def add_gain(head: nn.Linear) -> None:
    """Adds a gain to a score head, in place."""
    head.__class__ = GainedLinear
    head.gain = nn.Parameter(torch.ones(1, dtype=head.weight.dtype, device=head.weight.device))
