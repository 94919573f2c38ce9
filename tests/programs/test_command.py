# SPDX-License-Identifier: Apache-2.0
"""Programs for problems, run on their tests: the file, and what an interruption leaves."""

from types import SimpleNamespace

import pytest

from cli_runs import read_jsonl, write_jsonl
from dschat.base.errors import UserError
from dschat.programs.command import respond_and_run, run_programs
from dschat.programs.levels import weakness
from dschat.programs.options import ProgramOptions
from factories import make_causal_lm, make_prompt, save_folder

pytestmark = [
    pytest.mark.xdist_group("sandbox"),
    pytest.mark.skipif(bool(weakness("namespaces")), reason="no sandbox: " + weakness("namespaces")),
]


@pytest.fixture
def options(plain):
    """options(**changes): a short run on the held-out problems of APPS."""
    flags = {name: plain[name] for name in ("proj_path", "model", "device")}
    flags |= {"max_new_tokens": 8, "num_return": 2, "batch_size": 5, "sandbox_workers": 2}
    return lambda **changes: ProgramOptions(**(flags | changes))


def test_every_problem_with_tests_is_answered_and_run(options):
    chosen = options()
    line = run_programs(chosen)
    rows = read_jsonl(chosen.result_path)
    assert chosen.result_path.parts[-3:] == ("apps", "temperature=1.0", "run.jsonl")
    assert line.startswith(f"{len(rows)} problems (") and "1 of them without tests" in line
    assert {row["difficulty"] for row in rows} == {"introductory", "interview", "competition"}
    assert {row["dataset"] for row in rows} == {"apps"}
    statuses = {sample["status"] for row in rows for sample in row["samples"]}
    assert all(len(row["samples"]) == 2 for row in rows) and statuses <= {"compile_error", "runtime_error", "wrong"}
    with pytest.raises(UserError, match="exists, finished"):
        run_programs(chosen)


def test_difficulty_0_is_a_difficulty():
    silent = SimpleNamespace(respond=lambda examples, num_return: [])
    examples = [make_prompt([1], "p", 0, {"input_output": "", "difficulty": level}) for level in (0, None)]
    entries = respond_and_run(silent, None, 1, "last", "mine", examples)
    assert [entry["row"]["difficulty"] for entry in entries] == ["0", ""]
    assert [entry["row"]["dataset"] for entry in entries] == ["mine", "mine"]


def test_a_problem_without_tests_may_be_longer_than_the_model_reads(options, bytes_tokenizer, tmp_path):
    """GPT-2 has a table of positions, which a longer prompt exceeds."""
    model = save_folder(tmp_path / "gpt2", make_causal_lm("gpt2", vocab_size=len(bytes_tokenizer)), bytes_tokenizer)
    tests = {"inputs": [""], "outputs": ["1"]}
    rows = [{"prompt": "p", "input_output": tests}, {"prompt": "long " * 5000, "input_output": None}]
    file = write_jsonl(tmp_path / "rows.jsonl", rows)
    chosen = options(dataset="mine", data_path=str(file), model=model, max_prompt_len=100_000)
    assert run_programs(chosen).startswith("1 problems (1 problems left out, 1 of them without tests)")


def test_a_test_of_another_form_is_refused_before_anything_is_sampled(options, tmp_path):
    tests = {"fn_name": "f", "inputs": [[1], 2], "outputs": [1, 2]}
    file = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "p", "input_output": tests}])
    chosen = options(dataset="mine", data_path=str(file))
    with pytest.raises(UserError, match="rows.jsonl:1: inputs of the function f must be lists of arguments"):
        run_programs(chosen)
    assert not chosen.result_path.parent.exists()


def test_problems_without_tests_are_refused(options, tmp_path):
    file = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "p", "input_output": None}])
    with pytest.raises(UserError, match="no problem has tests: give rows whose column input_output holds them"):
        run_programs(options(dataset="mine", data_path=str(file)))
