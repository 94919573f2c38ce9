# SPDX-License-Identifier: Apache-2.0
"""The examples run: a loop of one's own learns, and the notebook says what arithmetic by hand says."""

import contextlib
import io
import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

import dschat
from closeness import FORMULA, UPDATE, assert_near, assert_weights_near, near
from dschat.base.errors import UserError
from dschat.models.tiny import make_model
from factories import make_causal_lm, make_classifier, to_device
from macro_actions.conditions import fixed
from recorded_updates import scored_batch, updated
from rl_cases import credit_of

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


@pytest.fixture(autouse=True)
def _place(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))


def test_the_notebook():
    """Three macro actions of values .2, .5, .7 and rewards 0, 0, 1: δ = .3, .2, .3; Â = .475, .35, .3 at λ = .5."""
    cells = json.loads((EXAMPLES / "macro_actions.ipynb").read_text(encoding="utf-8"))["cells"]
    names: dict[str, Any] = {}
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        for cell in cells:
            if cell["cell_type"] == "code":
                exec(compile("".join(cell["source"]), "macro_actions.ipynb", "exec"), names)
    assert names["macro"].index.tolist() == [[0, 0, 0, 1, 1, 1, 2]]
    assert names["by_macro"].tolist()[0] == near([0.475] * 3 + [0.35] * 3 + [0.3])
    # δ of the tokens is .1 six times, then .3: the first has .1 (1 + 1/2 + … + 1/32) + .3 / 64.
    assert names["by_token"][0, 0].item() == near(0.1 * (2 - 1 / 32) + 0.3 / 64)
    assert "macro action of each token: [0, 0, 0, 1, 1, 1, 2]" in said.getvalue()
    history = names["history"]
    assert history[0] < 0.1 < 0.3 < history[-1], "a token in 32 at first"


def test_ppo_in_one_file_computes_what_the_pipeline_computes(group):
    """Eight recorded responses, macro actions of three tokens: credit, losses and weights after two updates."""
    import ppo_macro_actions as one_file

    trajectory = to_device(scored_batch()).trajectory
    ends = fixed(trajectory.response_mask, 3)
    batch = credit_of(trajectory, ends, kl_coef=0.05, gamma=1.0, lam=0.95, value_function="first")
    weights, stats = updated(batch, epochs=2)
    recorded = one_file.SampledResponses(
        trajectory.rollout.input_ids,
        trajectory.rollout.attention_mask,
        trajectory.response_mask,
        trajectory.scores,
        trajectory.logprobs,
        trajectory.ref_logprobs,
        trajectory.values,
    )
    settings = one_file.Hyperparameters(ngram=3, kl_coef=0.05, epochs=2)
    advantages, returns = one_file.assign_credit(recorded, settings)
    assert_near(advantages, batch.advantages, FORMULA)
    assert_near(returns, batch.returns, FORMULA)

    actor = make_causal_lm().to(advantages.device)
    classifier = make_classifier(seed=2).to(advantages.device)
    critic = one_file.Critic(classifier.model, classifier.score)
    optimizers = [one_file.optimizer_of(model, 5e-5) for model in (actor, critic)]
    losses = torch.tensor(one_file.update(actor, critic, *optimizers, recorded, settings))
    assert losses.mean(0).tolist() == near([stats["loss/policy"], stats["loss/value"]], UPDATE)
    expected = {f"actor.inner.{name}": weight for name, weight in actor.state_dict().items()}
    expected |= {f"critic.inner.{name}": weight for name, weight in classifier.state_dict().items()}
    found = {name: weight for name, weight in expected.items() if name in weights}
    assert len(found) == len(weights)
    assert_weights_near(weights, {name: weight.cpu() for name, weight in found.items()})


def test_ppo_in_one_file_samples_from_the_policy_alone(tmp_path):
    """A model's own penalties and temperature, which a folder may say, change nothing."""
    import ppo_macro_actions as one_file

    model = make_model(tmp_path, [f"{prompt} word word" for prompt in one_file.PROMPTS], 0)
    settings = one_file.Hyperparameters(samples=2)
    plain = one_file.train(str(model), 1, settings)
    GenerationConfig(do_sample=True, temperature=0.1, repetition_penalty=2.0).save_pretrained(model)
    assert one_file.train(str(model), 1, settings) == plain


@pytest.mark.slow
def test_ppo_in_one_file_learns(tmp_path):
    """A random model learns the number of words; it reaches .8 after 15 iterations, from .47."""
    import ppo_macro_actions as one_file

    model = make_model(tmp_path, [f"{prompt} word word" for prompt in one_file.PROMPTS], 0)
    settings = one_file.Hyperparameters(kl_coef=0.0, samples=8, actor_learning_rate=3e-3, critic_learning_rate=3e-3)
    history = one_file.train(str(model), 15, settings)
    assert history[-1] > history[0] + 0.2


def test_the_tutorials_data_without_a_folder(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["chats.py"])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(EXAMPLES / "chats.py"), run_name="__main__")
    assert end.value.code == 2 and "usage: chats.py [-h] folder" in capsys.readouterr().err


def test_names_of_the_package(monkeypatch):
    """`import dschat` is quick and knows what it promises; `train` takes configurations alone."""
    for name in dschat.__all__:
        assert getattr(dschat, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        dschat.nothing  # noqa: B018
    with pytest.raises(UserError, match="dict is not the configuration of a training step"):
        dschat.train({})
