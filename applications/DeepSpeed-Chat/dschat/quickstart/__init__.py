# SPDX-License-Identifier: Apache-2.0
"""The whole pipeline on one machine, on models and data made in code."""
