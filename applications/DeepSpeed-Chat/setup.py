# SPDX-License-Identifier: Apache-2.0
"""Installs the distribution that the setup.py at the repository's root describes, from this folder."""

import runpy
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).resolve().parents[2]

if __name__ == "__main__":
    distribution = runpy.run_path(str(ROOT / "setup.py"))["distribution"]
    setup(**distribution(".", "../macro-actions", "../../Constituent-Treelib"))
