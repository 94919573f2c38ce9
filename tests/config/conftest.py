# SPDX-License-Identifier: Apache-2.0
"""Each test of flags runs as a single process, in a folder of its own with the files that the flags name."""

import pytest

MODULE = """
import math as numbers
from os.path import join
try:
    import json
except ImportError:
    json = None
    fallback = 1
if True:
    annotated: int = 1
else:
    other = 2
class Scorer: ...
first = second = 1
some.attribute = 3
def f(prompts, responses, rows):
    raise SystemExit("a check must not run this")
def score(prompts, responses, rows):
    inner = 1
    raise SystemExit("a check must not run this")
raise SystemExit("a check must not run this")
"""
FILES = {
    "score.py": MODULE,
    "star.py": "from os.path import *\n",
    "null.py": "x = 1\0",
    "broken.py": "def (:\n",
    "metric.py": "def kl(prompts, responses, rows): ...\n",
    "ds.json": '{"steps_per_print": 1}',
    "list.json": "[]",
    "rubric.toml": 'task = "Grade."\n[criteria]\nbrevity = "Is it short?"\n',
    "ranking.toml": 'task = "Rank."\njudge = "ranking"\n',
    "broken.json": "{",
    "stage.json": '\ufeff{"zero_optimization": {"stage": 0}}',  # with a byte-order mark
    "file": "",
}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr("dschat.settings.rollouts.find_spec", lambda name: None)  # vLLM is not installed
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    return tmp_path
