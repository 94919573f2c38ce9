# SPDX-License-Identifier: Apache-2.0
"""Constants of the throughput estimate of `dschat plan`: data sheets of GPUs, and measured shares of their peaks.

The measurements are in bf16 at ZeRO 0. `benchmarks/gpu.sh` repeats them (docs/measurements.md).
"""

from __future__ import annotations

from dataclasses import dataclass

from dschat.models.operations import Peaks

TERA = 10**12
GIGA = 10**9
MEASURED = "measured on one H100 and one H200 on 2026-11-26 to 28, of Gemma 2B's shape"

# Activation memory of a compiled decoder layer, as a share of that of the uncompiled layer: 20 GB instead of 31 GB.
# Measured on an H100 with 8 rows of 800 tokens, forward and backward without gradient checkpointing.
COMPILED_ACTIVATIONS = 0.65

# Attainable peaks, as shares of the data sheet: large matrix products on the H200 run at 800 of 989 TFLOP/s, copies at
# 4.2 of 4.8 TB/s. DECODING_*, SCORING and TRAINING below are shares of these attainable peaks.
REACHED_OPERATIONS = 0.81
REACHED_BYTES = 0.88


@dataclass(frozen=True)
class Gpu:
    """A GPU by its data sheet."""

    memory: float  # GB
    peaks: Peaks  # dense bf16 matrix products with float32 accumulation


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

# Batch size of decoding → share of the memory bandwidth that it reaches. Prompts have 64 to 512 tokens, responses 512.
DECODING_ONE_BY_ONE = {16: 0.13, 64: 0.14}  # H100; --decode_graphs off: the CPU launches every kernel of a step
DECODING_GRAPHS = {16: 0.33, 64: 0.29}  # H200
# H200, CUDA graphs of compiled layers, averaged over the rollouts of whole PPO iterations, with the prompts' prefill
# (single decoding steps reach .60 and .59).
DECODING_GRAPHS_COMPILED = {16: 0.56, 64: 0.47}

# Are the layers compiled? → share of the matrix peak that forward passes without gradients reach. H200, micro-batch 8.
SCORING = {False: 0.54, True: 0.70}

# (gradient checkpointing, compiled) → share of the matrix peak that updates reach; recomputed operations do not count.
# H200. Micro-batch: 8 with gradient checkpointing; without it, 2 for uncompiled layers and 4 for compiled ones.
TRAINING = {(True, False): 0.38, (True, True): 0.47, (False, False): 0.34, (False, True): 0.52}
