# SPDX-License-Identifier: Apache-2.0
"""A stand-in for the Hugging Face hub on loopback that serves data sets to `datasets` and `hf download`."""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from fake_score_server import Handler, served

Repositories = dict[str, dict[str, Path]]  # owner/name → revision → folder with its files
Answer = tuple[int, dict[str, str], bytes]  # status, headers, content


def commit_of(revision: str) -> str:
    """The commit that a revision points to here: forty hexadecimal digits."""
    return revision if len(revision) == 40 else hashlib.sha1(revision.encode()).hexdigest()


@contextmanager
def hub_server(repositories: Repositories) -> Iterator[tuple[str, list[str]]]:
    """Serves data sets until the block ends.

    Yields:
        The address, for HF_ENDPOINT, and the growing list of requests ("GET /api/...").
    """
    requests: list[str] = []

    class Hub(Handler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            requests.append(f"{self.command} {unquote(self.path)}")
            span = self.headers.get("Range", "")
            status, headers, content = _respond(repositories, self.path, self.body(), span)
            self.send(status, content, headers)

        do_HEAD = do_POST = do_GET

    with served(Hub) as address:
        yield address, requests


def _respond(repositories: Repositories, target: str, body: bytes, span: str) -> Answer:
    """Status, headers and content for one request; `span` is its Range header."""
    parts = urlsplit(target)
    path = unquote(parts.path)
    for name, revisions in repositories.items():
        if path == f"/api/datasets/{name}" or path.startswith(f"/api/datasets/{name}/"):
            recursive = parse_qs(parts.query).get("recursive") == ["true"]
            return _describe(name, revisions, path.removeprefix(f"/api/datasets/{name}"), body, recursive)
        if path.startswith(f"/datasets/{name}/resolve/"):
            return _send_file(revisions, path.removeprefix(f"/datasets/{name}/resolve/"), span)
    return _missing("RepoNotFound")


def _missing(code: str) -> Answer:
    return 404, {"X-Error-Code": code, "X-Error-Message": code}, b"{}"


def _find(revisions: dict[str, Path], rest: str) -> tuple[str, Path, str] | None:
    """(commit, folder, what follows) of a path that begins with a revision."""
    for revision, folder in revisions.items():
        for name in (revision, commit_of(revision)):
            if rest == name or rest.startswith(name + "/"):
                return commit_of(revision), folder, rest[len(name) :].strip("/")
    return None


def _describe(name: str, revisions: dict[str, Path], rest: str, body: bytes, recursive: bool) -> Answer:
    """What the API says of a repository, a folder of it, or some of its paths."""
    kind, _, place = rest.strip("/").partition("/")
    found = _find(revisions, place or "main")
    if found is None:
        return _missing("RevisionNotFound")
    commit, folder, below = found
    content: Any
    if kind in ("", "revision"):
        siblings = [{"rfilename": str(file.relative_to(folder))} for file in sorted(folder.rglob("*.*"))]
        content = {"id": name, "sha": commit, "siblings": siblings, "tags": [], "private": False, "gated": False}
    elif kind == "tree" and (folder / below).is_dir():
        content = [_entry(path, folder) for path in sorted((folder / below).glob("**/*" if recursive else "*"))]
    elif kind == "paths-info":
        places = json.loads(body)["paths"] if body.startswith(b"{") else parse_qs(body.decode())["paths"]
        content = [_entry(folder / place, folder) for place in places if (folder / place).exists()]
    else:
        return _missing("EntryNotFound")
    return 200, {"Content-Type": "application/json"}, json.dumps(content).encode()


def _send_file(revisions: dict[str, Path], rest: str, span: str) -> Answer:
    """A file, or the part of it that `span` ("bytes=0-99") asks for."""
    found = _find(revisions, rest)
    if found is None:
        return _missing("RevisionNotFound")
    commit, folder, below = found
    if not (folder / below).is_file():
        status, headers, content = _missing("EntryNotFound")
        return status, headers | {"X-Repo-Commit": commit}, content
    content = (folder / below).read_bytes()
    headers = {"X-Repo-Commit": commit, "ETag": f'"{hashlib.sha1(content).hexdigest()}"', "Accept-Ranges": "bytes"}
    if not span:
        return 200, headers, content
    first, _, end = span.removeprefix("bytes=").partition("-")
    last = min(int(end or len(content)), len(content) - 1)
    headers["Content-Range"] = f"bytes {first}-{last}/{len(content)}"
    return 206, headers, content[int(first) : last + 1]


def _entry(path: Path, folder: Path) -> dict[str, Any]:
    place = str(path.relative_to(folder))
    if path.is_dir():
        return {"type": "directory", "oid": hashlib.sha1(place.encode()).hexdigest(), "size": 0, "path": place}
    oid = hashlib.sha1(path.read_bytes()).hexdigest()
    return {"type": "file", "oid": oid, "size": path.stat().st_size, "path": place}
