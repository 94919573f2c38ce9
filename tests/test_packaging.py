# SPDX-License-Identifier: Apache-2.0
"""What is installed: every import is declared, no two distributions own the same file, and the lowest versions."""

import ast
import os
import re
import runpy
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
import setuptools
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from cli_runs import ROOT
from dschat.base.extras import EXTRAS
from dschat.cli import COMMANDS, main
from dschat.run.record import COMMIT_VARIABLE
from lowest_versions import lowest_pins

APPLICATIONS = ROOT / "applications"
CORE = APPLICATIONS / "macro-actions"
TREES = ROOT / "Constituent-Treelib"
DSCHAT = APPLICATIONS / "DeepSpeed-Chat"
MODULES = {"macro_actions", "constituent_treelib", "dschat"}
# Modules whose distribution has another name.
DISTRIBUTIONS = {
    **{"yaml": "pyyaml", "markdown_it": "markdown-it-py", "tree_sitter": "tree-sitter"},
    "rouge_score": "rouge-score",
}
# Trainers that macro_actions is plugged into bring it in; benchmarks compare with TRL in an environment of its own.
PLUGGED_INTO = {"skyrl", "slime", "trl", "verl"}


def imported(folder: Path) -> dict[str, str]:
    """Modules that are no part of Python or of the folder, with a file that imports each."""
    own = {path.stem for path in folder.rglob("*.py")} | {path.name for path in folder.rglob("*") if path.is_dir()}
    found: dict[str, str] = {}
    for path in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [str(node.module)]
            for name in names:
                found.setdefault(name.split(".")[0], str(path.relative_to(ROOT)))
    # A module of a library may be called like one of the folder's: datasets, trl.
    libraries = {"datasets", "trl", "verl", "skyrl", "slime"}
    return {name: path for name, path in found.items() if name not in sys.stdlib_module_names | (own - libraries)}


def declared(requirements: list[str]) -> set[str]:
    return {canonicalize_name(Requirement(text).name) for text in requirements}


def distribution() -> dict[str, Any]:
    """What setup.py says of ma-rlhf."""
    return runpy.run_path(str(ROOT / "setup.py"))["distribution"](".", ".", ".")


def root_requirements() -> list[str]:
    ours = distribution()
    return [*ours["install_requires"], *(text for extra in ours["extras_require"].values() for text in extra)]


def project_requirements(folder: Path) -> list[str]:
    project = tomllib.loads((folder / "pyproject.toml").read_text("utf-8"))["project"]
    return [*project["dependencies"], *(text for extra in project["optional-dependencies"].values() for text in extra)]


@pytest.mark.parametrize(
    ("folder", "requirements"),
    [
        (DSCHAT / "dschat", root_requirements()),
        (DSCHAT / "benchmarks", root_requirements()),
        (DSCHAT / "research", root_requirements()),
        (DSCHAT / "training", root_requirements()),
        (CORE / "macro_actions", project_requirements(CORE)),
        (TREES / "constituent_treelib", project_requirements(TREES)),
    ],
    ids=lambda value: value.name if isinstance(value, Path) else "",
)
def test_what_is_imported_is_declared(folder, requirements):
    known = declared(requirements)
    for module, path in imported(folder).items():
        if module in MODULES | PLUGGED_INTO:
            continue
        assert canonicalize_name(DISTRIBUTIONS.get(module, module)) in known, f"{path} imports {module}"


def test_extras_bring_what_commands_ask_for():
    """The table that commands read has the modules of setup.py's extras, which no plain installation brings."""
    ours = distribution()
    plain = declared(ours["install_requires"])
    for extra, modules in EXTRAS.items():
        brought = declared(ours["extras_require"][extra])
        assert {canonicalize_name(DISTRIBUTIONS.get(module, module)) for module in modules} == brought
        assert not brought & plain
    assert {extra for command in COMMANDS.values() for extra in command.extras} == {*EXTRAS}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["report", "nothing", "--output", "report"],
            "dschat report needs matplotlib, rouge_score, scipy, statsmodels,",
        ),
        (
            ["ppo", "--data_path=a", "--output_dir=b", "--actor_model_name_or_path=c", "--reward_source=programs"]
            + ["--advantage_estimator=grpo", "--samples_per_prompt=2"],
            "--reward_source programs needs markdown_it, which a plain installation leaves out: pip",
        ),
    ],
)
def test_a_missing_extra_is_named_first(words, message, monkeypatch, capsys, caplog):
    """Before a file or a model is looked for."""
    modules = {module for names in EXTRAS.values() for module in names} - {"pandas"}
    for module in modules:
        monkeypatch.setitem(sys.modules, module, None)
    assert main(words, may_launch=False) == 2
    assert message in capsys.readouterr().err + caplog.text


def test_the_lowest_versions_are_those_of_setup():
    """A pin for each requirement of a run and of the tests, at its lower bound; none without one."""
    pins = dict(pin.split("==") for pin in lowest_pins())
    assert {"torch", "httpx2", "scipy", "pytest"} <= {*pins} and "macro-actions" not in pins
    for text in root_requirements():
        requirement = Requirement(text)
        if requirement.name in pins:
            assert requirement.specifier.contains(pins[requirement.name]), text
        assert ">=" in text or "==" in text, text


def test_the_projects_name_no_other_versions():
    """What several of the distributions need, all of them bound alike from below."""
    bounds: dict[str, set[str]] = {}
    for text in [*root_requirements(), *project_requirements(CORE), *project_requirements(TREES)]:
        requirement = Requirement(text)
        lowest = [str(one.version) for one in requirement.specifier if one.operator == ">="]
        bounds.setdefault(requirement.name, set()).update(lowest)
    assert {name: found for name, found in bounds.items() if len(found) > 1} == {}


def built_files(folder: str, names: list[str]) -> set[str]:
    """What a build leaves in a folder."""
    built = {name for name in names if name.endswith(".egg-info") or name == "__pycache__"}
    return built | ({"build"} & set(names) if "pyproject.toml" in names else set())


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> Path:
    """A copy: building leaves folders beside the sources."""
    copy = tmp_path_factory.mktemp("checkout") / "ma-rlhf"
    for name in ("applications", "Constituent-Treelib"):
        shutil.copytree(ROOT / name, copy / name, ignore=built_files)
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy / name)
    return copy


def pip(*words: str | Path, target: Path | None = None) -> str:
    """Runs pip without an index, in this environment or for another one's Python."""
    where = [] if target is None else ["--python", str(target / "bin" / "python")]
    command = [sys.executable, "-m", "pip", *where, *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=os.environ | {"PIP_NO_INDEX": "1"})
    assert done.returncode == 0, done.stderr
    return done.stdout


def new_environment(folder: Path) -> Path:
    """An environment with nothing but this one's setuptools, which builds without an index."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True, timeout=120)
    source = Path(setuptools.__file__).parents[1]
    (site_packages,) = folder.glob("lib/python*/site-packages")
    for path in (source / "setuptools", source / "_distutils_hack", *source.glob("setuptools-*.dist-info")):
        (site_packages / path.name).symlink_to(path)
    return folder


def found_in(environment: Path) -> dict[str, str]:
    """Where an environment finds the three packages; those that it does not find are left out."""
    program = (
        f"import importlib.util as u\nfor name in {sorted(MODULES)}:\n    spec = u.find_spec(name)\n"
        "    if spec: print(name, list(spec.submodule_search_locations)[0])\n"
    )
    command = [environment / "bin" / "python", "-c", program]
    variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(command, capture_output=True, text=True, cwd="/", env=variables, check=True, timeout=60)
    return dict(line.split(" ", 1) for line in done.stdout.splitlines())


@pytest.mark.slow
def test_wheels_own_their_files_alone(checkout, tmp_path):
    """Each is installed and removed in turn; the others stay whole."""
    for folder in (checkout, checkout / "applications" / "macro-actions", checkout / "Constituent-Treelib"):
        pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", tmp_path / "wheels", folder)
    wheels = {path.name.split("-")[0]: path for path in (tmp_path / "wheels").glob("*.whl")}
    files: dict[str, list[str]] = {}
    for name, path in wheels.items():
        with zipfile.ZipFile(path) as content:
            for file in content.namelist():
                files.setdefault(file, []).append(name)
            metadata = content.read(next(f for f in content.namelist() if f.endswith("METADATA"))).decode()
        if name == "ma_rlhf":
            assert re.search(r"^Requires-Dist: macro-actions==0.1.0$", metadata, re.M)
            assert re.search(r"^Requires-Dist: ma-rlhf-constituent-treelib==0.1.0; extra == .parsing", metadata, re.M)
        assert any(file.endswith("licenses/LICENSE") for file, names in files.items() if name in names)
    assert len(wheels) == 3 and all(len(names) == 1 for names in files.values())
    assert {"dschat/py.typed", "macro_actions/py.typed", "constituent_treelib/py.typed"} <= {*files}
    assert "dschat/training/steps/common.py" in files

    environment = new_environment(tmp_path / "environment")
    packages = {"ma-rlhf": "dschat", "macro-actions": "macro_actions"}
    packages["ma-rlhf-constituent-treelib"] = "constituent_treelib"
    pip("install", "--no-deps", *wheels.values(), target=environment)
    site = Path(found_in(environment)["dschat"]).parent
    for distribution, module in packages.items():
        pip("uninstall", "--yes", distribution, target=environment)
        assert {*found_in(environment)} == MODULES - {module}
        missing = [file for file in files if not file.startswith(module) and not (site / file).exists()]
        assert [file for file in missing if ".dist-info" not in file] == []
        wheel = wheels[distribution.replace("-", "_")]
        pip("install", "--no-deps", wheel, target=environment)


@pytest.mark.slow
@pytest.mark.parametrize("place", [".", "applications/DeepSpeed-Chat"])
def test_an_editable_install_needs_nothing_else(place, checkout, tmp_path):
    """From the root and from applications/DeepSpeed-Chat, with no index and no other distribution of ours."""
    environment = new_environment(tmp_path / "environment")
    command = ["install", "--no-deps", "--no-build-isolation"]
    pip(*command, "--editable", checkout / place, target=environment)
    for name, path in found_in(environment).items():
        (expected,) = [folder / name for folder in (DSCHAT, CORE, TREES) if (folder / name).is_dir()]
        assert Path(path).resolve() == checkout.resolve() / expected.relative_to(ROOT)
    shown = pip("show", "ma-rlhf", target=environment)
    assert "macro-actions" not in shown and "torch" in shown
    for other in (TREES, CORE):
        pip(*command, "--editable", checkout / other.relative_to(ROOT), target=environment)
    assert {*found_in(environment)} == MODULES
    pip("uninstall", "--yes", "macro-actions", target=environment)
    assert found_in(environment)["macro_actions"].endswith("applications/macro-actions/macro_actions")


def image_instructions() -> list[tuple[str, str]]:
    """Instructions of the Dockerfile with their words, such as ("USER", "1000"); continued lines are joined."""
    text = (ROOT / "Dockerfile").read_text("utf-8")
    lines = re.sub(r"^#.*\n", "", text, flags=re.MULTILINE).replace("\\\n", " ").splitlines()
    pairs = [line.partition(" ") for line in lines if line]
    return [(name, words) for name, _, words in pairs]


def test_the_image_has_a_user_libraries_of_infiniband_and_its_commit():
    """Docker is not needed: its instructions are read."""
    instructions = image_instructions()
    assert [words for name, words in instructions if name == "USER"] == ["1000"]
    assert ("VOLUME", "/cache") in instructions
    environment = " ".join(words for name, words in instructions if name == "ENV").split()
    assert {"HOME=/cache", "USER=ma-rlhf", f"{COMMIT_VARIABLE}=${{COMMIT}}"} <= set(environment)
    commands = [words for name, words in instructions if name == "RUN"]
    assert {"libibverbs1", "ibverbs-providers"} <= set(commands[0].split())
    for command in commands:
        subprocess.run(["bash", "-n", "-c", command], check=True)
