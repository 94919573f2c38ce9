# SPDX-License-Identifier: Apache-2.0
"""Which models a run left, what opens, and what is refused."""

import json
import shutil

import pytest
import torch
from huggingface_hub import constants
from transformers import AutoModelForCausalLM

from closeness import assert_near
from demo_cases import as_run, make_session, save_endless, save_reward, text_tokenizer
from dschat.base.errors import UserError
from dschat.demo.models import find_models, select_model
from dschat.demo.session import SamplingChoice
from dschat.models.lora import add_lora
from dschat.models.save import save_model
from factories import make_causal_lm, saved_weights


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_endless(tmp_path_factory.mktemp("checkpoints") / "base")


@pytest.fixture
def run(model, tmp_path):
    """A step-3 run with models of two updates, started from `model`."""
    run = as_run(tmp_path / "ppo", actor_model_name_or_path=model, temperature=0.7, top_k=9, max_answer_seq_len=33)
    for place in ("actor", "actor_ema", "models/step-9/actor", "models/step-10/actor"):
        shutil.copytree(model, run / place)
    save_reward(run / "critic")
    save_reward(run / "models" / "step-9" / "critic")
    (run / "models" / "step-11").mkdir()  # no model in it
    return run


def test_the_policies_of_a_run_are_found_the_newest_first(run, model):
    names = ["actor", "actor_ema", "models/step-10/actor", "models/step-9/actor", f"start model: {model}"]
    assert [one.name for one in find_models(str(run))] == names
    inside = run / "models" / "step-9" / "actor"
    found = find_models(f" {inside} ")  # a model of a run brings the run's others
    assert [one.name for one in found] == names and select_model(found, str(inside)).path == str(inside)
    assert select_model(found, str(run)).name == "actor"


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A cache of the hub, offline; `hub(name, source)` puts a copy of a model's folder into it."""
    cache = tmp_path / "hub"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)

    def add(name, source):
        repository = cache / f"models--{name.replace('/', '--')}"
        snapshot = repository / "snapshots" / ("a" * 40)
        shutil.copytree(source, snapshot)
        (repository / "refs").mkdir()
        (repository / "refs" / "main").write_text("a" * 40)
        return snapshot

    return add


def test_a_model_of_the_hub_is_sampled_as_its_generation_config_says(hub, model):
    snapshot = hub("someone/chat", model)
    (snapshot / "generation_config.json").write_text('{"do_sample": true, "temperature": 0.6, "top_k": 20}')
    choice, words = make_session().choice("someone/chat")
    assert choice == SamplingChoice(0.6, 20, 1.0, 128, True) and words == "from generation_config.json"
    assert make_session("someone/chat").status(0).startswith("Loaded someone/chat")


def test_a_reward_model_of_the_hub_is_refused_before_its_weights_are_read(hub, tmp_path):
    save_reward(tmp_path / "reward")
    snapshot = hub("someone/reward", tmp_path / "reward")
    (snapshot / "model.safetensors").unlink()
    with pytest.raises(UserError, match="someone/reward: a reward model or critic, which gives scores"):
        make_session("someone/reward")


def test_a_model_by_itself_and_a_run_of_step_1_are_their_own_model(model, tmp_path):
    assert [(one.name, one.path) for one in find_models(model)] == [("final model", model)]
    run = as_run(tmp_path / "sft", model_name_or_path="gone/away/long")
    shutil.copytree(model, run, dirs_exist_ok=True)
    assert [one.name for one in find_models(str(run))] == ["final model"]
    assert [one.path for one in find_models("owner/name")] == ["owner/name"]


@pytest.mark.parametrize("others", [True, False])
def test_a_model_elsewhere_in_a_run_is_not_replaced_by_another(others, run, model):
    """Also where the run has no other policy."""
    merged = run / "merged"
    shutil.copytree(model, merged)
    if not others:
        for place in ("actor", "actor_ema", "models"):
            shutil.rmtree(run / place)
    assert select_model(find_models(str(merged)), str(merged)).path == str(merged)
    assert make_session(merged).path(0) == str(merged)


def test_folders_without_a_policy_say_what_they_are(run, model, tmp_path):
    as_run(tmp_path / "begun", model_name_or_path=model)
    as_run(tmp_path / "saved")
    (tmp_path / "saved" / "checkpoints" / "step-3").mkdir(parents=True)
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    for folder, config in [
        ("no weights", {"model_type": "gpt2"}),
        ("bert", {"model_type": "bert"}),
        ("t5", {"model_type": "t5", "is_encoder_decoder": True}),
    ]:
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "config.json").write_text(json.dumps(config))
        name = "pytorch_model.bin" if folder == "no weights" else "model.safetensors"
        (tmp_path / folder / name).touch()
    save_reward(as_run(tmp_path / "reward", model_name_or_path=model))
    for place, words in [
        ("begun", "saved no model yet"),
        ("saved", "only training checkpoints"),
        ("empty", "neither a run's output folder nor a model's"),
        ("no weights", r"config.json, but no weights \(\*.safetensors\)"),
        ("bert", "a model of the type bert, which reads text and writes none"),
        ("t5", "a model of the type t5, which reads text and writes none"),
        ("file", "no such folder"),
        ("away", "no such folder"),
        ("reward", "reward model or critic"),
        (run / "critic", "reward model or critic"),
    ]:
        with pytest.raises(UserError, match=words):
            find_models(str(tmp_path / place))
    with pytest.raises(UserError, match="give a run's output folder"):
        find_models(" ")


def test_a_refused_model_leaves_the_one_before(run, model, tmp_path):
    session = make_session(model)
    before = session.status(0)
    assert before.startswith(f"Loaded {model}: 0.0") and "parameters, on cpu, fp32, in " in before
    for path, words in [(run / "critic", "writes no text"), (tmp_path / "away", "--model .*no such folder")]:
        with pytest.raises(UserError, match=words):
            session.load(0, str(path))
        assert session.status(0) == before


def test_a_run_s_folder_stands_for_its_actor(run):
    assert make_session(run).path(0) == str(run / "actor")


def adapted():
    """A causal LM whose adapter changes what it says."""
    model = make_causal_lm(seed=3, vocab_size=300)
    add_lora(model, 4, None, "unknown")
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    return model


def test_an_adapter_without_its_merged_model_opens_on_its_base(tmp_path):
    base = make_causal_lm(seed=3, vocab_size=300)
    base.save_pretrained(tmp_path / "base")
    model = adapted()
    model.peft_config["default"].base_model_name_or_path = str(tmp_path / "base")
    run = as_run(tmp_path / "lora")
    save_model(model, saved_weights(model), text_tokenizer(), run, merge=False)
    save_model(model, saved_weights(model), text_tokenizer(), tmp_path / "merged", merge=True)
    assert [one.name for one in find_models(str(run))] == ["final model"]
    session = make_session(run)
    opened, ids = session._sides[0].model.causal_lm, torch.arange(3, 40)[None]
    expected = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")(ids).logits
    assert_near(opened(ids).logits, expected)
    assert (opened(ids).logits - base(ids).logits).abs().max() > 0.1
    assert session.load(0, str(run / "adapter")).startswith("Loaded")
    shutil.rmtree(tmp_path / "base")
    with pytest.raises(UserError, match="base"):
        make_session(run)


def test_how_a_run_drew_is_how_the_demo_draws_unless_a_flag_says_otherwise(run, model, tmp_path):
    session = make_session()
    assert session.choice(str(run / "actor"))[0] == SamplingChoice(
        temperature=0.7, top_k=9, top_p=1.0, max_new_tokens=33
    )
    own = shutil.copytree(model, tmp_path / "own")
    (own / "generation_config.json").write_text('{"do_sample": true, "temperature": 0.6, "top_p": 0.95, "top_k": 20}')
    choice, words = session.choice(str(own))
    assert choice == SamplingChoice(0.6, 20, 0.95, 128, True) and words == "from generation_config.json"
    (own / "generation_config.json").write_text('{"do_sample": false}')
    assert not session.choice(str(own))[0].do_sample
    (own / "generation_config.json").unlink()
    assert session.choice(str(own))[0] == SamplingChoice(0.8, 50, 1.0, 128, True)
    given = make_session(temperature=0.0, top_k=0, max_new_tokens=5)
    assert given.choice(str(run))[0] == SamplingChoice(0.8, 0, 1.0, 5, do_sample=False)
