# SPDX-License-Identifier: Apache-2.0
"""Options for loading a model: device, dtype, attention, and where its weights are."""

import logging
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from dschat.base.errors import UserError
from dschat.models.attention import SDPA

logger = logging.getLogger(__name__)

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def choose_device(gpu: int | None = None, device: str | None = None) -> torch.device:
    """The device that the flags ask for; with neither flag the first GPU, or else the CPU.

    Args:
        gpu: --gpu. Number 0 falls back to the CPU, with a warning, where there is no GPU at all.
        device: --device, which takes precedence over `gpu`: "cpu", "cuda" or "cuda:N".

    Raises:
        UserError: there is no such device.
    """
    if device is not None and not re.fullmatch(r"cpu|cuda(:\d+)?", device):
        raise UserError(f"--device {device}: must be cpu, cuda or cuda:N with the number of a GPU.")
    if device == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device is not None:
        asked = f"--device {device}"
        number = int(device.partition(":")[2] or 0)
    else:
        asked = f"--gpu {gpu}"
        number = gpu or 0
        if count == 0 and number == 0:
            if gpu is not None:
                logger.warning("%s: there is no GPU here, computing on the CPU", asked)
            return torch.device("cpu")
    if number >= count:
        raise UserError(
            f"{asked}: GPUs found by PyTorch: {count}. Give one that exists, counted from 0, or --device cpu;"
            " or check the driver, CUDA_VISIBLE_DEVICES and that PyTorch was installed with CUDA."
        )
    return torch.device("cuda", number)


def choose_dtype(name: str | None, device: torch.device) -> torch.dtype:
    """The dtype called fp32, bf16 or fp16; by default bf16 on a GPU and fp32 on a CPU."""
    if name is None:
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return DTYPES[name]


class Placement(Protocol):
    """Places the weights of a model while it is loaded. Every rank must call the methods."""

    def while_loading(self) -> AbstractContextManager[dict[str, Any]]:
        """Inside, each weight is placed as soon as it is loaded; yields options of from_pretrained."""

    def gathered(self, model: nn.Module, *modules: nn.Module) -> AbstractContextManager[None]:
        """Inside, these modules' weights are whole on every process and may be changed.

        At the end the main process's values are broadcast to the others.
        """

    def finalise(self, model: nn.Module) -> None:
        """Places the weights that did not come from a file."""


@dataclass(frozen=True)
class SingleDevice:
    """Places whole weights on one device, loaded directly into its memory."""

    device: torch.device = torch.device("cpu")

    @contextmanager
    def while_loading(self) -> Iterator[dict[str, Any]]:
        """Loads onto the device; transformers needs no option for the CPU."""
        yield {} if self.device.type == "cpu" else {"device_map": {"": self.device}}

    @contextmanager
    def gathered(self, model: nn.Module, *modules: nn.Module) -> Iterator[None]:
        """Does nothing: all weights are whole."""
        yield

    def finalise(self, model: nn.Module) -> None:
        """Does nothing: new weights are on the device already."""


@dataclass(frozen=True)
class LoadOptions:
    """Attention of a model that is loaded, and placement of its weights."""

    placement: Placement = SingleDevice()
    attention: str = SDPA  # value of ``--attn_implementation``


DEFAULT_OPTIONS = LoadOptions()
