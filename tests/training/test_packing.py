# SPDX-License-Identifier: Apache-2.0
"""Packed examples are trained as those that have a row each: losses, gradients, whole runs; others are refused."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from closeness import WEIGHT_GAP, near
from dschat.base.errors import UserError
from dschat.data.examples import SFTExample
from dschat.models.lora import add_lora
from dschat.models.policy import PolicyModel
from dschat.training.supervised.sft import SFTTask
from factories import PAD, largest_difference, make_causal_lm, ragged_rows, supervised_loop, weights_of
from model_families import MODEL_FAMILIES

TEXTS = ["the quick brown fox jumps over the lazy dog"] * 20
# Longer than the sliding windows, which are 16 wide, and than the rows that they are packed into.
ROWS = ragged_rows([12, 5, 9, 1, 3, 24, 6, 2], [17, 1, 14, 3, 9, 12, 5, 8], seed=1)
EXAMPLES = [SFTExample(p, r) for p, r in ROWS]
WIDTH = 48
REFUSED = ("bloom",)


def model_of(kind, folder, **options):
    """A random model of a family, as a run opens it."""
    path = MODEL_FAMILIES[kind].save(folder, TEXTS)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **options)
    return model.eval()


class Plain:
    """A model without DeepSpeed, for its gradients."""

    def __init__(self, model):
        self.module = PolicyModel(model)

    def __call__(self, *args, **options):
        return self.module(*args, **options)

    def eval(self):
        self.module.eval()


def gradients_of(model, task, training=False):
    """The loss of an update of two micro-batches, and its gradients."""
    engine = Plain(model)
    engine.module.train(training)
    engine.module.zero_grad()
    count = task.count(EXAMPLES)
    total = sum(task.loss(engine, part, count)[0] for part in (EXAMPLES[:5], EXAMPLES[5:]))
    total.backward()
    gradients = {name: p.grad.clone() for name, p in engine.module.named_parameters() if p.grad is not None}
    return total.item(), gradients


@pytest.mark.parametrize("on_prompt", [False, True])
@pytest.mark.parametrize("kind", [kind for kind in MODEL_FAMILIES if kind not in REFUSED])
def test_loss_and_gradients_are_those_of_a_row_each(kind, on_prompt, tmp_path):
    model = model_of(kind, tmp_path)
    packed = SFTTask(EXAMPLES, [], PAD, on_prompt, packed_width=WIDTH)
    packed.prepare(Plain(model))
    assert len(packed.collate(EXAMPLES)["input_ids"]) < len(EXAMPLES)
    expected, gradients = gradients_of(model, SFTTask(EXAMPLES, [], PAD, on_prompt))
    loss, found = gradients_of(model, packed)
    assert loss == near(expected)
    assert largest_difference(found, gradients) < WEIGHT_GAP


@pytest.mark.parametrize("kind", ["opt", "falcon", "mistral"])
def test_eager_attention(kind, tmp_path):
    model = model_of(kind, tmp_path, attn_implementation="eager")
    expected, gradients = gradients_of(model, SFTTask(EXAMPLES, [], PAD))
    loss, found = gradients_of(model, SFTTask(EXAMPLES, [], PAD, packed_width=WIDTH))
    assert loss == near(expected)
    assert largest_difference(found, gradients) < WEIGHT_GAP


def test_with_adapters_and_smoothed_labels():
    model = make_causal_lm("llama")
    add_lora(model, 2, None, "base")
    smoothed = {"label_smoothing": 0.2}
    expected, gradients = gradients_of(model, SFTTask(EXAMPLES, [], PAD, **smoothed), True)
    loss, found = gradients_of(model, SFTTask(EXAMPLES, [], PAD, packed_width=WIDTH, **smoothed), True)
    assert loss == near(expected)
    assert abs(loss - gradients_of(model, SFTTask(EXAMPLES, [], PAD))[0]) > 1e-3
    assert largest_difference(found, gradients) < WEIGHT_GAP


@pytest.mark.parametrize("kind", REFUSED)
def test_families_without_positions_are_refused_by_name(kind, tmp_path):
    engine = Plain(model_of(kind, tmp_path))
    with pytest.raises(UserError, match=f"--packing: {kind} models cannot keep packed examples apart"):
        SFTTask(EXAMPLES, [], PAD, packed_width=WIDTH).prepare(engine)


def test_examples_that_see_each_other_are_refused(tmp_path, monkeypatch):
    """OPT, told by positions alone, looks at what stands before in a row."""
    monkeypatch.setattr("dschat.models.backbone.OWN_MASK", ())
    engine = Plain(model_of("opt", tmp_path))
    with pytest.raises(UserError, match="--packing: log-probs differ .* opt models cannot keep packed examples apart"):
        SFTTask(EXAMPLES, [], PAD, packed_width=WIDTH).prepare(engine)


def test_a_run_with_packing_is_the_run_without(group, tmp_path):
    """The same updates of the same examples: metrics, evaluations and weights."""
    ends, tables = [], []
    flags = {"per_device_train_batch_size": 2, "per_device_eval_batch_size": 3, "gradient_accumulation_steps": 2}
    flags |= {"num_train_epochs": 2, "max_seq_len": WIDTH, "learning_rate": 1e-3}
    for packing in (False, True):
        flags |= {"packing": packing, "gradient_checkpointing": packing}
        model, place = make_causal_lm("llama"), tmp_path / str(packing)
        trainer = supervised_loop("sft", place, EXAMPLES, EXAMPLES[:5], model, **flags)
        tables.append([trainer.evaluate(), trainer.fit()])
        ends.append(weights_of(trainer.algorithm.engine))
    assert largest_difference(*ends) < WEIGHT_GAP
    for before, after in zip(*tables, strict=True):
        assert after == near(before)
