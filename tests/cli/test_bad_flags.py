# SPDX-License-Identifier: Apache-2.0
"""A command line that is refused ends a main with one message, before anything is loaded; the rules: tests/config."""

import pytest

from cli_runs import Result, message_of
from dschat.cli import main
from flag_cases import REQUIRED


@pytest.mark.parametrize(
    ("step", "flags", "words"),
    [
        ("ppo", "--temperature -1.0", ["--temperature -1", "above 0"]),
        ("reward", "--global_batch_size 16 --gradient_accumulation_steps 4", ["--gradient_accumulation_steps 4"]),
        ("ppo", "--global_batch_size 9", ["--global_batch_size 9"]),
        ("ppo", "--reward_function bad.py:f", ["--reward_function", "bad.py"]),
        ("ppo", "--metric_function bad.py:f", ["--metric_function", "bad.py"]),
        ("sft", "--learning_rat 1", ["--learning_rat", "--learning_rate"]),
        ("sft", "--seed one", ["--seed", "one"]),
        ("sft", "--output_dir=", ["--output_dir"]),
    ],
)
def test_rules(step, flags, words, tmp_path, monkeypatch, capsys):
    (tmp_path / "bad.py").write_text("def f(prompts, responses, rows:\n    return 1\n")
    monkeypatch.chdir(tmp_path)
    try:
        status = main([step, *REQUIRED[step], *flags.split()], may_launch=False)
    except SystemExit as exit:
        status = exit.code
    captured = capsys.readouterr()
    message_of(Result(status, captured.out, captured.err), *words)
    assert not (tmp_path / "out").exists()
