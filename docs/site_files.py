# SPDX-License-Identifier: Apache-2.0
"""A hook of mkdocs: files of the repository that pages link to, such as ../examples/reward.py, come with the site."""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = Path(__file__).resolve().parents[1]
OUTSIDE = re.compile(r"\]\(\.\./([^)#\s]+)")
CODE = r"(?<!`)(?P<ticks>`+)(?!`).*?(?<!`)(?P=ticks)(?!`)"
LABEL = r"\[(?P<label>(?:[^\[\]]|\[[^\[\]]*\])*)\]"
DOCUMENT = r"\(\.\./(?P<path>[^)#\s]+\.md)(?:#[^)\s]*)?(?:\s+\"[^\"]*\")?\)"
CODE_OR_LINK = re.compile(f"{CODE}|{LABEL}{DOCUMENT}", re.DOTALL)
FOLDER = "repository"  # folder of the site that holds the files


def on_files(files: Files, config: Any) -> Files:
    """Adds each such file under the path of its links, and writes it into `FOLDER`.

    A file that does not exist is left for the strict build to complain about.
    """
    names: set[str] = set()
    for page in files.documentation_pages():
        names.update(OUTSIDE.findall(page.content_string))
    for name in sorted(names):
        if (ROOT / name).is_file() and not name.endswith(".md"):
            # Included, although mkdocs leaves out paths that begin with a dot.
            file = File.generated(
                config, f"../{name}", abs_src_path=str(ROOT / name), inclusion=InclusionLevel.INCLUDED
            )
            file.dest_uri = f"{FOLDER}/{name}"
            files.append(file)
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Names documents of other folders instead of linking to them, since their own links would not work."""
    return CODE_OR_LINK.sub(_without_link, markdown)


def _without_link(match: re.Match[str]) -> str:
    if match["path"] is None:  # code
        return match[0]
    return f"{match['label']} (`{match['path']}` of the repository)"
