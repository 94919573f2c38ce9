# SPDX-License-Identifier: Apache-2.0
"""Folders that bring Python code for their model: it is never run, not even if somebody on standard input says yes."""

import ast
import io
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from dschat.base.errors import UserError
from dschat.models.classifiers import load_classifier, load_scalar
from dschat.models.limits import check_length
from dschat.models.load import load_causal_lm
from dschat.models.pretrained import open_config
from dschat.models.tokenizer import load_tokenizer
from dschat.scoring.reward_tokenizer import load_reward_tokenizer
from factories import make_tokenizer

ROOT = Path(__file__).resolve().parents[2]
FP32 = torch.float32
# What a folder says is ignored where a class is named that transformers or peft holds itself.
NAMED = {"GemmaConfig", "GemmaForCausalLM", "GemmaForSequenceClassification", "GenerationConfig", "LoraConfig"}
NAMED |= {"PeftModel"}


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """A model whose code, once it is run, leaves a file `ran`; and somebody who says yes to everything."""
    place = tmp_path / "own"
    place.mkdir()
    (place / "code.py").write_text(f"open({str(place / 'ran')!r}, 'w').close()\nraise ValueError('own code')\n")
    names = ("AutoConfig", "AutoModel", "AutoModelForCausalLM", "AutoModelForSequenceClassification")
    config = {"model_type": "own", "auto_map": {name: "code.Own" for name in names}}
    (place / "config.json").write_text(json.dumps(config))
    tokenizer = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["code.Own", None]}}
    (place / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 9))
    return place


@pytest.mark.parametrize(
    "open_it",
    [
        open_config,
        partial(check_length, tokens=5, what="5"),
        partial(load_causal_lm, dtype=FP32, tokenizer=None),
        partial(load_scalar, dtype=FP32, tokenizer=None),
        lambda path, flag: load_classifier(path, flag, FP32, make_tokenizer()),
        load_tokenizer,
        lambda path, flag: load_reward_tokenizer(path, False),
    ],
)
def test_code_of_a_folder_is_not_run(open_it, folder) -> None:
    with pytest.raises(
        UserError, match=rf"--reward_model {folder}: .*needs Python code of its own \(auto_map\), which is never run"
    ):
        open_it(str(folder), "--reward_model")
    assert not (folder / "ran").exists()


def calls_that_open() -> Iterator[tuple[str, ast.Call]]:
    """Place and call, of every call in the sources that opens what may bring code, but for classes in NAMED."""
    sources = [path for part in ("applications", "inference", "evaluation", "Constituent-Treelib", "examples")
               for path in sorted((ROOT / part).rglob("*.py"))]  # fmt: skip
    for path in sources:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call):
                continue
            words = ast.unparse(node.func).split(".")
            owner, name = words[-2] if len(words) > 1 else "", words[-1]
            opens = name == "from_pretrained" and owner not in NAMED
            opens |= name in ("from_config", "from_model_id") and owner.startswith("Auto")
            if opens or name in ("LLM", "pipeline"):
                yield f"{path.relative_to(ROOT)}:{node.lineno}", node


def test_every_call_says_that_no_code_is_run() -> None:
    calls = list(calls_that_open())
    silent = [
        place
        for place, call in calls
        if not any(word.arg == "trust_remote_code" and ast.unparse(word.value) == "False" for word in call.keywords)
    ]
    assert not silent
    assert len(calls) > 12, "the search finds what it looks for"
