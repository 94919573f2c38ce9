# SPDX-License-Identifier: Apache-2.0
"""run.json, the model card, and the folders that a run leaves."""

import hashlib
import importlib.metadata
import json
import math
import shutil
import subprocess
from pathlib import Path

import pytest

from dschat.data.sources import Share
from dschat.run import record
from dschat.run.model_card import CardModel, hub_base, write_model_card
from dschat.run.model_folders import ModelFolders, SavedModel
from dschat.run.output import due, warn_unless_made_by
from dschat.run.record import new_record
from factories import engine_of, make_causal_lm, make_tokenizer, ppo_config, run_of, save_engines


def test_run_json(tmp_path):
    record = new_record("ppo", ["main.py", "--seed", "7"], 7, 2)
    record.save(tmp_path)
    stored = json.loads((tmp_path / "run.json").read_text())
    assert stored["finished"] is False and stored["hardware"]["processes"] == 2
    record.finished = True
    record.metrics = {"eval/loss": math.nan, "eval/ppl": math.inf, "eval/accuracy": 0.5}
    record.save(tmp_path)
    stored = json.loads((tmp_path / "run.json").read_text())
    assert stored["finished"] is True
    assert stored["metrics"] == {"eval/loss": None, "eval/ppl": None, "eval/accuracy": 0.5}


def test_run_json_names_optional_packages(monkeypatch):
    """Those that are installed, such as vLLM, which samples the responses."""
    installed = {"ma-rlhf": "0.1.0", "torch": "2.9", "vllm": "0.11"}

    def version(package):
        if package not in installed:
            raise importlib.metadata.PackageNotFoundError
        return installed[package]

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert new_record("ppo", [], 7, 1).packages == installed


def git(folder, *words):
    identity = ["-c", "user.name=n", "-c", "user.email=e@example.com", "-c", "commit.gpgsign=false"]
    done = subprocess.run(["git", "-C", str(folder), *identity, *words], capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.mark.skipif(shutil.which("git") is None, reason="there is no git")
def test_run_json_says_which_code_ran(tmp_path, monkeypatch):
    """As committed; with a changed file; new files are none of git's, and nor is a folder in somebody's checkout."""
    assert Path(__file__).resolve().parents[2] == record.CHECKOUT
    monkeypatch.setattr(record, "CHECKOUT", tmp_path)
    git(tmp_path, "init", "-q")
    assert record.commit_of(tmp_path) is None
    (tmp_path / "code.py").write_text("a = 1\n")
    git(tmp_path, "add", "code.py")
    git(tmp_path, "commit", "-qm", "first")
    version, commit = importlib.metadata.version("ma-rlhf"), git(tmp_path, "rev-parse", "HEAD")
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "new").write_text("x")
    new_record("ppo", [], 7, 1).save(tmp_path / "runs")
    stored = json.loads((tmp_path / "runs" / "run.json").read_text())
    assert stored["code"] == {"version": version, "commit": commit}
    (tmp_path / "code.py").write_text("a = 2\n")
    assert new_record("ppo", [], 7, 1).code == {"version": version, "commit": f"{commit}-dirty"}
    assert record.commit_of(tmp_path / "runs") is None
    monkeypatch.setenv("MA_RLHF_COMMIT", "0123abc-dirty")  # of an image, from which the folder .git is left out
    assert record.commit_of(tmp_path / "runs") == "0123abc-dirty"
    monkeypatch.setenv("GIT_DIR", str(record.CHECKOUT / "absent"))  # as in a hook of another repository
    assert record.commit_of(tmp_path) == f"{commit}-dirty"


def test_a_model_of_another_step_is_warned_of(tmp_path, caplog):
    """run.json lies in the model's folder or above; one that cannot be read says nothing."""
    for name in ("ppo/actor", "broken"):
        (tmp_path / name).mkdir(parents=True)
    new_record("sft", [], 1, 1).save(tmp_path)
    new_record("ppo", [], 1, 1).save(tmp_path / "ppo")
    (tmp_path / "broken" / "run.json").write_text("{")
    for step, name in (("sft", "."), ("ppo", "ppo/actor"), ("sft", "broken")):
        warn_unless_made_by(step, str(tmp_path / name), "--model_name_or_path")
    assert not caplog.messages
    for step, name in (("reward", "."), ("sft", "ppo/actor"), ("ppo", "absent/folder")):
        warn_unless_made_by(step, str(tmp_path / name), "--model_name_or_path")
        assert f"--model_name_or_path {tmp_path / name} was not made by the {step} step" in caplog.messages[-1]


@pytest.mark.parametrize("step", ["sft", "ppo", "tokens", "rloo"])
def test_the_model_card_states_data_settings_and_metrics(step, tmp_path):
    titles = {"sft": "Supervised fine-tuning", "rloo": "RLOO, without a critic"}
    titles |= {"ppo": "PPO with macro actions (step 3)", "tokens": "PPO on tokens (step 3)"}
    changed = {"tokens": {"ngram": 1}, "rloo": {"advantage_estimator": "rloo"}}
    record = new_record("ppo" if step in changed else step, [], 1, 1)
    record.data = {"sources": [{"name": "tldr", "train": 120, "eval": 30, "hub": {"id": "openai/tldr"}}]}
    record.metrics = {"eval/scores": 1.23456789, "eval/scores_stderr": 0.123, "eval/rows": 30.0}
    settings = {"kl_coef": 0.1} | changed.get(step, {"ngram": 5})
    write_model_card(tmp_path, CardModel("mine", "policy", "base/model", "out/mine"), settings, record)
    body = (tmp_path / "README.md").read_text().split("---\n", 2)[2]
    texts = ["# mine: policy", titles[step], "started from `base/model`"]
    texts += [f"- `--{flag}`: {value}" for flag, value in settings.items()]
    texts += ["- `tldr`: 120 training and 30 held-out rows", "- eval/scores: 1.235 ± 0.12"]
    texts += ["On 30 held-out rows, after 0 updates, ± one standard error:", "the defaults of ma-rlhf 0.1.0."]
    assert all(text in body for text in [*texts, f"torch {record.packages['torch']}"])


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (("policy", "owner/base"), ("owner/base", "finetune", "text-generation", "transformers", "CausalLM")),
        (("reward model", "from-hub"), ("owner/base", "finetune", "text-classification", "transformers", "Auto")),
        (
            ("critic", "owner/base", True),
            ("owner/base", "adapter", "text-classification", "peft", "AutoPeftModelForSequenceClassification"),
        ),
    ],
)
def test_the_cards_metadata_is_that_of_the_hub(model, expected, tmp_path):
    """A base in a folder is the one that its own card names."""
    from huggingface_hub import ModelCard

    role, base, *is_adapter = model
    record = new_record("ppo", [], 1, 1)
    record.data = {"sources": [{"name": "tldr", "train": 1, "eval": 1, "hub": {"id": "openai/tldr"}}]}
    (tmp_path / "from-hub").mkdir()
    write_model_card(tmp_path / "from-hub", CardModel("a", "policy", "owner/base", "a"), {}, record)
    base = str(tmp_path / base) if (tmp_path / base).exists() else base
    model = CardModel("mine", role, base, "out", is_adapter=bool(is_adapter))
    write_model_card(tmp_path, model, {}, record)
    card = ModelCard.load(tmp_path / "README.md")
    data = card.data
    found = (data.base_model, data.to_dict().get("base_model_relation"), data.pipeline_tag, data.library_name)
    assert found == expected[:4] and data.datasets == ["openai/tldr"] and data.tags == ["ma-rlhf", "rlhf"]
    assert expected[4] in card.text and not [value for value in data.to_dict().values() if value is None]


def test_the_card_of_an_adapter_on_an_adapter_names_no_opener_that_loses_one(tmp_path):
    """peft would load the second over the first."""
    (tmp_path / "first").mkdir()
    (tmp_path / "first" / "adapter_config.json").write_text("{}")
    model = CardModel("mine", "policy", str(tmp_path / "first"), "out", is_adapter=True)
    write_model_card(tmp_path, model, {}, new_record("sft", [], 1, 1))
    card = (tmp_path / "README.md").read_text()
    assert "AutoPeftModel" not in card and "open this folder with dschat" in card


@pytest.mark.parametrize(
    "header", [b"title: my model: v1", b"base_model: \xff\xfe", b"base_model: [owner/a, owner/b]"]
)
def test_a_base_whose_card_cannot_be_read(header, tmp_path):
    """The base is unknown then."""
    base = tmp_path / "base"
    base.mkdir()
    (base / "README.md").write_bytes(b"---\n" + header + b"\n---\n\n# A model\n")
    assert hub_base(str(base)) is None
    (base / "README.md").write_text("---\nbase_model:\n- owner/base\n---\n")
    assert hub_base(str(base)) == "owner/base"
    (base / "README.md").write_text("---\nbase_model: owner/base\n---\n")
    assert hub_base(str(base)) == "owner/base"


def test_a_card_that_cannot_be_written_does_not_cost_the_model(group, tokenizer, tmp_path, monkeypatch, caplog):
    def fail(*_):
        raise KeyError("title")

    monkeypatch.setattr("dschat.run.model_folders.write_model_card", fail)
    save_engines(tmp_path, tokenizer, actor=engine_of(make_causal_lm(), 8))
    saved = {path.name for path in (tmp_path / "actor").iterdir()}
    assert {"model.safetensors", "config.json", "tokenizer.json", "run.json"} <= saved and "README.md" not in saved
    assert "the model card of" in caplog.text and "could not be written" in caplog.text


@pytest.mark.parametrize("has_template", [True, False])
def test_the_cards_example_runs(has_template, tmp_path, capsys):
    tokenizer = make_tokenizer()
    if has_template:
        tokenizer.chat_template = "{{ messages[0].content }}"
    make_causal_lm().save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    model = CardModel("mine", "policy", "base", str(tmp_path), has_template)
    write_model_card(tmp_path, model, {}, new_record("sft", [], 1, 1))
    code = (tmp_path / "README.md").read_text().split("```python\n")[1].split("```")[0]
    exec(code, {})
    assert capsys.readouterr().out


def test_a_stage_leaves_its_records(group, tokenizer, tmp_path):
    """The card has the flags that the run was given and those of its models, not the other defaults."""
    data = tmp_path / "train.jsonl"
    data.write_text("{}\n")
    folder = tmp_path / "out"
    models = {"critic_model_name_or_path": "a/critic", "reward_model_name_or_path": "a/reward"}
    config = ppo_config(folder, kl_coef=0.1, save_models=5, max_steps=100, **models)
    run = run_of("ppo", config)
    sources = [{"name": "tldr", "train": 12, "eval": 3, "dropped": {}}]
    run.describe_data(Share([], [], sources, (data,)), train={"prompt too long": 2})
    run.announce(4, 35)
    run.record.record_evaluation({"eval/scores": 0.5}, 4)
    actor = SavedModel(engine_of(make_causal_lm("gemma2"), 8), "policy", "base", "actor")
    ModelFolders([actor], tokenizer, config, run).save_final()
    run.finish()
    stored = json.loads((folder / "run.json").read_text())
    assert stored["data"]["dropped"] == {"train": {"prompt too long": 2}}
    assert stored["data"]["sha256"] == {str(data): hashlib.sha256(b"{}\n").hexdigest()}
    card = (folder / "actor" / "README.md").read_text()
    assert "- `--max_steps`: 100" in card and "`--save_models`" not in card
    assert all(f"- `--{flag}`: {name}" in card for flag, name in models.items())
    assert "- `--kl_coef`: 0.1" in card and "- eval/scores: 0.5" in card and "after 4 updates" in card
    assert "- `--actor_learning_rate`: 0.001" in card and "`--gamma`" not in card and "`--output_dir`" not in card


def test_due():
    assert [n for n in range(4, 25, 4) if due(6, n - 4, n)] == [8, 12, 20, 24]
    assert not any(due(0, n - 1, n) for n in range(1, 13))


def test_a_resumed_run_compares_with_its_first_evaluation(tmp_path, group):
    run = run_of("ppo", ppo_config(tmp_path))
    run.record.record_evaluation({"eval/scores": 0.7}, 0)
    run.record.record_evaluation({"eval/scores": 0.0}, 1)
    run.metrics.log(1, 8, {"loss": 3.0})
    state, text = run.state_dict(), run.metrics.text()
    run.finish()
    resumed = run_of("ppo", ppo_config(tmp_path, resume_from_checkpoint="latest"))
    resumed.load_state_dict(state, text, 1)
    assert resumed.record.first_metrics == {"eval/scores": 0.7} and resumed.record.metrics == {"eval/scores": 0.0}
