# SPDX-License-Identifier: Apache-2.0
"""The examples of a step on every rank: one process of a machine makes them, the others read what it made."""

from __future__ import annotations

import os
from typing import TypeVar

from dschat.data.loading import ExampleLoader, Make, StepData, Validate
from dschat.data.sources import ShareFlags
from dschat.run.distributed import barrier, broadcast_object, is_main

E = TypeVar("E")


def load_step_data(
    flags: ShareFlags, kind: type[E], make: Make[E], validate: Validate | None = None, on_prompt: bool | None = None
) -> StepData[E]:
    """The examples of a step. Every rank must call it.

    Args:
        flags: which rows the step reads.
        kind: of the examples.
        make, validate: see `dschat.data.loading.ExampleLoader`.
        on_prompt: in step 1, whether prompts are learnt from, too.

    Raises:
        UserError: no data, a bad row, or no example is left.
    """
    loader = ExampleLoader(flags, kind, make, validate, on_prompt)
    if broadcast_object(loader.is_small):
        return loader.read(show=is_main())
    key = broadcast_object(loader.key if is_main() else "")
    data = None
    if is_main():
        data = loader.find(key, show=True)
        data = loader.make(show=True) if data is None else data
    barrier()
    if data is None:
        data = loader.find(key)
        if data is None and os.environ.get("LOCAL_RANK") == "0":  # of a machine with a disk of its own
            data = loader.make()
    barrier()
    if data is None:
        data = loader.find(key)
    return loader.read() if data is None else data
