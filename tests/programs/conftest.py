# SPDX-License-Identifier: Apache-2.0
"""A project folder, and runs that are interrupted."""

from project_fixtures import interrupt, plain, project

__all__ = ["interrupt", "plain", "project"]
