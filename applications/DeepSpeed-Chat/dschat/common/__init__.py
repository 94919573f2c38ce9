# SPDX-License-Identifier: Apache-2.0
"""What anybody may use and what knows nothing of macro actions: files of rows, statistics, users' functions."""
