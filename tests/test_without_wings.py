# SPDX-License-Identifier: Apache-2.0
"""The core without a wing: a copy of the package that lacks the wing's folder and its rows passes the core's tests.

A wing's rows, all removed by one rule each:

- an element of a table with a string "wing.module:name" (`COMMANDS`, `SCORE_SOURCES`);
- a constant of type `str | None` with such a string, which becomes None (`MINIMUM_MEMORY`);
- an import of a wing, with each group of flags and each tuple of rules that it brings (`PPOConfig`).
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
CORE_TESTS = ("scoring", "rollouts", "training")
# Words by which tests of the core use a wing without importing it.
WORDS = {
    "judge": ("reward_judge", "judge"),
    "programs": ("programs",),
    "turns": ("environment", "simulated_user"),
    "evaluation": ("macro-actions",),
}


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
        wings: what is removed.
        brought: names that the file imports of them.
        flags: names of flags in the groups among these.
    """

    def __init__(self, wings: set[str], brought: set[str], flags: set[str]) -> None:
        self.names_function = re.compile(rf"(dschat\.)?({'|'.join(wings)})(\.\w+)*:\w+")
        self.wings = wings
        self.brought = brought
        self.flags = flags

    def is_row(self, node: ast.AST) -> bool:
        """Whether an element of a table names a function of the wings, or is what they bring."""
        if isinstance(node, ast.Starred):
            return isinstance(node.value, ast.Name) and node.value.id in self.brought
        if not isinstance(node, ast.Call):
            return False
        constants = [part.value for part in ast.walk(node) if isinstance(part, ast.Constant)]
        return any(isinstance(value, str) and self.names_function.fullmatch(value) for value in constants)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.AST | None:
        """An import of a wing goes; a block that it leaves empty gets `pass`."""
        return ast.Pass() if part_of(node.module or "") in self.wings else node

    def visit_Dict(self, node: ast.Dict) -> ast.AST:
        """Rows of a table by names, and what it says of flags that go."""
        kept = []
        for key, value in zip(node.keys, node.values, strict=True):
            is_flag = isinstance(key, ast.Constant) and key.value in self.flags
            if not self.is_row(value) and not is_flag:
                kept.append((key, value))
        node.keys = [key for key, _ in kept]
        node.values = [value for _, value in kept]
        return self.generic_visit(node)

    def visit_Tuple(self, node: ast.Tuple) -> ast.AST:
        """Rows of a table, and tuples of rules within one."""
        node.elts = [element for element in node.elts if not self.is_row(element)]
        return self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        """A group of flags in a command goes; a constant that names a function, or None, becomes None."""
        if isinstance(node.annotation, ast.Name) and node.annotation.id in self.brought:
            return ast.Pass()
        value = node.value
        if ast.unparse(node.annotation) == "str | None" and isinstance(value, ast.Constant):
            if isinstance(value.value, str) and self.names_function.fullmatch(value.value):
                node.value = ast.Constant(None)
        return self.generic_visit(node)


def names_brought(tree: ast.AST, wings: set[str]) -> dict[str, str]:
    """Names that a file imports of wings, each with its module."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and part_of(node.module) in wings:
            names |= {alias.name: node.module for alias in node.names}
    return names


def fields_of(names: dict[str, str]) -> set[str]:
    """Annotated fields of the classes among these names, which their modules define."""
    fields = set()
    for name, module in names.items():
        source = PACKAGE.joinpath(*module.split(".")[1:]).with_suffix(".py").read_text("utf-8")
        for node in ast.parse(source).body:
            if isinstance(node, ast.ClassDef) and node.name == name:
                fields |= {ast.unparse(item.target) for item in node.body if isinstance(item, ast.AnnAssign)}
    return fields


def remove_rows(file: Path, wings: set[str]) -> None:
    """Rewrites a file of the core without the rows of wings, if it has any."""
    tree = ast.parse(file.read_text("utf-8"))
    before = ast.unparse(tree)
    brought = names_brought(tree, wings)
    after = ast.unparse(ast.fix_missing_locations(RowRemover(wings, set(brought), fields_of(brought)).visit(tree)))
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
    assert removed_with("turns") == {"turns", "judge", "refuel", "plan", "quickstart"}


def test_rows_are_removed() -> None:
    """What the three rules leave of a small table, by hand."""
    source = """
from dschat.judge.settings import RULES, Flags
TABLE = {'a': Row('judge.step3:build'), 'b': Row('training.step:build')}
PLACE: str | None = 'dschat.judge.step3:build'
ASKED = 'dschat.judge.step3:build'

class Config:
    rules = (*RULES, *OTHERS)
    helps = {'model': 'of the judge', 'lam': 'λ'}
    judge: Flags
    lam: float
"""
    tree = RowRemover({"judge"}, {"RULES", "Flags"}, {"model"}).visit(ast.parse(source))
    assert ast.unparse(tree).splitlines() == [
        "pass",
        "TABLE = {'b': Row('training.step:build')}",
        "PLACE: str | None = None",
        "ASKED = 'dschat.judge.step3:build'",
        "",
        "class Config:",
        "    rules = (*OTHERS,)",
        "    helps = {'lam': 'λ'}",
        "    pass",
        "    lam: float",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("wing", sorted(WINGS))
def test_the_core_passes_its_tests_without(wing: str, tmp_path: Path) -> None:
    """Every module that is left can be imported, and every command read; then the core's tests."""
    removed = removed_with(wing)
    copy_without(removed, tmp_path)
    folders = [tmp_path / PACKAGE.parent.relative_to(ROOT), tmp_path / "applications" / "macro-actions"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, [*folders, tmp_path / "Constituent-Treelib"]))}
    modules = [module_name(path) for path in PACKAGE.rglob("*.py") if path.name != "__main__.py"]
    kept = [name for name in modules if part_of(name) not in removed | {"vllm", "demo"}]  # these need packages
    program = (
        f"import importlib, dschat.cli\nfrom dschat.settings.flags import flags_of\n"
        f"assert dschat.__file__.startswith({str(tmp_path)!r})\n"
        f"for name in {kept}:\n    importlib.import_module(name)\n"
        "for command in dschat.cli.COMMANDS.values():\n    flags_of(command.flags_class()), command.function()\n"
    )
    command = [sys.executable, "-c", program]
    run = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stderr
    words = {word for name in removed for word in WORDS.get(name, ())}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *core_test_files(removed)]
    if words:
        command += ["-k", " and ".join(f"not {word}" for word in sorted(words))]
    run = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=3600)
    assert run.returncode == 0, run.stdout
