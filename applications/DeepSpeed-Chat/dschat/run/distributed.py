# SPDX-License-Identifier: Apache-2.0
"""What a process may ask about its group without knowing DeepSpeed: rank, size, device, sums over ranks."""

from collections.abc import Sequence
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")


def device() -> torch.device:
    """Where this process computes: its GPU, or the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def rank() -> int:
    """Number of this process, 0 without a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """Number of processes, 1 without a process group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def is_main() -> bool:
    """True on the process that writes files and shows progress."""
    return rank() == 0


def sum_over_ranks(x: Tensor) -> Tensor:
    """A new tensor: ``x`` added up over all ranks, the same everywhere."""
    total = x.clone()
    if world_size() > 1:
        dist.all_reduce(total)
    return total


def own_part(flat: Tensor) -> Tensor:
    """This rank's part of a flat tensor, as ZeRO 3 cuts it: N / ranks elements, rounded up; the last have fewer."""
    size = -(-flat.numel() // world_size())
    return flat[rank() * size : (rank() + 1) * size]


def put_together(part: Tensor, total: int) -> Tensor:
    """The flat tensor of ``total`` elements of which ranks hold parts, see `own_part`; on this rank's device."""
    if world_size() == 1:
        return part.to(device())
    padded = torch.zeros(-(-total // world_size()), dtype=part.dtype, device=device())
    padded[: part.numel()] = part
    whole = padded.new_empty(padded.numel() * world_size())
    dist.all_gather(list(whole.chunk(world_size())), padded)
    return whole[:total]


_patient: dist.ProcessGroup | None = None  # for `barrier`
_host: dist.ProcessGroup | None = None  # for what does not pass through the GPU


def make_host_groups(timeout: float) -> None:
    """Makes the groups of `barrier`, which waits for as long as it takes (a rank may write a large model), and of
    `largest_over_ranks` and `gather_on_host`, which wait for `timeout` seconds. Every rank must call it.
    """
    global _patient, _host
    if world_size() > 1:
        _patient = dist.new_group(backend="gloo", timeout=timedelta(days=365))
        _host = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))


def barrier() -> None:
    """Waits for every rank, beyond the time-out of other collectives."""
    if world_size() > 1:
        dist.barrier(group=_patient)


def neighbours(size: int) -> dist.ProcessGroup | None:
    """The group of `size` successive ranks that this one is in, for `gather_objects`; of all ranks, or none for one.
    Every rank must call it; `size` divides the number of ranks.
    """
    if size == 1 or world_size() == 1:
        return None
    starts = range(0, world_size(), size)
    groups = [dist.new_group(list(range(start, start + size)), backend="gloo") for start in starts]
    own: dist.ProcessGroup = groups[rank() // size]
    return own


def gather_objects(item: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """What every rank passes, in the order of ranks, on every rank (of a group). Small picklable objects."""
    if world_size() == 1:
        return [item]
    gathered = [item] * dist.get_world_size(group)
    dist.all_gather_object(gathered, item, group)
    return gathered


def gather_on_host(item: T) -> list[T]:
    """`gather_objects` of what is not small: it does not pass through the GPU. Tensors must be on the host."""
    return gather_objects(item, _host)


def interleave_over_ranks(items: Sequence[T]) -> list[T]:
    """What every rank passes, equally many items, one of each rank in turn, as examples are dealt to them."""
    return [item for of_ranks in zip(*gather_on_host(items), strict=True) for item in of_ranks]


def broadcast_object(item: T) -> T:
    """The main process's item, on every rank."""
    return gather_objects(item)[0]


def first_over_ranks(place: int | None) -> tuple[int, int] | None:
    """The smallest of the places that ranks pass, and the lowest rank that passes it; None where no rank does."""
    nowhere = -(1 << 62)
    first = largest_over_ranks(nowhere if place is None else -(place * world_size() + rank()))
    return None if first == nowhere else divmod(-first, world_size())


def largest_over_ranks(number: int) -> int:
    """The largest of every rank's number. It does not pass through the GPU, so that nothing waits for it."""
    if world_size() == 1:
        return number
    largest = torch.tensor(number)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=_host)
    return int(largest)
