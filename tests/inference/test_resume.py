# SPDX-License-Identifier: Apache-2.0
"""Runs that were interrupted: they go on where they stood, with the same settings only."""

import shutil

import pytest
from transformers import AutoTokenizer

from cli_runs import read_jsonl
from dschat.errors import UserError
from dschat.inference import run as run_module
from dschat.inference.run import run_inference
from factories import make_causal_lm, save_folder


class Killed(BaseException):
    """Stands for a signal."""


@pytest.fixture
def interrupt(monkeypatch):
    """interrupt(n): runs die at the (n+1)-th batch; interrupt(None): no longer."""
    original = run_module.respond_and_score
    batches = []

    def after(count):
        batches.clear()

        def work(policy, reader, num_return, examples, rows):
            if count is not None and len(batches) == count:
                raise Killed
            batches.append(len(examples))
            return original(policy, reader, num_return, examples, rows)

        monkeypatch.setattr(run_module, "respond_and_score", work)
        return batches

    return after


@pytest.fixture
def interrupted(options, interrupt, project):
    """(flags, what the file must be, path): a run that was stopped after 2 of 5 batches."""
    flags = {"batch_size": 5, "num_return": 2}
    whole = options(proj_path=project / "whole", **flags)
    stopped = options(proj_path=project / "stopped", **flags)
    partial = stopped.result_path.with_name("run.jsonl.partial")
    if not whole.result_path.exists():
        run_inference(whole)
        interrupt(2)
        with pytest.raises(Killed):
            run_inference(stopped)
        interrupt(None)
    assert not stopped.result_path.exists()
    assert len(read_jsonl(partial)) == 1 + 10
    path = options(**flags).result_path
    path.parent.mkdir(parents=True)
    shutil.copy(partial, path.parent)
    return flags, whole.result_path.read_bytes(), path


def test_an_interrupted_run_goes_on(interrupted, interrupt, options):
    flags, expected, path = interrupted
    batches = interrupt(None)
    run_inference(options(**flags))
    assert len(batches) == 3
    assert path.read_bytes() == expected
    assert [file.name for file in path.parent.iterdir()] == ["run.jsonl"]


@pytest.mark.parametrize("cut", [1, 40, 700])
def test_what_a_kill_left_of_a_batch_is_done_again(cut, interrupted, interrupt, options):
    flags, expected, path = interrupted
    partial = path.with_name("run.jsonl.partial")
    content = partial.read_bytes()
    partial.write_bytes(content[:-cut])
    batches = interrupt(None)
    run_inference(options(**flags))
    assert len(batches) == 4
    assert path.read_bytes() == expected


def test_the_journal_holds_the_longest_prompts_first(interrupted, project):
    _, _, path = interrupted
    tokenizer = AutoTokenizer.from_pretrained(project / "rm")
    rows = read_jsonl(path.with_name("run.jsonl.partial"))[1:]
    lengths = [len(tokenizer.encode(row["row"]["prompt"])) for row in rows]
    assert lengths == sorted(lengths, reverse=True)


def test_a_run_that_was_killed_before_its_last_step_loads_no_model(interrupted, options, monkeypatch):
    flags, expected, path = interrupted

    def dies(self, rows):
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(run_module.Journal, "finish", dies)
        with pytest.raises(Killed):
            run_inference(options(**flags))
    monkeypatch.setattr(run_module, "load_policy", None)
    monkeypatch.setattr(run_module, "load_reward_model", None)
    run_inference(options(**flags))
    assert path.read_bytes() == expected


@pytest.mark.parametrize(
    "change",
    [
        {"batch_size": 4},
        {"num_return": 3},
        {"rollout_engine": "generate"},
        {"seed": 2},
        {"top_k": 5},
        {"top_p": 0.5},
        {"max_new_tokens": 13},
        {"max_prompt_len": 149},  # none before
        {"num_samples": 23},
        {"dtype": "bf16"},
        {"reward_model": "run/actor"},
        {"data_path": "hh-rlhf"},
    ],
)
def test_other_settings_are_refused_and_named(change, interrupted, options, project):
    flags, _, path = interrupted
    partial = path.with_name("run.jsonl.partial")
    before = partial.read_bytes()
    flag = "--" + next(iter(change)).replace("_", "-")
    if "reward_model" in change:
        change = {"reward_model": str(project / "run" / "actor")}
    with pytest.raises(UserError) as error:
        run_inference(options(**(flags | change)))
    assert f"was begun with {flag} " in str(error.value) and "--overwrite" in str(error.value)
    assert partial.read_bytes() == before


def test_a_model_that_was_trained_anew_is_refused(options, bytes_tokenizer, interrupt, tmp_path):
    flags = {"model": str(tmp_path / "model"), "batch_size": 5}
    save_folder(tmp_path / "model", make_causal_lm(vocab_size=300), bytes_tokenizer)
    interrupt(1)
    with pytest.raises(Killed):
        run_inference(options(**flags))
    interrupt(None)
    save_folder(tmp_path / "model", make_causal_lm(vocab_size=300, seed=5), bytes_tokenizer)
    with pytest.raises(UserError, match=r"was begun with --model .*model \(files \w{12}\), now it is .*--overwrite"):
        run_inference(options(**flags))
    run_inference(options(overwrite=True, **flags))


def test_other_settings_may_follow_where_nothing_was_kept(options, interrupt):
    interrupt(0)
    with pytest.raises(Killed):
        run_inference(options(num_samples=3))
    interrupt(None)
    assert ", 2 rows: " in run_inference(options(num_samples=2))
