# SPDX-License-Identifier: Apache-2.0
"""The package constituent_treelib: what it imports, installs and says when something is missing."""

import importlib.metadata
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import constituent_treelib
from constituent_treelib import TreelibError, make_backend

FOLDER = Path(constituent_treelib.__file__).resolve().parents[1]


def test_importing_loads_the_standard_library_only():
    program = (
        f"import sys\nsys.path.insert(0, {str(FOLDER)!r})\n"
        "import constituent_treelib as trees\n"
        "trees.ConstituentTree('A fox.', 'chunker').extract_all_phrases()\n"
        "names = {name.partition('.')[0] for name in sys.modules}\n"
        "print(sorted(names - set(sys.stdlib_module_names)))\n"
    )
    variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    command = [sys.executable, "-S", "-c", program]
    done = subprocess.run(command, cwd="/", env=variables, capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.stderr) == ("['__main__', 'constituent_treelib']\n", "")


def test_the_chunker_has_no_models():
    assert make_backend("chunker").name == "chunker"
    with pytest.raises(TreelibError, match="the backend chunker has no models; leave 'en' out"):
        make_backend("chunker", model="en")


def test_without_tree_sitter(monkeypatch):
    monkeypatch.setitem(sys.modules, "tree_sitter", None)
    with pytest.raises(TreelibError, match="pip install tree-sitter tree-sitter-python, or use the backend chunker"):
        make_backend("tree-sitter")


@pytest.mark.parametrize("model", ["klingon", "c_sharp_7"])
def test_a_language_without_a_grammar(model):
    pytest.importorskip("tree_sitter")
    with pytest.raises(TreelibError, match=f"no grammar .* pip install tree-sitter-{model.replace('_', '-')}, "):
        make_backend("tree-sitter", model=model)


@pytest.mark.parametrize("model", ["../python", ""])
def test_no_name_of_a_language(model):
    with pytest.raises(TreelibError, match="knows no language .* such as python"):
        make_backend("tree-sitter", model=model)


def test_versions():
    pytest.importorskip("tree_sitter_python")
    grammar = importlib.metadata.version("tree-sitter-python")
    expected = f"{importlib.metadata.version('tree-sitter')}, tree-sitter-python {grammar}"
    assert make_backend("tree-sitter").version == expected
    assert make_backend("tree-sitter", model="Python").version == expected


def test_readme_examples(tmp_path, monkeypatch):
    pytest.importorskip("nltk")
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", (FOLDER / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    outputs = []
    for block in blocks:
        exec(compile(block, "README.md", "exec"), {"print": lambda *words: outputs.append(words)})
    assert outputs == [
        ("(S (CLAUSE (CHUNK She) (CHUNK said)) (CLAUSE (CHUNK that it) (CHUNK was fast) .))",),
        (3, 3, 0),
    ]
    assert all(" ".join(map(str, output)) in blocks[0] for output in outputs)
    assert (tmp_path / "tree.svg").exists()
