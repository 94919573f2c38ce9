# SPDX-License-Identifier: Apache-2.0
"""A hook of mkdocs for links that lead out of docs/, such as ../examples/reward.py. All pages are directly in docs/.

A file is published with the site. A document (.md) is named and not linked, since its own links would not work.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING
from xml.etree.ElementTree import Element, SubElement

from markdown import Markdown
from markdown.extensions import Extension
from markdown.treeprocessors import Treeprocessor
from mkdocs.structure.files import File, Files

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig

ROOT = Path(__file__).resolve().parents[1]
FOLDER = "repository"  # folder of the site that holds the files


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Registers the extension that rewrites links."""
    config.markdown_extensions.append(LinksOutOfDocs(files, config))
    return files


class LinksOutOfDocs(Extension):
    """Adds `_LinkChanger` to Python-Markdown."""

    def __init__(self, files: Files, config: MkDocsConfig) -> None:
        super().__init__()
        self.changer = _LinkChanger(files, config)

    def extendMarkdown(self, md: Markdown) -> None:
        """Lets it run before mkdocs checks links, at priority 0."""
        md.treeprocessors.register(self.changer, "links_out_of_docs", priority=1)


class _LinkChanger(Treeprocessor):
    def __init__(self, files: Files, config: MkDocsConfig) -> None:
        super().__init__()
        self.files = files
        self.site_config = config

    def run(self, root: Element) -> None:
        """Changes the links of a page that lead out of docs/. Others, and dead ones, are left for mkdocs to report."""
        for link in root.iter("a"):
            address, _, _ = link.get("href", "").partition("#")
            path = address.removeprefix("../")
            file = (ROOT / path).resolve()
            if path == address or not file.is_relative_to(ROOT) or not file.is_file():
                continue
            if path.endswith(".md"):
                _name_document(link, path)
            elif address not in self.files.src_uris:
                self._publish(address, path)

    def _publish(self, address: str, path: str) -> None:
        """Adds a file to the site, under the address of its links."""
        file = File.generated(self.site_config, address, abs_src_path=str(ROOT / path))
        file.dest_uri = f"{FOLDER}/{path}"
        self.files.append(file)


def _name_document(link: Element, path: str) -> None:
    """Turns a link into its text, followed by the document's path."""
    link.tag = "span"
    link.attrib.clear()
    note = SubElement(link, "span")  # text cannot follow the children of an element otherwise
    note.text = " ("
    code = SubElement(note, "code")
    code.text = path
    code.tail = " of the repository)"
