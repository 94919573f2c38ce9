# SPDX-License-Identifier: Apache-2.0
"""Trained models to talk to: a page of this machine, or a terminal. `dschat demo chat --help`."""
