# SPDX-License-Identifier: Apache-2.0
"""Flags, data and folders that cannot be used: one clear message on stderr, exit status 2, no traceback."""

import pytest

from cli_runs import Result, message_of, write_jsonl
from dschat.cli import main
from flag_cases import REQUIRED

# -- flags


@pytest.mark.parametrize(
    ("step", "flags", "words"),
    [
        ("ppo", "--temperature -1.0", ["--temperature -1", "above 0"]),
        ("reward", "--global_batch_size 16 --gradient_accumulation_steps 4", ["--gradient_accumulation_steps 4"]),
        ("ppo", "--global_batch_size 9", ["--global_batch_size 9"]),
        ("ppo", "--termination_condition bigram", ["--termination_condition bigram"]),
        ("ppo", "--reward_function bad.py:f", ["--reward_function", "bad.py"]),
        ("ppo", "--metric_function bad.py:f", ["--metric_function", "bad.py"]),
        ("sft", "--learning_rat 1", ["--learning_rat", "--learning_rate"]),
        ("sft", "--seed one", ["--seed", "one"]),
        ("sft", "--output_dir=", ["--output_dir"]),
    ],
)
def test_a_refused_command_line(step, flags, words, tmp_path, monkeypatch, capsys):
    """Ends a main with one message, before anything is loaded; the rules: tests/config."""
    (tmp_path / "bad.py").write_text("def f(prompts, responses, rows:\n    return 1\n")
    monkeypatch.chdir(tmp_path)
    try:
        status = main([step, *REQUIRED[step], *flags.split()], may_launch=False)
    except SystemExit as exit:
        status = exit.code
    captured = capsys.readouterr()
    message_of(Result(status, captured.out, captured.err), *words)
    assert not (tmp_path / "out").exists()


# -- real processes


# -- data


ROWS = [{"prompt": f"question {i}", "chosen": f" yes {i}", "rejected": f" no {i}"} for i in range(40)]


def changed(place: int, **columns) -> list[dict]:
    """ROWS with one row changed; None removes a column."""
    row = {name: value for name, value in (ROWS[place] | columns).items() if value is not None}
    return [*ROWS[:place], row, *ROWS[place + 1 :]]


DATA = {
    "missing prompt in step 3": ("ppo", changed(6, prompt=None), ["rows.jsonl:7", "'prompt'", "--prompt_key"]),
    "missing response": ("sft", changed(3, chosen=None, rejected=None), ["rows.jsonl:4", "--response_key"]),
    "missing rejected": ("reward", changed(3, rejected=None), ["rows.jsonl:4", "rejected", "--rejected_key"]),
    "empty file": ("ppo", [], ["rows.jsonl", "empty"]),
    "fewer than a batch": ("sft", ROWS[:6], ["--data_path", "8"]),
    "fewer than a batch in step 2": ("reward", ROWS[:6], ["--data_path", "8"]),
    "fewer than a rollout": ("ppo", ROWS[:6], ["--data_path", "16"]),
}


@pytest.mark.parametrize("name", DATA)
def test_data(name, request, run, tmp_path):
    step, rows, words = DATA[name]
    file = write_jsonl(tmp_path / "rows.jsonl", rows)
    split = {"sft": "1,0,0", "reward": "0,1,0", "ppo": "0,0,1"}[step]
    result = run(step, request.getfixturevalue(f"{step}_flags") | {"data_path": file, "data_split": split})
    message_of(result, *words)
    assert not (tmp_path / "out").exists()


def test_a_corrupt_row(run, sft_flags, tmp_path):
    file = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "a", "response": "b"}] * 3)
    file.write_text(file.read_text().replace('"a", "response"', '"a" "response"', 2).replace('"a" "', '"a", "', 1))
    message_of(run("sft", sft_flags | {"data_path": file}), "rows.jsonl:2", "JSON")


def test_a_refused_run_changes_no_folder(run, sft_flags, tmp_path):
    """Neither an empty one, nor that of an earlier run which it would have replaced or gone on with."""
    bad = {"data_path": write_jsonl(tmp_path / "rows.jsonl", changed(6, prompt=None))}
    empty = tmp_path / "empty"
    empty.mkdir()
    message_of(run("sft", sft_flags | bad | {"output_dir": empty}), "rows.jsonl:7")
    assert list(empty.iterdir()) == []
    run("sft", sft_flags).expect(0)
    before = {file: file.read_bytes() for file in (tmp_path / "out").rglob("*") if file.is_file()}
    for flags in ({"overwrite_output_dir": True}, {"resume_from_checkpoint": "latest"}):
        message_of(run("sft", sft_flags | bad | flags), "rows.jsonl:7")
        after = {file: file.read_bytes() for file in (tmp_path / "out").rglob("*") if file.is_file()}
        assert after == before


# -- the rest


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"train_batch_size": 1024}', ["--deepspeed_config", "train_batch_size"]),
        ('{"train_micro_batch_size_per_gpu": 3}', ["--deepspeed_config", "train_micro_batch_size_per_gpu"]),
    ],
)
def test_a_deepspeed_config_that_contradicts(content, words, run, sft_flags, tmp_path):
    file = tmp_path / "ds.json"
    file.write_text(content)
    message_of(run("sft", sft_flags | {"deepspeed_config": file}), *words)
