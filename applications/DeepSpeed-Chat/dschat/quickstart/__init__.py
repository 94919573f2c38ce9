# SPDX-License-Identifier: Apache-2.0
"""The quickstart: corpora made in code whose gold scores are known."""
