# SPDX-License-Identifier: Apache-2.0
"""Packed examples are trained as those that have a row each: losses, gradients, whole runs; others are refused."""

import pytest
import torch
from transformers import AutoModelForCausalLM, FalconConfig, FalconForCausalLM

from closeness import WEIGHT_GAP, near
from dschat.base.errors import UserError
from dschat.data.examples import SFTExample
from dschat.models.policy import PolicyModel
from dschat.training.supervised.sft import SFTTask
from factories import PAD, largest_difference, ragged_rows
from model_families import MODEL_FAMILIES

TEXTS = ["the quick brown fox jumps over the lazy dog"] * 20
# Longer than the sliding windows, which are 16 wide, and than the rows that they are packed into.
ROWS = ragged_rows([12, 5, 9, 1, 3, 24, 6, 2], [17, 1, 14, 3, 9, 12, 5, 8], seed=1)
EXAMPLES = [SFTExample(p, r) for p, r in ROWS]
WIDTH = 48


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


def gradients_of(model, task):
    """The loss of an update of two micro-batches, and its gradients."""
    engine = Plain(model)
    engine.module.zero_grad()
    count = task.count(EXAMPLES)
    total = sum(task.loss(engine, part, count)[0] for part in (EXAMPLES[:5], EXAMPLES[5:]))
    total.backward()
    gradients = {name: p.grad.clone() for name, p in engine.module.named_parameters() if p.grad is not None}
    return total.item(), gradients


@pytest.mark.parametrize("kind", [kind for kind in MODEL_FAMILIES if kind != "bloom"])
def test_loss_and_gradients_are_those_of_a_row_each(kind, tmp_path):
    """The loss is that of responses; with llama that of prompts, too."""
    on_prompt = kind == "llama"
    model = model_of(kind, tmp_path)
    packed = SFTTask(EXAMPLES, [], PAD, on_prompt, packed_width=WIDTH)
    packed.prepare(Plain(model))
    assert len(packed.collate(EXAMPLES)["input_ids"]) < len(EXAMPLES)
    expected, gradients = gradients_of(model, SFTTask(EXAMPLES, [], PAD, on_prompt))
    loss, found = gradients_of(model, packed)
    assert loss == near(expected)
    assert largest_difference(found, gradients) < WEIGHT_GAP


def test_families_without_positions_are_refused_by_name(tmp_path):
    """Falcon's models with ALiBi take position ids and ignore them."""
    config = FalconConfig(vocab_size=50, hidden_size=16, num_attention_heads=2, num_hidden_layers=1, alibi=True)
    for family, model in (("bloom", model_of("bloom", tmp_path)), ("falcon", FalconForCausalLM(config))):
        engine = Plain(model)
        with pytest.raises(UserError, match=f"--packing: {family} models cannot keep packed examples apart"):
            SFTTask(EXAMPLES, [], PAD, packed_width=WIDTH).prepare(engine)


def test_examples_that_see_each_other_are_refused(tmp_path, monkeypatch):
    """OPT, told by positions alone, looks at what stands before in a row."""
    monkeypatch.setattr("dschat.models.backbone.OWN_MASK", ())
    engine = Plain(model_of("opt", tmp_path))
    with pytest.raises(UserError, match="--packing: log-probs differ .* opt models cannot keep packed examples apart"):
        SFTTask(EXAMPLES, [], PAD, packed_width=WIDTH).prepare(engine)
