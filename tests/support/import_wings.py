# SPDX-License-Identifier: Apache-2.0
"""Imports every module of the installed distributions: `python -I tests/support/import_wings.py` (`make release`).

Run it in an environment with the wheels and all extras but `vllm`. Modules of other environments are counted.
"""

import sys
from collections import Counter
from importlib import import_module
from pathlib import Path
from pkgutil import walk_packages

DISTRIBUTIONS = ("constituent_treelib", "macro_actions", "dschat")
# Packages that have environments of their own: `make test-vllm` and `make test-frameworks`.
ELSEWHERE = ("vllm", "trl", "verl", "skyrl", "slime")


def import_all(name: str) -> tuple[Counter[str], Counter[str]]:
    """Imports the modules of a package.

    Returns:
        The number of modules by part (`dschat.judge`), and of those left out by the missing package.
    """
    package = import_module(name)
    if not Path(str(package.__file__)).is_relative_to(sys.prefix):
        sys.exit(f"{name} was found in {package.__file__}, which is not the installed one")
    imported: Counter[str] = Counter()
    left_out: Counter[str] = Counter()
    for module in walk_packages(package.__path__, f"{name}."):
        if module.name.endswith(".__main__"):
            continue
        part = ".".join(module.name.split(".")[:2])
        try:
            import_module(module.name)
        except ModuleNotFoundError as error:
            if error.name not in ELSEWHERE:
                raise
            left_out[f"{part} ({error.name})"] += 1
        else:
            imported[part] += 1
    return imported, left_out


def main() -> None:
    """Prints the number of modules of each part."""
    for name in DISTRIBUTIONS:
        imported, left_out = import_all(name)
        for part, count in imported.items():
            print(f"{part}: {count} imported")
        for part, count in left_out.items():
            print(f"{part}: {count} left out")


if __name__ == "__main__":
    main()
