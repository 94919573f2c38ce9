# SPDX-License-Identifier: Apache-2.0
"""The page and the picture of a report: complete in themselves, escaped, of the expected size."""

import json
import math

import pandas as pd
import pytest

from dschat.evaluation.chart import draw_charts
from dschat.evaluation.run_data import read_log
from dschat.evaluation.run_page import run_charts, smooth
from dschat.evaluation.runs import build_report
from handmade_runs import Page, edit_rows, make_run, tables_of, write_lines

SCRIPT = "<script>alert('x')</script>"


def read_page(folder) -> Page:
    return Page((folder / "report.html").read_text(encoding="utf-8"))


def test_text_of_models_prompts_and_names_is_escaped(tmp_path, no_pictures):
    name = f"run {SCRIPT}"
    run = make_run(tmp_path / "a", [0.4, 0.6], prompts=(f"p {SCRIPT}", "p1"), text=f" {SCRIPT}\n")
    build_report(
        {name: run}, tmp_path / "out", title=f"title {SCRIPT}", about=[f"about {SCRIPT}"], notes=[f"note {SCRIPT}"]
    )
    page = read_page(tmp_path / "out")
    assert not any(tag == "script" for tag, _ in page.elements)
    assert not any(attribute.startswith("on") for _, attrs in page.elements for attribute in attrs)
    for text in (name, f"p {SCRIPT}", f" {SCRIPT}\n" * 3, f"title {SCRIPT}", f"about {SCRIPT}", f"note {SCRIPT}"):
        assert text in page.text
    assert json.dumps([f" {SCRIPT}\n"]) in page.text  # a flag in the settings


def test_page_needs_nothing_from_outside(built):
    page = built.page
    assert not {"link", "iframe", "object", "script"} & {tag for tag, _ in page.elements}
    assert not any("href" in attrs for _, attrs in page.elements)
    images = [attrs["src"] for tag, attrs in page.elements if tag == "img"]
    assert len(images) == 5 and all(image.startswith("data:image/png;base64,") for image in images)


def test_page_shows_every_model_with_its_spans(built):
    page = built.page
    # Two prompts: SFT and MA-PPO have macro actions of 2 and 1 tokens, PPO three of 1; the legend has five.
    assert len(page.of_class("ma-panel")) == 6
    assert len(page.of_class("ma")) == 2 * (2 + 3 + 2) + 5
    assert len(page.of_class("tk")) == 2 * 9
    assert "gold score 0.900 · reward-model score 9.000 · 3 tokens · ended by EOS" in page.text
    assert "macro actions as in MA-PPO" in page.text


def test_page_holds_the_tables_and_sentences(built):
    outcome, text = built.outcome, built.page.text
    tables = tables_of(outcome).values()
    assert all("".join(row) in text for table in tables for row in (table.headers, *table.rows))
    order = [outcome.title, outcome.lead, "About.", "Learning curves", "Responses before and after", "Results"]
    places = [text.rindex(part) for part in [*order, "Differences between the runs", "A remark.", "All flags"]]
    assert places == sorted(places), "the result, how it came about, the numbers, and what few read"


def test_responses_without_tokens_are_counted_but_not_shown(two_runs, tmp_path, no_pictures):
    path = two_runs["PPO"] / "samples" / "update-000010.jsonl"
    edit_rows(path, lambda index, row: row if index == 0 else {key: row[key] for key in row if key != "tokens"})
    outcome = build_report(two_runs, tmp_path / "out")
    assert "2 held-out prompts, paired" in outcome.text()
    assert len(read_page(tmp_path / "out").of_class("ma-panel")) == 3


def test_a_prompt_that_was_answered_twice_is_shown_once(tmp_path, no_pictures):
    run = make_run(tmp_path / "a", [0.4, 0.6], prompts=("p0", "p0"))
    build_report({"PPO": run}, tmp_path / "out")
    assert len(read_page(tmp_path / "out").of_class("ma-panel")) == 2


def test_the_seventh_run_is_drawn_as_the_legend_shows_it(two_runs):
    """Dashed, and with hollow markers: the first one's colour comes again. One line of each run has a label."""
    chart = run_charts([read_log("run", two_runs["PPO"])] * 7, {})[0]
    first, seventh = chart.lines[:4], chart.lines[24:]
    assert {line.look["color"] for line in (*first, *seventh)} == {first[0].look["color"]}
    assert [line.look.get("linestyle", "-") for line in (*first, *seventh)] == [*"---", "none", *["--"] * 3, "none"]
    assert "markerfacecolor" not in first[-1].look and seventh[-1].look["markerfacecolor"] == "white"
    assert [bool(line.look["label"]) for line in chart.lines] == [True, False, False, False] * 7


def test_curves_are_drawn_whatever_runs_are_called(two_runs, recwarn):
    """A name may be no mathematics to be typeset, or begin with an underscore."""
    logs = [read_log(name, two_runs["PPO"]) for name in ("$x_^ odd", "_hidden", "_")]
    charts = run_charts(logs, {})
    assert [chart.title for chart in charts] == [
        *("Score", "KL to SFT per sequence", "Response length", "Critic's explained variance")
    ]
    assert len(draw_charts(charts[:1], (5, 4))) > 5_000
    assert not [warning for warning in recwarn if "label" in str(warning.message)]


def test_a_run_has_the_curves_of_what_it_logged(tmp_path):
    (tmp_path / "run.json").write_text('{"step": "reward"}')
    (tmp_path / "train_config.json").write_text("{}")
    row = {"update": 1, "samples": 8, "seconds": 1.0, "eval/loss": 1.0, "eval/accuracy": 0.5}
    write_lines(tmp_path / "metrics.jsonl", [row])
    charts = run_charts([read_log("run", tmp_path)], {})
    assert [chart.title for chart in charts] == ["Loss", "Accuracy"]


def test_a_curve_that_cannot_be_drawn_leaves_the_page(two_runs, tmp_path, monkeypatch, caplog):
    def broken(*_, **__):
        assert (tmp_path / "out" / "report.json").exists()
        raise RuntimeError("no font")

    monkeypatch.setattr("dschat.evaluation.run_page.draw_charts", broken)
    build_report(two_runs, tmp_path / "out")
    page = read_page(tmp_path / "out")
    assert "from 0.200 to 0.700" in page.text and not any(tag == "img" for tag, _ in page.elements)
    assert "KL to SFT per sequence could not be drawn (RuntimeError: no font)" in caplog.text


def test_smoothing_is_a_centred_mean():
    """Of 40 values a tenth is 4, so two on each side."""
    values = pd.Series([0.0] * 20 + [5.0] + [0.0] * 19)
    assert smooth(values)[18:23].tolist() == pytest.approx([1.0] * 5)
    assert smooth(values).sum() == pytest.approx(5.0)
    assert smooth(pd.Series([1.0, math.nan, 3.0])).tolist() == [1.0, 2.0, 3.0]
