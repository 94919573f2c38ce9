# SPDX-License-Identifier: Apache-2.0
"""`dschat vote` in a terminal: in this process, and as one that writes ASCII."""

import io
import re
import subprocess
import sys

import pytest

from cli_runs import environment
from dschat.cli import main
from vote_runs import command, places, votes, write_responses


@pytest.fixture
def rate(tmp_path, monkeypatch, capsys):
    """rate(typed, *flags): what is printed, after these lines were typed and the input ended."""
    monkeypatch.setenv("COLUMNS", "90")

    def run(typed, *flags):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(typed.encode())))
        assert main(["vote", *command(tmp_path, "--rater", "anna", *flags)[2:]]) == 0
        printed = capsys.readouterr()
        assert printed.err == ""
        return printed.out

    return run


def shown(output):
    """Per item shown: the texts under PROMPT, RESPONSE A and RESPONSE B."""
    found = re.findall(r"-- PROMPT -+\n(.*?)\n\n-- RESPONSE A -+\n(.*?)\n\n-- RESPONSE B -+\n(.*?)\n\n", output, re.S)
    return [tuple(texts) for texts in found]


def test_four_keys_vote_for_the_places_and_the_file_names_the_models(tmp_path, rate):
    write_responses(tmp_path, 4)
    output = rate("1\n2\n3\n4\n", "--dataset", "summarize")
    items = shown(output)
    assert [item[0] for item in items] == [f"prompt {i}" for i in range(4)]
    rows = votes(tmp_path)
    assert [places(row) for row in rows] == [item[1:] for item in items]
    assert rows[0]["verdict"] == ("A" if items[0][1] == "good 0" else "B")
    assert rows[1]["verdict"] == ("A" if items[1][2] == "good 1" else "B")
    assert [row["verdict"] for row in rows[2:]] == ["tie", "skip"]
    assert {(row["rater"], row["dataset"], row["kind"]) for row in rows} == {("anna", "summarize", "human")}
    assert "== Item 3 of 4 ==" in output and "relevance" in output
    last = output.splitlines()[-1]
    assert "anna: 4 of 4 voted (kestrel better " in last
    assert last.endswith(f"equal 1, passed 1): {tmp_path / 'votes.jsonl'}")


def test_the_end_of_input_keeps_everything_and_the_next_start_goes_on(tmp_path, rate):
    write_responses(tmp_path, 4)
    output = rate("1\n?\nu\n1\n2\nx\n")
    assert not re.search("kestrel|osprey", output), "models stay hidden while votes are open"
    assert output.endswith(f"anna: 2 of 4 voted: {tmp_path / 'votes.jsonl'}\n")
    before = votes(tmp_path)
    output = rate("3\nq\n")
    assert [item[0] for item in shown(output)] == ["prompt 2", "prompt 3"]
    assert votes(tmp_path)[:2] == before and len(votes(tmp_path)) == 3
    output = rate("1")  # a last line without its end
    assert "4 of 4 voted (" in output and len(votes(tmp_path)) == 4


def test_undo_comment_guidelines_and_wrong_keys(tmp_path, rate):
    write_responses(tmp_path, 3)
    typed = ["u", "c", "first thought", "1", "c a remark", "3", "u", "u", "", "12", "1 2", "?", "2", "c", "", "4"]
    output = rate("\n".join(typed) + "\n", "--dataset", "webgpt")
    assert "There is no vote to take back." in output
    assert [item[0] for item in shown(output)] == [f"prompt {i}" for i in (0, 1, 2, 1, 0, 1, 2)]
    assert "Comment: a remark" in output, "the comment comes back with its item"
    assert output.count("Type one of the keys") == 3
    assert output.count("usefulness") == 2
    rows = votes(tmp_path)
    assert [(row["prompt"], row["comment"]) for row in rows] == [("prompt 0", "first thought"), ("prompt 1", "")]
    assert rows[0]["verdict"] == ("A" if places(rows[0])[1] == "good 0" else "B")
    assert rows[1]["verdict"] == "skip"


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_model_text_cannot_steer_the_terminal(tmp_path, encoding):
    attack = "\x1b]0;title\x07\x1b[2J\x9b1m\rhidden\x08 naïve \u202e猫"
    write_responses(tmp_path, 1, good0=attack)
    changed = environment(PYTHONIOENCODING=encoding, PYTHONUTF8="0")
    typed = b"c \x1b[5mblink\nx\n1\n"
    done = subprocess.run(command(tmp_path, "--rater", "anna"), input=typed, env=changed, capture_output=True)
    output = done.stdout.decode()
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", output)
    assert r"\x1b]0;title\x07\x1b[2J\x9b1m\x0dhidden\x08" in output
    assert ("naïve \\u202e猫" if encoding == "utf-8" else r"na\xefve \u202e\u732b") in output
    assert votes(tmp_path)[0]["response_a"] == attack, "the file keeps the text as it was"


def test_another_data_set_is_refused(tmp_path, caplog):
    write_responses(tmp_path, 3)
    assert main(["vote", *command(tmp_path, "--dataset", "apps")[2:]]) == 2
    assert "--dataset apps" in caplog.text and "summarize, hh-rlhf, webgpt" in caplog.text
    assert not (tmp_path / "votes.jsonl").exists()
