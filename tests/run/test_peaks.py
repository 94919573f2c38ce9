# SPDX-License-Identifier: Apache-2.0
"""Peaks of a device: sizes by hand, times by a clock that is set, and a CPU, which has none."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dschat.models.operations import Peaks
from dschat.run import peaks
from dschat.run.peaks import describe_peaks, fastest, matrix_side, measure_own_gpu, measure_peaks

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("dtype", "free", "side"),
    [
        (torch.bfloat16, 80 * 10**9, 8192),
        (torch.float32, 80 * 10**9, 8192),
        (torch.bfloat16, 1_200_000, 64),  # 5 % are 60,000 bytes, a third of which holds 100 · 100 numbers
        (torch.bfloat16, 1, 64),
        (torch.bfloat16, 2 * 10**9, 4032),  # 4082 · 4082, a multiple of 64
    ],
)
def test_matrices_take_a_small_share_of_the_memory(dtype: torch.dtype, free: int, side: int) -> None:
    assert matrix_side(dtype, free) == side


def test_the_fastest_call_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first call, which is slow, does not count; calls of 0.04, 0.01 and 0.06 s fill the 0.1 s."""
    durations, now, calls = iter([9.0, 0.04, 0.01, 0.06, 0.001]), 0.0, 0
    monkeypatch.setattr(peaks, "_now", lambda gpu: now)

    def call() -> None:
        nonlocal now, calls
        calls += 1
        now += next(durations)

    assert fastest(call, CPU) == pytest.approx(0.01) and calls == 4


def test_peaks_by_their_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """2 · 64³ operations in 1 ms, and 2 · 2,500 bytes in 1 ms: 5 % of the memory, half for each side of the copy."""
    called = []

    def one_millisecond(call: Any, gpu: torch.device) -> float:
        called.append(call())
        return 1e-3

    monkeypatch.setattr(peaks, "fastest", one_millisecond)
    before = torch.get_rng_state()
    assert measure_peaks(CPU, torch.float32, free=100_000) == Peaks(2e3 * 64**3, 2e3 * 2500)
    assert len(called) == 2 and torch.equal(torch.get_rng_state(), before), "seeds are left as they are"


def test_a_cpu_has_no_peaks() -> None:
    record: Any = SimpleNamespace(peaks={})
    assert measure_own_gpu(torch.float32, record) is None and record.peaks == {}


def test_what_a_record_says(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    measured = Peaks(799.96e12, 4.2004e12)
    expected = {"source": "measured", "tflops": 800.0, "gb_per_second": 4200.4, "dtype": "bf16"}
    assert describe_peaks(measured, torch.bfloat16) == expected
    monkeypatch.setattr(peaks, "device", lambda: torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (10**9, 10**9))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(peaks, "measure_peaks", lambda gpu, dtype, free: measured)
    record: Any = SimpleNamespace(peaks={})
    with caplog.at_level(logging.INFO, logger="dschat"):
        assert measure_own_gpu(torch.bfloat16, record) == measured
    assert record.peaks == expected
    assert "measured peaks of the GPU" in caplog.text and "800 TFLOP/s in bf16, 4200 GB/s" in caplog.text
