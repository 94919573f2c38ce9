# SPDX-License-Identifier: Apache-2.0
"""The lowest versions that setup.py accepts, as pins for pip: `python tests/support/lowest_versions.py`.

Extras that need other hardware, or an environment of their own, are left out, and so are tools that no test imports.
"""

import runpy
from pathlib import Path

from packaging.requirements import Requirement

SETUP = Path(__file__).resolve().parents[2] / "setup.py"
EXTRAS = ("evaluation", "programs", "serve", "dev")
TOOLS = ("ruff", "mypy")


def lowest_pins() -> list[str]:
    """Pins such as `scipy==1.15`, of what a run and the tests need."""
    ours = runpy.run_path(str(SETUP))["distribution"](".", ".", ".")
    texts = [*ours["install_requires"], *(text for extra in EXTRAS for text in ours["extras_require"][extra])]
    pins: list[str] = []
    for text in texts:
        requirement = Requirement(text)
        lowest = [one.version for one in requirement.specifier if one.operator == ">="]
        if lowest and requirement.name not in TOOLS:
            pins.append(f"{requirement.name}=={lowest[0]}")
    return pins


if __name__ == "__main__":
    print("\n".join(lowest_pins()))
