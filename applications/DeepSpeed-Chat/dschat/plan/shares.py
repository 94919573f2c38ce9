# SPDX-License-Identifier: Apache-2.0
"""Constants of the throughput estimate of `dschat plan`: measured shares of a GPU's peaks, assumed speeds of links.

The shares refer to the data sheet (`dschat.run.peaks`) and to the operations and bytes of `dschat.models.operations`.
They were measured in bf16 at ZeRO 0; `benchmarks/gpu.py` repeats them (docs/measurements.md).
"""

MEASURED = "measured on one H100 and one H200 on 2026-11-26 to 28, of Gemma 2B's shape"

# Activation memory of a compiled decoder layer, as a share of that of the uncompiled layer: 20 GB instead of 31 GB.
# Measured on an H100 with 8 rows of 800 tokens, forward and backward without gradient checkpointing.
COMPILED_ACTIVATIONS = 0.65

# Batch size of decoding → share of the memory bandwidth that it reaches. Prompts have 64 to 512 tokens, responses 512.
DECODING_ONE_BY_ONE = {16: 0.11, 64: 0.12}  # H100; --decode_graphs off: the CPU launches every kernel of a step
DECODING_GRAPHS = {16: 0.29, 64: 0.25}  # H200
# H200, CUDA graphs of compiled layers, averaged over the rollouts of whole PPO iterations, with the prompts' prefill.
DECODING_GRAPHS_COMPILED = {16: 0.49, 64: 0.41}

# Are the layers compiled? → share of the matrix peak that forward passes without gradients reach. H200, micro-batch 8.
SCORING = {False: 0.46, True: 0.60}

# (gradient checkpointing, compiled) → share of the matrix peak that updates reach; recomputed operations do not count.
# H200. Micro-batch: 8 with gradient checkpointing; without it, 2 for uncompiled layers and 4 for compiled ones.
TRAINING = {(True, False): 0.33, (True, True): 0.40, (False, False): 0.29, (False, True): 0.44}

# Links between GPUs were not measured: 0.8 of what is published for H100 machines.
NVLINK = 360e9  # bytes per second into a GPU from the other GPUs of its node (450e9)
NETWORK = 40e9  # bytes per second into a node, for each of its GPUs (50e9, InfiniBand of 400 Gb/s)
OVERLAP = 0.5  # share of the shorter of computing and moving that is hidden behind the longer
