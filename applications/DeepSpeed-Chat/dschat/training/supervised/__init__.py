# SPDX-License-Identifier: Apache-2.0
"""Steps 1 and 2: supervised fine-tuning, the reward model and direct preference optimisation."""
