# SPDX-License-Identifier: Apache-2.0
"""Trained models to talk to: a page of this machine, or a terminal. `python -m dschat.demo chat --help`."""
