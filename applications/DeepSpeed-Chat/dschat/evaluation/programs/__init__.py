# SPDX-License-Identifier: Apache-2.0
"""How many problems a model solves: pass@k from files of programs that were run."""
