# SPDX-License-Identifier: Apache-2.0
"""Work with finished models and runs: generate, score, vote, measure and compare; tables, charts and pages."""
