# SPDX-License-Identifier: Apache-2.0
"""A check that runs on each of two processes: engines after a rehearsal equal engines without one."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from dschat.run.distributed import rank
from factories import largest_difference, whole_state
from reduction_cases import adapted_lm, engine_at, update

# Name, ZeRO stage, precision and further options; without ZeRO and in bf16 at stage 1 gradients take other ways.
CASES: dict[str, tuple[int, str, dict[str, Any]]] = {
    "none": (0, "fp32", {}),
    "1-bf16": (1, "bf16", {}),
    "3-bf16": (3, "bf16", {}),
    "lora-3": (3, "fp32", {}),
    "1-fp32": (1, "fp32", {}),
    "2-bf16": (2, "bf16", {}),
    "checkpointing-3": (3, "bf16", {"gradient_checkpointing": True}),
    "offload-3": (3, "fp32", {"offload": True}),  # DeepSpeed compiles Adam for the CPU, for a minute
}


def rehearsal(folder: Path, keep: Callable[..., None]) -> None:
    """`moved`: how far the weights after a rehearsal and an update are from those without the rehearsal. `said`: what
    the check of the reduction says in the update. `left`: parameters with a gradient after the rehearsal.
    """
    notes: dict[str, dict[str, Any]] = {"moved": {}, "said": {}, "left": {}}
    for case, (stage, dtype, options) in CASES.items():
        models = [{"model": adapted_lm()} if case.startswith("lora") else {} for _ in range(2)]
        rehearsed, fresh = (engine_at(stage, dtype, **options, **model) for model in models)
        with rehearsed.rehearsing():
            update(rehearsed)
        notes["left"][case] = sum(parameter.grad is not None for parameter in rehearsed.module.parameters())
        rehearsed.check_reduction()
        notes["said"][case] = update(rehearsed)
        update(fresh)
        states = [whole_state(engine) for engine in (rehearsed, fresh)]  # nothing but on the main process
        notes["moved"][case] = largest_difference(*states) if rank() == 0 else 0.0
    keep(folder, "rehearsal", notes)


CHECKS = {"rehearsal": rehearsal}
