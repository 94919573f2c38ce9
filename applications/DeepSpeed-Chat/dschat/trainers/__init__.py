# SPDX-License-Identifier: Apache-2.0
"""The training loops: `supervised` for steps 1 and 2, `ppo` for step 3. They receive engines, examples and flags."""
