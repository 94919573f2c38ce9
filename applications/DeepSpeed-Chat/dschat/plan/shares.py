# SPDX-License-Identifier: Apache-2.0
"""Figures that were measured or published, from which a plan estimates: nothing here follows from anything else.

To measure them anew: `benchmarks/gpu.sh` (docs/performance.md). All are of bf16 and ZeRO 0.
"""

from __future__ import annotations

from dataclasses import dataclass

from dschat.models.operations import Peaks

TERA = 10**12
GIGA = 10**9
MEASURED = "measured on one H100 and one H200 on 2026-11-26 and 27, of Gemma 2B's shape"

# Bytes of activations of a compiled layer, of those of the same layer as transformers has it. H100, 8 rows of 800
# tokens, forward and backward without gradient checkpointing: 20 GB in the place of 31.
COMPILED_ACTIVATIONS = 0.65

# What large matrix products and copies reach, of the data sheet's figures: on the H200, 800 of 989 TFLOP/s and 4.2 of
# 4.8 TB/s. The shares below are shares of what is reached.
REACHED_OPERATIONS = 0.81
REACHED_BYTES = 0.88


@dataclass(frozen=True)
class Gpu:
    """A GPU by its data sheet."""

    memory: float  # GB
    peaks: Peaks  # bf16 without sparsity, added up in float32


def _gpu(memory: float, tflops: float, gigabytes_per_second: float) -> Gpu:
    return Gpu(memory, Peaks(tflops * TERA, gigabytes_per_second * GIGA))


GPUS = {
    "a100-40gb": _gpu(40, 312, 1555),
    "a100-80gb": _gpu(80, 312, 2039),
    "a10g": _gpu(24, 70, 600),
    "b200": _gpu(180, 2250, 8000),
    "h100-pcie": _gpu(80, 756, 2000),
    "h100-sxm": _gpu(80, 989, 3350),
    "h200": _gpu(141, 989, 4800),
    "l4": _gpu(24, 121, 300),
    "l40s": _gpu(48, 362, 864),
}

# Rows that are decoded together → share of the memory's bandwidth that decoding steps reach. H200, 64 to 512 tokens of
# a prompt and 512 of a response; one by one: H100.
DECODING_ONE_BY_ONE = {16: 0.13, 64: 0.14}  # --decode_graphs off
DECODING_GRAPHS = {16: 0.33, 64: 0.29}
# Whole rollouts, first tokens included; steps alone reach .60 and .58. 64 rows: in whole iterations, where they take
# 6 % longer than alone. 16 rows: alone, less as much.
DECODING_GRAPHS_COMPILED = {16: 0.53, 64: 0.47}

# Whether layers are compiled → share of the matrix peak that passes without gradients reach. H200, micro-batch 8.
SCORING = {False: 0.54, True: 0.70}

# (gradient checkpointing, compiled) → share of the matrix peak that updates reach, recomputation not counted. H200,
# micro-batches of 8 with checkpointing, and without of 2 (layers as they are) or 4 (compiled).
TRAINING = {
    (True, False): 0.38,
    (True, True): 0.47,
    (False, False): 0.34,
    (False, True): 0.49,
}
