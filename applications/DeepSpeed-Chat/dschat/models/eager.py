# SPDX-License-Identifier: Apache-2.0
"""Running a model's layers eagerly that compiled.py may have compiled (``--compile``)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from transformers import PreTrainedModel

if TYPE_CHECKING:
    from dschat.models.compiled import Compiler


def compiler_of(model: PreTrainedModel) -> Compiler | None:
    """The compiler of a model's layers; None if they run eagerly."""
    for module in model.modules():
        compiler: Compiler | None = getattr(module._compiled_call_impl, "compiler", None)  # of a `CompiledLayer`
        if compiler is not None:
            return None if compiler.refusal is not None else compiler
    return None


@contextmanager
def uncompiled(model: PreTrainedModel) -> Iterator[None]:
    """Runs a model's layers eagerly inside."""
    compiler = compiler_of(model)
    if compiler is None:
        yield
        return
    with compiler.paused():
        yield
