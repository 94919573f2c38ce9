# SPDX-License-Identifier: Apache-2.0
"""The algorithm as pure functions of tensors.

Nothing in this package reads a file, a flag or a clock, logs, draws from the global random state, or knows about
DeepSpeed, transformers or process groups. Shapes: B rows, P prompt positions, R response positions, M macro actions.
"""
