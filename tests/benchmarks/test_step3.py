# SPDX-License-Identifier: Apache-2.0
"""The benchmark of step 3: contenders do the same work, their figures add up, and the document gets its tables."""

from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
import torch
from transformers import AutoModel, AutoTokenizer

import harness
from benchmark_runs import run_benchmark
from contenders import work
from contenders.meter import PHASES, Meter

TINY = "--sizes tiny --repeats 1"
WORK = work.IterationWork(work.SIZES["tiny"], 4, 2, 3, 9, 40)


@pytest.mark.slow
def test_equal_lengths(tmp_path: Path) -> None:
    """Plain PyTorch and ours sample as many tokens; the phases make up the whole; TRL is left out by name."""
    document = tmp_path / "performance.md"
    first, last = "<!-- step3 tiny, equal -->\n", "<!-- /step3 tiny, equal -->\n"
    document.write_text(f"before\n{first}old\n{last}after\n", encoding="utf-8")
    figures = run_benchmark(
        "step3.py", f"{TINY} --lengths equal --contenders plain_pytorch_scoring ours trl --markdown {document}"
    )
    rows = figures["tiny, equal"]
    assert rows["TRL PPOTrainer"] == {"not_measured": "no --trl_python"}
    for name in ("plain PyTorch + scoring passes", "ours"):
        cpu = rows[name]["cpu_seconds"]
        assert rows[name]["tokens"] == 8 * 6
        assert cpu["total"] == pytest.approx(sum(cpu[phase] for phase in PHASES), abs=1e-3)
        assert min(cpu[phase] for phase in PHASES[:3]) > 0
    assert min(rows["ours"]["positions_per_token"].values()) >= 1
    inside = rows["ours"]["function_seconds"].values()
    assert min(inside) > 0 and sum(inside) < rows["ours"]["cpu_seconds"]["total"]
    text = document.read_text(encoding="utf-8")
    assert text.startswith(f"before\n{first}`python step3.py ") and text.endswith(f"{last}after\n")
    assert "| ours |" in text and "old" not in text


def test_parts_of_the_time_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """A forward pass inside sampling is booked once, as what it is; the clock shows one second more at every look."""
    clock = count(0.0)
    monkeypatch.setattr("contenders.meter.time.process_time", lambda: next(clock))
    meter = Meter(None)
    forward = meter.measured("forward", lambda: None)
    meter.measured("sampling", lambda: [forward(), forward()])()
    forward()
    assert meter.figures.function_seconds == {"forward": 3, "sampling": 3}


def test_lengths_of_responses() -> None:
    """The actor's own probability of EOS gives the mean that was asked for, or none at all; pad is never drawn."""
    asked = replace(WORK, mean_response=11.0)
    ids = torch.randint(2, 64, (64, 49), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        ragged = work.make_actor(asked)(ids).logits[:, 8:-1].softmax(-1)
        equal = work.make_actor(WORK)(ids).logits.softmax(-1)
    reached = (1 - ragged[..., work.EOS].double()).cumprod(1)
    mean = 1 + reached[:, :-1].sum(1).mean()  # token t + 1 is there if none of the first t was EOS
    assert float(mean) == pytest.approx(11.0, rel=0.05)
    assert float(equal[..., work.EOS].max()) < 1e-9 and float(ragged[..., work.PAD].max()) < 1e-9


def test_models_of_a_run_that_was_cut_short_are_made_again(tmp_path: Path) -> None:
    (tmp_path / "actor").mkdir()
    (tmp_path / "actor" / "model.safetensors").write_bytes(b"half")
    work.make_files(WORK, tmp_path)
    for name in ("actor", "reward"):
        assert AutoModel.from_pretrained(tmp_path / name).config.hidden_size == 16
        assert AutoTokenizer.from_pretrained(tmp_path / name).eos_token_id == work.EOS
    written = (tmp_path / "actor" / "model.safetensors").stat().st_mtime_ns
    work.make_files(WORK, tmp_path)
    assert (tmp_path / "actor" / "model.safetensors").stat().st_mtime_ns == written


def test_a_document_without_the_section_is_refused(tmp_path: Path) -> None:
    document = tmp_path / "a.md"
    document.write_text("nothing", encoding="utf-8")
    with pytest.raises(ValueError, match="no section between"):
        harness.write_section(document, "step3", "text")
