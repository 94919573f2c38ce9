# SPDX-License-Identifier: Apache-2.0
"""What DeepSpeed says on its own account, kept off the screen."""

import logging

import deepspeed
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime import bf16_optimizer

SHARED_MEMORY = "deepspeed_shm_comm"  # DeepSpeed's collectives between processes of one machine


def quieten_deepspeed() -> None:
    """Only warnings are logged, and the optimiser for bf16 prints no memory figures, for which it has no switch."""
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    bf16_optimizer.see_memory_usage = lambda message, force=False: None


def decide_on_shared_memory(wanted: bool) -> None:
    """Says whether DeepSpeed may use `SHARED_MEMORY`, where it can be compiled at all.

    DeepSpeed would look up the answer among those for all ops. To have them, it compiles and links a program for each,
    which takes seconds and lets the linker complain of libraries that nobody asked for.
    """
    known = vars(deepspeed.ops).setdefault("__compatible_ops__", {})
    if not wanted:
        known[SHARED_MEMORY] = False
    elif SHARED_MEMORY not in known:
        builder = get_accelerator().create_op_builder("ShareMemCommBuilder")
        known[SHARED_MEMORY] = builder is not None and builder.is_compatible()
