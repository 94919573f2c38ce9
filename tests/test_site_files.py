# SPDX-License-Identifier: Apache-2.0
"""The hook of mkdocs: which files come with the site, and what becomes of links to documents elsewhere."""

import runpy
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from markdown import markdown

ROOT = Path(__file__).resolve().parents[1]


class Files(list):
    """mkdocs' files of a site."""

    @property
    def src_uris(self):
        return {file.path: file for file in self}


@pytest.fixture
def convert(monkeypatch):
    """Markdown → (HTML, files added to the site). mkdocs, which tests do not install, has stand-ins."""
    module = ModuleType("mkdocs.structure.files")
    module.Files = Files
    module.File = SimpleNamespace(generated=lambda config, path, **more: SimpleNamespace(path=path, **more))
    monkeypatch.setitem(sys.modules, "mkdocs", ModuleType("mkdocs"))
    monkeypatch.setitem(sys.modules, "mkdocs.structure", ModuleType("mkdocs.structure"))
    monkeypatch.setitem(sys.modules, "mkdocs.structure.files", module)
    hook = runpy.run_path(str(ROOT / "docs" / "site_files.py"))

    def converted(text):
        files = Files()
        config = SimpleNamespace(markdown_extensions=["fenced_code"])
        assert hook["on_files"](files, config) is files
        return markdown(text, extensions=config.markdown_extensions), files

    return converted


def test_files_that_pages_link_to_are_added_once(convert):
    text = '[a](../examples/reward.py) [b](../README.md) [c](../absent.py) [d](../examples/reward.py#x "title") [e]'
    html, (file,) = convert(f"{text}\n\n[e]: ../examples/reward.py\n")
    assert (file.path, file.dest_uri) == ("../examples/reward.py", "repository/examples/reward.py")
    assert file.abs_src_path == str(ROOT / "examples/reward.py")
    assert html.count('href="../examples/reward.py') == 3 and 'href="../absent.py"' in html


def named(label, path):
    return f"<span>{label}<span> (<code>{path}</code> of the repository)</span></span>"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("the [README](../README.md#rows) says", f"<p>the {named('README', 'README.md')} says</p>"),
        ("[a [b]](../README.md)", f"<p>{named('a [b]', 'README.md')}</p>"),
        ('[`a`](../docs/index.md "title")', f"<p>{named('<code>a</code>', 'docs/index.md')}</p>"),
        ("[a](../absent.md#b)", '<p><a href="../absent.md#b">a</a></p>'),
        ("[a](../../README.md)", '<p><a href="../../README.md">a</a></p>'),
        ("a ` [b]\n\n[b]: ../README.md", f"<p>a ` {named('b', 'README.md')}</p>"),
        ("[rows](data.md)", '<p><a href="data.md">rows</a></p>'),
    ],
)
def test_documents_of_other_folders_are_named(text, expected, convert):
    assert convert(text) == (expected, [])


@pytest.mark.parametrize("text", ["`{}`", "```\n{}\n```", "    {}"])
def test_code_is_not_a_link(text, convert):
    sample = "[a](../README.md) [b](../examples/reward.py)"
    html, files = convert(text.format(sample))
    assert sample in html and not files
