# SPDX-License-Identifier: Apache-2.0
"""Files of responses and verdicts, and the journal of a run that can be killed."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cli_runs import write_jsonl
from dschat.common.journal import Journal
from dschat.common.jsonl import write_rows
from dschat.errors import UserError
from dschat.evaluation.pairs.comparisons import Comparison, comparison_of, mirrored, read_comparisons
from dschat.evaluation.pairs.responses import model_names, pair_id, read_pairs, read_responses


def responses(*prompts, text="yes"):
    return [{"prompt": p, "response": f"{text} {p} {i}", "reward": i / 2} for i, p in enumerate(prompts)]


def pairs_of(tmp_path, first, second):
    a, b = write_jsonl(tmp_path / "a.jsonl", first), write_jsonl(tmp_path / "b.jsonl", second)
    return read_pairs(a, "--model_name_a", b, "--model_name_b")


def test_rows_are_paired_by_prompt_whatever_the_order(tmp_path):
    """A prompt that occurs twice is paired by occurrence."""
    first = responses("p", "q", "p")
    pairs = pairs_of(tmp_path, first, responses("p", "p", "q", text="no"))
    assert [(pair.prompt, pair.a.response, pair.b.response) for pair in pairs] == [
        ("p", "yes p 0", "no p 0"),
        ("q", "yes q 1", "no q 2"),
        ("p", "yes p 2", "no p 1"),
    ]
    assert pairs[1].a.reward == 0.5 and pairs[1].b.reward == 1.0
    assert len({pair.id for pair in pairs}) == 3 and all(len(pair.id) == 16 for pair in pairs)


def test_ids_tell_where_one_text_ends():
    assert pair_id("a", "bc", "d") != pair_id("ab", "c", "d") != pair_id("a", "b", "cd")
    assert pair_id("a", "b", "c") == pair_id("a", "b", "c")


def test_other_prompts_and_other_lengths_are_named(tmp_path):
    with pytest.raises(UserError, match=r"a\.jsonl has 1 rows and --model_name_b .*b\.jsonl has 2"):
        pairs_of(tmp_path, responses("p"), responses("p", "q"))
    with pytest.raises(UserError, match=r"a\.jsonl:2: no row of --model_name_b .*b\.jsonl answers this prompt \('q'"):
        pairs_of(tmp_path, responses("p", "q"), responses("p", "r"))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "there is no such file"),
        ("", "is empty"),
        ('{"prompt": "p", "response": "r"}\n\n{"prompt": "p"', ":3: not valid JSON"),
        ('["p"]\n', ":1: list instead of an object"),
        ('{"prompt": "p"}\n', ":1: no column 'response'"),
        ('{"prompt": "p", "response": 3}\n', ":1: column 'response' holds int"),
        ('{"prompt": "p", "response": "r", "reward": "x"}\n', ":1: reward must be a number"),
        ('{"prompt": "p", "response": "r", "reward": NaN}\n', ":1: reward nan is not finite"),
    ],
)
def test_a_bad_file_of_responses_is_named_with_its_line(tmp_path, content, words):
    file = tmp_path / "a.jsonl"
    if content is not None:
        file.write_text(content)
    with pytest.raises(UserError) as error:
        read_responses(file, "--model_name_a")
    assert words in str(error.value) and str(file) in str(error.value)


def test_a_comparison_survives_its_file(tmp_path):
    one = Comparison("0" * 16, "p", "x", "y", "tie", "human", "r1", "m1", "m2", "webgpt", {"comment": "so\u2028so"})
    file = tmp_path / "c.jsonl"
    write_rows(file, [one.to_row()])
    assert read_comparisons(file, "--files") == [one]
    assert list(one.to_row()) == [
        *("id", "prompt", "response_a", "response_b", "verdict", "kind", "rater", "model_a", "model_b", "dataset"),
        "comment",
    ]


def test_a_row_that_is_no_comparison_is_named():
    row = {"prompt": "p", "response_a": "x", "response_b": "y", "kind": "judge"}
    with pytest.raises(UserError, match=r"f:3: verdict must be one of A, B, tie, invalid, skip, not 'C'"):
        comparison_of(row | {"verdict": "C"}, "f:3")
    with pytest.raises(UserError, match="f:3: kind must be one of"):
        comparison_of(row | {"verdict": "A", "kind": None}, "f:3")
    assert comparison_of(row | {"verdict": "A"}, "f:3").rater == "judge"


def test_mirroring():
    assert [mirrored(verdict) for verdict in ("A", "B", "tie", "invalid")] == ["B", "A", "tie", "invalid"]


def test_a_journal_goes_on_after_what_it_kept(tmp_path):
    file = tmp_path / "deep" / "out.jsonl"
    first = Journal(file, {"seed": 1})
    first.append([{"n": 0}, {"n": 1}])
    first.close()
    with open(first.partial, "ab") as journal:
        journal.write('{"n": 2, "text": "ü'.encode()[:-1])  # a kill in the middle of a character
    second = Journal(file, {"seed": 1})
    assert second.rows == [{"n": 0}, {"n": 1}]
    second.append([{"n": 2}])
    second.close()
    third = Journal(file, {"seed": 1})
    assert third.rows == [{"n": 0}, {"n": 1}, {"n": 2}]
    assert not file.exists()
    third.finish(reversed(third.rows))
    assert [json.loads(line)["n"] for line in file.read_text().splitlines()] == [2, 1, 0]
    assert [entry.name for entry in file.parent.iterdir()] == ["out.jsonl"]


def test_a_journal_refuses_other_settings_and_a_finished_file(tmp_path):
    file = tmp_path / "out.jsonl"
    journal = Journal(file, {"seed": 1, "model": "m"})
    journal.append([{"n": 0}])
    with pytest.raises(UserError, match="another process is writing it"):
        Journal(file, {"seed": 1, "model": "m"})
    journal.close()
    with pytest.raises(UserError, match=r"begun with --seed 1, now it is 2"):
        Journal(file, {"seed": 2, "model": "m"})
    with pytest.raises(UserError, match=r"--top_k"):
        Journal(file, {"seed": 1, "model": "m", "top_k": 3})
    again = Journal(file, {"seed": 2, "model": "m"}, overwrite=True)
    assert again.rows == []
    again.finish([{"n": 5}])
    with pytest.raises(UserError, match="exists, finished.*--overwrite"):
        Journal(file, {"seed": 2, "model": "m"})


def test_a_broken_line_in_the_middle_is_not_passed_over(tmp_path):
    journal = Journal(tmp_path / "out.jsonl", {})
    journal.append([{"n": 0}])
    journal.close()
    journal.partial.write_text(journal.partial.read_text() + "{broken\n")
    with pytest.raises(UserError, match=r"out\.jsonl\.partial:3: not valid JSON"):
        Journal(tmp_path / "out.jsonl", {})


def test_kill_9_loses_no_row_that_was_appended(tmp_path):
    """The process reports each row after `append` returned; all of them are there afterwards."""
    script = (
        "import sys; from pathlib import Path; from dschat.common.journal import Journal\n"
        "journal = Journal(Path(sys.argv[1]), {})\n"
        "for n in range(100000):\n    journal.append([{'n': n}]); print(n, flush=True)\n"
    )
    file = tmp_path / "out.jsonl"
    with subprocess.Popen([sys.executable, "-c", script, file], stdout=subprocess.PIPE, text=True) as process:
        while process.stdout.readline().strip() != "20":
            time.sleep(0)
        os.kill(process.pid, signal.SIGKILL)
        reported = [20, *map(int, process.stdout.read().split())]
    kept = [row["n"] for row in Journal(file, {}).rows]
    assert kept[: reported[-1] + 1] == list(range(reported[-1] + 1))


def test_text_that_utf8_cannot_hold_is_written_all_the_same(tmp_path):
    write_rows(tmp_path / "x.jsonl", [{"text": "half \ud800 of one"}])
    assert json.loads((tmp_path / "x.jsonl").read_text()) == {"text": "half ? of one"}


@pytest.mark.parametrize(
    ("files", "names"),
    [
        (["r/t=0.8/ppo-sampled.jsonl", "r/t=0.8/ma.jsonl"], ["ppo", "ma"]),
        (["x/ppo/m.jsonl", "x/ma/m.jsonl"], ["ppo/m", "ma/m"]),
        (["ppo/t=0/m.jsonl", "ma/t=0/m.jsonl"], ["ppo/t=0/m", "ma/t=0/m"]),
        (["x/m.jsonl", "x/m.jsonl"], ["m", "m"]),
    ],
)
def test_models_are_called_as_their_files(files, names):
    assert model_names([Path(file) for file in files]) == names


def begun(file, rows, overwrite, **settings):
    """A journal that was left with these rows."""
    journal = Journal(file, settings, overwrite)
    journal.append(rows)
    journal.close()


def test_a_run_that_overwrites_goes_on_too(tmp_path):
    file = tmp_path / "out.jsonl"
    file.write_text('{"n": "old"}\n')
    begun(file, [{"n": 0}], True, seed=1)
    assert file.read_text() == '{"n": "old"}\n'
    begun(file, [{"n": 1}], True, seed=1)
    again = Journal(file, {"seed": 1}, overwrite=True)
    assert again.rows == [{"n": 0}, {"n": 1}]
    again.finish(again.rows)
    assert [json.loads(line)["n"] for line in file.read_text().splitlines()] == [0, 1]
    assert Journal(file, {"seed": 1}, overwrite=True).rows == []  # a finished file is made anew


def test_overwriting_drops_a_run_that_was_begun_otherwise(tmp_path):
    file = tmp_path / "out.jsonl"
    begun(file, [{"n": 0}], False, seed=1)
    begun(file, [{"n": 1}], True, seed=1)
    begun(file, [{"n": 2}], True, seed=2)
    journal = Journal(file, {"seed": 2}, overwrite=True)
    assert journal.rows == [{"n": 2}]
    journal.close()
    journal.partial.write_text("{broken\n" + journal.partial.read_text())
    assert Journal(file, {"seed": 2}, overwrite=True).rows == []
