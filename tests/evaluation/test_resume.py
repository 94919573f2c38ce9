# SPDX-License-Identifier: Apache-2.0
"""Runs that were interrupted: they go on where they stood, with the same settings only."""

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


def test_an_interrupted_run_goes_on_and_does_again_what_a_kill_left_of_a_batch(options, dies, interrupt, tmp_path):
    """After two of five batches, and a cut in the last row."""
    flags = {"batch_size": 5, "num_return": 2}
    whole = options(proj_path=tmp_path / "whole", **flags)
    run_inference(whole)
    dies(2, **flags)
    path = options(**flags).result_path
    partial = path.with_name("run.jsonl.partial")
    assert rows_kept(partial) == 10 and not path.exists()
    partial.write_bytes(partial.read_bytes()[:-40])
    calls = interrupt(scored, "respond_and_score")
    run_inference(options(**flags))
    assert len(calls) == 4
    assert path.read_bytes() == whole.result_path.read_bytes()
    assert [file.name for file in path.parent.iterdir()] == ["run.jsonl"]


@pytest.mark.parametrize("change", [{"max_prompt_len": 149}, {"data_path": "hh-rlhf"}])
def test_other_settings_are_refused_and_named(change, options, dies):
    dies(1, batch_size=5)
    partial = options().result_path.with_name("run.jsonl.partial")
    before = partial.read_bytes()
    (flag,) = change
    with pytest.raises(UserError, match=f"was begun with --{flag} .*--overwrite"):
        run_inference(options(batch_size=5, **change))
    assert partial.read_bytes() == before


def test_a_model_that_was_trained_anew_is_refused(options, bytes_tokenizer, dies, tmp_path):
    flags = {"model": str(tmp_path / "model"), "batch_size": 5}
    save_folder(tmp_path / "model", make_causal_lm(vocab_size=300), bytes_tokenizer)
    dies(1, **flags)
    save_folder(tmp_path / "model", make_causal_lm(vocab_size=300, seed=5), bytes_tokenizer)
    with pytest.raises(UserError, match=r"was begun with --model .*model \(files \w{12}\), now it is .*--overwrite"):
        run_inference(options(**flags))
    run_inference(options(overwrite=True, **flags))
