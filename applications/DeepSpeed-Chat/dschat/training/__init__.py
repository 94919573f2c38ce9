# SPDX-License-Identifier: Apache-2.0
"""One training loop and its algorithms (``supervised``, ``ppo``); ``steps`` makes the parts of a run."""
