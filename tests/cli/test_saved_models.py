# SPDX-License-Identifier: Apache-2.0
"""What the mains save, opened with plain transformers, which test_families.py measures."""

import json
import shutil
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from cli_runs import run_command
from dschat.cli import main

# -- saved models in plain transformers


@pytest.mark.parametrize(
    ("auto_class", "name"), [(AutoModelForCausalLM, "actor"), (AutoModelForSequenceClassification, "critic")]
)
def test_models_of_step_3_open_and_change_until_the_end(auto_class, name, ppo):
    early, late, end = (
        auto_class.from_pretrained(ppo / place / name).get_input_embeddings().weight
        for place in ("models/step-2", "models/step-4", ".")
    )
    assert torch.equal(late, end) and not torch.equal(early, end)


def test_the_policy_ends_where_its_tokenizer_says(ppo):
    model = AutoModelForCausalLM.from_pretrained(ppo / "actor")
    assert model.generation_config.eos_token_id == AutoTokenizer.from_pretrained(ppo / "actor").eos_token_id


# -- models of checkpoints


def test_an_export_is_what_the_run_would_have_saved(run, ppo_flags, tmp_path, caplog):
    """To the last byte, of actor, critic and moving average; the run stays as it is."""
    out = tmp_path / "out"
    saves = {"save_models": 2, "save_steps": 2, "save_minutes": 1000}
    run("ppo", ppo_flags | saves | {"eval_interval": 2, "enable_ema": True}).expect(0)
    files = {file: file.read_bytes() for file in out.rglob("*") if file.is_file()}
    checkpoint, folder = out / "checkpoints" / "step-2", tmp_path / "exported"
    inside = tmp_path / "stopped" / "checkpoints" / "step-2"
    shutil.copytree(out, tmp_path / "stopped")
    state = json.loads((inside / "state.json").read_text())
    (inside / "state.json").write_text(json.dumps(state | {"rollout": {"current": {"done": 1}}}))
    for words, problem in (
        ([out, folder], "is not a checkpoint of a run"),
        ([inside, folder], f"{inside} was written inside a rollout, between two updates of its models"),
        ([checkpoint, out], f"{out} exists: give a new folder"),
    ):
        assert main(["export", *map(str, words)]) == 2
        assert problem in caplog.text
    (out / "checkpoints").rename(tmp_path / "disk")
    (out / "checkpoints").symlink_to(tmp_path / "disk")  # on another disk
    run_command([sys.executable, "-m", "dschat", "export", checkpoint, folder]).expect(0)
    (out / "checkpoints").unlink()
    (tmp_path / "disk").rename(out / "checkpoints")
    for name in ("actor", "critic", "actor_ema"):
        saved = out / "models" / "step-2" / name / "model.safetensors"
        assert (folder / name / "model.safetensors").read_bytes() == saved.read_bytes()
    assert {file: file.read_bytes() for file in out.rglob("*") if file.is_file()} == files
    assert not (folder / "checkpoints").exists()
