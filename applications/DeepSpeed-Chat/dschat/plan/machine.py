# SPDX-License-Identifier: Apache-2.0
"""What a run has to do with."""

from __future__ import annotations

from dataclasses import dataclass

import torch

# Of a GPU's memory, what is none of ours: CUDA's context, NCCL's and cuBLAS's work space.
CUDA_BYTES = 2_500_000_000
GB = 10**9


@dataclass(frozen=True)
class Machine:
    """What a run has, in bytes.

    Attributes:
        processes: N, each on a GPU of its own, or on the CPU.
        device_memory: of a GPU; None to plan for a CPU.
        main_memory: of a node; None where it is not known.
        gpus_per_node: the most processes of a node.
    """

    processes: int
    device_memory: int | None
    main_memory: int | None = None
    gpus_per_node: int = 8

    @property
    def on_a_node(self) -> int:
        """Processes of the fullest node."""
        return min(self.processes, self.gpus_per_node)

    @property
    def device(self) -> torch.device:
        """Where a process computes."""
        return torch.device("cpu" if self.device_memory is None else "cuda")
