# SPDX-License-Identifier: Apache-2.0
"""Macro actions from constituency trees: token ids → characters → words → macro-action lengths."""
