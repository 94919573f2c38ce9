# SPDX-License-Identifier: Apache-2.0
"""A hook of mkdocs: files of the repository that pages link to, such as ../examples/reward.py, come with the site."""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
OUTSIDE = re.compile(r"\]\(\.\./([^)#\s]+)")
DOCUMENT = re.compile(r"\[([^\]]*)\]\(\.\./([^)#\s]+\.md)(?:#[^)\s]*)?\)")
FOLDER = "repository"  # of the site


def on_files(files: Files, config: Any) -> Files:
    """Adds each such file; one that does not exist is left for the strict build to complain about."""
    pages = list(files.documentation_pages())
    for name in sorted({name for page in pages for name in OUTSIDE.findall(page.content_string)}):
        if (ROOT / name).is_file() and not name.endswith(".md"):
            files.append(File.generated(config, f"{FOLDER}/{name}", abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Leads the links there; documents of other folders are named instead, since their own links would not work."""
    named = DOCUMENT.sub(r"\1 (`\2` of the repository)", markdown)
    return OUTSIDE.sub(rf"]({FOLDER}/\1", named)
