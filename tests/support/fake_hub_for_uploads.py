# SPDX-License-Identifier: Apache-2.0
"""A stand-in for the Hugging Face hub on loopback that accepts uploads: repositories, large files, commits."""

import base64
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote, urlsplit

from fake_score_server import Handler, served

TOKEN = "hf_" + "x" * 20  # the one that may write
READER = "hf_" + "r" * 20  # one that may not
LARGE = ".safetensors"  # what goes into the large-file store
COMMIT = "c" * 40


@dataclass
class Repository:
    """What was pushed."""

    private: bool
    files: dict[str, bytes] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)


@contextmanager
def upload_server(repositories: dict[str, Repository]) -> Iterator[str]:
    """Serves until the block ends; repositories are made and filled in the dictionary. Yields the address."""
    large: dict[str, bytes] = {}

    class Hub(Handler):
        protocol_version = "HTTP/1.1"

        def do_PUT(self) -> None:
            large[self.path.rpartition("/")[2]] = self.body()
            self._say(200, {})

        def do_GET(self) -> None:
            body = self.body()
            token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
            path = unquote(urlsplit(self.path).path)
            if path == "/api/validate-yaml":
                self._say(200, {"errors": [], "warnings": []})
            elif token not in (TOKEN, READER):
                self._say(401, {"error": "Invalid credentials in Authorization header"})
            elif token == READER:
                self._say(403, {"error": "You don't have the rights to create a model under the namespace me"})
            else:
                self._say(*_respond(repositories, large, path, body, f"http://{self.headers['Host']}"))

        do_POST = do_GET

        def _say(self, status: int, content: Any) -> None:
            headers = {"Content-Type": "application/json"}
            if status >= 400:
                headers["X-Error-Message"] = content["error"]
            self.send(status, json.dumps(content).encode(), headers)

    with served(Hub) as address:
        yield address


def _respond(
    repositories: dict[str, Repository], large: dict[str, bytes], path: str, body: bytes, address: str
) -> tuple[int, Any]:
    if path == "/api/repos/create":
        asked = json.loads(body)
        name = f"{asked['organization']}/{asked['name']}" if asked.get("organization") else asked["name"]
        if name in repositories:
            return 409, {"error": "You already created this model repo", "url": f"{address}/{name}"}
        repositories[name] = Repository(asked.get("visibility") == "private" or bool(asked.get("private")))
        return 200, {"url": f"{address}/{name}", "name": name, "id": "1"}
    name = "/".join(path.removeprefix("/api/models").strip("/").split("/")[:2]).removesuffix(".git")
    repository = repositories[name]
    if path.endswith("/preupload/main"):
        names = [file["path"] for file in json.loads(body)["files"]]
        mode = {True: "lfs", False: "regular"}
        return 200, {
            "files": [{"path": n, "uploadMode": mode[n.endswith(LARGE)], "shouldIgnore": False} for n in names]
        }
    if path.endswith("/info/lfs/objects/batch"):
        objects = [
            {"oid": o["oid"], "size": o["size"], "actions": {"upload": {"href": f"{address}/store/{o['oid']}"}}}
            for o in json.loads(body)["objects"]
        ]
        return 200, {"transfer": "basic", "objects": objects}
    if path.endswith("/commit/main"):
        for line in map(json.loads, body.decode().splitlines()):
            value = line["value"]
            if line["key"] == "header":
                repository.messages.append(value["summary"])
            elif line["key"] == "file":
                repository.files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                repository.files[value["path"]] = large[value["oid"]]
            elif line["key"] == "deletedFile":
                del repository.files[value["path"]]
        return 200, {"commitUrl": f"{address}/{name}/commit/{COMMIT}", "commitOid": COMMIT, "success": True}
    siblings = [{"rfilename": file} for file in repository.files]
    return 200, {"id": name, "sha": COMMIT, "private": repository.private, "siblings": siblings, "tags": []}
