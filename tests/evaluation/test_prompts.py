# SPDX-License-Identifier: Apache-2.0
"""Which prompts are used: those of the protocol, in its order."""

import json
import shutil

import pytest

from cli_runs import arguments, write_jsonl
from dschat.base.errors import UserError
from dschat.base.fingerprints import file_hash
from dschat.cli import main
from dschat.data.formats import parse_row
from dschat.data.sources import hold_out, load_source, read_source
from dschat.evaluation.prompts import digest_of, select_prompts
from dschat.models.tokenizer import load_tokenizer
from dschat.settings.common import ColumnFlags


def texts_of(selection):
    return [example.prompt_text for example in selection.examples]


def plain_rows(count):
    return [{"prompt": f"Question {i}:", "chosen": f" yes {i}", "rejected": f" no {i}"} for i in range(count)]


def test_any_column_is_part_of_what_a_resumed_run_must_have_in_common():
    """A reward function may read it, and programs are run on its tests."""
    rows = []
    for expected in ("1", "2"):
        rows.append(parse_row(plain_rows(1)[0] | {"input_output": expected}, ColumnFlags(), "rows:1"))
    assert len({digest_of([row]) for row in rows}) == 2 and digest_of(rows[:1]) == digest_of(rows[:1])


@pytest.fixture
def folder(tmp_path):
    """A data folder of 2 training and 30 held-out rows."""
    write_jsonl(tmp_path / "set" / "train.jsonl", plain_rows(2))
    write_jsonl(tmp_path / "set" / "test.jsonl", plain_rows(30))
    return tmp_path / "set"


def test_the_seed_of_the_draws_does_not_choose_other_prompts(options, bytes_tokenizer):
    first, second = (select_prompts(options(seed=seed, num_samples=9), bytes_tokenizer) for seed in (1, 2))
    assert texts_of(first) == texts_of(second)
    assert first.digest == second.digest


def test_webgpt_is_used_whole_in_its_own_order(options, bytes_tokenizer):
    held_out = load_source("webgpt").eval
    assert len(held_out) > 1
    selection = select_prompts(options(dataset="webgpt"), bytes_tokenizer)
    assert texts_of(selection) == [row.prompt for row in held_out]
    assert texts_of(select_prompts(options(dataset="webgpt", num_samples=1), bytes_tokenizer)) == [held_out[0].prompt]


def test_a_folder_that_is_called_as_the_data_set_is_not_taken_for_it(options, bytes_tokenizer, tmp_path, monkeypatch):
    """Results lie in folders of those names: the script may be started beside them."""
    expected = select_prompts(options(), bytes_tokenizer)
    for name in ("summarize", "tldr"):
        write_jsonl(tmp_path / name / "train.jsonl", plain_rows(20))
    monkeypatch.chdir(tmp_path)
    assert texts_of(select_prompts(options(), bytes_tokenizer)) == texts_of(expected)


def test_long_prompts_are_dropped_and_counted_and_bring_no_others_in(options, folder, bytes_tokenizer, caplog):
    rows = plain_rows(30)
    for i in range(0, 30, 3):
        rows[i]["prompt"] = "A much longer question than the others, number " + str(i) * 5
    write_jsonl(folder / "test.jsonl", rows)
    flags = {"data_path": str(folder), "num_samples": 12}
    unlimited = texts_of(select_prompts(options(**flags), bytes_tokenizer))
    wanted = [text for text in unlimited if "longer" not in text]
    assert 0 < len(wanted) < 12
    limit = max(len(bytes_tokenizer.encode(text)) for text in wanted)
    limited = select_prompts(options(max_prompt_len=limit, **flags), bytes_tokenizer)
    assert texts_of(limited) == wanted
    assert limited.dropped == 12 - len(wanted)
    assert f"{limited.dropped} of 12 prompts left out (prompt too long: {limited.dropped})" in caplog.text
    with pytest.raises(UserError, match=r"none of the 12 prompts is left \(prompt too long: 12\).*--max_prompt_len"):
        select_prompts(options(max_prompt_len=2, **flags), bytes_tokenizer)


def test_a_file_of_which_no_row_is_held_out(options, bytes_tokenizer, tmp_path):
    """5 % of 10 rows are half a row; a longer limit would not help."""
    rows = [{"prompt": f"p{number}"} for number in range(10)]
    path = write_jsonl(tmp_path / "few.jsonl", rows)
    none = "few.jsonl: there are no evaluation rows .*5 % of 10 rows.*With --split all, all"
    with pytest.raises(UserError, match=none):
        select_prompts(options(data_path=str(path), split="eval"), bytes_tokenizer)
    selection = select_prompts(options(data_path=str(path), split="all"), bytes_tokenizer)
    assert sorted(texts_of(selection)) == [row["prompt"] for row in rows]


# prepared folders


@pytest.fixture
def chat_model(project, tmp_path):
    """The project's policy, whose tokenizer has a chat template here."""
    folder = shutil.copytree(project / "run" / "actor", tmp_path / "chat_model")
    template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"
    (folder / "chat_template.jinja").write_text(template)
    return folder


@pytest.fixture
def prepared(chat_model, tmp_path):
    """prepared(*words): a folder prepared from 40 training and 6 evaluation rows, each with an answer."""

    def prepare(*words):
        rows = [row | {"answer": str(number)} for number, row in enumerate(plain_rows(46))]
        write_jsonl(tmp_path / "source" / "train.jsonl", rows[:40])
        write_jsonl(tmp_path / "source" / "test.jsonl", rows[40:])
        flags = {"output": tmp_path / "prepared", "tokenizer": chat_model, "stage": "finetune"}
        flags |= {"data_split": "1,0", "minimum_response_length": 0}
        shutil.rmtree(tmp_path / "prepared", ignore_errors=True)
        command = ["prepare", str(tmp_path / "source"), *arguments(flags)]
        assert main(["data", *command, *words]) == 0
        return tmp_path / "prepared"

    return prepare


def test_a_prepared_folder_gives_the_rows_that_it_was_made_from(options, prepared, chat_model, tmp_path, caplog):
    """Prompts as the data have them, not as a chat template wrote them, and the other columns for reward functions."""
    caplog.set_level("INFO")
    folder = prepared("--apply_chat_template", "--validation_percentage", "0")
    tokenizer = load_tokenizer(str(chat_model), "--model")
    expected = select_prompts(options(data_path=str(tmp_path / "source"), apply_chat_template=True), tokenizer)
    selection = select_prompts(options(data_path=str(folder)), tokenizer)
    rows = [example.row for example in selection.examples]
    assert sorted(row.extra["answer"] for row in rows) == ["40", "41", "42", "43", "44", "45"]
    assert {row.messages[0]["content"] for row in rows} == {f"Question {number}:" for number in range(40, 46)}
    assert sorted(texts_of(selection)) == sorted(texts_of(expected))
    assert f"{folder}: 6 of 6 test rows of the prepared folder" in caplog.text


def test_prepared_folders_without_held_out_rows_are_refused(options, prepared, bytes_tokenizer):
    folder = prepared("--validation_percentage", "0", "--max_length", "1000")
    shutil.rmtree(folder / "test")
    info = json.loads((folder / "prepared.json").read_text())
    del info["kept"]["test"]
    (folder / "prepared.json").write_text(json.dumps(info))
    words = f"^--data_path {folder}: .*neither validation nor test rows; prepare .*--validation_p.*give --split all"
    with pytest.raises(UserError, match=words):
        select_prompts(options(data_path=str(folder)), bytes_tokenizer)


# rows that the models were not trained on


@pytest.fixture
def trained(tmp_path):
    """trained(name, *data, **flags): the output folder of a run, with its records; its model is not needed here."""

    def make(name, *data, **flags):
        sources = []
        hashes = {}
        for source in map(read_source, data):
            sources.append({"rows": {"train": source.num_rows[0], "eval": source.num_rows[1]}})
            hashes |= {str(file): file_hash(file) for file in source.files}
        run = tmp_path / name
        run.mkdir()
        (run / "train_config.json").write_text(json.dumps({"data_path": list(map(str, data))} | flags))
        (run / "run.json").write_text(json.dumps({"data": {"sources": sources, "sha256": hashes}}))
        return str(run)

    return make


def held_out_of(path, share):
    source = hold_out(read_source(path), share)
    return [row.prompt for row in source.eval]


def test_prompts_are_rows_that_the_policy_was_not_trained_on(options, trained, bytes_tokenizer, tmp_path, caplog):
    """The file is elsewhere since the training: its content tells. The seed of the run chose no rows."""
    caplog.set_level("INFO")
    data = write_jsonl(tmp_path / "rows.jsonl", plain_rows(200))
    model = trained("run", data, seed=7)
    data = data.rename(tmp_path / "moved.jsonl")
    chosen = options(data_path=str(data), model=model, reward_model=trained("reward", data, seed=3))
    prompts = texts_of(select_prompts(chosen, bytes_tokenizer))
    assert sorted(prompts) == sorted(held_out_of(data, 0.05))
    assert f"{data}: 10 of 10 evaluation rows (training holds out 5 % of 200 rows)" in caplog.text


def test_a_file_that_has_changed_since_the_training_is_refused(options, trained, bytes_tokenizer, tmp_path):
    """The same share of other rows would be mostly rows that the run was trained on."""
    data = write_jsonl(tmp_path / "rows.jsonl", plain_rows(200))
    model = trained("run", data)
    write_jsonl(data, plain_rows(200)[3:])
    with pytest.raises(UserError, match="rows.jsonl has changed since .*run was trained on it.* or --split all"):
        select_prompts(options(data_path=str(data), model=model), bytes_tokenizer)
    select_prompts(options(data_path=str(data), model=model, split="all"), bytes_tokenizer)
    folder = tmp_path / "folder"
    parts = [write_jsonl(folder / f"train{number}.jsonl", plain_rows(100 + number)) for number in (1, 2)]
    model = trained("run2", folder)
    inner = trained("run3", folder, write_jsonl(folder / "deeper" / "more.jsonl", plain_rows(30)))
    select_prompts(options(data_path=str(folder), model=inner), bytes_tokenizer)
    parts[1].unlink()
    with pytest.raises(UserError, match="folder has changed since"):
        select_prompts(options(data_path=str(folder), model=model), bytes_tokenizer)


def test_all_rows_of_data_that_no_run_was_trained_on(options, trained, bytes_tokenizer, tmp_path, caplog):
    caplog.set_level("INFO")
    data = write_jsonl(tmp_path / "rows.jsonl", plain_rows(200))
    model = trained("run", write_jsonl(tmp_path / "other.jsonl", plain_rows(30)))
    select_prompts(options(data_path=str(data), model=model), bytes_tokenizer)
    assert f"{data}: 200 of 200 rows (no run behind the models held out a part of them)" in caplog.text


def test_prompts_are_rows_that_no_run_was_trained_on(options, trained, bytes_tokenizer, tmp_path):
    """The reward model's run, the policy's, and the one that this started from held out different shares."""
    data = write_jsonl(tmp_path / "rows.jsonl", plain_rows(200))
    reward = trained("reward", data, eval_share=0.1)
    start = trained("sft", data, eval_share=0.3)
    model = trained("ppo", data, eval_share=0.2, actor_model_name_or_path=start)
    chosen = options(data_path=str(data), model=model, reward_model=reward)
    prompts = set(texts_of(select_prompts(chosen, bytes_tokenizer)))
    assert len(prompts) == 20
    for share in (0.1, 0.2, 0.3):
        assert prompts <= set(held_out_of(data, share))


def test_rows_that_a_run_held_out_of_one_of_its_files(options, folder, trained, bytes_tokenizer, tmp_path):
    """The share that it held out, of the second of its sources; --split reads the others."""
    file = write_jsonl(tmp_path / "b.jsonl", [{"prompt": f"B{number}"} for number in range(40)])
    flags = {"data_path": str(file), "model": trained("run", folder, file, eval_share=0.2)}
    held_out = texts_of(select_prompts(options(**flags), bytes_tokenizer))
    assert sorted(held_out) == sorted(held_out_of(file, 0.2)) and len(held_out) == 8
    others = texts_of(select_prompts(options(split="train", **flags), bytes_tokenizer))
    assert len(others) == 32 and not set(others) & set(held_out)
