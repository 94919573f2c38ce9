# SPDX-License-Identifier: Apache-2.0
"""Reading files and folders, recognising columns, the message of every bad row; and which rows a step reads."""

import json
import random
import re

import pytest

from cli_runs import write_jsonl as write
from data_cases import error_of, flags_of
from dialogue_cases import dialogue
from dschat.base.errors import UserError
from dschat.data.rows import Row
from dschat.data.sources import in_proportion, is_published, load_share, load_source, source_line, split_for
from dschat.data.splits import split_bounds, split_indices, split_part
from dschat.settings.common import ColumnFlags
from published_set_copies import write_rows

PAIR = {"prompt": "Q", "chosen": " a", "rejected": " b"}


def only_row(tmp_path, raw, keys=None):
    source = load_source(write(tmp_path / "one.jsonl", [raw]), keys)
    assert len(source.train) == 1 and not source.eval
    return source.train[0]


def comparison(choice=1, **info):
    return {"info": info, "summaries": [{"text": " first"}, {"text": " second"}], "choice": choice}


# columns


def test_preference_row(tmp_path):
    row = only_row(tmp_path, PAIR | {"id": 7})
    assert row == Row("Q", None, " a", " b", PAIR | {"id": 7}, f"{tmp_path}/one.jsonl:1")


def test_renamed_columns(tmp_path):
    keys = ColumnFlags(prompt_key="q", response_key="a", messages_key="talk")
    assert only_row(tmp_path, {"q": "Q", "a": "A"}, keys).chosen == "A"
    assert only_row(tmp_path, {"talk": dialogue("hi")}, keys).messages == dialogue("hi")


def test_tldr_rows_without_text_are_skipped_and_counted(tmp_path):
    rows = [comparison(0, post="P"), comparison(1, title="only"), comparison(1, post=None, article=None)]
    source = load_source(write(tmp_path / "c.jsonl", rows))
    assert [(row.chosen, row.rejected) for row in source.train] == [(" first", " second")]
    assert source.dropped == {"neither post nor article": 2}


# files and folders


def test_one_file_is_split(tmp_path):
    """Or a folder without evaluation files."""
    path = write(tmp_path / "train.jsonl", [{"prompt": str(i)} for i in range(40)])
    train, held_out = (split_indices(40, "95,5", part) for part in (0, 1))
    assert len(held_out) == 2
    for named, name in ((str(path), "train"), (tmp_path, tmp_path.name)):
        source = load_source(named)
        assert [row.prompt for row in source.train] == [str(i) for i in train]
        assert [row.prompt for row in source.eval] == [str(i) for i in held_out]
        assert (source.name, source.files, source.dropped) == (name, (path,), {})


def test_folder_with_evaluation_files(tmp_path):
    folder = tmp_path / "mine"
    folder.mkdir()
    second = write(folder / "train-2.jsonl", [{"prompt": "c"}])
    first = write(folder / "train-1.jsonl", [{"prompt": "a"}, {"prompt": "b"}])
    test = write(folder / "test.jsonl", [{"prompt": "t"}])
    write(folder / "notes.jsonl", [{"other": 1}])
    source = load_source(folder)
    assert [row.prompt for row in source.train] == ["a", "b", "c"]
    assert [row.prompt for row in source.eval] == ["t"]
    assert (source.name, source.files) == ("mine", (first, second, test))
    validation = write(folder / "validation.jsonl", [{"prompt": "v"}])
    assert load_source(folder).files == (first, second, validation)


@pytest.mark.parametrize(("name", "text"), [("a.json", "\n [\n{}\n]"), ("a.jsonl", "\ufeff[{}]")])
def test_json_array(tmp_path, text, name):
    path = tmp_path / name
    path.write_text(text.format(json.dumps(PAIR)), encoding="utf-8")
    assert load_source(path).train[0].origin == f"{path} row 1"


def test_json_lines_called_json_and_line_numbers(tmp_path):
    path = tmp_path / "a.json"
    # blank lines count; U+2028 and a carriage return are no line ends
    text = '\ufeff{"prompt": "a\u2028b"}\r\n\n{"prompt": "c"}'
    path.write_bytes(text.encode())
    rows = load_source(path).train
    assert sorted((row.prompt, row.origin) for row in rows) == [("a\u2028b", f"{path}:1"), ("c", f"{path}:3")]


# what the messages say


def test_absent_path(tmp_path):
    message = error_of(tmp_path / "no.jsonl", ColumnFlags(prompt_key="q"))
    assert "--data_path" in message and "no.jsonl" in message and "no such file" in message
    assert "train*.jsonl" in message and "columns q, chosen, rejected" in message
    for name in ("tldr", "hh", "webgpt", "apps"):
        assert f" {name} (" in message


def test_bad_layouts(tmp_path):
    assert "not a data file" in error_of(write(tmp_path / "a.tsv", []))
    assert "a.tsv" in (message := error_of(tmp_path))
    assert "train*.jsonl, train*.parquet" in message and "valid*, eval*, test*" in message
    write(tmp_path / "train.jsonl", [PAIR])
    write_rows(tmp_path / "train.parquet", [PAIR])
    assert "both as .jsonl and as .parquet" in error_of(tmp_path)
    (tmp_path / "empty").mkdir()
    assert "holds: nothing" in error_of(tmp_path / "empty")


CALL = b'{"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "sun", "arguments": ARGUMENTS}}]}]}'


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        (b'{"prompt": "a"', "not valid JSON"),
        (b'{"prompt": "\xff"}', "UTF-8"),
        (b'["a", "b"]', "a list instead of an object"),
        (b'{"question": "a", "answer": "b"}', "'question', 'answer'; name the prompt's column with --prompt_key"),
        (b'{"prompt": 3}', "column 'prompt' must be text, not a value of type int; .* --prompt_key"),
        (b'{"prompt": "a\\ud800"}', "lone surrogate.* at position 1"),
        (b'{"prompt": "a", "response": "b", "response": "c"}', "the key 'response' occurs twice.*remove it"),
        (b'{"messages": [{"role": "user"}]}', "content of message 1 in 'messages' must be text, not null"),
        (b'{"messages": [{"role": "assistant", "content": "a"}]}', "holds only the response"),
        (CALL.replace(b"ARGUMENTS", b'"{city: 1"'), "a tool call of message 1 .* has the arguments '{city: 1'; they"),
        (b'{"messages": [{"role": "human", "content": "a"}]}', "role of message 1 .* is 'human'.*; write 'user'"),
        (json.dumps({"messages": dialogue("a", "b"), "chosen": "c"}).encode(), "two responses"),
        (json.dumps(comparison(2, post="P")).encode(), "'choice' must be 0 or 1, not 2"),
        (json.dumps(comparison(post="P") | {"summaries": [{"text": "a"}]}).encode(), "not enough values"),
    ],
)
def test_bad_line_is_named(tmp_path, line, wanted):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"prompt": "fine"}\n' + line + b"\n")
    assert re.match(f"{path}:2: .*{wanted}", error_of(path))


@pytest.mark.parametrize(("name", "text"), [("e.jsonl", " \n\n"), ("e.json", "[]")])
def test_empty_file(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    assert f"{tmp_path / name} is empty" in error_of(tmp_path / name)


def test_bad_array_and_bad_parquet(tmp_path):
    path = tmp_path / "a.json"
    path.write_text('[{"prompt": "a"},\n{"prompt": }]')
    assert f"{path}: not valid JSON" in (message := error_of(path)) and "line 2 column 12" in message
    path.write_text('[{"prompt": "a"}, {"prompt": 3}]')
    assert error_of(path).startswith(f"{path} row 2: ")
    path = tmp_path / "b.parquet"
    path.write_text("no parquet")
    assert f"{path} is not a readable parquet file" in error_of(path)
    write_rows(path, [{"prompt": "a"}, {"prompt": None}])
    assert error_of(path).startswith(f"{path} row 2: column 'prompt' is empty")


def reference_shuffle(num_rows: int, seed: int) -> list[int]:
    """Fisher-Yates from the end, indices by masked rejection, on MT19937 seeded by Knuth's recurrence."""
    state = [seed]
    for i in range(1, 624):
        state.append((1812433253 * (state[-1] ^ (state[-1] >> 30)) + i) & 0xFFFFFFFF)
    twister = random.Random()
    twister.setstate((3, (*state, 624), None))
    order = list(range(num_rows))
    for i in range(num_rows - 1, 0, -1):
        mask = (1 << i.bit_length()) - 1
        j = twister.getrandbits(32) & mask
        while j > i:
            j = twister.getrandbits(32) & mask
        order[i], order[j] = order[j], order[i]
    return order


def test_parts_are_slices_of_one_order():
    order = reference_shuffle(1000, 1234)
    for part, expected in enumerate((order[:200], order[200:600], order[600:])):
        assert split_indices(1000, "2,4,4", part).tolist() == expected == split_part(range(1000), "2,4,4", part)
    assert split_indices(257, "1", 0).tolist() == reference_shuffle(257, 1234)


def test_excess_and_deficit_by_hand():
    # 7 rows: 1.4 → 1, 2.8 → 3, 2.8 → 3: exact. 8 rows: 1.6 → 2, 3.2 → 3, 3.2 → 3: exact.
    assert split_bounds(7, [2, 4, 4]) == [0, 1, 4, 7]
    assert split_bounds(8, [2, 4, 4]) == [0, 2, 5, 8]
    # 4 rows: .8 → 1, 1.6 → 2, 1.6 → 2 is one too many. 18,599 rows: 3720 + 7440 + 7440 is one too many.
    assert split_bounds(4, [2, 4, 4]) == [0, 0, 2, 4]
    assert split_bounds(18599, [2, 4, 4]) == [0, 3719, 11159, 18599]
    # 5 rows, halves: 2.5 rounds to 2 (to even), one too few, added to every bound.
    assert split_bounds(5, [1, 1]) == [0, 3, 5]
    # 3 rows: 0, 1.5 → 2, 2 is one too many; the first bound would be -1.
    assert split_bounds(3, [0, 1, 1]) == [0, 0, 1, 3]


@pytest.mark.parametrize("data_split", ["a,b", "2,-4,4", "0,0", "nan"])
def test_bad_split(data_split):
    with pytest.raises(UserError, match="--data_split .* is not a list of fractions"):
        split_indices(10, data_split, 0)


@pytest.mark.parametrize(("part", "named"), [(2, "PPO step"), (-1, "part -1")])
def test_absent_part(part, named):
    with pytest.raises(UserError, match=f"--data_split 1,1 has 2 parts, none for .*{named}"):
        split_indices(10, "1,1", part)


# which rows a step takes


@pytest.mark.parametrize("step", [1, 2, 3])
def test_every_step_takes_all_rows_of_a_users_file(step, tmp_path):
    """Of 200 rows, 5 in 100 are held out; the order is that of a split which gives everything to one step."""
    path = write(tmp_path / "mine.jsonl", [{"prompt": str(n)} for n in range(200)])
    share = load_share(flags_of(path, step=step, data_split=None))
    assert (len(share.train), len(share.eval)) == (190, 10)
    whole = ("1,0,0", "0,1,0", "0,0,1")[step - 1]
    assert share.train == load_share(flags_of(path, step=step, data_split=whole)).train
    assert list(map(source_line, share.sources)) == ["mine: 190 of 200 rows to train on, 10 to evaluate on"]


def test_published_sets_keep_their_shares_in_a_mixture(tmp_path, monkeypatch):
    """By short name, by hub id and as the local copy's folder; another folder of that name is the user's own."""
    monkeypatch.setenv("MA_RLHF_DATA", str(tmp_path / "data"))
    rows = [{"prompt": str(n), "response": "R"} for n in range(50)]
    copy = write(tmp_path / "data" / "hh" / "train.jsonl", rows).parent
    own = write(tmp_path / "hh" / "train.jsonl", rows[:20]).parent
    write(copy / "test.jsonl", rows[:10])
    write(own / "test.jsonl", rows[:10])
    published = ("hh", "HH-RLHF", "Dahoas/full-hh-rlhf", str(copy), copy)
    assert [split_for(path, None) for path in published] == ["2,4,4"] * 5
    assert split_for(own, None) is None and not is_published("owner/name")
    assert split_for(own, "1,0,0") == split_for("hh", "1,0,0") == "1,0,0"
    assert split_for("gsm8k", None) is None and split_for("harmless-base", None) is None  # not sets of the paper
    share = load_share(flags_of("hh", own, step=2, data_split=None))
    assert [(source["train"], source["eval"]) for source in share.sources] == [(20, 4), (20, 10)]


# evaluation rows of several sources


def test_the_order_of_several_sources_by_hand():
    """Row i of n is at i / n: a 0, b 1/4, c 1/2, d 3/4; x 0, y 1/2. At the same place the first source is first."""
    assert in_proportion([list("abcd"), [], list("xy")]) == list("axbcyd")
    assert in_proportion([list("abcd")]) == list("abcd")


def test_a_short_evaluation_reads_every_data_path(tmp_path):
    """Twice as many rows are held out of the first source as of the second: 5 % of 400 and of 200."""
    paths = []
    for name, count in (("a", 400), ("b", 200)):
        paths.append(write(tmp_path / f"{name}.jsonl", [{"prompt": f"{name}{number}"} for number in range(count)]))
    held_out = load_share(flags_of(*paths, data_split=None)).eval
    assert [row.prompt[0] for row in held_out] == list("abaaba" * 5)
    for path in paths:
        alone = load_share(flags_of(path, data_split=None)).eval
        assert [row for row in held_out if row.prompt[0] == path.stem] == alone, "each in the order that it has alone"
