# SPDX-License-Identifier: Apache-2.0
"""From a run's flags to engines and score sources."""
