# SPDX-License-Identifier: Apache-2.0
"""What a run will take: memory of each process and of a node, updates and samples, from flags and model configs."""
