# SPDX-License-Identifier: Apache-2.0
"""The process group without DeepSpeed: rank, size, device, sums and objects over ranks."""

import itertools
from collections.abc import Sequence
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from dschat.base.errors import TIMED_OUT, is_lost_peer

T = TypeVar("T")


def device() -> torch.device:
    """The device of this process: its GPU, or the CPU."""
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
    """The sum of ``x`` over all ranks as a new tensor, the same on every rank."""
    total = x.clone()
    if world_size() > 1:
        dist.all_reduce(total)
    return total


def own_part(flat: Tensor) -> Tensor:
    """This rank's part of a flat tensor (N,) as ZeRO 3 cuts it: ⌈N / ranks⌉ elements, fewer on the last ranks."""
    size = -(-flat.numel() // world_size())
    return flat[rank() * size : (rank() + 1) * size]


def put_together(part: Tensor, total: int) -> Tensor:
    """Gathers the flat tensor of ``total`` elements from all ranks' parts, see `own_part`, on this rank's device."""
    if world_size() == 1:
        return part.to(device())
    padded = torch.zeros(-(-total // world_size()), dtype=part.dtype, device=device())
    padded[: part.numel()] = part
    whole = padded.new_empty(padded.numel() * world_size())
    dist.all_gather(list(whole.chunk(world_size())), padded)
    return whole[:total]


_barrier_group: dist.ProcessGroup | None = None  # with the time-out of `barrier`
_barrier_timeout = timedelta()
_host_group: dist.ProcessGroup | None = None  # for collectives that do not involve the GPU


def make_host_groups(timeout: float, save_timeout: float) -> None:
    """Creates the process groups on the host. Every rank must call it.

    `barrier` waits for at most `save_timeout` seconds, since a rank may be writing a large model;
    `largest_over_ranks` and `gather_on_host` wait for at most `timeout` seconds.
    """
    global _barrier_group, _barrier_timeout, _host_group
    if world_size() > 1:
        _barrier_timeout = timedelta(seconds=save_timeout)
        _barrier_group = dist.new_group(backend="gloo", timeout=_barrier_timeout)
        _host_group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))


def barrier() -> None:
    """Waits for every rank while one may read or write files, for longer than in other collectives.

    Raises:
        RuntimeError: a rank has ended, or has not come in time; the message names it on rank 0.
    """
    if world_size() == 1:
        return
    try:
        dist.monitored_barrier(_barrier_group, _barrier_timeout, wait_all_ranks=True)
    except RuntimeError as error:
        if is_lost_peer(error) and not TIMED_OUT.search(str(error)):
            raise
        raise RuntimeError(
            f"waited {_barrier_timeout.total_seconds():g} s (--save_timeout) for another process to read or write"
            f" files: {error}. It or its machine is gone or hangs, or the disk needs longer."
        ) from error


def missing_ranks(seconds: float = 10) -> str:
    """Which ranks do not answer, in gloo's words. All ranks that are left ask, after a collective has timed out."""
    if _barrier_group is None:  # NCCL alone, which cannot be asked
        return "the processes had not finished joining"
    try:
        dist.monitored_barrier(_barrier_group, timedelta(seconds=seconds), wait_all_ranks=True)
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return "all processes answer again"


def neighbours(size: int) -> dist.ProcessGroup | None:
    """This rank's group of `size` successive ranks, for `gather_objects`; None if groups have one rank.

    Every rank must call it; `size` divides the number of ranks.
    """
    if size == 1 or world_size() == 1:
        return None
    groups = []
    for start in range(0, world_size(), size):
        groups.append(dist.new_group(list(range(start, start + size)), backend="gloo"))
    local_group: dist.ProcessGroup = groups[rank() // size]
    return local_group


def gather_objects(item: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Small picklable objects of all ranks (of a group), in the order of ranks, on every rank."""
    if world_size() == 1:
        return [item]
    gathered = [item] * dist.get_world_size(group)
    dist.all_gather_object(gathered, item, group)
    return gathered


def gather_on_host(item: T) -> list[T]:
    """Large objects of all ranks, like `gather_objects` but without the GPU; tensors must be on the host."""
    return gather_objects(item, _host_group)


def interleave_over_ranks(items: Sequence[T]) -> list[T]:
    """Items of all ranks, equally many of each, one from each rank in turn, as examples are dealt to ranks."""
    by_rank = gather_on_host(items)
    return list(itertools.chain.from_iterable(zip(*by_rank, strict=True)))


def broadcast_object(item: T) -> T:
    """The main process's item, on every rank."""
    return gather_objects(item)[0]


def first_over_ranks(position: int | None) -> tuple[int, int] | None:
    """The smallest position that a rank passes, and the lowest rank that passes it; None if all pass None."""
    nothing = -(1 << 62)
    largest = largest_over_ranks(nothing if position is None else -(position * world_size() + rank()))
    return None if largest == nothing else divmod(-largest, world_size())


def largest_over_ranks(number: int) -> int:
    """The maximum of all ranks' numbers, computed on the host, so that the GPU does not wait."""
    if world_size() == 1:
        return number
    largest = torch.tensor(number)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=_host_group)
    return int(largest)
