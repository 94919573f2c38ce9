# SPDX-License-Identifier: Apache-2.0
"""Prompt and response strings of the published sets, each written out, and the message for every kind of bad row."""

import pytest

from dschat.base.errors import UserError
from dschat.data.examples import prompt_examples, sft_examples
from dschat.data.formats import parse_row, without_citations
from dschat.data.sources import load_source
from dschat.settings.common import ColumnFlags
from published_set_copies import BIG, write_set

KEYS = ColumnFlags()
SUMMARIES = [{"text": " first ", "policy": "a", "note": None}, {"text": "second", "policy": "b", "note": None}]


def parsed(raw):
    row = parse_row(raw, KEYS, "rows.jsonl:7")
    assert row is not None
    return row


# TL;DR


@pytest.mark.parametrize(
    ("info", "prompt"),
    [
        (
            {"id": "t3", "post": "I lost it.\n\nHelp.", "title": "Lost", "subreddit": "tifu", "article": None},
            "POST\nSubreddit: r/tifu\nI lost it.\n\nHelp.\nTL;DR: ",
        ),
        ({"post": "P", "subreddit": None, "title": "T"}, "POST\nP\nTL;DR: "),
        ({"article": "A", "post": None, "subreddit": "news"}, "ARTICLE\nSubreddit: r/news\nA\nTL;DR: "),
    ],
)
def test_tldr(info, prompt):
    for choice, texts in ((0, (" first ", "second")), (1, ("second", " first "))):
        row = parsed({"info": info, "summaries": SUMMARIES, "choice": choice})
        assert (row.prompt, row.chosen, row.rejected) == (prompt, *texts)


# WebGPT


def webgpt(answer_0="Yes.", answer_1="No.", score_0=1.0, score_1=-1.0, **columns):
    question = {"dataset": "eli5", "id": "1", "full_text": "Why is it so?"}
    answers = {"answer_0": answer_0, "answer_1": answer_1, "score_0": score_0, "score_1": score_1}
    return {"question": question} | answers | columns


@pytest.mark.parametrize(("scores", "responses"), [((-0.5, 0.5), (" No.", " Yes.")), ((0.0, 0.0), (" Yes.", " No."))])
def test_webgpt(scores, responses):
    row = parsed(webgpt(score_0=scores[0], score_1=scores[1]))
    assert row.prompt == " Human: Why is it so? Assistant:"
    assert (row.chosen, row.rejected) == responses


@pytest.mark.parametrize(
    ("answer", "clean"),
    [
        ("It rains [1]. Then [2, 3] it stops.", "It rains. Then it stops."),
        ("Light (a wave) bends[1].", "Light bends."),
        ("A (b [c] d) e", "A d) e"),  # up to the first closing bracket of either kind
        ("Open [1 and\nclosed] on the next line", "Open [1 and\nclosed] on the next line"),
    ],
)
def test_citations(answer, clean):
    assert without_citations(answer) == clean
    assert parsed(webgpt(answer_0=answer)).chosen == " " + clean


def test_webgpt_keeps_no_gpt2_ids():
    row = parsed(webgpt(tokens_0={"prefix": [1], "completion": [2]}, tokens_1={"prefix": [], "completion": []}, x=1))
    assert row.extra == webgpt(x=1)


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        ({"question": {"full_text": None}}, "'full_text' must be text, not null"),
        ({"score_0": None}, "not supported between"),
    ],
)
def test_bad_webgpt(change, wanted):
    with pytest.raises(UserError, match=f"^rows.jsonl:7: not a row of the format WebGPT comparison .*{wanted}"):
        parsed(webgpt() | change)


# APPS


def apps(**columns):
    raw = {"question": "Add one.", "solutions": '["print(1)", "print(2)"]', "input_output": "{}", "starter_code": ""}
    return raw | columns


def test_apps_standard_input_and_call_based_with_starter_code():
    row = parsed(apps())
    assert row.prompt == "\nQUESTION:\nAdd one.\nUse Standard Input format\nANSWER:\n"
    assert (row.chosen, row.rejected, row.no_response) == ("print(1)", None, None)
    row = parsed(apps(starter_code="def f(n):\n    ", input_output='{"fn_name": "f", "inputs": [[1]]}'))
    assert row.prompt == "\nQUESTION:\nAdd one.\ndef f(n):\n    \nUse Call-Based format\nANSWER:\n"


@pytest.mark.parametrize("tests", ["", '{"fn_name": null}', '["fn_name"]'])
def test_apps_without_a_function_name(tests):
    assert parsed(apps(input_output=tests)).prompt.endswith("\nUse Standard Input format\nANSWER:\n")


def test_apps_integers_of_any_length():
    tests = f'{{"fn_name": "f", "inputs": [[{BIG}]], "outputs": [-{BIG}]}}'
    assert "Call-Based" in parsed(apps(input_output=tests)).prompt
    assert parsed(apps(solutions=f'["a", {BIG}]')).chosen == "a"


@pytest.mark.parametrize("solutions", [" \n", None, "[null]"])
def test_apps_without_a_solution(solutions):
    row = parsed(apps(solutions=solutions))
    assert (row.chosen, row.no_response) == (None, "no reference solution")


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        ({"solutions": "[" * 100_000}, "RecursionError"),
        ({"solutions": "[[3]]"}, "a text of the format APPS problem must be text, not a list"),
    ],
)
def test_bad_apps(change, wanted):
    with pytest.raises(UserError, match=f"^rows.jsonl:7: .*{wanted}"):
        parsed(apps(**change))


# what becomes of rows without a solution


def test_step_1_drops_and_counts_problems_without_a_solution_and_step_3_keeps_them(tmp_path, tokenizer):
    rows = load_source(write_set(tmp_path / "apps", "apps", rows=8, eval_rows=5)).train
    examples, dropped = sft_examples(rows, tokenizer, 4000, tokenizer.eos_token_id)
    assert (len(examples), dropped) == (6, {"no reference solution": 2})
    why = r"^--data_path: none of the 2 rows is left .no reference solution: 2.*\. Give other data\."  # of any length
    with pytest.raises(UserError, match=why):
        sft_examples([rows[1], rows[4]], tokenizer, 4000, tokenizer.eos_token_id)
    examples, dropped = prompt_examples(rows, tokenizer, 4000)
    assert (len(examples), dropped) == (8, {})
