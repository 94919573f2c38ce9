# SPDX-License-Identifier: Apache-2.0
"""What every other room uses: errors, files, locks, hashes, progress, statistics and metric names."""
