# SPDX-License-Identifier: Apache-2.0
"""Step 3 on a device that this machine need not have: shapes and devices without numbers.

PyTorch's meta device stands for a GPU. Whatever asks for a number raises: on a GPU, the host would wait for it. What
mixes its tensors with one of the CPU raises, too: `OneDevice` sees to that. What is not shown: the numbers, memory,
streams, what DeepSpeed does, the question that transformers asks in every forward (is a mask all True?), and those
asked once per rollout: by `segment` (how many macro actions has the longest row?) and by `randomized` (how many runs
of tokens has a row?).
"""

from dataclasses import fields, is_dataclass, replace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dschat.models.layout import Lengths
from dschat.models.policy import PolicyModel
from dschat.models.scalar import ScalarModel
from dschat.run.metrics import Means
from dschat.training.ppo import metrics
from dschat.training.ppo import update as ppo_updates
from dschat.training.ppo.credit import Credit, whiten_advantages
from dschat.training.ppo.metrics import rollout_metrics
from dschat.training.ppo.score import ScoredRows
from factories import make_causal_lm, make_classifier, make_rollout, ragged_rows, score, update_flags
from macro_actions.conditions import fixed, make_row_seeds, ppl
from macro_actions.estimators import EstimatorSettings, gae_batch
from macro_actions.types import ScoredRollout
from rl_cases import credit_of

ROWS = ragged_rows([2, 5, 9, 1], [7, 1, 4, 3])
LENGTHS = Lengths(np.array([2, 5, 9, 1]), np.array([7, 1, 4, 3]))
GPU = torch.device("meta")


class FakeEngine:
    """A model without DeepSpeed, whose optimiser does nothing."""

    grad_norm, skipped = 1.0, False

    def __init__(self, module):
        self.module = module

    def __call__(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    def backward(self, loss):
        loss.backward()

    def step(self):
        """Nothing to do."""


class OneDevice(TorchDispatchMode):
    """Raises where tensors of the CPU and the device meet; a copy to the device is no such place."""

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        places = {x.device for x in given if x.dim() or x.device == GPU}
        if len(places) > 1 and "copy" not in operation.__name__:
            raise RuntimeError(f"{operation} mixes tensors of different devices")
        return operation(*args, **(kwargs or {}))


class FakeGPU:
    """Models and a rollout with the shapes of real ones."""

    def __init__(self):
        self.actor = FakeEngine(PolicyModel(make_causal_lm().to(GPU)))
        self.critic = FakeEngine(ScalarModel(make_classifier().to(GPU)))
        self.rollout = moved(make_rollout(ROWS, left=1, right=2))


def moved(real):
    """A tensor, or a dataclass of such, on the device."""
    if isinstance(real, torch.Tensor):
        return real.to(GPU)
    given = {f.name: getattr(real, f.name) for f in fields(real)}
    return replace(real, **{name: moved(value) for name, value in given.items() if value is not None})


@pytest.fixture
def gpu(monkeypatch):
    """Everything inside is on the GPU; metrics are added up, and not read."""
    monkeypatch.setattr(Means, "reduce", lambda self: dict.fromkeys([*self._sums], 1.0))
    monkeypatch.setattr(metrics, "_sum_over_ranks", lambda sums: [1.0 for _ in torch.stack(sums)])
    monkeypatch.setattr(Lengths, "of", lambda rollout: LENGTHS)  # read once per rollout
    fake = FakeGPU()
    with OneDevice():
        yield fake


@pytest.fixture
def trajectory(gpu):
    """A scored rollout."""
    scores = torch.zeros(4, device=GPU)
    return score(gpu.rollout, scores, gpu.actor, gpu.actor, gpu.critic, 0.8, 2)


@pytest.fixture(scope="module")
def real_batch():
    """Advantages of a rollout, on the CPU."""
    rollout, scores = make_rollout(ROWS, left=1, right=2), torch.arange(4.0)
    actor, critic = PolicyModel(make_causal_lm()), ScalarModel(make_classifier())
    trajectory = score(rollout, scores, actor, actor, critic, 0.8, 2)
    return credit_of(trajectory, fixed(trajectory.response_mask, 3), kl_coef=0.05, gamma=1.0, lam=0.95)


@pytest.fixture
def batch(real_batch, gpu):
    """The same on the device."""
    return moved(real_batch)


def on_gpu(item):
    values = [getattr(item, f.name) for f in fields(item)]
    return all(on_gpu(x) if is_dataclass(x) else x is None or x.device == GPU for x in values)


def test_scoring_stays_on_the_device(trajectory):
    assert on_gpu(trajectory) and trajectory.logprobs.shape == (4, 9)


def test_what_is_measured_of_a_rollout_stays_on_the_device(batch):
    assert rollout_metrics(batch, 0.95) and on_gpu(whiten_advantages(batch))


def test_ends_are_found_on_the_device(trajectory):
    mask = trajectory.response_mask
    assert make_row_seeds(7, trajectory.rollout.prompt_index, 1).device == GPU
    for ends in (
        fixed(mask, 3),
        fixed(mask, float("inf")),
        *(ppl(mask, trajectory.ref_logprobs, mode) for mode in ("chunk", "prefix", "token")),
    ):
        assert ends.device == GPU and ends.shape == mask.shape


def one_update(gpu, credit, ratio):
    """Two micro-batches, forward and backward; lengths are known on the host."""
    config, plan = update_flags(4, 2, 1, temperature=0.8, policy_ratio=ratio)
    means = Means()
    context = ppo_updates.UpdateContext(gpu.actor, gpu.critic, credit, config, plan)
    update = ppo_updates.Update(np.arange(4), trains_actor=True, trains_critic=True)
    ppo_updates._one_update(context, update, LENGTHS, means)
    for engine in (gpu.actor, gpu.critic):
        assert all(p.grad is None or p.grad.device == GPU for p in engine.module.parameters())
    assert {"loss/policy", "loss/value", "policy/entropy"} <= set(means._sums)


@pytest.mark.parametrize("ratio", ["token", "macro"])
def test_the_micro_batch_loop_never_waits_for_the_device(ratio, gpu, batch):
    one_update(gpu, Credit(batch), ratio)


def test_credit_assignment_within_the_update_never_waits_for_the_device(gpu, batch):
    trajectory = batch.trajectory
    scored = ScoredRollout(trajectory.rollout, trajectory.ref_logprobs, trajectory.scores)

    def credit(trajectory, macro):
        return gae_batch(trajectory, macro, EstimatorSettings(kl_coef=0.05, lam=0.95))

    one_update(gpu, Credit(ScoredRows(scored, batch.macro), credit), "token")


def test_a_tensor_that_stays_on_the_cpu_is_seen(gpu, batch, monkeypatch):
    real = ppo_updates.value_loss

    def wrong(*args):
        loss, stats = real(*args)
        return loss + torch.ones(1), stats

    monkeypatch.setattr(ppo_updates, "value_loss", wrong)
    with pytest.raises(Exception, match="different devices|same device"):
        one_update(gpu, Credit(batch), "token")
