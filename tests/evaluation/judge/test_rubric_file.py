# SPDX-License-Identifier: Apache-2.0
"""A rubric of the user's own: from file to verdicts; what is wrong with one; verdicts by two are not mixed."""

import json
from pathlib import Path

import pytest

from cli_runs import ROOT, read_jsonl
from dschat.errors import UserError
from dschat.evaluation.judge.rubrics import Rubric, answer_schema, messages_of, read_rubric
from judges import better, judged, shown_in, two_files, verdicts

EXAMPLE = ROOT / "evaluation" / "rubrics" / "support.toml"
CRITERIA = ["correctness", "completeness", "tone"]
PLAIN = {"task": "You compare two poems. Prefer the one that rhymes."}


def write(path: Path, content: object) -> Path:
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return path


def error_of(path):
    with pytest.raises(UserError) as caught:
        read_rubric(path, "mine")
    assert str(caught.value).startswith(f"--rubric {path}: ")
    return str(caught.value)


def test_the_example():
    rubric = read_rubric(EXAMPLE, "help-desk")
    assert (rubric.dataset, rubric.prompt_name, rubric.response_name) == ("help-desk", "question", "answer")
    assert list(rubric.criteria) == CRITERIA and rubric.separate
    assert rubric.task.startswith("You compare two answers of a help desk") and "\n" not in rubric.task
    system, user = messages_of(rubric, "Q", "one", "two")
    assert rubric.task in system["content"] and all(f"- {name}: " in system["content"] for name in CRITERIA)
    assert "<question-" in user["content"] and "<first-answer-" in user["content"]
    assert answer_schema(rubric)["required"] == [*CRITERIA, "verdict"]


def test_what_a_file_need_not_say(tmp_path):
    rubric = read_rubric(write(tmp_path / "r.json", PLAIN), "poems")
    said = {"dataset": "poems", "task": PLAIN["task"], "output_tokens": 60, "digest": rubric.digest}
    assert rubric == Rubric(prompt_name="prompt", response_name="response", **said)
    toml = write(tmp_path / "r.toml", f'task = "{PLAIN["task"]}"\n')
    assert read_rubric(toml, "poems") == rubric  # the same words in another form are the same rubric


def test_the_digest_follows_the_words(tmp_path):
    """And not the name of the data."""
    texts = [PLAIN, PLAIN | {"response": "poem"}, PLAIN | {"criteria": {"a": "b?"}}, {"task": "Other."}]
    texts += [PLAIN | {"criteria": {"a": "c?"}}, PLAIN | {"criteria": {"a": "b?"}, "separate": True}]
    file = tmp_path / "r.json"
    assert len({read_rubric(write(file, text), "mine").digest for text in texts}) == len(texts)
    assert len({read_rubric(file, name).digest for name in ("mine", "yours")}) == 1


@pytest.mark.parametrize(
    ("content", "wanted"),
    [
        ({}, "key 'task' is missing or empty"),
        ({"task": " "}, "key 'task' is missing or empty"),
        ({"task": 3}, "key 'task' must be text"),
        (PLAIN | {"name": "x"}, "unknown key 'name'; a rubric has task, prompt, response, criteria, separate"),
        (PLAIN | {"prompt": "a question"}, "key 'prompt' must be one word of lower-case letters"),
        (PLAIN | {"response": "<b>"}, "key 'response' must be one word"),
        (PLAIN | {"criteria": ["a"]}, "key 'criteria' must hold names"),
        (PLAIN | {"criteria": {"a b": "c"}}, "key 'criteria.a b': a criterion's name must be letters"),
        (PLAIN | {"criteria": {"Overall": "c"}}, "key 'criteria.Overall': a criterion's name must be"),
        (PLAIN | {"criteria": {"a": 3}}, "key 'criteria.a' must be text"),
        (PLAIN | {"separate": 1}, "key 'separate' must be true or false"),
        (PLAIN | {"separate": True}, "key 'separate' asks for a verdict on each of 'criteria': add some"),
        ("[]", "must hold one object with the keys task,"),
        ("{", "not readable as JSON"),
        ('{"task": "a", "task": "b"}', "not readable as JSON (the key 'task' stands there twice)"),
    ],
)
def test_a_bad_rubric_is_named_by_file_and_key(tmp_path, content, wanted):
    assert wanted in error_of(write(tmp_path / "r.json", content))


def test_a_bad_file(tmp_path):
    assert "not readable as TOML" in error_of(write(tmp_path / "r.toml", "task = \n"))
    assert "give a file that ends in .toml or .json" in error_of(write(tmp_path / "r.txt", "task"))
    assert "cannot be read (No such file or directory)" in error_of(tmp_path / "none.toml")


# runs


def by_length(messages):
    """A verdict on each criterion, and the longer answer wins."""
    shown = shown_in(messages)
    place = better(len(shown["first"]) > len(shown["second"]))
    one = {"comparison": "counted", "verdict": place}
    return json.dumps(dict.fromkeys(CRITERIA, one) | {"verdict": place})


def test_a_run_with_the_example(server, tmp_path):
    server.answer = by_length
    a, b = two_files(tmp_path, ["long answer", "x"], ["short", "longer"])
    line = judged(server, a, b, tmp_path / "o.jsonl", "--rubric", EXAMPLE, "--dataset", "help-desk")
    assert "a against b on help-desk" in line and verdicts(tmp_path / "o.jsonl") == ["A", "B"]
    rows = read_jsonl(tmp_path / "o.jsonl")
    assert {row["dataset"] for row in rows} == {"help-desk"}
    assert rows[0]["aspects"] == dict.fromkeys(CRITERIA, "A")
    assert "help desk" in server.bodies[0]["messages"][0]["content"]
    dry = judged(server, a, b, tmp_path / "dry.jsonl", "--rubric", EXAMPLE, "--dry-run")
    assert "4 more are in the cache" in dry


def test_verdicts_of_another_rubric_are_not_gone_on_with(server, tmp_path):
    """Ended after two of four pairs: the same command goes on with the same words alone."""
    a, b = two_files(tmp_path)
    file = write(tmp_path / "r.json", PLAIN)
    run = (server, a, b, tmp_path / "o.jsonl", "--rubric", file, "--dataset", "poems", "--concurrency", "1")
    server.plan.extend(["ok"] * 4 + [(401, {"error": {"message": "no"}}, {})])
    with pytest.raises(UserError, match="2 of 4 pairs are judged and kept"):
        judged(*run)
    server.plan.clear()
    kept = (tmp_path / "o.jsonl.partial").read_bytes()
    write(file, PLAIN | {"criteria": {"metre": "Is it kept?"}})
    with pytest.raises(UserError, match="rubric"):
        judged(*run)
    assert (tmp_path / "o.jsonl.partial").read_bytes() == kept
    write(file, json.dumps(PLAIN, indent=4))
    assert "4 requests" in judged(*run)
    assert verdicts(tmp_path / "o.jsonl") == ["A", "B", "tie", "A"]


def test_names_of_data_sets(server, tmp_path, caplog):
    a, b = two_files(tmp_path)
    with pytest.raises(
        UserError, match="--dataset mine: unknown; give summarize, .*, or for data .* with --rubric FILE"
    ):
        judged(server, a, b, tmp_path / "o.jsonl", "--dataset", "mine")
    with pytest.raises(UserError, match="--dataset my/own: a name of your own must be letters"):
        judged(server, a, b, tmp_path / "o.jsonl", "--dataset", "my/own", "--rubric", EXAMPLE)
    with pytest.raises(UserError, match="--rubric: this script always judges by the webgpt rubric"):
        judged(server, a, b, tmp_path / "o.jsonl", "--rubric", EXAMPLE, dataset="webgpt")
    assert server.bodies == []
