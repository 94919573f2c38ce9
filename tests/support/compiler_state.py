# SPDX-License-Identifier: Apache-2.0
"""torch.compile as a process has it at its start: its graphs and settings belong to the whole process."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch._dynamo.utils import counters

from dschat.models import compiled


@contextmanager
def fresh_compiler() -> Iterator[None]:
    """Inside, there are no graphs of other tests and torch's own linear function; settings made inside end with it.

    DeepSpeed replaces the linear function when a process uses ZeRO 3, and leaves it so.
    """
    torch._dynamo.reset()
    counters.clear()
    dynamo: dict[str, Any] = {"recompile_limit": 8, "fail_on_recompile_limit_hit": False}
    lowering: dict[str, Any] = {}
    if hasattr(torch._functorch.config, compiled.EAGER_LOWERING):
        lowering = {compiled.EAGER_LOWERING: False}
    plain_linear = patch("torch.nn.functional.linear", torch._C._nn.linear)
    with torch._dynamo.config.patch(**dynamo), torch._functorch.config.patch(**lowering), plain_linear:
        duck = torch.fx.experimental._config.use_duck_shape
        yield
        torch.fx.experimental._config.use_duck_shape = duck
    torch._dynamo.reset()
