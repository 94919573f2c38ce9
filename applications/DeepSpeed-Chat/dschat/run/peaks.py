# SPDX-License-Identifier: Apache-2.0
"""Peak performance of GPUs, from their data sheets."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass

import torch

from dschat.run.distributed import device, is_main

logger = logging.getLogger("dschat")


@dataclass(frozen=True)
class Gpu:
    """A GPU by its data sheet."""

    memory: float  # GB
    operations_per_second: float  # dense matrix products in bf16 or fp16, with float32 accumulation
    bytes_per_second: float  # memory traffic


GPUS = {
    "a100-40gb": Gpu(40, 312e12, 1555e9),
    "a100-80gb": Gpu(80, 312e12, 2039e9),
    "a10g": Gpu(24, 70e12, 600e9),
    "b200": Gpu(180, 2250e12, 8000e9),
    "h100-pcie": Gpu(80, 756e12, 2000e9),
    "h100-sxm": Gpu(80, 989e12, 3350e9),
    "h200": Gpu(141, 989e12, 4800e9),
    "l4": Gpu(24, 121e12, 300e9),
    "l40s": Gpu(48, 362e12, 864e9),
}
# Pattern in the name that CUDA gives a GPU → its row of GPUS.
CUDA_NAMES = {
    r"A100.*40GB": "a100-40gb",
    r"A100.*80GB": "a100-80gb",
    r"\bA10G\b": "a10g",
    r"\bB200\b": "b200",
    r"H100 PCIe": "h100-pcie",
    r"H100.*HBM3": "h100-sxm",
    r"\bH200\b": "h200",
    r"\bL4\b": "l4",
    r"\bL40S\b": "l40s",
}


def gpu_of_name(cuda_name: str) -> Gpu | None:
    """The GPU that CUDA gives a name such as "NVIDIA H100 80GB HBM3"; None if GPUS does not hold it."""
    for pattern, name in CUDA_NAMES.items():
        if re.search(pattern, cuda_name):
            return GPUS[name]
    return None


def own_gpu(dtype: torch.dtype) -> Gpu | None:
    """This process's GPU; None on a CPU, for an unknown GPU, and for a dtype that its peak does not hold for."""
    if device().type != "cuda" or dtype == torch.float32:
        return None
    cuda_name = torch.cuda.get_device_name()
    gpu = gpu_of_name(cuda_name)
    if gpu is None and is_main():
        logger.info("time/mfu and time/bandwidth are not given: the peaks of %s are not known", cuda_name)
    return gpu
