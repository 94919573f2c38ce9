# SPDX-License-Identifier: Apache-2.0
"""How long the parts of an iteration take."""

import time
from dataclasses import dataclass, field

import torch


@dataclass
class Clock:
    """Seconds of the parts of an iteration, waiting for the device at each border."""

    seconds: dict[str, float] = field(default_factory=dict)
    _last: float = field(default_factory=time.perf_counter)

    def lap(self, name: str) -> None:
        """Books the time since the last lap under ``time/name``."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        now = time.perf_counter()
        self.seconds[f"time/{name}"] = now - self._last
        self._last = now
