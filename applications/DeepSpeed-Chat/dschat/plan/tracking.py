# SPDX-License-Identifier: Apache-2.0
"""Counts the bytes of tensors as torch makes and drops them; on the meta device they take no memory."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, UntypedStorage
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class AliveBytes(TorchDispatchMode):
    """Inside, follows every tensor that an operation makes, of the backward pass, too, until nothing refers to it.

    Attributes:
        now: bytes alive.
        peak: the most that were alive at one time since `start_peak`.
    """

    def __init__(self, existing: Iterable[Tensor] = ()) -> None:
        """Takes tensors that are there already and do not count, such as a model's parameters."""
        super().__init__()
        self.now = self.peak = 0
        self._existing = [tensor.untyped_storage() for tensor in existing]  # held, so that none is used again
        self._known: dict[int, int] = {storage._cdata: 0 for storage in self._existing}  # storage → bytes

    def start_peak(self) -> None:
        """Forgets earlier peaks."""
        self.peak = self.now

    def __torch_dispatch__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any | None = None
    ) -> Any:
        """Runs the operation and notes what it made."""
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._note(tensor.untyped_storage())
        return result

    def _note(self, storage: UntypedStorage) -> None:
        key = storage._cdata
        if key in self._known:
            return
        self._known[key] = storage.nbytes()
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._drop, key)

    def _drop(self, key: int) -> None:
        self.now -= self._known.pop(key)
