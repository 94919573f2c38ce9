# SPDX-License-Identifier: Apache-2.0
"""GPUs by the names that CUDA gives them, and a CPU, which has no data sheet."""

import logging

import pytest
import torch

from dschat.run import peaks
from dschat.run.peaks import GPUS, gpu_of_name, own_gpu


@pytest.mark.parametrize(
    ("cuda_name", "name"),
    [
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H100 80GB HBM3", "h100-sxm"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA L40S", "l40s"),
    ],
)
def test_gpus_by_their_names(cuda_name: str, name: str) -> None:
    assert gpu_of_name(cuda_name) is GPUS[name]


def test_others_have_no_peaks(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Other GPUs, which the log names; float32; and a CPU."""
    assert own_gpu(torch.bfloat16) is None
    monkeypatch.setattr(peaks, "device", lambda: torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    assert own_gpu(torch.bfloat16) is GPUS["h200"] and own_gpu(torch.float32) is None
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA GeForce RTX 4090")
    with caplog.at_level(logging.INFO, logger="dschat"):
        assert own_gpu(torch.bfloat16) is None
    assert "the peaks of NVIDIA GeForce RTX 4090 are not known" in caplog.text
