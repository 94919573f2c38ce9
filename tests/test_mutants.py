# SPDX-License-Identifier: Apache-2.0
"""Every mutant can be made of the package as it is now; and, on request, the tests notice each of them."""

import subprocess
import sys

import pytest

import mutants


def test_every_mutant_can_be_made() -> None:
    names = [mutant.name for mutant in mutants.MUTANTS]
    assert len(set(names)) == len(names) >= 85
    for mutant in mutants.MUTANTS:
        compile(mutant.source(), mutant.file, "exec")
        for test in mutant.tests:
            file, name = test.partition("[")[0].split("::")
            assert f"def {name}(" in (mutants.ROOT / "tests" / file).read_text(encoding="utf-8"), test


@pytest.mark.parametrize(("old", "times"), [("no such line", 0), ("return ends", 2)])
def test_a_mutant_whose_text_does_not_occur_once_is_named(old: str, times: int) -> None:
    mutant = mutants.Mutant("a name", "rl/termination.py", old, "x", ())
    with pytest.raises(ValueError, match=f"mutant 'a name': rl/termination.py holds '{old}' {times} times"):
        mutant.source()


@pytest.mark.mutants
def test_every_mutant_is_killed(capfd: pytest.CaptureFixture[str]) -> None:
    with capfd.disabled():
        assert subprocess.run([sys.executable, mutants.__file__]).returncode == 0
