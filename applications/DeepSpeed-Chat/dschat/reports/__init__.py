# SPDX-License-Identifier: Apache-2.0
"""What people read: tables, pictures and pages of runs, comparisons, sweeps and macro actions."""
