# SPDX-License-Identifier: Apache-2.0
"""Step 3: sample, score, cut into macro actions, assign credit, update."""
