# SPDX-License-Identifier: Apache-2.0
"""Models that talk, and runs that are interrupted."""

from project_fixtures import interrupt, models

__all__ = ["interrupt", "models"]
