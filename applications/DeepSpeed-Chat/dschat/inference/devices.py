# SPDX-License-Identifier: Apache-2.0
"""Where to compute."""

import logging
import re

import torch

from dschat.errors import UserError

logger = logging.getLogger(__name__)


def choose_device(gpu: int | None = None, device: str | None = None) -> torch.device:
    """The device that the flags ask for; with neither flag the first GPU, or else the CPU.

    Args:
        gpu: --gpu. Number 0 falls back to the CPU, with a warning, where there is no GPU at all.
        device: --device, which decides over `gpu`: "cpu", "cuda" or "cuda:N".
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    found = f"PyTorch finds {count or 'no'} GPU{'s' if count > 1 else ''} here{', numbered from 0' if count else ''}"
    if device == "cpu":
        return torch.device("cpu")
    if device is not None:
        named = re.fullmatch(r"cuda(?::(\d+))?", device)
        if named is None:
            raise UserError(f"--device {device}: must be cpu, cuda or cuda:N with the number of a GPU.")
        number = int(named[1] or 0)
        if number >= count:
            remedy = "check the driver, CUDA_VISIBLE_DEVICES and that PyTorch was installed with CUDA"
            raise UserError(f"--device {device}: {found}. Give --device cpu, or {remedy}.")
        return torch.device("cuda", number)
    if gpu is not None and gpu >= max(1, count):
        raise UserError(f"--gpu {gpu}: {found}. Give one that exists, or --device cpu.")
    if count:
        return torch.device("cuda", gpu or 0)
    if gpu is not None:
        logger.warning("--gpu %d: there is no GPU here, computing on the CPU", gpu)
    return torch.device("cpu")
