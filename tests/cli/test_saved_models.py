# SPDX-License-Identifier: Apache-2.0
"""What the mains save, opened with plain transformers, which test_families.py measures; and second runs into the same
folder.
"""

import json
import subprocess
import sys

import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from dschat.cli import main

# -- saved models in plain transformers


def test_step_3_saves_both_models(ppo, sft, reward):
    actor, critic = ppo / "actor", ppo / "critic"
    tokenizer = AutoTokenizer.from_pretrained(actor)
    assert tokenizer.get_vocab() == AutoTokenizer.from_pretrained(sft).get_vocab()
    model = AutoModelForCausalLM.from_pretrained(actor).eval()
    ids = tokenizer("POST\n", return_tensors="pt")
    assert ids.input_ids[0, 0] == tokenizer.bos_token_id
    assert model.generate(**ids, max_new_tokens=4).shape[1] > ids.input_ids.shape[1]
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    head = AutoModelForSequenceClassification.from_pretrained(critic).score
    assert head.out_features == 1
    assert not torch.equal(head.weight, AutoModelForSequenceClassification.from_pretrained(reward).score.weight)
    before = AutoModelForCausalLM.from_pretrained(sft).get_input_embeddings().weight
    assert not torch.equal(before, model.get_input_embeddings().weight)


def test_a_checkpoint_opens_and_differs_from_the_end(sft, reward, ppo):
    for auto_class, folder in (
        (AutoModelForCausalLM, sft),
        (AutoModelForSequenceClassification, reward),
        (AutoModelForCausalLM, ppo),
    ):
        name = "actor" if folder == ppo else "."
        early, late, end = (
            auto_class.from_pretrained(folder / place / name).get_input_embeddings().weight
            for place in ("models/step-2", "models/step-4", ".")
        )
        assert torch.equal(late, end) and not torch.equal(early, end)
        AutoTokenizer.from_pretrained(folder / "models" / "step-2" / name)


# -- models of checkpoints


def test_an_export_is_what_the_run_would_have_saved(run, ppo_flags, tmp_path, caplog):
    """To the last byte, of actor, critic and moving average; the run stays as it is."""
    out = tmp_path / "out"
    run("ppo", ppo_flags | {"save_models": 2, "save_steps": 2, "eval_interval": 2, "enable_ema": True}).expect(0)
    files = {file: file.read_bytes() for file in out.rglob("*") if file.is_file()}
    checkpoint, folder = out / "checkpoints" / "step-2", tmp_path / "exported"
    for words, problem in (
        ([out, folder], "is not a checkpoint of a run"),
        ([checkpoint, out], f"{out} exists: give a new folder"),
    ):
        assert main(["export", *map(str, words)]) == 2
        assert problem in caplog.text
    exported = subprocess.run([sys.executable, "-m", "dschat", "export", checkpoint, folder], capture_output=True)
    assert exported.returncode == 0, exported.stderr
    for name in ("actor", "critic", "actor_ema"):
        saved = out / "models" / "step-2" / name / "model.safetensors"
        assert (folder / name / "model.safetensors").read_bytes() == saved.read_bytes()
    assert {file: file.read_bytes() for file in out.rglob("*") if file.is_file()} == files
    assert not (folder / "checkpoints").exists()


# -- a second run into the same folder


def test_a_finished_output_dir_is_refused_then_overwritten_whole(run, ppo_flags, tmp_path):
    """Nothing of the earlier run is left."""
    run("ppo", ppo_flags | {"save_models": 2, "eval_interval": 2}).expect(0)
    weights = (tmp_path / "out" / "actor" / "model.safetensors").read_bytes()
    again = run("ppo", ppo_flags).expect(2)
    assert "--overwrite_output_dir" in again.stderr and "Traceback" not in again.stderr
    assert json.loads((tmp_path / "out" / "run.json").read_text())["finished"] is True
    shorter = ppo_flags | {"per_device_training_batch_size": 16, "overwrite_output_dir": True, "seed": 2}
    run("ppo", shorter).expect(0)
    assert (tmp_path / "out" / "actor" / "model.safetensors").read_bytes() != weights
    names = {file.name for file in (tmp_path / "out" / "samples").iterdir()}
    assert names == {"update-000000.jsonl", "update-000002.jsonl"}
    assert not (tmp_path / "out" / "models").exists()


# -- the same seed
