# SPDX-License-Identifier: Apache-2.0
"""`dschat data check` and `preview`, with one token per word, so that every number can be counted."""

import itertools
import json

import pytest

from cli_runs import write_jsonl
from data_cases import look_at_data as main
from data_cases import word_tokenizer
from dialogue_cases import dialogue
from dschat.base.errors import UserError
from dschat.data.check import check_report, describe_columns, summary
from dschat.data.preview import Settings, preview_report
from published_set_copies import write_set


@pytest.fixture(scope="module")
def words():
    return word_tokenizer()


def write(path, rows):
    return str(write_jsonl(path, rows))


def check(path, data_split="2,4,4", **settings):
    return check_report(str(path), data_split, Settings(**settings))


def preview(path, count=3, step=None, colour=False, **settings):
    return preview_report(str(path), count, step, colour, Settings(**settings))


def limits(longest, longest_prompt):
    return {"max_seq_len": longest, "max_prompt_seq_len": longest_prompt}


def lines_of(report, title):
    """The lines of a section, without their indent."""
    lines = report.splitlines()
    later = lines[lines.index(title) + 1 :]
    return [line[2:] for line in itertools.takewhile(lambda line: line.startswith("  "), later)]


# lengths and columns


def test_summary():
    # of 1..20: the tenth, the nineteenth and the twentieth
    assert summary(range(20, 0, -1)) == "min 1, median 10, mean 10.5, 95 % 19, 99 % 20, max 20"


def test_columns():
    rows = [
        {"info": {"post": "P", "site": None}, "n": 1, "flag": True, "list": [{"t": "x"}, {"t": ""}]},
        {"info": {"post": None, "site": None}, "n": 2.5, "flag": None, "list": []},
    ]
    assert describe_columns(rows) == [
        "info       object 2",
        "info.post  text 1, null 1",
        "info.site  null 2",
        "n          number 2",
        "flag       true/false 1, null 1",
        "list       list 2",
        "list[]     object 2",
        "list[].t   text 1, text (empty) 1",
    ]
    assert describe_columns([]) == []
    assert describe_columns([{f"c{i}": 1 for i in range(70)}])[-1] == "... and 10 more"


# check


PAIRS = [
    {"prompt": "a b", "chosen": "c", "rejected": "d"},
    {"prompt": "a b", "chosen": "c d", "rejected": "c e"},
    {"prompt": "a b c d", "chosen": "a", "rejected": "b"},
    {"prompt": "a", "chosen": "b", "rejected": "b"},
]


@pytest.fixture
def folder(tmp_path):
    write(tmp_path / "train.jsonl", PAIRS)
    write(tmp_path / "test.jsonl", [PAIRS[0], PAIRS[0], {"prompt": "e", "chosen": "a", "rejected": "b"}])
    return tmp_path


def test_check_without_a_tokenizer(folder):
    report = check(folder, "0,1,1")
    lines = report.splitlines()
    assert lines[:2] == [str(folder), "=" * len(str(folder))]
    assert lines[2:7] == [
        f"read       {folder}/train.jsonl, {folder}/test.jsonl",
        "rows       4 training, 3 evaluation",
        "format     prompt and responses: 7",
        "responses  chosen and rejected: 7",
        "skipped    none",
    ]
    assert lines_of(report, "columns (type and number)")[2] == "rejected  text 7"
    assert lines_of(report, "prompts") == [
        "3 different ones in 4 training rows, 2 in 3 evaluation rows",
        "2 evaluation rows have a prompt that is in training, too",
    ]
    # Of 3 rows, 1.5 and 1.5 round to 2 and 2, one too many, which the second bound loses: it is 1. The first prompt's
    # two rows have their middle there, and so belong to step 3 as the last row does.
    assert lines_of(report, "shares of --data_split 0,1,1") == [
        "step 1 (SFT): 0 of 4 training, 0 of 3 evaluation rows",
        "step 2 (reward model): 2 of 4 training, 0 of 3 evaluation rows",
        "step 3 (PPO): 2 of 4 training, 3 of 3 evaluation rows",
    ]
    assert lines_of(report, "lengths") == ["--tokenizer MODEL counts tokens, and the rows that each step leaves out"]


def test_check_with_a_tokenizer(folder, words):
    report = check(folder, "1,1,1", tokenizer=words, **limits(4, 4))
    assert lines_of(report, "length of the prompts, in tokens, with BOS") == [
        "min 2, median 3, mean 3.0, 95 % 5, 99 % 5, max 5",
        "longer than --max_prompt_seq_len 4: 1 of 7 rows (14.3 %), dropped in step 3",
    ]
    whole = lines_of(report, "length of prompt and longer response, in tokens, with BOS and EOS")
    # 5, 6, 7, 4 and 5, 5, 4: all but two are longer than 4
    assert whole[-1] == "longer than --max_seq_len 4: 5 of 7 rows (71.4 %), cut in steps 1 and 2"


def test_check_says_why_rows_are_missing(tmp_path, words, monkeypatch):
    monkeypatch.setenv("MA_RLHF_DATA", str(tmp_path))
    write_set(tmp_path / "apps", "apps", rows=10, eval_rows=4)
    report = check("apps", "1,0,0", tokenizer=words)
    assert "published  5,000 training, 5,000 evaluation" in report
    assert "format     APPS problem: 14" in report
    # rows 1 and 4 of the training file, row 1 of the other
    assert "responses  one: 11, none (no reference solution): 3" in report
    assert "step 1 (SFT): 2 of 10 training rows (no reference solution: 2)" in report
    report = check("apps", "0,1,0", tokenizer=words)
    assert "step 2 (reward model): not possible: " in report and "the row has no rejected response" in report


# preview


@pytest.fixture
def shown(tmp_path):
    """A folder whose training rows keep their order: two that fit six tokens, one that does not."""
    longest = {"prompt": "a b c d e", "chosen": "b", "rejected": "c"}
    path = write(tmp_path / "train.jsonl", [PAIRS[0], PAIRS[2], longest])
    write(tmp_path / "test.jsonl", PAIRS)
    return str(tmp_path), path


def test_preview_of_step_1(shown, words):
    folder, path = shown
    assert preview(folder, 3, 1, tokenizer=words, **limits(6, 6)).splitlines() == [
        f"{folder}: step 1: the loss is taken on the response alone; the prompt is masked",
        "rows shown: 3 of 3 for training; 4 for evaluation",
        "",
        f"{path}:1",
        "[[prompt, 3 tokens: masked]]<s>a b",
        "[[response, 2 tokens: trained]]c</s>",
        "",
        f"{path}:2",
        "[[prompt, 5 tokens: masked]]<s>a b c d",
        "[[response, 1 tokens: trained, cut, without EOS]]a",
        "",
        f"{path}:3: dropped (response cut to nothing)",
    ]


def test_preview_of_step_2_is_the_default_for_pairs(shown, words):
    folder, path = shown
    assert preview(folder, 1, tokenizer=words).splitlines() == [
        f"{folder}: step 2: the score is read at the last token of each response",
        "rows shown: 1 of 3 for training; 4 for evaluation",
        "",
        f"{path}:1",
        "[[prompt, 3 tokens: read]]<s>a b",
        "[[chosen, 2 tokens: scored]]c</s>",
        "[[rejected, 2 tokens: scored]]d</s>",
    ]


def test_preview_of_step_3(shown, words):
    folder, path = shown
    assert preview(folder, 3, 3, tokenizer=words, **limits(6, 5)).splitlines()[7:] == [
        f"{path}:2",
        "[[prompt, 5 tokens: read]]<s>a b c d",
        "[[response: sampled, up to </s>]]",
        "",
        f"{path}:3: dropped (prompt too long)",
    ]


def test_preview_without_a_tokenizer(tmp_path):
    talks = [[{"role": "system", "content": "x"}, *dialogue(*texts)] for texts in (["y"], ["y", " z"])]
    path = write(tmp_path / "train.jsonl", [{"messages": talk} for talk in talks])
    write(tmp_path / "test.jsonl", PAIRS)
    report = preview(tmp_path)  # the first row has no response: step 3
    assert "step 3" in report and f"{path}:2\n[[prompt: read]]system: x\nuser: y" in report
    with pytest.raises(UserError, match=":1: the row has no response text, which step 1 needs"):
        preview(tmp_path, step=1)
    folder = write_set(tmp_path / "apps", "apps", rows=3, eval_rows=2)
    report = preview(folder)
    assert "step 1" in report and "train.jsonl:2: dropped (no reference solution)" in report
    assert "[[prompt: masked]]\nQUESTION:\n" in report and "[[response: trained]]" in report


def test_preview_marks_by_colour_and_disarms_control_characters(tmp_path):
    row = {"prompt": "a\x1b[31mb\tc\n\x07é", "chosen": "d", "rejected": "e"}
    write(tmp_path / "train.jsonl", [row])
    write(tmp_path / "test.jsonl", [row])
    plain = preview(tmp_path)
    assert "\x1b" not in plain and "[[prompt: read]]a\\x1b[31mb\tc\n\\x07é" in plain
    coloured = preview(tmp_path, colour=True)
    assert "\x1b[32m[[chosen: scored]]d\x1b[0m" in coloured
    assert "\x1b[36m[[prompt: read]]a\\x1b[31mb" in coloured


# the command


def test_command_of_several_paths_and_renamed_columns(tmp_path, capsys):
    row = {"q": "x", "good": "y", "bad": "z"}
    first, second = write(tmp_path / "a.jsonl", [row] * 20), write(tmp_path / "b.jsonl", [row] * 40)
    keys = ["--prompt_key", "q", "--chosen_key", "good", "--rejected_key", "bad"]
    assert main(["check", first, second, *keys]) == 0
    printed = capsys.readouterr().out
    assert "19 training, 1 eval" in printed and "38 training, 2 eval" in printed
    assert printed.count("rows of the steps: all rows in each (no --data_split)") == 2
    assert printed.count("step 3 (PPO): 19 of 19 training, 1 of 1 evaluation rows") == 1
    assert main(["preview", first, "-n", "1", "--step", "1", *keys, "--colour", "always"]) == 0
    assert "[[response: trained]]y" in capsys.readouterr().out


def test_command_with_bad_input(tmp_path, capsys, caplog, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    bad = write(tmp_path / "bad.jsonl", [{"prompt": "a"}, {"text": "b"}])
    for arguments, words in (
        (["check", bad], [f"{bad}:2", "--prompt_key"]),
        (["check", bad, "--tokenizer", str(tmp_path / "none")], ["--tokenizer", "no such folder"]),
        (["check", bad, "--tokenizer", "nobody/nothing-at-all"], ["--tokenizer nobody/nothing-at-all", "hf download"]),
        (["preview", bad, "-n", "0"], ["--rows 0", "at least 1"]),
    ):
        assert main(arguments) == 2 and capsys.readouterr().out == ""
        message = caplog.messages[-1]
        assert message.startswith("error: ") and all(word in message for word in words)


def test_a_tokenizer_without_an_end(tmp_path, words, folder, caplog):
    words.save_pretrained(tmp_path / "model")
    file = tmp_path / "model" / "tokenizer_config.json"
    file.write_text(json.dumps({k: v for k, v in json.loads(file.read_text()).items() if k != "eos_token"}))
    assert main(["check", str(folder), "--tokenizer", str(tmp_path / "model")]) == 2
    assert "has no eos token" in caplog.text
