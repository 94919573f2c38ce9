# SPDX-License-Identifier: Apache-2.0
"""People as judges, in a terminal or a browser."""
