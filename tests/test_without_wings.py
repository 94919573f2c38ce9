# SPDX-License-Identifier: Apache-2.0
"""The core without a wing: a copy of the package that lacks the wing's folder and its rows passes the core's tests.

A wing's rows, all removed by one rule each:

- an element of a table with a string "wing.module:name" (`COMMANDS`, `SCORE_SOURCES`);
- an attribute whose annotation has such a string (the groups of flags of `PPOConfig`);
- a constant of type `str | None` with such a string, which becomes None (`MINIMUM_MEMORY`).
"""

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cli_runs import ROOT
from test_imports import MAY_IMPORT, PACKAGE, WINGS, imports_of, module_name, part_of

# Folders of tests of what wings are added to.
CORE_TESTS = ("scoring", "rollouts", "training", "engine", "models")
# Words in the names of their tests that use a wing without importing it.
WORDS = ("judge", "programs", "environment", "simulated_user", "macro-actions", "tokenizer_for_data", "preview")


def removed_with(wing: str) -> set[str]:
    """The wing and all that import it, directly or not."""
    removed = {wing}
    while True:
        more = {name for name in WINGS - removed if MAY_IMPORT[name] & removed}
        if not more:
            return removed
        removed |= more


class RowRemover(ast.NodeTransformer):
    """Removes the rows of wings from a file of the core.

    Attributes:
        names_function: whether a text is "module:function" of the wings.
    """

    def __init__(self, wings: set[str]) -> None:
        self.names_function = re.compile(rf"(dschat\.)?({'|'.join(wings)})(\.\w+)*:\w+").fullmatch

    def is_row(self, node: ast.AST) -> bool:
        """Whether an element of a table, or an annotation, names a function of the wings."""
        if not isinstance(node, ast.Call | ast.Subscript):
            return False
        constants = [part.value for part in ast.walk(node) if isinstance(part, ast.Constant)]
        return any(isinstance(value, str) and self.names_function(value) for value in constants)

    def visit_Dict(self, node: ast.Dict) -> ast.AST:
        """Rows of a table by names."""
        kept = []
        for key, value in zip(node.keys, node.values, strict=True):
            if not self.is_row(value):
                kept.append((key, value))
        node.keys = [key for key, _ in kept]
        node.values = [value for _, value in kept]
        return self.generic_visit(node)

    def visit_Tuple(self, node: ast.Tuple) -> ast.AST:
        """Rows of a table."""
        node.elts = [element for element in node.elts if not self.is_row(element)]
        return self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        """A group of flags in a command goes; a constant that names a function, or None, becomes None."""
        if self.is_row(node.annotation):
            return ast.Pass()
        value = node.value
        if ast.unparse(node.annotation) == "str | None" and isinstance(value, ast.Constant):
            if isinstance(value.value, str) and self.names_function(value.value):
                node.value = ast.Constant(None)
        return self.generic_visit(node)


def remove_rows(file: Path, wings: set[str]) -> None:
    """Rewrites a file of the core without the rows of wings, if it has any."""
    tree = ast.parse(file.read_text("utf-8"))
    before = ast.unparse(tree)
    after = ast.unparse(ast.fix_missing_locations(RowRemover(wings).visit(tree)))
    if after != before:
        file.write_text(after, "utf-8")


def copy_without(wings: set[str], target: Path) -> None:
    """Copies the repository without the folders and rows of wings."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    package = PACKAGE.relative_to(ROOT)
    for name in listed.stdout.splitlines():
        parts = Path(name).parts
        is_left_out = Path(name).is_relative_to(package) and parts[len(package.parts)] in wings
        if is_left_out or (parts[0] == "tests" and parts[1] in wings):
            continue
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target / name, follow_symlinks=False)
    for file in (target / package).rglob("*.py"):
        if file.relative_to(target / package).parts[0] not in WINGS:
            remove_rows(file, wings)


def imports_when_loaded(helper: Path) -> list[str]:
    """Modules that a helper imports at its top. What its functions import is of the tests that call them."""
    names = []
    for node in ast.parse(helper.read_text("utf-8")).body:
        if isinstance(node, ast.ImportFrom):
            names.append(str(node.module))
        elif isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
    return names


def uses(file: Path, names: list[str], wings: set[str], seen: set[Path]) -> bool:
    """Whether a file of tests or a helper, which imports `names`, imports a wing, itself or by helpers."""
    seen.add(file)
    for name in names:
        if part_of(name) in wings:
            return True
        helper = ROOT / "tests" / "support" / f"{name.split('.')[0]}.py"
        if helper.exists() and helper not in seen and uses(helper, imports_when_loaded(helper), wings, seen):
            return True
    return False


def core_test_files(wings: set[str]) -> list[str]:
    """Files of tests that import none of the wings."""
    files = [file for folder in CORE_TESTS for file in sorted((ROOT / "tests" / folder).glob("test_*.py"))]
    return [str(file.relative_to(ROOT)) for file in files if not uses(file, imports_of(file, file.stem), wings, set())]


def test_what_goes_with_a_wing() -> None:
    assert removed_with("judge") == {"judge"}
    assert removed_with("refuel") == {"refuel", "plan"}
    assert removed_with("turns") == {"turns", "refuel", "plan", "quickstart"}


def test_rows_are_removed() -> None:
    """What the three rules leave of a small table, by hand."""
    source = """
TABLE = {'a': Row('judge.step3:build'), 'b': Row('training.step:build')}
PLACE: str | None = 'dschat.judge.step3:build'
ASKED = 'dschat.judge.step3:build'

class Config:
    rows = (Row('judge.step3:build'), Row('training.step:build'))
    judge: Annotated[Any, GroupRow('judge.settings:Flags')]
    lam: float
"""
    tree = RowRemover({"judge"}).visit(ast.parse(source))
    assert ast.unparse(tree).splitlines() == [
        "TABLE = {'b': Row('training.step:build')}",
        "PLACE: str | None = None",
        "ASKED = 'dschat.judge.step3:build'",
        "",
        "class Config:",
        "    rows = (Row('training.step:build'),)",
        "    pass",
        "    lam: float",
    ]


def run_in(copy: Path, arguments: list[str], timeout: int) -> None:
    """Runs Python in a copy, with the copy's packages; it must succeed."""
    folders = [copy / PACKAGE.parent.relative_to(ROOT), copy / "applications" / "macro-actions"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, [*folders, copy / "Constituent-Treelib"]))}
    command = [sys.executable, *arguments]
    run = subprocess.run(command, env=environment, cwd=copy, capture_output=True, text=True, timeout=timeout)
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.slow
@pytest.mark.parametrize("wing", sorted(WINGS))
def test_a_wing_can_be_removed(wing: str, tmp_path: Path) -> None:
    """Every module that is left can be imported, and every command's flags are read."""
    removed = removed_with(wing)
    copy_without(removed, tmp_path)
    modules = [module_name(path) for path in PACKAGE.rglob("*.py") if path.name != "__main__.py"]
    kept = [name for name in modules if part_of(name) not in removed | {"vllm", "demo"}]  # these need packages
    program = (
        f"import importlib, dschat.cli\nfrom dschat.settings.flags import flags_of\n"
        f"assert dschat.__file__.startswith({str(tmp_path)!r})\n"
        f"for name in {kept}:\n    importlib.import_module(name)\n"
        "for command in dschat.cli.COMMANDS.values():\n    flags_of(command.flags_class()), command.function()\n"
    )
    run_in(tmp_path, ["-c", program], 600)


@pytest.mark.slow
def test_the_core_passes_its_tests_without_any_wing(tmp_path: Path) -> None:
    """Tests that use a wing by a flag's value, which no import shows, are left out by its name."""
    copy_without(set(WINGS), tmp_path)
    files = core_test_files(set(WINGS))
    assert len(files) > 30
    words = " and ".join(f"not {word}" for word in WORDS)
    run_in(tmp_path, ["-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *files, "-k", words], 3600)
