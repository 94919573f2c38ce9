# SPDX-License-Identifier: Apache-2.0
"""Flags, data, models and folders that cannot be used: one clear message on stderr, exit status 2, no traceback."""

import shutil

import pytest

from cli_runs import Result, message_of, write_jsonl
from dschat.cli import main
from flag_cases import REQUIRED


@pytest.mark.parametrize(
    ("step", "flags", "words"),
    [
        ("ppo", "--reward_function bad.py:f", ["--reward_function", "bad.py"]),
        ("sft", "--learning_rat 1", ["--learning_rat", "--learning_rate"]),
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


ROWS = [{"prompt": f"question {i}", "chosen": f" yes {i}", "rejected": f" no {i}"} for i in range(40)]


def test_a_refused_run_changes_no_folder(run, sft_flags, tmp_path):
    """Neither an empty one, nor that of an earlier run which it would have replaced or gone on with."""
    bad = {"data_path": write_jsonl(tmp_path / "rows.jsonl", [*ROWS[:6], {"chosen": " yes"}, *ROWS[7:]])}
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


@pytest.mark.parametrize(("step", "flag"), [("sft", "model_name_or_path"), ("ppo", "critic_model_name_or_path")])
def test_an_encoder_decoder_is_refused_before_the_data_are_read(step, flag, request, run, tmp_path):
    from transformers import T5Config

    T5Config(vocab_size=100).save_pretrained(tmp_path / "t5")
    flags = request.getfixturevalue(f"{step}_flags") | {flag: tmp_path / "t5", "data_path": "absent.jsonl"}
    message_of(run(step, flags), f"--{flag} {tmp_path / 't5'}: a t5 model is an encoder-decoder")


@pytest.mark.parametrize("mistake", ["./absent", "old"])
def test_a_mistake_loses_no_earlier_model(mistake, run, sft_flags, sft, tmp_path):
    """With --overwrite_output_dir, whether the model cannot be read, or the old model is the new one's base."""
    folder = tmp_path / "old"
    shutil.copytree(sft, folder)
    before = {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}
    base = {"model_name_or_path": tmp_path / mistake}
    message_of(run("sft", sft_flags | base | {"output_dir": folder, "overwrite_output_dir": True}), "--")
    assert all(file.read_bytes() == content for file, content in before.items())
