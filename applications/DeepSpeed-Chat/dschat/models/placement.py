# SPDX-License-Identifier: Apache-2.0
"""Where the weights of a model go while it is loaded."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from dschat.models.attention import SDPA


class Placement(Protocol):
    """Takes the weights of a model as they are loaded. Every rank must call its methods."""

    def arriving(self) -> AbstractContextManager[dict[str, Any]]:
        """Inside, each weight that is loaded goes where it belongs, one by one; yields options of from_pretrained."""

    def whole(self, model: nn.Module, *modules: nn.Module) -> AbstractContextManager[None]:
        """Inside, these modules' weights are whole, and may be changed or replaced; only the main process's count."""

    def settle(self, model: nn.Module) -> None:
        """Places the weights that did not come from a file."""


@dataclass(frozen=True)
class Whole:
    """Whole weights on one device, read straight into its memory."""

    device: torch.device = torch.device("cpu")

    @contextmanager
    def arriving(self) -> Iterator[dict[str, Any]]:
        """transformers reads onto a CPU unless it is told another device."""
        yield {} if self.device.type == "cpu" else {"device_map": {"": self.device}}

    @contextmanager
    def whole(self, model: nn.Module, *modules: nn.Module) -> Iterator[None]:
        """They always are."""
        yield

    def settle(self, model: nn.Module) -> None:
        """There is one place."""


@dataclass(frozen=True)
class Opening:
    """How a model is opened.

    Attributes:
        placement: where its weights go.
        attention: how that is computed; see `dschat.models.attention`.
    """

    placement: Placement = Whole()
    attention: str = SDPA


PLAIN = Opening()
