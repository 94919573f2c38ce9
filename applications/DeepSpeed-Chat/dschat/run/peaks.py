# SPDX-License-Identifier: Apache-2.0
"""What the GPU of this process does in a second, measured at the start of a run."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import torch

from dschat.models.opening import NAMES
from dschat.models.operations import Peaks
from dschat.run.distributed import device
from dschat.run.output import RunRecord

logger = logging.getLogger("dschat")

SIDE = 8192  # of the square matrices that are multiplied
COPIED = 1 << 30  # bytes
FREE_SHARE = 0.05  # of the free memory that either measurement may take at most
SECONDS = 0.1  # of each measurement, after a first call that does not count
STEP = 64  # sides are multiples of it


def measure_peaks(gpu: torch.device, dtype: torch.dtype, free: int) -> Peaks:
    """How fast a device multiplies matrices in the dtype, and copies memory.

    Args:
        gpu: a device.
        dtype: of training.
        free: bytes of its memory that are free.
    """
    return Peaks(_operations_per_second(gpu, dtype, free), _bytes_per_second(gpu, free))


def _operations_per_second(gpu: torch.device, dtype: torch.dtype, free: int) -> float:
    side = matrix_side(dtype, free)
    # Random numbers, of a generator of their own: constants are multiplied faster than a model's weights.
    generator = torch.Generator(gpu).manual_seed(0)
    left, right = torch.randn(2, side, side, dtype=dtype, device=gpu, generator=generator)
    product = torch.empty_like(left)
    return 2 * side**3 / fastest(lambda: torch.mm(left, right, out=product), gpu)


def _bytes_per_second(gpu: torch.device, free: int) -> float:
    """Of a copy, bytes read and bytes written."""
    source = torch.zeros(min(COPIED, int(FREE_SHARE * free) // 2), dtype=torch.uint8, device=gpu)
    target = torch.empty_like(source)
    return 2 * source.numel() / fastest(lambda: target.copy_(source), gpu)


def measure_own_gpu(dtype: torch.dtype, record: RunRecord) -> Peaks | None:
    """The peaks of this process's GPU, which the run's record and a line on the terminal say; None on a CPU."""
    if device().type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info()
    peaks = measure_peaks(device(), dtype, free)
    torch.cuda.empty_cache()  # models and vLLM are to find the memory as it was
    record.peaks = describe_peaks(peaks, dtype)
    logger.info(
        "measured peaks of the GPU, of which time/mfu and time/bandwidth are shares: %.0f TFLOP/s in %s, %.0f GB/s",
        record.peaks["tflops"],
        record.peaks["dtype"],
        record.peaks["gb_per_second"],
    )
    return peaks


def describe_peaks(peaks: Peaks, dtype: torch.dtype) -> dict[str, str | float]:
    """Measured peaks for run.json."""
    return {
        "source": "measured",
        "tflops": round(peaks.operations_per_second / 1e12, 1),
        "gb_per_second": round(peaks.bytes_per_second / 1e9, 1),
        "dtype": NAMES[dtype],
    }


def matrix_side(dtype: torch.dtype, free: int) -> int:
    """The side of three square matrices that take a small share of the free memory."""
    largest = int((FREE_SHARE * free / (3 * dtype.itemsize)) ** 0.5)
    return min(SIDE, max(STEP, largest // STEP * STEP))


def fastest(call: Callable[[], object], gpu: torch.device) -> float:
    """Seconds of the fastest of the calls that SECONDS leaves time for, at least one."""
    call()
    end = _now(gpu) + SECONDS
    best = float("inf")
    while best == float("inf") or _now(gpu) < end:
        begun = _now(gpu)
        call()
        best = min(best, _now(gpu) - begun)
    return best


def _now(gpu: torch.device) -> float:
    """In seconds, when the device has done its work."""
    if gpu.type == "cuda":
        torch.cuda.synchronize(gpu)
    return time.perf_counter()
