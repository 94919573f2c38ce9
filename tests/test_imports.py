# SPDX-License-Identifier: Apache-2.0
"""The direction of imports in dschat and its core macro_actions, the one place that renames and the one that applies
chat templates, read from the source; what the core loads.
"""

import ast
import functools
import os
import re
import subprocess
import sys
import tomllib
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from dschat.base.extras import EXTRAS
from syntax_patterns import parsed

pytestmark = pytest.mark.xdist_group("imports")  # one process parses the files

ROOT = Path(__file__).resolve().parents[1] / "applications" / "DeepSpeed-Chat"
PACKAGE = ROOT / "dschat"
CORE = ROOT.parent / "macro-actions" / "macro_actions"
FILES = [*sorted(PACKAGE.rglob("*.py")), *sorted(CORE.rglob("*.py"))]
REPOSITORY = ROOT.parents[1]
CODE = ("applications", "Constituent-Treelib", "evaluation", "examples", "inference")  # below it

# What the core and each part of dschat may import of both, besides itself and the one exception; a new part takes its
# place here. The core imports no wing.
# The front door stands on top: it may import every part, and no part imports it.
MAY_IMPORT: dict[str, set[str]] = {
    "macro_actions": set(),
    "base": set(),
    "settings": {"base", "macro_actions"},
    "models": {"base", "macro_actions"},
    "data": {"base", "settings", "models", "macro_actions"},
    # what a run knows of itself, and what moves its weights
    "run": {"base", "settings", "models"},
    "engine": {"base", "settings", "models", "run"},
    # prompts → rollout → scores
    "rollouts": {"base", "settings", "data", "models", "macro_actions", "run"},
    "scoring": {"base", "settings", "data", "models", "macro_actions", "run"},
    # one loop and what it trains; training/steps makes engines and all that a run needs
    "training": {"base", "settings", "data", "engine", "models", "macro_actions", "run", "rollouts", "scoring"},
    # the wings
    "vllm": {"base", "settings", "engine", "models", "run", "rollouts", "training"},
    # work with finished models and runs
    "evaluation": {"base", "settings", "data", "models", "macro_actions", "rollouts", "scoring"},
    "programs": {"base", "settings", "data", "macro_actions", "run", "scoring", "training", "evaluation"},
    "turns": {
        *{"base", "settings", "data", "models", "macro_actions", "run", "rollouts", "scoring", "training"},
        *{"evaluation"},
    },
    "judge": {"base", "settings", "data", "macro_actions", "run", "scoring", "training", "evaluation"},
    "refuel": {
        *{"base", "settings", "data", "engine", "models", "macro_actions", "run", "rollouts", "scoring", "training"},
        *{"evaluation", "turns"},
    },
    # what a run will take, from its flags and configs alone
    "plan": {"base", "settings", "data", "models", "macro_actions", "run", "refuel"},
    "demo": {"base", "settings", "data", "models", "macro_actions", "rollouts", "scoring", "evaluation"},
    # the pipeline on data made in code
    "quickstart": {"base", "settings", "data", "models", "evaluation", "programs", "turns"},
}
# Modules of the front door, and which of its other modules each may import.
FRONT_DOOR: dict[str, set[str]] = {
    "cluster": set(),
    "ranks": set(),
    "remote": {"ranks"},
    "launch": {"cluster", "ranks", "remote"},
    "main": {"cluster", "launch"},
    "cli": {"cluster", "launch", "main"},
    "__main__": {"cli", "remote"},
    "export": {"cli"},
    "reference": {"cli"},
}
# The core knows torch and a little of the standard library.
CORE_MAY_IMPORT = {
    "__future__",
    "collections.abc",
    "dataclasses",
    "functools",
    "importlib",
    "macro_actions",
    "math",
    "torch",
    "typing",
}
# What cuts texts knows tokenizers and trees, too, and adapters their frameworks.
READS_TEXT = {"macro_actions.constituents", "macro_actions.token_text"}
FORMULAS = [
    path for path in sorted(CORE.glob("*.py")) if path.stem not in {name.rpartition(".")[2] for name in READS_TEXT}
]


@functools.cache
def nodes_of(path: Path) -> list[ast.AST]:
    """Every node of a file's syntax tree, its module first; each file is parsed once for all tests."""
    return list(ast.walk(parsed(path.read_text(encoding="utf-8"), str(path))))


@functools.cache
def module_name(path: Path) -> str:
    """Dotted name of a source file of the package."""
    parts = path.relative_to(CORE.parent if path.is_relative_to(CORE) else ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def imports_of(path: Path, module: str | None = None) -> list[str]:
    """Every module that a file imports, anywhere in it, by absolute dotted name.

    `module` is its own name, which relative imports start from; that of a file of the package if None.

    `from a import b` gives `a.b`, so that a submodule imported by name is seen. String arguments of
    `importlib.import_module` and `__import__` count.
    """
    package = (module or module_name(path)).split(".")
    if path.name != "__init__.py":
        package = package[:-1]
    imported: list[str] = []
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            imported += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            start = ".".join([*base, *([node.module] if node.module else [])])
            imported += [f"{start}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = ast.unparse(node.func)
            if called.endswith("import_module") or called == "__import__":
                imported.append(str(node.args[0].value))
    return imported


def part_of(name: str) -> str | None:
    """`data` of `dschat.data.rows`, or `macro_actions`; None of a name outside of both, or of dschat itself."""
    pieces = name.split(".")
    if pieces[0] == "macro_actions":
        return pieces[0]
    return pieces[1] if pieces[0] == "dschat" and len(pieces) > 1 else None


def test_every_part_has_its_place() -> None:
    parts = {part_of(module_name(path)) for path in FILES} - {None}
    assert parts == set(MAY_IMPORT) | set(FRONT_DOOR)


def allowed_parts(path: Path) -> set[str]:
    """The parts that a file may import."""
    part = part_of(module_name(path))
    if part is None:  # dschat itself, whose `train` is that of the front door
        return {"cli", "settings", "refuel"}
    if part in FRONT_DOOR:
        return FRONT_DOOR[part] | set(MAY_IMPORT)
    return MAY_IMPORT[part] | {part}


def test_nothing_points_up() -> None:
    forbidden = {}
    for path in FILES:
        used = {part for name in imports_of(path) if (part := part_of(name))}
        if not used <= allowed_parts(path):
            forbidden[module_name(path)] = used - allowed_parts(path)
    assert forbidden == {}


def test_nothing_below_the_front_door_imports_it() -> None:
    assert not set().union(*MAY_IMPORT.values()) & set(FRONT_DOOR)


@pytest.mark.parametrize("table", [MAY_IMPORT, FRONT_DOOR], ids=["parts", "front door"])
def test_a_table_has_no_circle(table) -> None:
    TopologicalSorter(table).prepare()  # raises CycleError


def test_no_permission_is_unused() -> None:
    used: dict[str | None, set[str | None]] = {}
    for path in FILES:
        used.setdefault(part_of(module_name(path)), set()).update(map(part_of, imports_of(path)))
    assert {part: unused for part, allowed in MAY_IMPORT.items() if (unused := allowed - used[part])} == {}


def test_only_engine_imports_deepspeed() -> None:
    importers = {
        part_of(module_name(path))
        for path in FILES
        if any(name.split(".")[0] == "deepspeed" for name in imports_of(path))
    }
    assert importers == {"engine"}


def test_the_core_is_pure() -> None:
    forbidden = []
    for path in FORMULAS:
        allowed = CORE_MAY_IMPORT
        if path.stem == "conditions":
            allowed = allowed | {"constituent_treelib", "transformers"}  # of `parsing`, when called
        for name in imports_of(path):
            is_allowed = any(name == root or name.startswith(root + ".") for root in allowed)
            if not is_allowed or name.startswith("torch.distributed"):
                forbidden.append((path.name, name))
    assert forbidden == []


def test_the_core_loads_torch_alone() -> None:
    program = (
        f"import sys\nsys.path.insert(0, {str(CORE.parent)!r})\nimport torch\nbefore = set(sys.modules)\n"
        f"import {', '.join(module_name(path) for path in sorted(CORE.glob('*.py')))}\n"
        "loaded = {name.split('.')[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names)\n"
        "assert loaded == {'macro_actions'}, loaded\n"
        "import torch.distributed as dist\n"
        "assert not (dist.is_available() and dist.is_initialized())\n"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, cwd="/")
    assert run.returncode == 0, run.stderr


def renames_in(source: str) -> list[int]:
    """Lines of a program that rename a file or folder.

    `Path.replace` takes one argument, `str.replace` two, `dataclasses.replace` and `datetime.replace` named ones.
    """
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module in ("os", "shutil"):
            if {alias.name for alias in node.names} & {"rename", "renames", "replace", "move"}:
                found.append(node.lineno)
        elif (
            isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in ("os", "shutil")
        ):
            if node.attr in ("rename", "renames", "replace", "move"):
                found.append(node.lineno)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            names = {keyword.arg for keyword in node.keywords}
            one = (len(node.args) == 1 and not names) or (not node.args and names == {"target"})
            if node.func.attr in ("rename", "replace") and one:
                found.append(node.lineno)
    return found


def test_files_are_renamed_in_one_place() -> None:
    """Whatever writes a file or replaces a folder uses `dschat.base.atomic`; tests may do as they like."""
    files = [file for folder in CODE for file in (REPOSITORY / folder).rglob("*.py")]
    found = {str(file): lines for file in files if (lines := renames_in(file.read_text("utf-8")))}
    assert found.pop(str(PACKAGE / "base" / "atomic.py"))
    assert found == {}


def test_chat_templates_are_applied_in_one_place() -> None:
    calls = [
        module_name(path)
        for path in FILES
        for node in nodes_of(path)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "apply_chat_template"
    ]
    assert calls == ["dschat.models.templates"]


def test_every_helper_of_the_tests_is_checked_strictly() -> None:
    """mypy's strict table takes names of modules; one that is missing would be checked loosely, without a word."""
    settings = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))
    named = {module for override in settings["tool"]["mypy"]["overrides"] for module in override["module"]}
    helpers = {file.stem for file in Path(__file__).parent.glob("support/*.py")}
    assert helpers <= named, helpers - named


def test_no_file_is_long() -> None:
    long = {module_name(path): lines for path in FILES if (lines := path.read_text("utf-8").count("\n")) > 600}
    assert long == {}


# Folders that stand on `sys.path`, so that imports name what is below them; then those of scripts.
IMPORT_ROOTS = {
    ROOT: ("dschat",),
    CORE.parent: ("macro_actions",),
    REPOSITORY / "Constituent-Treelib": ("constituent_treelib",),
    ROOT / "benchmarks": (".",),
    ROOT / "research": (".",),
}
SCRIPTS = ("docs", "evaluation", "examples", "inference", "applications/DeepSpeed-Chat/training")
# What the packages below dschat may import of each other.
PACKAGES = {"macro_actions": {"constituent_treelib"}, "constituent_treelib": set()}


@functools.cache
def all_modules() -> dict[str, Path]:
    """Every module of the repository but tests, by the name that an import gives it; scripts by their paths."""
    modules: dict[str, Path] = {}
    for root, folders in IMPORT_ROOTS.items():
        for folder in folders:
            for path in sorted((root / folder).rglob("*.py")):
                parts = path.relative_to(root).with_suffix("").parts
                modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    for folder in SCRIPTS:
        for path in sorted((REPOSITORY / folder).rglob("*.py")):
            modules[str(path.relative_to(REPOSITORY))] = path
    for path in (REPOSITORY / "setup.py", ROOT / "setup.py", ROOT / "build_backend.py"):
        modules[str(path.relative_to(REPOSITORY))] = path
    return modules


@functools.cache
def module_graph() -> dict[str, set[str]]:
    """Which modules each module of the repository imports, at its top or later."""
    modules = all_modules()
    graph: dict[str, set[str]] = {}
    for module, path in modules.items():
        graph[module] = set()
        for name in imports_of(path, module):
            for imported in (name, name.rpartition(".")[0]):  # `from a import b` is of a.b, if that is a module
                if imported in modules and imported != module:
                    graph[module].add(imported)
                    break
    return graph


def test_the_graph_holds_all_code() -> None:
    tracked = subprocess.run(["git", "ls-files", "*.py"], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    code = {REPOSITORY / name for name in tracked.stdout.split() if not name.startswith("tests/")}
    assert code <= set(all_modules().values())
    graph = module_graph()
    assert "trials" in graph["run_trial"] and "pieces.plan" in graph["memory"]
    assert "dschat.cli" in graph["evaluation/gpt4-eval.py"]


def test_no_circle_in_all_code() -> None:
    TopologicalSorter(module_graph()).prepare()  # raises CycleError


# Capabilities that a run may do without, each a folder. What the rest of the package knows of them are rows with
# "module:function", imported when a flag asks for it.
WINGS = {"vllm", "programs", "judge", "turns", "refuel", "evaluation", "plan", "demo", "quickstart"}


def wing_of(module: str) -> str | None:
    """The wing that a module belongs to; None for one of the core."""
    part = part_of(module)
    return part if part in WINGS else None


def test_the_core_imports_no_wing() -> None:
    assert WINGS < set(MAY_IMPORT)
    imports = set()
    for module, imported in module_graph().items():
        if part_of(module) in MAY_IMPORT and wing_of(module) is None:  # the front door imports all
            imports |= {(module, name) for name in imported if wing_of(name) is not None}
    assert imports == set()


def test_steps_load_no_wing_and_a_plain_installation_all_but_extras() -> None:
    """Step 1 loads no wing and nothing of step 3; step 3 loads the flags of wings at most.

    No module of an extra can be imported but pandas, which `datasets` brings. Commands that need no extra are loaded.
    """
    hidden = {module for modules in EXTRAS.values() for module in modules} - {"pandas"}
    program = (
        f"import sys\nsys.modules.update(dict.fromkeys({sorted(hidden)}))\n"
        "import dschat.cli, dschat.run.preflight\n"
        "from dschat.settings.flags import flags_of\n"
        "commands = dschat.cli.COMMANDS\n"
        "plain = [name for name in commands if not commands[name].extras]\n"
        "for name in dict.fromkeys(['sft', 'ppo', *plain]):\n"
        "    flags_of(commands[name].flags_class()), commands[name].function()\n"
        "    if name in ('sft', 'ppo'):\n"
        "        print(*[module for module in sys.modules if module.startswith('dschat.')])\n"
        "print(*plain)\n"
    )
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{CORE.parent}"}
    run = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    sft, ppo, plain = (set(line.split()) for line in run.stdout.splitlines()[-3:])
    step_3 = {name for name in sft if name.startswith(("dschat.rollouts", "dschat.scoring", "dschat.training.ppo"))}
    assert step_3 | {name for name in sft if wing_of(name) not in (None, "plan")} == set()
    wings = {name for name in ppo if wing_of(name) not in (None, "plan") and name.count(".") > 1}
    assert {name for name in wings if not name.endswith("settings")} == set()
    assert "dschat.training.ppo.algorithm" in ppo and "dschat.training.loop" in sft
    assert {"sft", "reward", "dpo", "ppo", "refuel", "plan", "macro-actions"} <= plain


def test_packages_know_nothing_of_what_uses_them() -> None:
    """Benchmarks, research, examples and scripts are on top; the core and its parsers know nothing of dschat."""
    folders = (ROOT / "benchmarks", ROOT / "research")
    above = {name for name, path in all_modules().items() if any(map(path.is_relative_to, folders))}
    for module, imported in module_graph().items():
        package = module.split(".")[0]
        if package not in ("dschat", *PACKAGES):
            continue
        assert not imported & above, module
        others = {name.split(".")[0] for name in imported} - {package}
        assert others <= PACKAGES.get(package, set(PACKAGES)), module


def test_files_that_the_map_names_are_there() -> None:
    """CONTRIBUTING.md is short, because the path is the map; each file that it names exists."""
    text = (REPOSITORY / "CONTRIBUTING.md").read_text("utf-8")
    named = {name for name in re.findall(r"`([\w./-]+\.(?:py|toml|txt|md))\b", text) if "NAME" not in name}
    places = (PACKAGE, ROOT, REPOSITORY, CORE.parent)
    assert {name for name in named if not any((place / name).exists() for place in places)} == set()
    assert "settings/flags.py" in named and text.count("\n") <= 80
