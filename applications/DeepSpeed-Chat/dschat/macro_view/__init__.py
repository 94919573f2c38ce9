# SPDX-License-Identifier: Apache-2.0
"""Macro actions drawn: in a terminal, as HTML, side by side."""
