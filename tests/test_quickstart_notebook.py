# SPDX-License-Identifier: Apache-2.0
"""The notebook of the quickstart runs: its cells in order on the small quickstart, and its installation on Colab."""

import json
import subprocess
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from cli_runs import ROOT

NOTEBOOK = ROOT / "examples" / "quickstart.ipynb"


def code_cells() -> list[str]:
    """The code of the notebook: settings, installation, run, report."""
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


@pytest.fixture
def shown(monkeypatch) -> list[str]:
    """What the notebook displays; the environment of the tests has no IPython."""
    texts: list[str] = []
    display = ModuleType("IPython.display")
    display.HTML = str
    display.display = texts.append
    monkeypatch.setitem(sys.modules, "IPython", ModuleType("IPython"))
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    return texts


@pytest.mark.slow
def test_the_cells_run(shown, tmp_path, monkeypatch, capsys) -> None:
    """On this machine nothing is installed; the report of two runs is shown in a frame."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for source in code_cells():
        exec(compile(source, NOTEBOOK.name, "exec"), names)
    assert names["FULL"] is False
    assert "report: runs/notebook/report.html" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["runs"], "no clone"
    (frame,) = shown
    assert frame.startswith("<div><iframe srcdoc=") and "MA-PPO" in frame
    assert '<html lang="en">' not in frame, "the page is quoted inside of the attribute"


def test_a_failed_quickstart_is_an_error(tmp_path, monkeypatch, capsys) -> None:
    """Its output folder is a file."""
    (tmp_path / "runs").write_text("")
    monkeypatch.chdir(tmp_path)
    settings, _, run, _ = code_cells()
    with pytest.raises(RuntimeError, match="status 2: see the lines above"):
        exec(settings + "\nimport subprocess, sys\n" + run, {})
    assert "--output_dir runs/notebook: cannot be made" in capsys.readouterr().out


def test_colab_installs_the_three_distributions_of_the_repository(tmp_path, monkeypatch) -> None:
    """Where the cell runs again, the clone is kept."""
    monkeypatch.chdir(tmp_path)
    commands: list[list[str]] = []
    monkeypatch.setitem(sys.modules, "google.colab", SimpleNamespace())
    monkeypatch.setattr(subprocess, "run", lambda command, check: commands.append(command))
    _, installation, _, _ = code_cells()
    with pytest.raises(ValueError, match="enter the address"):
        exec(installation, {"REPOSITORY": ""})
    exec(installation, {"REPOSITORY": "/shared/ma-rlhf.git"})
    clone, install = commands
    assert clone == ["git", "clone", "--depth", "1", "/shared/ma-rlhf.git", "ma-rlhf"]
    assert install[:4] == [sys.executable, "-m", "pip", "install"]
    (tmp_path / "ma-rlhf").mkdir()
    exec(installation, {"REPOSITORY": "/shared/ma-rlhf.git"})
    assert commands[2:] == [install]
    folders = [word.partition("[")[0].removeprefix("./").removeprefix("ma-rlhf") for word in install[5:]]
    assert all((ROOT / folder.strip("/") / "pyproject.toml").is_file() for folder in folders)
