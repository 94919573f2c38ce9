# SPDX-License-Identifier: Apache-2.0
"""What a run knows and leaves behind: its processes, its output folder, metrics, records, saved models."""
