# SPDX-License-Identifier: Apache-2.0
"""The hook of mkdocs: which files come with the site, and what becomes of links to documents elsewhere."""

import runpy
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def hook(monkeypatch):
    """The hook, with stand-ins for the parts of mkdocs that it uses, which tests do not install."""
    module = ModuleType("mkdocs.structure.files")
    module.Files = list
    module.File = SimpleNamespace(generated=lambda config, path, **more: SimpleNamespace(path=path, **more))
    module.InclusionLevel = SimpleNamespace(INCLUDED="included")
    monkeypatch.setitem(sys.modules, "mkdocs", ModuleType("mkdocs"))
    monkeypatch.setitem(sys.modules, "mkdocs.structure", ModuleType("mkdocs.structure"))
    monkeypatch.setitem(sys.modules, "mkdocs.structure.files", module)
    return SimpleNamespace(**runpy.run_path(str(ROOT / "docs" / "site_files.py")))


def test_files_that_pages_link_to_are_added_once(hook):
    class Pages(list):
        def documentation_pages(self):
            text = (
                '[a](../examples/reward.py) [b](../README.md) [c](../absent.py) [d](../examples/reward.py#x "title")'
            )
            return [SimpleNamespace(content_string=text)] * 2

    (file,) = hook.on_files(Pages(), None)
    assert (file.path, file.dest_uri) == ("../examples/reward.py", "repository/examples/reward.py")
    assert file.abs_src_path == str(ROOT / "examples/reward.py") and file.inclusion == "included"


@pytest.mark.parametrize(
    ("markdown", "expected"),
    [
        ("the [README](../README.md#rows) says", "the README (`README.md` of the repository) says"),
        ("[a [b]](../README.md)", "a [b] (`README.md` of the repository)"),
        ('[`a`](../b/README.md "title")', "`a` (`b/README.md` of the repository)"),
        ("[rows](data.md) and [file](../examples/reward.py)", None),
        ("`[a](../README.md)`", None),
        ("```\n[a](../README.md)\n```", None),
        ("``[`a`](../README.md)``", None),
        ("`code` [a](../README.md) `code`", "`code` a (`README.md` of the repository) `code`"),
    ],
)
def test_documents_of_other_folders_are_named(markdown, expected, hook):
    assert hook.on_page_markdown(markdown) == (markdown if expected is None else expected)
