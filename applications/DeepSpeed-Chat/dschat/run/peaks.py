# SPDX-License-Identifier: Apache-2.0
"""Measures the peak performance of this process's GPU at the start of a run."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable

import torch

from dschat.models.opening import DTYPE_NAMES
from dschat.models.operations import Peaks
from dschat.run.distributed import device
from dschat.run.record import RunRecord

logger = logging.getLogger("dschat")

MAX_SIDE = 8192  # maximum side of the square matrices that are multiplied
COPIED = 1 << 30  # bytes
FREE_SHARE = 0.05  # maximum share of the free memory that a measurement allocates
SECONDS = 0.1  # duration of each measurement, after a warm-up call
SIDE_STEP = 64  # sides are multiples of it


def measure_peaks(gpu: torch.device, dtype: torch.dtype, free: int) -> Peaks:
    """Measures how fast a device multiplies matrices, and copies memory.

    Args:
        gpu: the device.
        dtype: dtype of the matrices.
        free: free bytes of its memory.
    """
    return Peaks(_operations_per_second(gpu, dtype, free), _bytes_per_second(gpu, free))


def _operations_per_second(gpu: torch.device, dtype: torch.dtype, free: int) -> float:
    side = matrix_side(dtype, free)
    # Random numbers, because constants are multiplied faster than a model's weights.
    generator = torch.Generator(gpu).manual_seed(0)
    left, right = torch.randn(2, side, side, dtype=dtype, device=gpu, generator=generator)
    product = torch.empty_like(left)
    return 2 * side**3 / fastest(lambda: torch.mm(left, right, out=product), gpu)


def _bytes_per_second(gpu: torch.device, free: int) -> float:
    """Bytes read plus bytes written by a copy, per second."""
    source = torch.zeros(min(COPIED, int(FREE_SHARE * free) // 2), dtype=torch.uint8, device=gpu)
    target = torch.empty_like(source)
    return 2 * source.numel() / fastest(lambda: target.copy_(source), gpu)


def measure_own_gpu(dtype: torch.dtype, record: RunRecord) -> Peaks | None:
    """Measures this process's GPU, and reports its peaks in the run's record and on the terminal; None on a CPU."""
    if device().type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info()
    peaks = measure_peaks(device(), dtype, free)
    torch.cuda.empty_cache()  # models and vLLM will need the memory
    record.peaks = describe_peaks(peaks, dtype)
    logger.info(
        "measured peaks of the GPU (time/mfu and time/bandwidth are shares of them): %.0f TFLOP/s in %s, %.0f GB/s",
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
        "dtype": DTYPE_NAMES[dtype],
    }


def matrix_side(dtype: torch.dtype, free: int) -> int:
    """The side of three square matrices that fit into a small share of the free memory."""
    side = int((FREE_SHARE * free / (3 * dtype.itemsize)) ** 0.5)
    side = side // SIDE_STEP * SIDE_STEP
    return min(MAX_SIDE, max(SIDE_STEP, side))


def fastest(call: Callable[[], object], gpu: torch.device) -> float:
    """Seconds of the fastest call among those in SECONDS, at least one."""
    call()
    end = _now(gpu) + SECONDS
    fastest_seconds = math.inf
    while fastest_seconds == math.inf or _now(gpu) < end:
        start = _now(gpu)
        call()
        fastest_seconds = min(fastest_seconds, _now(gpu) - start)
    return fastest_seconds


def _now(gpu: torch.device) -> float:
    """The time in seconds, after the device has finished its work."""
    if gpu.type == "cuda":
        torch.cuda.synchronize(gpu)
    return time.perf_counter()
