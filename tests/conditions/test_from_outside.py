# SPDX-License-Identifier: Apache-2.0
"""A termination condition and an advantage estimator, each added from outside by what CONTRIBUTING.md names."""

from dataclasses import dataclass, replace

import pytest
import torch

from dschat.base.errors import UserError
from dschat.evaluation.panel_options import MacroActionsOptions
from dschat.rollouts import termination
from dschat.rollouts.termination import Ends, TerminationCondition
from dschat.settings import flags
from dschat.settings.conditions import CONDITIONS, Condition
from dschat.settings.flags import AT_LEAST_1, flag
from dschat.settings.parse import parse
from dschat.settings.parser import FlagParser
from dschat.settings.ppo import PPOConfig
from dschat.training.ppo.credit import assign_credit
from macro_actions.estimators import ESTIMATORS
from macro_actions.segments import segment
from macro_actions.settings import NEEDS, Needs
from macro_actions.types import PPOBatch
from rl_cases import trajectory_of

WORDS = "--data_path rows.jsonl --output_dir out --actor_model_name_or_path a --critic_model_name_or_path c".split()
TRAJECTORY = trajectory_of([5, 2], 6, seed=0)


@pytest.fixture(autouse=True)
def read_anew(tmp_path, monkeypatch):
    """Declarations are read once; these tests add some."""
    monkeypatch.chdir(tmp_path)
    for cache in (flags._groups_of, flags._flags_of):
        cache.cache_clear()
    yield
    monkeypatch.undo()
    for cache in (flags._groups_of, flags._flags_of):
        cache.cache_clear()


# A condition: its group of flags and its row (dschat/settings/conditions.py) …


@dataclass(kw_only=True)
class HeadFlags:
    """One macro action for the beginning of a response, one for the rest."""

    section = "macro actions"

    head_tokens: int = flag("head: tokens of the first macro action", 2, AT_LEAST_1)


HEAD = Condition("head", "rollouts.termination:head", HeadFlags)


# … and its function (dschat/rollouts/termination.py).


def head(own: HeadFlags, run):
    def find(trajectory, epoch):
        mask = trajectory.response_mask
        places = mask.cumsum(1)
        return Ends(mask & ((places == own.head_tokens) | (places == mask.sum(1, keepdim=True))))

    return find


def test_a_condition(monkeypatch, caplog):
    monkeypatch.setitem(CONDITIONS, "head", HEAD)
    monkeypatch.setattr(termination, "head", head, raising=False)
    config = parse(PPOConfig, [*WORDS, "--termination_condition", "head", "--head_tokens", "3"])
    found = TerminationCondition(config.termination, None, 0, 0)(TRAJECTORY, 0)
    assert found.ends.int().tolist() == [[0, 0, 1, 0, 1, 0], [0, 1, 0, 0, 0, 0]]
    assert "tokens of the first macro action (default: 2)" in " ".join(FlagParser(PPOConfig).format_help().split())
    parse(PPOConfig, [*WORDS, "--head_tokens", "3"])
    assert caplog.messages == ["--head_tokens: of no effect without --termination_condition head."]
    options = parse(MacroActionsOptions, ["--model", "m", "--text", "t", "--head_tokens", "4"])
    assert options.values_of("head") == {"head_tokens": 4}
    with pytest.raises(UserError, match="--head_tokens 0 is out of range: give a whole number of at least 1"):
        parse(PPOConfig, [*WORDS, "--head_tokens", "0"])


# An estimator: its function (macro_actions/estimators.py), and what it needs (macro_actions/settings.py).


def constant(trajectory, macro, settings):
    """The score on every token."""
    advantages = torch.where(trajectory.response_mask, trajectory.scores[:, None], 0.0)
    kl = torch.zeros_like(trajectory.logprobs)
    return PPOBatch(trajectory, macro, kl, kl, advantages, None)


def test_an_estimator(monkeypatch):
    monkeypatch.setitem(ESTIMATORS, "constant", constant)
    monkeypatch.setitem(NEEDS, "constant", Needs("a constant", "the score, everywhere"))
    config = parse(PPOConfig, [*WORDS, "--advantage_estimator", "constant"])
    assert config.model_paths == ["a", "c"] and len(config.zero_stages) == 1  # without a critic
    trajectory = replace(TRAJECTORY, scores=torch.tensor([1.0, -2.0]))
    macro = segment(trajectory.response_mask, trajectory.response_mask)
    batch = assign_credit(trajectory, macro, config.kl.kl_coef, config)
    assert batch.advantages.tolist() == [[1.0] * 5 + [0.0], [-2.0] * 2 + [0.0] * 4]
    with pytest.raises(UserError, match="--advantage_estimator constant adds up the rewards"):
        parse(PPOConfig, [*WORDS, "--advantage_estimator", "constant", "--gamma", "0.9"])
