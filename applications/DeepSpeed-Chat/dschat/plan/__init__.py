# SPDX-License-Identifier: Apache-2.0
"""Plans of runs from flags and model configs: memory per process and per node, updates and samples."""
