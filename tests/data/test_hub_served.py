# SPDX-License-Identifier: Apache-2.0
"""The real `datasets` and `hf` against a stand-in for the hub that holds all sets as they are there."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from dschat.data.known_sets import KNOWN_SETS
from dschat.data.sources import load_source
from fake_hub import hub_server
from published_set_copies import ANTHROPIC_PARTS, write_hub

pytestmark = pytest.mark.xdist_group("hub")  # one process makes what they share

PACKAGE = Path(__file__).resolve().parents[2] / "applications" / "DeepSpeed-Chat"
PROGRAM = """
import dataclasses, json
from dschat.data import known_sets as registry
from dschat.data.sources import load_source
small = []
for known in registry.KNOWN_SETS:
    parts = 4 if known.name == "anthropic-hh" else 1
    small.append(dataclasses.replace(known, train_rows=40 * parts, eval_rows=known.eval_rows and 20 * parts))
registry.KNOWN_SETS = tuple(small)
for known in small:
    source = load_source(known.name)
    print(json.dumps([known.name, len(source.train), len(source.eval), source.train[0].prompt, source.hub]))
"""


def start(command, **variables):
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "MA_RLHF"))}
    changes = {"PYTHONPATH": str(PACKAGE), "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=kept | changes | variables, stdout=pipe, stderr=pipe, text=True)


def result_of(process):
    stdout, stderr = process.communicate(timeout=240)
    return {"stdout": stdout, "stderr": stderr, "returncode": process.returncode}


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """Each set loaded from the stand-in; loaded again offline; downloaded by the commands of the messages."""
    folder = tmp_path_factory.mktemp("hub")
    repositories = write_hub(folder / "repositories", rows=40, eval_rows=20)
    with hub_server(repositories) as (address, requests):
        place = {"HF_ENDPOINT": address, "HF_HOME": str(folder / "home")}
        online = result_of(start([sys.executable, "-c", PROGRAM], **place))
        asked = list(requests)
        commands = {known.name: known.fetch_command(folder / "copies" / known.name) for known in KNOWN_SETS}
        hf = str(Path(sys.executable).with_name("hf"))
        fetching = {name: start([hf, *shlex.split(words)[1:]], **place) for name, words in commands.items()}
        offline = start([sys.executable, "-c", PROGRAM], **place, HF_HUB_OFFLINE="1")
        fetched = {name: result_of(process) for name, process in fetching.items()}
    done = {"online": online, "offline": result_of(offline), "asked": asked, "fetched": fetched}
    return SimpleNamespace(**done, copies=folder / "copies")


def answers(result):
    assert result["returncode"] == 0, result["stdout"] + result["stderr"]
    return {line[0]: line[1:] for line in map(json.loads, result["stdout"].splitlines())}


def test_every_form_works_with_the_library(served):
    found = answers(served.online)
    assert {name: line[:2] for name, line in found.items()} == {
        "tldr": [40, 20],
        "hh": [40, 20],
        "webgpt": [38, 2],
        "apps": [40, 20],
        "gsm8k": [40, 20],
        "anthropic-hh": [160, 80],
    } | dict.fromkeys(ANTHROPIC_PARTS, [40, 20])
    assert found["tldr"][2].startswith("POST\nSubreddit: r/")
    assert found["tldr"][3]["revision"] == "refs/convert/parquet"
    assert found["helpful-base"][3]["id"] == "Anthropic/hh-rlhf/helpful-base"


def test_no_script_of_a_repository_is_fetched(served):
    """A script would also have ended the process with status 77."""
    assert served.asked and not [line for line in served.asked if line.startswith("GET") and ".py" in line]


def test_what_was_loaded_once_loads_offline(served):
    online, offline = answers(served.online), answers(served.offline)
    assert {name: line[:3] for name, line in offline.items()} == {name: line[:3] for name, line in online.items()}
    assert "using an earlier download in" in served.offline["stderr"]


@pytest.mark.parametrize("name", ["tldr", "hh", "webgpt", "apps", "gsm8k", "anthropic-hh", "helpful-online"])
def test_downloaded_copies_are_read(name, served, monkeypatch):
    assert served.fetched[name]["returncode"] == 0, served.fetched[name]["stderr"]
    folder = served.copies / name
    files = [file for file in folder.rglob("*") if file.is_file() and ".cache" not in file.parts]
    assert files and not [file for file in files if file.suffix not in (".jsonl", ".parquet", ".gz")]
    train, held_out = {"webgpt": (38, 2), "anthropic-hh": (160, 80)}.get(name, (40, 20))
    monkeypatch.setenv("MA_RLHF_DATA", str(served.copies))
    for path in (name, folder):
        source = load_source(path)
        assert (len(source.train), len(source.eval), source.hub) == (train, held_out, None)
