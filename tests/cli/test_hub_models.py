# SPDX-License-Identifier: Apache-2.0
"""Models as others publish them, through the mains: pad = eos or none, more rows than ids; and adapters alone."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from cli_runs import ROOT, read_jsonl, run_forked
from closeness import near

SAMPLES = 8  # responses that are looked at
MORE_ROWS = 40


def published(model: Path, folder: Path, pad: str | None = "<eos>") -> Path:
    """A copy as a hub has many: EOS pads, or nothing; none in reserve; more rows than ids, whose logits are large."""
    shutil.copytree(model, folder, ignore=shutil.ignore_patterns("checkpoints", "models", "tensorboard"))
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text().replace("<pad>", "wordy").replace("<bos>", "wordz"))
    content["added_tokens"] = [token for token in content["added_tokens"] if token["content"] == "<eos>"]
    content["post_processor"] = None
    file.write_text(json.dumps(content))
    file = folder / "tokenizer_config.json"
    settings = json.loads(file.read_text()) | {"pad_token": pad, "bos_token": "<eos>"}
    file.write_text(json.dumps({name: value for name, value in settings.items() if value is not None}))
    causal_lm = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    rows = causal_lm.config.vocab_size
    causal_lm.resize_token_embeddings(rows + MORE_ROWS)
    with torch.no_grad():
        causal_lm.get_input_embeddings().weight[rows:] = 2 * causal_lm.get_input_embeddings().weight[5]
    causal_lm.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def hub(inputs, tmp_path_factory):
    return published(inputs / "model", tmp_path_factory.mktemp("hub") / "model")


def run_in(tmp_path, step, flags, name):
    """A main whose output is tmp_path/name."""
    run_forked(step, flags | {"output_dir": tmp_path / name}, tmp_path / f"printed {name}").expect(0)
    return tmp_path / name


def generate(tmp_path, policy, reward, data, name):
    """`inference_with_rewards.py`: the rows that it writes."""
    words = ["--proj-path", tmp_path / name, "--dataset", "own", "--model", policy, "--reward-model", reward]
    words += ["--data-path", data, "--num-samples", SAMPLES, "--max-new-tokens", 12]
    script = ROOT / "inference" / "inference_with_rewards.py"
    run_forked(script, list(map(str, words)), tmp_path / f"printed {name}").expect(0)
    (file,) = (tmp_path / name).rglob("*.jsonl")
    return read_jsonl(file)


@pytest.mark.parametrize("step", ["sft", "dpo", "reward"])
def test_every_step_takes_a_model_whose_eos_pads(step, hub, request, tmp_path):
    """Only a reward model, which transformers could not read otherwise, gets a token of its own."""
    flags = request.getfixturevalue(f"{step}_flags") | {"model_name_or_path": hub}
    out = run_in(tmp_path, step, flags, "out")
    tokenizer = AutoTokenizer.from_pretrained(out)
    if step != "reward":
        assert tokenizer.pad_token == "<eos>" and len(tokenizer) == 400
        return
    assert tokenizer.pad_token == "<pad>" and tokenizer.pad_token_id == 400
    model = AutoModelForSequenceClassification.from_pretrained(out, dtype=torch.float32).eval()
    texts = ["One text<eos>", "Another text, which is longer<eos>"]
    together = model(**tokenizer(texts, padding=True, return_tensors="pt")).logits[:, 0]
    alone = [model(**tokenizer(text, return_tensors="pt")).logits[0, 0] for text in texts]
    assert together.tolist() == near([float(x) for x in alone])


@pytest.mark.slow
def test_adapters_alone_go_through_all_steps(hub, sft_flags, dpo_flags, reward_flags, prompt_flags, inputs, tmp_path):
    """Step 1 to `generate`, each with --no_merge_lora, from a model with more rows than ids and pad = eos."""
    lora = {"lora_dim": 2, "no_merge_lora": True}
    sft = run_in(tmp_path, "sft", sft_flags | lora | {"model_name_or_path": hub}, "sft")
    assert not (sft / "config.json").exists() and (sft / "adapter" / "adapter_config.json").exists()
    reward = run_in(tmp_path, "reward", reward_flags | lora | {"model_name_or_path": sft}, "reward")
    dpo = run_in(tmp_path, "dpo", dpo_flags | lora | {"model_name_or_path": sft}, "dpo")
    models = {"actor_model_name_or_path": dpo, "critic_model_name_or_path": reward}
    flags = prompt_flags | models | lora | {"reward_model_name_or_path": reward, "save_models": 2}
    ppo = run_in(tmp_path, "ppo", flags, "ppo")
    printed = (tmp_path / "printed ppo" / "stderr.txt").read_text()
    assert "new score head" not in printed and str(reward) in printed
    assert len(AutoTokenizer.from_pretrained(ppo / "actor")) == 400
    rows = generate(tmp_path, ppo, reward, inputs / "data" / "comparisons", "answers")
    assert len(rows) == SAMPLES
    shared = {"share_base": True, "actor_model_name_or_path": sft}
    run_in(tmp_path, "ppo", flags | shared, "shared")
