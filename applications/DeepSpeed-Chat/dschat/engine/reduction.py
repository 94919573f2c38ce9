# SPDX-License-Identifier: Apache-2.0
"""A check of DeepSpeed's reduction: the gradients that an engine holds before its first updates are those that
autograd gave the processes, added up.

A parameter is compared until its gradient has once been other than zero, in UPDATES updates at most: that of a LoRA
run's A matrices, and that of a critic's backbone behind a value head of zeros, is zero in the first update.

Every process notes a sample of what arrives at each trained parameter, and the sums are compared with the same numbers
in the engine's own buffers. The check reads what the update computes anyway: no pass, gather or random number is
added, and nothing is changed.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import deepspeed
import torch
from torch import Tensor, nn

from dschat.base.errors import UserError
from dschat.run.distributed import device, is_main, rank, sum_over_ranks, world_size

logger = logging.getLogger(__name__)

SAMPLED = 4096  # elements of a parameter that are compared; all where it has fewer
UPDATES = 8  # with finite gradients, in which a parameter is compared whose gradient is zero


@dataclass
class Arrivals:
    """What arrived at one parameter on this process since the last update.

    Attributes:
        name: of the parameter.
        parameter: itself.
        places: (n,) long, which elements of the flat gradient are compared.
        sums: (n,) float64, of the gradients.
        sizes: (n,) float64, of their magnitudes.
        count: of the gradients.
    """

    name: str
    parameter: nn.Parameter
    places: Tensor
    sums: Tensor = field(init=False)
    sizes: Tensor = field(init=False)
    count: int = 0

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forgets what arrived."""
        self.sums = torch.zeros(len(self.places), dtype=torch.float64, device=self.places.device)
        self.sizes, self.count = torch.zeros_like(self.sums), 0

    def note(self, gradients: tuple[Tensor | None, ...]) -> None:
        """Adds a gradient: of one use of the parameter, or of all that a backward pass has gathered."""
        for gradient in gradients:
            if gradient is not None:
                numbers = gradient.detach().reshape(-1)[self.places].double()
                self.sums += numbers
                self.sizes += numbers.abs()
                self.count += 1


class ReductionCheck:
    """Compares the gradients of an engine's next updates. Every rank must call its methods."""

    def __init__(self, engine: Any, nodes: Mapping[nn.Parameter, Any]) -> None:
        """Takes DeepSpeed's engine, and the nodes of the graph where the gradients of trained parameters arrive."""
        self._engine = engine
        names = {parameter: name for name, parameter in engine.module.named_parameters()}
        self._arrivals = [
            Arrivals(names[parameter].removeprefix("inner."), parameter, sampled_places(_numel(parameter)))
            for parameter in nodes
        ]
        pairs = zip(self._arrivals, nodes.values(), strict=True)
        self._hooks = [node.register_prehook(arrivals.note) for arrivals, node in pairs]
        self._trained = len(self._arrivals)
        self._updates = 0  # so far
        self._compared = 0  # of these, those with finite gradients

    def compare(self) -> bool:
        """Compares, after the last backward pass of an update and before its step.

        Returns:
            Whether the check is over. The next update is to be compared as well where gradients are not finite, which
            are met elsewhere, and as long as the gradients of some parameters were nothing but zeros.

        Raises:
            UserError: a gradient is not the sum of what the processes computed. It names the parameter.
        """
        self._updates += 1
        if torch.cuda.is_available():  # DeepSpeed reduces and offloads on streams of its own
            torch.cuda.synchronize()
        sizes = [len(arrivals.places) for arrivals in self._arrivals]
        sums = sum_over_ranks(torch.cat([arrivals.sums for arrivals in self._arrivals])) / world_size()
        magnitudes = sum_over_ranks(torch.cat([arrivals.sizes for arrivals in self._arrivals])) / world_size()
        held = sum_over_ranks(torch.cat([held_numbers(self._engine, arrivals) for arrivals in self._arrivals]))
        counts = sum_over_ranks(torch.tensor([arrivals.count for arrivals in self._arrivals], device=device()))
        for arrivals in self._arrivals:
            arrivals.reset()
        finite = bool(sums.isfinite().all())
        overflows = self._engine.fp16_enabled() and not bool(held.isfinite().all())
        if not finite or overflows:
            return False
        roundings = (counts + world_size() + 2).repeat_interleave(torch.tensor(sizes, device=device()))
        allowed = explained(magnitudes, roundings, self._dtypes())
        wrong = ~((held - sums).abs() <= allowed)  # also where the engine holds NaN
        if bool(wrong.any()):
            raise UserError(self._message(held, sums, allowed, wrong, sizes))
        self._compared += 1
        self._keep_unseen(torch.stack([part.sum() for part in magnitudes.split(sizes)]).tolist())
        return not self._arrivals

    def _keep_unseen(self, magnitudes: list[float]) -> None:
        """Goes on with the parameters whose gradients were zeros on every process; after UPDATES updates with none."""
        left: list[tuple[Arrivals, Any]] = []
        for arrivals, hook, magnitude in zip(self._arrivals, self._hooks, magnitudes, strict=True):
            if magnitude == 0 and self._compared < UPDATES:
                left.append((arrivals, hook))
            else:
                hook.remove()
        unseen = [arrivals.name for arrivals, size in zip(self._arrivals, magnitudes, strict=True) if size == 0]
        if unseen and not left and is_main():
            logger.info(
                "self-check: the gradients of %d of %d trained parameters were zero in the first %d updates, so that "
                "their reduction is not checked any further: %s",
                len(unseen),
                self._trained,
                UPDATES,
                ", ".join(unseen[:3]) + (", …" if len(unseen) > 3 else ""),
            )
        self._arrivals = [arrivals for arrivals, _ in left]
        self._hooks = [hook for _, hook in left]

    def _dtypes(self) -> tuple[torch.dtype, torch.dtype]:
        """Of gradients, and of what the processes send to each other."""
        return self._arrivals[0].parameter.dtype, self._engine.communication_data_type

    def _message(self, held: Tensor, sums: Tensor, allowed: Tensor, wrong: Tensor, sizes: list[int]) -> str:
        """What the user reads: the first parameter that differs, at the element where it differs most."""
        parts = [x.split(sizes) for x in (held, sums, allowed, wrong)]
        of_parameter = [part for part in zip(self._arrivals, *parts, strict=True) if bool(part[4].any())]
        arrivals, own, expected, tolerance, _ = of_parameter[0]
        place = int((own - expected).abs().nan_to_num(nan=torch.inf).argmax())
        update = "the first update" if self._updates == 1 else f"update {self._updates} since the start"
        return (
            f"self-check: before {update}, DeepSpeed {deepspeed.__version__} at ZeRO stage "
            f"{self._engine.zero_optimization_stage()} holds another gradient of {arrivals.name} than the "
            f"{world_size()} processes computed together: {float(own[place]):.6g} in the place of "
            f"{float(expected[place]):.6g} (rounding explains {float(tolerance[place]):.2g}). "
            f"{len(of_parameter)} of {len(self._arrivals)} compared parameters differ. Training would go wrong "
            "without a word: try another --zero_stage or one process, and please report it. --no_self_checks "
            "skips this check."
        )


def check_of(engine: Any, nodes: Mapping[nn.Parameter, Any]) -> ReductionCheck | None:
    """The check of an engine's next updates; None where there is nothing to be reduced, or rounding has no bound."""
    if world_size() == 1 or not nodes:
        return None
    if engine.zero_quantized_gradients():
        logger.warning("--deepspeed_config: gradients are quantised, so that their reduction cannot be checked.")
        return None
    return ReductionCheck(engine, nodes)


def sampled_places(numel: int) -> Tensor:
    """(n,) long: one element of each of n equal stretches of a flat tensor, in each another one, so that they are not
    all of one column of a matrix.
    """
    count = min(numel, SAMPLED)
    numbers = torch.arange(count + 1, device=device())
    bounds = numbers * numel // max(count, 1)
    starts, lengths = bounds[:-1], bounds.diff()
    return starts + (numbers[:-1] * 7919) % lengths


def explained(magnitudes: Tensor, roundings: Tensor, dtypes: tuple[torch.dtype, torch.dtype]) -> Tensor:
    """How much rounding may change sums whose terms have these magnitudes, added up, in dtypes of which the coarsest
    counts: each rounding by half an eps, or by the smallest normal number.

    Args:
        magnitudes: (n,) float64.
        roundings: (n,), how often a number was rounded.
    """
    eps = max(torch.finfo(dtype).eps for dtype in dtypes)
    tiny = max(torch.finfo(dtype).tiny for dtype in dtypes)
    return roundings * (eps / 2 * magnitudes + tiny)


def held_numbers(engine: Any, arrivals: Arrivals) -> Tensor:
    """(n,) float64: what this rank holds of the reduced gradient at the places, 0 at those that another rank holds.

    Added up over ranks they are the numbers that the optimiser will read, but for clipping and the loss scale.
    """
    numbers = torch.zeros_like(arrivals.sums)
    start, part = held_part(engine, arrivals.parameter)
    if part is None:
        return numbers
    places = arrivals.places - start
    is_here = (places >= 0) & (places < part.numel())
    numbers[is_here] = part.reshape(-1)[places[is_here].to(part.device)].to(numbers)
    return numbers


def held_part(engine: Any, parameter: Any) -> tuple[int, Tensor | None]:
    """The part of a parameter's reduced gradient that this rank owns: flat, and where it begins; None if it has none.

    At stage 0, where every rank has all of it, rank 0 is the owner.
    """
    if hasattr(parameter, "ds_id"):  # stage 3
        part = parameter._z3_optimizer.get_local_fp32_grad_for_param(parameter)
        return engine.optimizer._get_param_partition_rank(parameter) * part.numel(), part
    if not hasattr(parameter, "_hp_mapping"):  # stage 0
        return 0, parameter.grad if rank() == 0 else None
    mapping = parameter._hp_mapping
    if mapping is None:
        return 0, None
    address, part = mapping.lp_fragment_address, mapping.get_lp_grad_fragment(parameter._index_in_param_group)
    if part.numel() == parameter.numel():  # of which this rank updates a part, in bf16 at stage 1
        return address.start, part.reshape(-1)[address.start : address.start + address.numel]
    return address.start, part


def _numel(parameter: Any) -> int:
    return parameter.ds_numel if hasattr(parameter, "ds_id") else parameter.numel()
