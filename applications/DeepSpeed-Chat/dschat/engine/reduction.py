# SPDX-License-Identifier: Apache-2.0
"""Checks DeepSpeed's reduction: before the first updates, an engine's gradients must be the sum of the processes' own.

Every process records a sample of the gradients that autograd accumulates for each trained parameter. Their sum over
processes is compared with the same elements in the engine's buffers. The check uses what the update computes anyway,
adds no pass, gather or random number, and changes nothing.

A parameter is compared until its gradient was once not zero, in at most UPDATES updates. In the first update, the
gradients of a LoRA run's A matrices are zero, and those of a critic's backbone before a value head of zeros.
"""

import logging
from collections.abc import Mapping
from typing import Any

import deepspeed
import torch
from torch import Tensor, nn

from dschat.base.errors import UserError
from dschat.models.parameters import whole_numel
from dschat.run.distributed import device, is_main, rank, sum_over_ranks, world_size

logger = logging.getLogger(__name__)

SAMPLED = 4096  # elements of a parameter that are compared; all if it has fewer
UPDATES = 8  # maximum number of updates with finite gradients in which a zero gradient is compared again


class GradientSample:
    """Records elements of the gradients of one parameter on this process since the last update.

    Attributes:
        name: name of the parameter.
        parameter: whose gradients are recorded.
        indices: (n,) long, the recorded elements of the flat gradient.
        total: (n,) float64, sum of the gradients.
        magnitude: (n,) float64, sum of their absolute values.
        count: number of gradients.
        hook: handle that ends the recording.
    """

    def __init__(self, name: str, parameter: nn.Parameter, node: Any) -> None:
        """Hooks into the autograd node that accumulates the parameter's gradient."""
        self.name = name
        self.parameter = parameter
        self.indices = sampled_indices(whole_numel(parameter))
        self.reset()
        self.hook = node.register_prehook(self.add)

    def reset(self) -> None:
        """Forgets the gradients so far."""
        self.total = torch.zeros(len(self.indices), dtype=torch.float64, device=self.indices.device)
        self.magnitude = torch.zeros_like(self.total)
        self.count = 0

    def add(self, gradients: tuple[Tensor | None, ...]) -> None:
        """Adds a gradient, either of one use of the parameter or accumulated over a backward pass."""
        for gradient in gradients:
            if gradient is not None:
                elements = gradient.detach().reshape(-1)[self.indices].double()
                self.total += elements
                self.magnitude += elements.abs()
                self.count += 1


class ReductionCheck:
    """Compares the gradients of an engine's next updates. Every rank must call its methods."""

    def __init__(self, engine: Any, nodes: Mapping[nn.Parameter, Any]) -> None:
        """Takes DeepSpeed's engine, and the autograd nodes that accumulate the gradients of trained parameters."""
        self._engine = engine
        names = {parameter: name for name, parameter in engine.module.named_parameters()}
        self._samples: list[GradientSample] = []  # samples of the parameters that are still to be compared
        for parameter, node in nodes.items():
            self._samples.append(GradientSample(names[parameter].removeprefix("inner."), parameter, node))
        self._trained = len(self._samples)
        self._updates = 0  # so far
        self._compared = 0  # updates so far with finite gradients

    def compare(self) -> bool:
        """Compares gradients after the last backward pass of an update, before the optimiser's step.

        Returns:
            Whether the check is complete. It is repeated in the next update if gradients were not finite, which is
            handled elsewhere, or if the gradients of a parameter were all zero.

        Raises:
            UserError: a gradient is not the sum of what the processes computed; the message names the parameter.
        """
        self._updates += 1
        if device().type == "cuda":  # DeepSpeed reduces and offloads on its own streams
            torch.cuda.synchronize()

        # The processes' gradients, and the engine's; every rank holds a part of the latter.
        sizes = [len(sample.indices) for sample in self._samples]
        expected = sum_over_ranks(torch.cat([sample.total for sample in self._samples])) / world_size()
        magnitudes = sum_over_ranks(torch.cat([sample.magnitude for sample in self._samples])) / world_size()
        actual = sum_over_ranks(torch.cat([local_gradient(self._engine, sample) for sample in self._samples]))
        counts = sum_over_ranks(torch.tensor([sample.count for sample in self._samples], device=device()))
        for sample in self._samples:
            sample.reset()

        is_finite = bool(expected.isfinite().all())
        overflows = self._engine.fp16_enabled() and not bool(actual.isfinite().all())
        if not is_finite or overflows:
            return False
        roundings = (counts + world_size() + 2).repeat_interleave(torch.tensor(sizes, device=device()))
        dtypes = (self._samples[0].parameter.dtype, self._engine.communication_data_type)
        tolerances = rounding_error(magnitudes, roundings, dtypes)
        differs = ~((actual - expected).abs() <= tolerances)  # also if the engine's is NaN
        if bool(differs.any()):
            raise UserError(self._message(actual, expected, tolerances, differs, sizes))
        self._compared += 1
        self._drop_compared([float(part.sum()) for part in magnitudes.split(sizes)])
        return not self._samples

    def _drop_compared(self, magnitudes: list[float]) -> None:
        """Keeps the parameters whose gradients were zero on every process; after UPDATES updates, drops all."""
        zero_samples: list[GradientSample] = []
        for sample, magnitude in zip(self._samples, magnitudes, strict=True):
            if magnitude == 0:
                zero_samples.append(sample)
        is_over = self._compared >= UPDATES
        if zero_samples and is_over and is_main():
            shown = ", ".join(sample.name for sample in zero_samples[:3])
            logger.info(
                "self-check: the gradients of %d of %d trained parameters were zero in the first %d updates, so their "
                "reduction is not checked: %s%s",
                len(zero_samples),
                self._trained,
                UPDATES,
                shown,
                ", …" if len(zero_samples) > 3 else "",
            )
        remaining = [] if is_over else zero_samples
        for sample in self._samples:
            if sample not in remaining:
                sample.hook.remove()
        self._samples = remaining

    def _message(self, actual: Tensor, expected: Tensor, tolerances: Tensor, differs: Tensor, sizes: list[int]) -> str:
        """The error message: the first parameter that differs, at the element with the largest difference."""
        differing_numbers: list[int] = []
        for number, part in enumerate(differs.split(sizes)):
            if bool(part.any()):
                differing_numbers.append(number)
        first = differing_numbers[0]
        first_actual = actual.split(sizes)[first]
        first_expected = expected.split(sizes)[first]
        worst = int((first_actual - first_expected).abs().nan_to_num(nan=torch.inf).argmax())
        tolerance = float(tolerances.split(sizes)[first][worst])
        update = "the first update" if self._updates == 1 else f"update {self._updates} since the start"
        return (
            f"self-check: before {update}, DeepSpeed {deepspeed.__version__} at ZeRO stage "
            f"{self._engine.zero_optimization_stage()} holds another gradient of {self._samples[first].name} than the "
            f"{world_size()} processes computed together: {float(first_actual[worst]):.6g} instead of "
            f"{float(first_expected[worst]):.6g} (rounding explains {tolerance:.2g}). "
            f"{len(differing_numbers)} of {len(self._samples)} compared parameters differ. Training would go wrong "
            "without a word: try another --zero_stage or one process, and please report it. --no_self_checks "
            "skips this check."
        )


def reduction_check(engine: Any, nodes: Mapping[nn.Parameter, Any]) -> ReductionCheck | None:
    """The check of an engine's next updates; None if nothing is trained, or rounding errors have no bound."""
    if not nodes:
        return None
    if engine.zero_quantized_gradients():
        logger.warning("--deepspeed_config: gradients are quantised, so their reduction cannot be checked.")
        return None
    return ReductionCheck(engine, nodes)


def sampled_indices(numel: int) -> Tensor:
    """(n,) long: one element of each of n equal stretches of a flat tensor, not all in one column of a matrix."""
    count = min(numel, SAMPLED)
    numbers = torch.arange(count + 1, device=device())
    bounds = numbers * numel // max(count, 1)
    starts = bounds[:-1]
    lengths = bounds.diff()
    return starts + (numbers[:-1] * 7919) % lengths


def rounding_error(magnitudes: Tensor, roundings: Tensor, dtypes: tuple[torch.dtype, torch.dtype]) -> Tensor:
    """Upper bound of the rounding error of sums: each rounding by half an eps, or the smallest normal number.

    Args:
        magnitudes: (n,) float64, sums of the absolute values of the terms.
        roundings: (n,), number of roundings.
        dtypes: in which numbers are added; the coarsest counts.

    Returns:
        (n,) float64.
    """
    eps = max(torch.finfo(dtype).eps for dtype in dtypes)
    tiny = max(torch.finfo(dtype).tiny for dtype in dtypes)
    return roundings * (eps / 2 * magnitudes + tiny)


def local_gradient(engine: Any, sample: GradientSample) -> Tensor:
    """(n,) float64: the sampled elements of the reduced gradient on this rank, 0 for elements of other ranks.

    Summed over ranks, they are the numbers that the optimiser will read, except for clipping and the loss scale.
    """
    elements = torch.zeros_like(sample.total)
    start, part = local_gradient_part(engine, sample.parameter)
    if part is None:
        return elements
    indices = sample.indices - start
    is_local = (indices >= 0) & (indices < part.numel())
    elements[is_local] = part.reshape(-1)[indices[is_local].to(part.device)].to(elements)
    return elements


def local_gradient_part(engine: Any, parameter: Any) -> tuple[int, Tensor | None]:
    """This rank's part of a parameter's reduced gradient, flat, after the index of its first element.

    None if it has no part. At stage 0, where every rank has the whole gradient, it counts as rank 0's.
    """
    if hasattr(parameter, "ds_id"):  # stage 3
        part = parameter._z3_optimizer.get_local_fp32_grad_for_param(parameter)
        return engine.optimizer._get_param_partition_rank(parameter) * part.numel(), part
    if not hasattr(parameter, "_hp_mapping"):  # stage 0
        return 0, parameter.grad if rank() == 0 else None
    mapping = parameter._hp_mapping
    if mapping is None:
        return 0, None
    address = mapping.lp_fragment_address
    gradient = mapping.get_lp_grad_fragment(parameter._index_in_param_group)
    if gradient.numel() == parameter.numel():  # the whole gradient, of which this rank updates a part (bf16, stage 1)
        return address.start, gradient.reshape(-1)[address.start : address.start + address.numel]
    return address.start, gradient
