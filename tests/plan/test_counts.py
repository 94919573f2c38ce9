# SPDX-License-Identifier: Apache-2.0
"""The rows that a plan counts: those that the run reads, or those of a published set by its size."""

from pathlib import Path

from dschat.base.jsonl import write_rows
from dschat.data.sources import load_share
from dschat.plan.counts import find_sources
from dschat.settings.supervised import SFTConfig


def write(file: str, numbers: range) -> None:
    write_rows(Path(file), [{"prompt": f"Question {number}", "response": "R"} for number in numbers])


def config_of(*data_path: str) -> SFTConfig:
    return SFTConfig(data_path=list(data_path), output_dir="o", model_name_or_path="m", eval_iters=0)


def test_prompts_that_sources_share():
    """Questions 0 to 9 are evaluation rows of b, so that a does not train on them either; 2 of a's 40 are held out."""
    write("a.jsonl", range(40))
    write("b/train.jsonl", range(100, 140))
    write("b/test.jsonl", range(10))
    config = config_of("a.jsonl", "b")
    a, b = find_sources(config)
    assert 28 <= a["train"] <= 30 and a["train"] + a["eval"] == 40 and (b["train"], b["eval"]) == (40, 10)
    assert [a, b] == load_share(config).sources


def test_a_published_set_is_read_from_its_copy_alone(monkeypatch):
    """SFT gets 2 of 10 parts. Without a copy, the published 112,052 rows count, and ./hh is another set."""
    write("hh/train.jsonl", range(20))
    (source,) = find_sources(config_of("hh"))
    assert source["train"] == 22_410 and source["is_estimate"]
    (source,) = find_sources(config_of("./hh"))
    assert source["train"] == 19 and "is_estimate" not in source

    write("copies/hh/train.jsonl", range(50))
    write("copies/hh/test.jsonl", range(50, 60))
    monkeypatch.setenv("MA_RLHF_DATA", "copies")
    (source,) = find_sources(config_of("hh"))
    assert (source["train"], source["eval"]) == (10, 2)


def test_parts_of_a_published_set(monkeypatch):
    """webgpt has 19,578 rows and no evaluation split: 979 are held out, and the steps share 2, 4 and 4 of 10 parts."""
    counted = []
    for step in (1, 2, 3):
        monkeypatch.setattr(SFTConfig, "step", step)
        (source,) = find_sources(config_of("webgpt"))
        counted.append((source["train"], source["eval"]))
    assert counted == [(3719, 195), (7440, 392), (7440, 392)]
