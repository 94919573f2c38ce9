# SPDX-License-Identifier: Apache-2.0
"""The longest micro-batch of a run, forward and backward before the first update: what it holds, that it leaves
nothing behind, and what is said where memory ends.

On two processes at every ZeRO stage: tests/distributed/test_rehearsal.py.
"""

from functools import partial

import pytest
import torch

from dschat.base.errors import UserError
from dschat.engine.rehearsal import first_update_bytes
from dschat.rollouts.continuous import ContinuousEngine
from dschat.training import rehearsal
from factories import engine_of, make_causal_lm, pad_rows, ragged_rows
from reduction_cases import DTYPES, update
from resume_runs import Setup, ppo, refuel_online, result_of, supervised

DROPOUT = Setup(lora_dim=2, lora_dropout=0.5)
FUSED = {"ppo_epochs": 1, "generation_batches": 1}
one_rollout = partial(ppo, max_steps=4)
RUNS = {
    **{step: partial(supervised, step, max_steps=2) for step in ("sft", "dpo")},
    "adapters-with-dropout": partial(supervised, "sft", setup=DROPOUT, max_steps=2),
    "ppo": one_rollout,
    "ppo-fused": partial(ppo, per_device_training_batch_size=4, gradient_accumulation_steps=1, max_steps=1, **FUSED),
    "refuel-online": partial(refuel_online, max_steps=3),
    "zero2-fp32": partial(one_rollout, setup=Setup(zero_stage=2)),
}
SLOW = {"adapters-with-dropout", "dpo", "ppo-fused"}
pytestmark = pytest.mark.usefixtures("group")


def note_passes(monkeypatch, loop):
    """Sizes (rows, tokens) of the training passes of each engine inside a rehearsal, by name."""
    sizes = {name: [] for name in loop.checkpoints._engines}
    for name, engine in loop.checkpoints._engines.items():

        def forward(*args, engine=engine, sizes=sizes[name], forward=engine.module.forward, **kwargs):
            if engine._is_rehearsing:
                assert torch.is_grad_enabled() and engine.module.training
                sizes.append(tuple((args[0] if args else kwargs["input_ids"]).shape))
            return forward(*args, **kwargs)

        monkeypatch.setattr(engine.module, "forward", forward)
    return sizes


@pytest.mark.parametrize("name", [pytest.param(x, marks=pytest.mark.slow) if x in SLOW else x for x in RUNS])
def test_a_rehearsed_run_is_the_run_without(name, tmp_path, monkeypatch):
    """Weights, metrics and samples to the last bit."""
    expected = result_of(RUNS[name](tmp_path / "without"), tmp_path / "without")
    monkeypatch.setattr(rehearsal, "is_due", lambda: True)
    loop = RUNS[name](tmp_path / "with")
    sizes = note_passes(monkeypatch, loop)
    weights, metrics, samples = result_of(loop, tmp_path / "with")
    assert all(len(passes) == 1 for passes in sizes.values()), sizes
    assert (metrics, samples) == expected[1:]
    assert weights.keys() == expected[0].keys()
    assert all(torch.equal(x, expected[0][name]) for name, x in weights.items())


# The longest examples of `resume_runs` are of 13 and 12 tokens, 9 + 4 and 3 + 9; a pair's better response is longer by
# a token in DPO and REFUEL. PPO: the longest prompts have 6 tokens, responses at most 6. REFUEL online: dialogues come
# to at most 24 tokens. Sizes (rows, tokens) by hand.
SIZES = {
    "sft": (supervised, {"step": "sft"}, (2, 9 + 9)),
    "sft-fewer-tokens": (supervised, {"step": "sft", "max_tokens_per_micro_batch": 25}, (1, 13)),
    # Packed examples of a micro-batch are every second one by length: 13 and 11 tokens.
    "sft-packed": (supervised, {"step": "sft", "packing": True, "max_seq_len": 24}, (1, 24)),
    "reward": (supervised, {"step": "reward"}, (4, 13)),
    "dpo-fewer-tokens": (supervised, {"step": "dpo", "max_tokens_per_micro_batch": 55}, (2, 14)),
    "refuel": (supervised, {"step": "refuel"}, (4, 14)),
    "ppo": (ppo, {}, (2, 12)),
    "ppo-fewer-tokens": (ppo, {"max_tokens_per_micro_batch": 23}, (1, 12)),
    "refuel-online": (refuel_online, {}, (8, 24)),
    "refuel-online-fewer-tokens": (refuel_online, {"max_tokens_per_micro_batch": 4 * 24}, (4, 24)),
}


@pytest.mark.parametrize("name", SIZES)
def test_sizes_by_hand(name, tmp_path, monkeypatch):
    make, flags, size = SIZES[name]
    loop = make(folder=tmp_path, **flags)
    sizes = note_passes(monkeypatch, loop)
    loop.algorithm.rehearse()
    assert all(passes == [size] for passes in sizes.values()), sizes


def test_one_example_is_rehearsed_itself(tmp_path):
    """It is padded to nothing, whatever prompts and responses others have."""
    task = supervised("sft", tmp_path).algorithm.task
    shortest = min(task.train, key=lambda example: len(example.prompt_ids))
    assert task.with_placeholders([shortest]) == [shortest]


@pytest.mark.parametrize(("stage", "dtype"), [(0, "fp32"), (1, "bf16"), (2, "bf16"), (3, "fp32")])
def test_room_for_what_the_first_update_takes_by_hand(stage, dtype):
    """Adam's two float32 moments; and the sum of gradients, where DeepSpeed has not made it already."""
    engine = engine_of(make_causal_lm(), 2, 2, zero_stage=stage, dtype=DTYPES[dtype])
    elements = sum(p.ds_numel if stage == 3 else p.numel() for p in engine.module.parameters())
    has_sums = stage == 3 or (stage < 2 and dtype == "bf16")
    assert first_update_bytes(engine._engine, engine._adam) == (8 if has_sums else 12) * elements
    assert update(engine) is None
    assert first_update_bytes(engine._engine, engine._adam) == (0 if has_sums else 4) * elements
    alone = engine_of(make_causal_lm(), 2, 1, zero_stage=stage, dtype=DTYPES[dtype])
    assert first_update_bytes(alone._engine, alone._adam) == 8 * elements


@pytest.mark.parametrize(("stage", "dtype"), [(0, "bf16"), (1, "fp32")])
def test_gradients_live_as_long_as_in_training(stage, dtype):
    """The most gradients that there are at a time, in an update of one micro-batch."""
    engine = engine_of(make_causal_lm(), 2, 1, zero_stage=stage, dtype=DTYPES[dtype])
    parameters = list(engine.module.parameters())
    counts = []
    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(
            lambda _: counts.append(sum(other.grad is not None for other in parameters))
        )

    def most_gradients():
        counts.clear()
        ids, attention_mask, mask = pad_rows(ragged_rows([2, 5], [7, 1], seed=3))
        logprobs, _ = engine(ids, attention_mask, mask.shape[1])
        engine.backward(-logprobs[mask].sum())
        return max(counts)

    with engine.rehearsing():
        rehearsed = most_gradients()
    assert rehearsed == most_gradients()
    assert rehearsed == (len(parameters) if dtype == "fp32" else 0)


def no_memory(*args, **kwargs):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nSee documentation")


@pytest.mark.parametrize("name", ["sft", "ppo"])
def test_memory_that_ends_is_explained_before_anything_is_written(name, tmp_path, monkeypatch):
    loop, begun = RUNS[name](tmp_path), []
    engine = next(iter(loop.checkpoints._engines.values()))
    monkeypatch.setattr(loop.run, "begin", lambda: begun.append(True))
    monkeypatch.setattr(rehearsal, "is_due", lambda: True)
    monkeypatch.setattr(type(engine), "backward", no_memory)
    flag = "--per_device_training_batch_size" if name == "ppo" else "--per_device_train_batch_size"
    with pytest.raises(UserError, match=f"sequences of .* lower {flag} or --max_tokens_per_micro_batch") as raised:
        loop.fit()
    for word in ("--gradient_checkpointing", "`dschat plan`", "(CUDA out of memory. Tried to allocate 2.00 GiB.)"):
        assert word in str(raised.value)
    assert not begun


@pytest.mark.parametrize(
    ("graphs", "slots", "prompts", "columns"), [(True, 4, 8, 512), (True, 9, 8, 256), (None, 4, 4, 0)]
)
def test_memory_that_sampling_keeps_by_hand(graphs, slots, prompts, columns):
    """Keys and values of 2 layers with a head of 16 numbers, 4 bytes each; 100 logits, 4 times. 64 spare columns."""
    rows = min(slots, prompts)
    expected = rows * columns * 2 * 2 * 16 * 4 + 4 * 4 * 100 * rows * bool(graphs)
    assert ContinuousEngine(slots, graphs).kept_bytes(make_causal_lm(), prompts, 200) == expected
