# SPDX-License-Identifier: Apache-2.0
"""Runs that were interrupted: they go on where they stood, with the same settings only."""

import shutil
import sys

import pytest

from cli_runs import ROOT, arguments
from dschat.base.errors import UserError
from dschat.base.journal import Journal
from dschat.evaluation import generate as scored
from dschat.evaluation import prompts
from dschat.evaluation.generate import run_inference
from factories import make_causal_lm, save_folder
from killed_commands import kill_when, rows_kept


@pytest.fixture
def dies(interrupt, options):
    """dies(n, **flags): a run that is interrupted at its (n+1)-th batch."""

    def run_and_die(count, **flags):
        interrupt(scored, "respond_and_score", count)
        with pytest.raises(KeyboardInterrupt):
            run_inference(options(**flags))
        interrupt(scored, "respond_and_score")

    return run_and_die


@pytest.fixture
def interrupted(options, dies, project):
    """(flags, what the file must be, path): a run that was stopped after 2 of 5 batches."""
    flags = {"batch_size": 5, "num_return": 2}
    whole = options(proj_path=project / "whole", **flags)
    stopped = options(proj_path=project / "stopped", **flags)
    partial = stopped.result_path.with_name("run.jsonl.partial")
    if not whole.result_path.exists():
        run_inference(whole)
        dies(2, proj_path=project / "stopped", **flags)
    assert not stopped.result_path.exists()
    assert rows_kept(partial) == 10
    path = options(**flags).result_path
    path.parent.mkdir(parents=True)
    shutil.copy(partial, path.parent)
    return flags, whole.result_path.read_bytes(), path


@pytest.mark.parametrize(("cut", "batches"), [(0, 3), (40, 4)])
def test_an_interrupted_run_goes_on_and_does_again_what_a_kill_left_of_a_batch(
    cut, batches, interrupted, interrupt, options
):
    flags, expected, path = interrupted
    partial = path.with_name("run.jsonl.partial")
    partial.write_bytes(partial.read_bytes()[: -cut or None])
    calls = interrupt(scored, "respond_and_score")
    run_inference(options(**flags))
    assert len(calls) == batches
    assert path.read_bytes() == expected
    assert [file.name for file in path.parent.iterdir()] == ["run.jsonl"]


@pytest.mark.slow
def test_killed_half_way_and_started_again_gives_the_same_file(project, run, capsys, monkeypatch):
    """On a machine without a GPU, where --gpu 0 means the CPU; the data sets lie in PROJ_PATH/data.

    What is started again is the same run in this process, which has imported everything.
    """
    flags = {"dataset": "hh-rlhf", "max_new_tokens": 60, "batch_size": 1, "top_k": 0, "seed": 7}
    uninterrupted = run(**flags).read_bytes()
    words = flags | {"gpu": 0, "proj_path": project, "model": project / "run", "reward_model": project / "rm"}
    partial = project / "results" / "hh-rlhf" / "temperature=0.8" / "run.jsonl.partial"
    command = [sys.executable, "inference/inference_with_rewards.py", *arguments(words)]
    stderr = kill_when(command, lambda: rows_kept(partial) > 2, ROOT, MA_RLHF_DATA=None)
    (warning,) = [line for line in stderr.splitlines() if "--gpu 0" in line]
    assert "CPU" in warning and 2 < rows_kept(partial) < 23
    capsys.readouterr()
    monkeypatch.setattr("dschat.base.progress.LINE_SECONDS", 0.0)
    assert run(proj_path=project, device=None, gpu=0, **flags).read_bytes() == uninterrupted
    assert "24/24" in capsys.readouterr().err  # the progress bar
    assert not partial.exists()


def test_a_run_that_was_killed_before_its_last_step_loads_no_model(interrupted, options, interrupt, monkeypatch):
    flags, expected, path = interrupted
    interrupt(Journal, "finish", 0)
    with pytest.raises(KeyboardInterrupt):
        run_inference(options(**flags))
    interrupt(Journal, "finish")
    monkeypatch.setattr(prompts, "load_policy", None)
    monkeypatch.setattr(scored, "load_reward_model", None)
    run_inference(options(**flags))
    assert path.read_bytes() == expected


@pytest.mark.parametrize(
    "change",
    [
        {"num_return": 3},
        {"max_prompt_len": 149},  # none before
        {"reward_model": "run/actor"},
        {"data_path": "hh-rlhf"},
    ],
)
def test_other_settings_are_refused_and_named(change, interrupted, options, project):
    flags, _, path = interrupted
    partial = path.with_name("run.jsonl.partial")
    before = partial.read_bytes()
    flag = f"--{next(iter(change))}"
    if "reward_model" in change:
        change = {"reward_model": str(project / "run" / "actor")}
    with pytest.raises(UserError) as error:
        run_inference(options(**(flags | change)))
    assert f"was begun with {flag} " in str(error.value) and "--overwrite" in str(error.value)
    assert partial.read_bytes() == before


def test_a_model_that_was_trained_anew_is_refused(options, bytes_tokenizer, dies, tmp_path):
    flags = {"model": str(tmp_path / "model"), "batch_size": 5}
    save_folder(tmp_path / "model", make_causal_lm(vocab_size=300), bytes_tokenizer)
    dies(1, **flags)
    save_folder(tmp_path / "model", make_causal_lm(vocab_size=300, seed=5), bytes_tokenizer)
    with pytest.raises(UserError, match=r"was begun with --model .*model \(files \w{12}\), now it is .*--overwrite"):
        run_inference(options(**flags))
    run_inference(options(overwrite=True, **flags))
