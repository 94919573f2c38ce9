# SPDX-License-Identifier: Apache-2.0
"""Runs that were interrupted: they go on where they stood, with the same settings only."""

import shutil

import pytest

from dschat.base.errors import UserError
from dschat.evaluation import generate as scored
from dschat.evaluation.generate import run_inference
from factories import make_causal_lm, save_folder
from killed_commands import rows_kept


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


def test_an_interrupted_run_goes_on_and_does_again_what_a_kill_left_of_a_batch(interrupted, interrupt, options):
    flags, expected, path = interrupted
    partial = path.with_name("run.jsonl.partial")
    partial.write_bytes(partial.read_bytes()[:-40])
    calls = interrupt(scored, "respond_and_score")
    run_inference(options(**flags))
    assert len(calls) == 4
    assert path.read_bytes() == expected
    assert [file.name for file in path.parent.iterdir()] == ["run.jsonl"]


@pytest.mark.parametrize(
    "change",
    [
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


def test_scores_of_the_data_set_do_not_go_on_from_those_of_samples(options, dies):
    flags = {"batch_size": 5, "name": "run"}
    dies(1, **flags)
    with pytest.raises(UserError, match="was begun with --ref_scores False, now it is True"):
        run_inference(options(ref_scores=True, **flags))


def test_a_model_that_was_trained_anew_is_refused(options, bytes_tokenizer, dies, tmp_path):
    flags = {"model": str(tmp_path / "model"), "batch_size": 5}
    save_folder(tmp_path / "model", make_causal_lm(vocab_size=300), bytes_tokenizer)
    dies(1, **flags)
    save_folder(tmp_path / "model", make_causal_lm(vocab_size=300, seed=5), bytes_tokenizer)
    with pytest.raises(UserError, match=r"was begun with --model .*model \(files \w{12}\), now it is .*--overwrite"):
        run_inference(options(**flags))
    run_inference(options(overwrite=True, **flags))
