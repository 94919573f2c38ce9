# SPDX-License-Identifier: Apache-2.0
"""Learning curves and samples of finished runs on one page: the quickstart's report."""
