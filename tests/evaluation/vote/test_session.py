# SPDX-License-Identifier: Apache-2.0
"""What a rater sees: sides, text, guidelines; the session, the file of votes, and the answers to the browser."""

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from cli_runs import write_jsonl
from dschat.base.errors import UserError
from dschat.evaluation.responses import comparison_of, read_pairs
from dschat.evaluation.vote.page import Screens, answer, escaped, page_html
from dschat.evaluation.vote.sessions import RaterView, VoteFile, items_for, rater_name
from vote_runs import make_study, votes, write_responses


def items_of(first, second, rater="anna", seed=42):
    return items_for(read_pairs(first, "-a", second, "-b"), rater, seed)


@pytest.mark.parametrize(
    ("seed", "rater", "expected"),
    [(42, "anna", "ABBAAABB"), (42, "Anna", "ABBAAABB"), (42, "ben", "BBBAAAAB"), (43, "anna", "BAAABABB")],
)
def test_sides_follow_from_seed_rater_and_texts(tmp_path, seed, rater, expected):
    """Worked out with sha256sum; they must not change, or a study begun before would change its sides."""
    items = items_of(*write_responses(tmp_path, 8), rater, seed)
    assert "".join(item.first for item in items) == expected


def test_a_pair_of_the_same_texts_is_asked_once(tmp_path):
    file = write_jsonl(tmp_path / "a.jsonl", [{"prompt": prompt, "response": "r"} for prompt in "pqp"])
    assert [item.pair.prompt for item in items_of(file, file)] == ["p", "q"]


def test_the_page_escapes_every_text_that_it_shows():
    """Whatever a template or a browser could obey."""
    assert escaped("&\"'`{{y}}@x\\") == "&#38;&#34;&#39;&#96;&#123;&#123;y&#125;&#125;&#64;x&#92;"
    text, html = "<b>${x}", "&#60;b&#62;&#36;&#123;x&#125;"
    pair = SimpleNamespace(id="0f", prompt=text)
    view = RaterView(SimpleNamespace(pair=pair, responses=(text, text)), voted=1, total=3, last=None)
    macros = page_html()
    shown = [macros.item(view), macros.progress(view, text), macros.note(text), macros.guidelines([(text, text)])]
    assert [part.count(html) for part in shown] == [3, 1, 1, 2]
    assert not any("<b>" in part or "$" in part for part in shown)
    assert macros.note("") == macros.item(RaterView(None, 3, 3, None)).strip() == ""


@pytest.mark.parametrize("name", ["  ", "x" * 61, "a\x1b[2J"])
def test_a_rater_needs_a_name(name):
    with pytest.raises(UserError, match="--rater"):
        rater_name(name)
    assert rater_name("  Anna   Ö. ") == "Anna Ö."


# The session


def vote_all(session, choices):
    for choice in choices:
        assert session.vote(session.view().item.pair.id, choice)


def test_a_vote_becomes_a_row_that_the_report_reads(tmp_path, monkeypatch):
    session = make_study(tmp_path, 3).session("Anna")
    monkeypatch.setattr("time.monotonic", lambda: 100.0)
    item = session.view().item
    monkeypatch.setattr("time.monotonic", lambda: 112.34)
    assert session.vote(item.pair.id, "1", " clear, and \n short ")
    row = votes(tmp_path)[0]
    texts = {"id": item.pair.id, "prompt": "prompt 0", "response_a": "good 0", "response_b": "bad 0"}
    verdict = {"verdict": "A" if item.responses[0] == "good 0" else "B", "kind": "human", "rater": "Anna"}
    models = {"model_a": "kestrel", "model_b": "osprey", "dataset": ""}
    assert row == texts | verdict | models | {"first": item.first, "comment": "clear, and \n short", "seconds": 12.3}
    vote = comparison_of(row, "votes.jsonl:1")
    assert (vote.kind, vote.details["first"]) == ("human", item.first)


def test_votes_that_are_given_at_the_same_time_are_all_kept(tmp_path):
    """By 4 raters on 6 pairs each, as a page's threads do."""
    study = make_study(tmp_path, 6)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda name: vote_all(study.session(name), "121212"), ["anna", "ben", "cleo", "dan"]))
    found = Counter(row["rater"] for row in votes(tmp_path))
    assert found == {"anna": 6, "ben": 6, "cleo": 6, "dan": 6}
    assert not list(tmp_path.glob(".*"))


def test_a_rater_who_comes_back_goes_on_under_the_same_name(tmp_path):
    vote_all(make_study(tmp_path, 3).session("Anna"), "12")
    session = make_study(tmp_path, 3).session("anna ")
    assert session.view().item.pair.prompt == "prompt 2"
    vote_all(session, "3")
    assert [row["rater"] for row in votes(tmp_path)] == ["Anna"] * 3


def test_undo_takes_back_the_vote_that_the_rater_means(tmp_path):
    session = make_study(tmp_path, 3).session("anna")
    vote_all(session, "12")
    first, second = (row["id"] for row in votes(tmp_path))
    assert session.undo(first) is None and len(votes(tmp_path)) == 2
    assert session.undo(second).id == second
    assert session.view().item.pair.id == second
    assert session.undo(second) is None, "a second press of the same undo takes nothing more"
    assert session.undo(first).prompt == "prompt 0"
    assert votes(tmp_path) == [] and session.view().last is None
    last = session.study.pairs[2].id  # is shown again even if others are open before it
    session.vote(last, "1")
    assert session.view(session.undo(last).id).item.pair.prompt == "prompt 2"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"kind": "judge"}, "a verdict of kind 'judge', not a person's vote"),
        ({"id": "0" * 16}, "a vote on responses that the two files do not hold"),
        ({"model_b": "heron"}, "a vote on kestrel and heron, and now it is kestrel and osprey"),
        ({"verdict": "maybe"}, "verdict must be one of"),
        ({"dataset": "webgpt"}, "a vote with --dataset 'webgpt', and now it is "),
    ],
)
def test_a_file_of_something_else_is_refused_and_left_alone(tmp_path, change, words):
    vote_all(make_study(tmp_path, 3).session("anna"), "12")
    rows = votes(tmp_path)
    content = [rows[0], rows[1] | change]
    write_jsonl(tmp_path / "votes.jsonl", content)
    with pytest.raises(UserError) as error:
        make_study(tmp_path, 3)
    assert f"{tmp_path / 'votes.jsonl'}:2: {words}" in str(error.value)
    assert votes(tmp_path) == content


def test_a_place_that_cannot_be_written_is_named_before_the_first_question(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"--output .*file/votes\.jsonl: cannot be written"):
        VoteFile(tmp_path / "file" / "votes.jsonl")


# The answers to the browser


def test_a_vote_of_another_tab_is_on_the_item_that_was_shown(tmp_path):
    screens = Screens(make_study(tmp_path, 3))
    shown = screens.enter("Tabea").view.item.pair.id
    assert screens.vote("3", "Tabea", shown, "").note == ""
    late = screens.vote("4", "tabea", shown, "")
    assert "did not count" in late.note and late.view.item.pair.prompt == "prompt 1"
    screens.vote("4", "Tabea", late.view.item.pair.id, "")
    assert "Nothing was taken back" in screens.undo("Tabea", shown).note
    assert [row["verdict"] for row in votes(tmp_path)] == ["tie", "skip"]


def test_a_full_disk_is_said_and_the_item_stays(tmp_path, monkeypatch):
    screens = Screens(make_study(tmp_path, 2))
    item = screens.enter("Anna").view.item

    def fails(_):
        raise OSError("no space")

    monkeypatch.setattr("dschat.base.atomic.flush", fails)
    screen = answer(screens.vote, "1", "Anna", item.pair.id, "why")
    assert screen.view is None and "votes.jsonl: cannot be written: no space" in screen.note
