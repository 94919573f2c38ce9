# SPDX-License-Identifier: Apache-2.0
"""docs/support.md says what the parameters of the tests say."""

import sys
from pathlib import Path
from types import ModuleType

import pytest

from support_matrix import Column, FamilyTest, devices_by_family, tables

PAGE = Path(__file__).resolve().parents[1] / "docs" / "support.md"


def test_the_page_has_the_tables_of_the_tests() -> None:
    """Printed by `python tests/support/support_matrix.py`, between the lines that say so."""
    begin, end = "<!-- made by python tests/support/support_matrix.py -->\n\n", "\n<!-- end -->"
    assert PAGE.read_text(encoding="utf-8").partition(begin)[2].partition(end)[0] == tables()


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two test files: one for CPUs, with a slow family and a value that is no family, and one for GPUs."""

    @pytest.mark.parametrize("rank", [0, 1])
    @pytest.mark.parametrize("name", ["llama policy", pytest.param("opt", marks=pytest.mark.slow), "several files"])
    def on_cpu(name: str, rank: int) -> None: ...

    @pytest.mark.parametrize("kind", ("llama", "gemma"))
    def on_gpu(kind: str) -> None: ...

    for file, function, marks in (("cpu", on_cpu, []), ("gpu", on_gpu, [pytest.mark.gpu, pytest.mark.slow])):
        module = ModuleType(file)
        module.test_it = function  # type: ignore[attr-defined]
        module.pytestmark = marks  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, f"support_matrix_{file}", module)


def test_devices_by_hand(modules: None) -> None:
    cpu_test = FamilyTest("cpu.py", "test_it", "name")
    gpu_test = FamilyTest("gpu.py", "test_it", "kind")
    column = Column("feature", "something", (cpu_test, gpu_test))
    assert devices_by_family(column) == {"llama": "CPU, GPU", "opt": "CPU", "gemma": "GPU"}
