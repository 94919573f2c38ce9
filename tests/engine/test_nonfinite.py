# SPDX-License-Identifier: Apache-2.0
"""An update with numbers that are not finite leaves an engine as it was, at every ZeRO stage."""

import math

import pytest
import torch

from dschat.base.errors import UserError
from factories import engine_of, largest_difference, make_causal_lm, pad_rows, ragged_rows, whole_state

ROWS = ragged_rows([2, 5, 3, 1], [7, 1, 4, 3], seed=3)


def update(engine, factors=(1.0, 1.0), addends=(0.0, 0.0)):
    """One update of two micro-batches; the loss of each is spoiled by a factor and an addend."""
    for part, factor, addend in zip((ROWS[:2], ROWS[2:]), factors, addends, strict=True):
        ids, attention_mask, mask = pad_rows(part)
        logprobs, _ = engine(ids, attention_mask, mask.shape[1])
        loss = -torch.where(mask, logprobs, 0.0).sum() / 15 * factor + addend
        engine.backward(loss)
        engine.step()


AT_LAST, AT_FIRST = {"factors": (1.0, math.nan)}, {"factors": (math.nan, 1.0)}
WITH_FINITE_GRADIENTS = {"addends": (0.0, math.inf)}


def engine_at(stage, **options):
    options = {"learning_rate": 1e-2, "zero_stage": stage, "schedule": "linear", "total_updates": 10} | options
    return engine_of(make_causal_lm(), 2, 2, **options)


@pytest.mark.parametrize(
    ("stage", "spoiled"), [(0, AT_LAST), (1, AT_FIRST), (2, WITH_FINITE_GRADIENTS), (3, AT_FIRST)]
)
def test_a_loss_that_is_not_finite_changes_nothing(stage, spoiled, group):
    """Weights, Adam's moments and step count, and the schedule: the next update is that of a run without this one."""
    engine, other = engine_at(stage), engine_at(stage)
    update(engine)
    update(other)
    before, rate = whole_state(engine), engine.learning_rate
    update(engine, **spoiled)
    assert engine.nonfinite == "losses" and not engine.skipped
    assert largest_difference(whole_state(engine), before) == 0 and engine.learning_rate == rate
    update(engine)
    update(other)
    assert engine.nonfinite is None and engine.grad_norm == other.grad_norm
    assert largest_difference(whole_state(engine), whole_state(other)) == 0
    assert engine.learning_rate == other.learning_rate != rate


@pytest.mark.parametrize(("stage", "clipping"), [(0, 0.0), (0, 1.0), (1, 1.0), (2, 0.0), (3, 1.0)])
def test_a_gradient_that_is_not_finite_changes_nothing(stage, clipping, group):
    engine, other = engine_at(stage, gradient_clipping=clipping), engine_at(stage, gradient_clipping=clipping)
    update(other)
    weight = engine.module.inner.model.layers[0].mlp.up_proj.weight
    hook = weight.register_hook(lambda gradient: gradient.index_fill(0, torch.tensor(0), math.inf))
    update(engine)
    hook.remove()
    assert engine.nonfinite == "gradients" and not math.isfinite(engine.grad_norm)
    update(engine)
    assert engine.nonfinite is None and engine.grad_norm == other.grad_norm
    assert largest_difference(whole_state(engine), whole_state(other)) == 0


@pytest.mark.parametrize(("stage", "dtype"), [(0, torch.float32), (2, torch.bfloat16)])
def test_gradients_whose_norm_overflows(stage, dtype, group):
    """Each number is finite, their squares are not: in bf16 it is DeepSpeed's own check that leaves the update out. At
    stage 3 it adds squares up in float64.
    """
    engine, other = engine_at(stage, dtype=dtype), engine_at(stage, dtype=dtype)
    update(engine)
    update(other)
    before, rate = whole_state(engine), engine.learning_rate
    update(engine, factors=(1e30, 1e30))
    assert engine.nonfinite == "gradient norms" and not engine.skipped
    assert largest_difference(whole_state(engine), before) == 0 and engine.learning_rate == rate
    update(engine)
    update(other)
    assert largest_difference(whole_state(engine), whole_state(other)) == 0


def test_an_update_that_deepspeed_leaves_out_by_itself_is_skipped(group, tmp_path):
    """In bf16, with gradients that are finite: it is said, and a checkpoint of then goes on alike."""
    engine = engine_at(2, dtype=torch.bfloat16)
    update(engine)
    before, rate, optimizer = whole_state(engine), engine.learning_rate, engine._engine.optimizer
    real = type(optimizer).has_overflow
    optimizer.has_overflow = lambda *_: True
    norm = engine._engine.get_global_grad_norm
    engine._engine.get_global_grad_norm = lambda: 1.0
    update(engine)
    optimizer.has_overflow, engine._engine.get_global_grad_norm = real.__get__(optimizer), norm
    assert engine.skipped and engine.nonfinite is None
    assert largest_difference(whole_state(engine), before) == 0 and engine.learning_rate == rate
    engine.save_checkpoint(tmp_path / "step-2")
    resumed = engine_at(2, dtype=torch.bfloat16)
    resumed.load_checkpoint(tmp_path / "step-2")
    assert resumed._engine.skipped_steps == 1
    for one in (engine, resumed):
        update(one)
    assert not engine.skipped and engine.learning_rate == resumed.learning_rate != rate
    assert largest_difference(whole_state(engine), whole_state(resumed)) == 0


@pytest.mark.parametrize("stage", [0, 2])
def test_an_update_that_is_applied_all_the_same_is_refused(stage, group, monkeypatch):
    engine = engine_at(stage)
    update(engine)
    adam = engine._engine.basic_optimizer
    step = engine._engine.step

    def applied():
        is_last = engine._engine.is_gradient_accumulation_boundary()
        step()
        if is_last:
            for state in adam.state.values():
                state["step"] += 1

    monkeypatch.setattr(engine._engine, "step", applied)
    update(engine)
    with pytest.raises(UserError, match="applied an update with numbers that are not finite.*deepspeed>=0.19.8"):
        update(engine, **AT_LAST)
