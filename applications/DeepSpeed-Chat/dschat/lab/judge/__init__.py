# SPDX-License-Identifier: Apache-2.0
"""A language model as the judge."""
