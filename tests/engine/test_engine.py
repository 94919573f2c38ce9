# SPDX-License-Identifier: Apache-2.0
"""Engines against plain torch: accumulation, schedule, norm, clipping, checkpointing, precision, configuration."""

import json
import math
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import deepspeed
import pytest
import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

from closeness import UPDATE, assert_weights_near, near
from dschat.base.errors import UserError
from dschat.engine.deepspeed_config import deepspeed_config, offloads_optimizer
from dschat.engine.engine import Engine, EngineSettings
from dschat.engine.process_group import training_dtype
from dschat.models.policy import PolicyModel
from dschat.run.distributed import device
from dschat.settings.batches import BatchSizes, plan_batches
from dschat.settings.deepspeed import deepspeed_settings
from factories import (
    HIDDEN,
    engine_of,
    largest_difference,
    make_causal_lm,
    pad_rows,
    ragged_rows,
    to_device,
    weights_of,
    whole_state,
)
from macro_actions.supervised_losses import sft_loss
from real_size import as_large_as

ROWS = ragged_rows([2, 5, 9, 1, 3, 4, 6, 2], [7, 1, 4, 3, 9, 2, 5, 8])
TOKENS = sum(len(response) for _, response in ROWS)


def loss_of(model, rows, count=TOKENS):
    ids, attention_mask, mask = (to_device(x) for x in pad_rows(rows))
    logprobs, _ = model(ids, attention_mask, mask.shape[1])
    return sft_loss(logprobs, mask, count)[0]


def update(engine, micro, rows=ROWS):
    for start in range(0, len(rows), micro):
        engine.backward(loss_of(engine, rows[start : start + micro]))
        engine.step()


def reference_update(updates=1, clip=1.0, learning_rate=1e-3, weight_decay=0.0):
    """Weights and gradient norms of plain torch with the loss over all rows at once."""
    model = PolicyModel(make_causal_lm()).to(device())
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    adam = torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95))
    norms = []
    for _ in range(updates):
        loss_of(model, ROWS).backward()
        norms.append(float(torch.sqrt(sum(p.grad.double().square().sum() for p in model.parameters()))))
        for p in model.parameters():
            p.grad *= min(1.0, clip / norms[-1])
        adam.step()
        adam.zero_grad()
    return {name: p.detach().cpu() for name, p in model.named_parameters()}, norms


@pytest.mark.parametrize("micro", [2, 8])
def test_any_accumulation_gives_the_update_of_plain_torch(micro, group):
    engine = engine_of(make_causal_lm(), micro, 8 // micro, weight_decay=0.1)
    before = weights_of(engine)
    update(engine, micro)
    update(engine, micro)
    expected, norms = reference_update(updates=2, weight_decay=0.1)
    assert_weights_near(weights_of(engine), expected)
    assert largest_difference(before, expected) > 1e-3
    assert engine.grad_norm == near(norms[-1], UPDATE)
    assert engine._engine.global_steps == 2


def test_clipping_acts_and_the_norm_is_that_before_clipping(group):
    """Adam's step hardly depends on the gradient's scale, but its second does on the ratio of two clipped ones."""
    expected, norms = reference_update(updates=3, clip=0.05)
    unclipped, _ = reference_update(updates=3, clip=1e9)
    engine, free = (engine_of(make_causal_lm(), 8, 1, gradient_clipping=clip) for clip in (0.05, 0.0))
    reported = []
    for _ in range(3):
        update(engine, 8)
        update(free, 8)
        reported.append(engine.grad_norm)
    assert reported == near(norms, UPDATE) and min(norms) > 0.1
    assert_weights_near(weights_of(engine), expected)
    assert_weights_near(weights_of(free), unclipped)  # a limit of 0 is none
    assert largest_difference(unclipped, expected) > 1e-4


def test_schedule_and_warm_up_count_optimiser_updates(group):
    """Linear: half the peak, the peak, then from it down to 0 at update 6; with 4 micro-batches each. The first update
    of the warm-up moves the weights.
    """
    engine = engine_of(
        make_causal_lm(), 2, 4, learning_rate=1e-2, schedule="linear", total_updates=6, warmup_updates=2
    )
    seen = []
    for _ in range(6):
        before = weights_of(engine)
        seen.append(engine.learning_rate)
        update(engine, 2)
        moved = largest_difference(weights_of(engine), before)
        assert moved > 0
    assert seen == pytest.approx([0.005, 0.01, 0.01, 0.0075, 0.005, 0.0025])
    assert engine.learning_rate == pytest.approx(0)


def test_weight_decay_acts_on_matrices_only(group):
    engine = engine_of(make_causal_lm(), 8, 1, weight_decay=0.1)
    for one_group in engine._engine.optimizer.param_groups:
        dims = {p.dim() for p in one_group["params"]}
        assert (one_group["weight_decay"] == 0.1) == (dims == {2})
        assert one_group["betas"] == (0.9, 0.95)


@pytest.mark.parametrize(("every", "stage"), [(2, 0), (3, 3)])
def test_gradient_checkpointing_of_some_layers_gives_the_same_update(every, stage, group):
    """Of four layers those with number 0, every, 2 every, … go forward twice in each of two micro-batches."""
    expected = engine_of(make_causal_lm(num_hidden_layers=4), 4, 2, zero_stage=stage)
    options = {"gradient_checkpointing": True, "gradient_checkpointing_every": every}
    engine = engine_of(make_causal_lm(num_hidden_layers=4), 4, 2, zero_stage=stage, **options)
    calls = Counter()
    for name, module in engine.module.named_modules():
        if name.endswith(".mlp"):
            module.register_forward_pre_hook(lambda *_, name=name: calls.update([int(name.split(".")[-2])]))
    update(engine, 4)
    update(expected, 4)
    assert calls == {number: 4 if number % every == 0 else 2 for number in range(4)}
    assert_weights_near(whole_state(engine), whole_state(expected))


@pytest.mark.parametrize(
    ("fp16", "applied", "skipped"), [(True, False, True), (True, True, False), (False, False, False)]
)
def test_an_update_is_skipped_in_fp16_alone(fp16, applied, skipped):
    inner = SimpleNamespace(
        module=torch.nn.Linear(1, 1),
        step=lambda: None,
        is_gradient_accumulation_boundary=lambda: True,
        get_global_grad_norm=lambda: math.inf,
        fp16_enabled=lambda: fp16,
        zero_optimization_stage=lambda: 1,
        was_step_applied=lambda: applied,
    )
    engine = Engine(inner)
    engine.step()
    assert engine.skipped is skipped


def states_of(engine):
    """Master weights in float32 and Adam's moments, by DeepSpeed's own functions."""
    weights = {name: safe_get_full_fp32_param(p) for name, p in engine.module.named_parameters()}
    moments = {
        f"{name}.{key}": safe_get_full_optimizer_state(p, key)
        for name, p in engine.module.named_parameters()
        for key in ("exp_avg", "exp_avg_sq")
    }
    return {name: x.cpu().clone() for name, x in (weights | moments).items()}


@pytest.mark.parametrize(
    ("updates", "options"),
    [(2, {"dtype": torch.bfloat16}), pytest.param(2, {"offload": True}, marks=pytest.mark.slow), (0, {})],
    ids=["bf16", "offload", "before the first update"],
)
def test_zero_3_goes_on_from_states_in_other_pieces(updates, options, group, tmp_path):
    """In other sub-groups and with vectors in parts that are whole now, as another number of processes would."""

    def made(weights, whole):
        model = make_causal_lm("llama", tie_word_embeddings=True)
        file = as_large_as(weights, model, whole)
        more = {"weight_decay": 0.1, "schedule": "linear", "config_file": file} | options
        return engine_of(model, 8, 1, learning_rate=1e-2, zero_stage=3, **more)

    saved, resumed = made(7e9, 0), made(2e10, HIDDEN)
    for _ in range(updates):
        update(saved, 8)
    saved.save_checkpoint(tmp_path / "model")
    resumed.load_checkpoint(tmp_path / "model", is_resized=True)
    if updates:
        assert largest_difference(states_of(resumed), states_of(saved)) == 0
    assert resumed.learning_rate == saved.learning_rate and resumed._engine.global_steps == updates
    update(saved, 8)
    update(resumed, 8)
    assert_weights_near(states_of(resumed), states_of(saved))
    assert_weights_near(whole_state(resumed), whole_state(saved))


@pytest.mark.parametrize(
    ("updates", "options"),
    [
        pytest.param(2, {"zero_stage": 1, "dtype": torch.bfloat16}, id="bf16"),
        pytest.param(2, {"zero_stage": 2, "offload": True}, id="offload", marks=pytest.mark.slow),  # is compiled
        pytest.param(0, {"zero_stage": 2}, id="before the first update"),
    ],
)
def test_a_run_goes_on_from_slices(updates, options, group, tmp_path):
    """At stages 1 and 2, to the last bit where the slices are the same."""
    more = {"learning_rate": 1e-2, "weight_decay": 0.1, "schedule": "linear"} | options
    saved, resumed = (engine_of(make_causal_lm("llama"), 8, 1, **more) for _ in range(2))
    for _ in range(updates):
        update(saved, 8)
    saved.save_checkpoint(tmp_path / "model")
    resumed.load_checkpoint(tmp_path / "model", is_resized=True)
    for further in range(3):
        assert resumed.learning_rate == saved.learning_rate
        assert resumed._engine.global_steps == updates + further
        assert largest_difference(whole_state(resumed), whole_state(saved)) == 0
        update(saved, 8)
        update(resumed, 8)


def test_slices_in_the_order_of_another_number_of_processes_are_refused(group, tmp_path):
    """DeepSpeed deals parameters to the processes then, and its files do not say where they are."""
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"zero_optimization": {"round_robin_gradients": True}}))
    engine = engine_of(make_causal_lm(), 8, 1, zero_stage=2, config_file=str(file))
    engine.save_checkpoint(tmp_path / "model")
    engine.load_checkpoint(tmp_path / "model")
    with pytest.raises(UserError, match="round_robin_gradients continues only on the number of processes that wrote"):
        engine.load_checkpoint(tmp_path / "model", is_resized=True)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_save_waits_for_the_files_of_other_ranks_before_deepspeed_does(stage, group, tmp_path, monkeypatch):
    """Whose collectives wait for --ddp_timeout alone: rank 0 may write a whole model meanwhile."""
    waits = []
    real = deepspeed.comm.barrier
    written = lambda: sum(file.is_file() for file in tmp_path.rglob("*"))  # noqa: E731
    monkeypatch.setattr("dschat.engine.engine.barrier", lambda: waits.append(("files", written())))
    monkeypatch.setattr(deepspeed.comm, "barrier", lambda *a, **k: waits.append(("DeepSpeed", written())) or real(*a))
    engine_of(make_causal_lm(), zero_stage=stage).save_checkpoint(tmp_path / "model")
    *before, files, after = waits
    assert {*before} == {("DeepSpeed", 0)} and files == ("files", after[1]) and after[1] > 0


SETTINGS = {"dtype": torch.float32, "plan": plan_batches(BatchSizes("per_device_train_batch_size", 2, 4), 1)}


def settings_with(given, tmp_path):
    file = tmp_path / "ds.json"
    file.write_text(given if isinstance(given, str) else json.dumps(given))
    return EngineSettings(**SETTINGS, config_file=str(file))


@pytest.mark.parametrize(
    "given",
    [
        {"wall_clock_breakdown": True, "zero_optimization": {"overlap_comm": True}},
        # As in configurations written for Hugging Face's Trainer.
        {"optimizer": "auto", "bf16": {"enabled": "auto"}, "zero_optimization": {"stage": "auto"}},
    ],
    ids=str,
)
def test_a_users_deepspeed_config_is_merged(given, tmp_path):
    """Key by key, also into sections; "auto" means ours."""
    expected = deepspeed_config(EngineSettings(**SETTINGS), 1.0)
    assert (expected["train_micro_batch_size_per_gpu"], expected["gradient_accumulation_steps"]) == (2, 4)
    assert (expected["gradient_clipping"], expected["zero_optimization"]) == (1.0, {"stage": 0})
    assert not expected["bf16"]["enabled"] and not expected["wall_clock_breakdown"]
    for key, value in given.items():
        if isinstance(value, dict):
            expected[key] |= {name: new for name, new in value.items() if new != "auto"}
        elif value != "auto":
            expected[key] = value
    assert deepspeed_config(settings_with(given, tmp_path), 1.0) == expected


@pytest.mark.parametrize(
    ("given", "words"),
    [
        # Refused even if they agree with the flags here: another model of a run may have another stage or batch.
        ({"train_micro_batch_size_per_gpu": 2}, "train_micro_batch_size_per_gpu is decided by --global_batch_size"),
        ({"gradient_clipping": -1}, "gradient_clipping is decided by --gradient_clipping"),
        ({"bf16": {"enabled": False}}, 'bf16.enabled is decided by --dtype: remove the key, or set it to "auto"'),
        ({"zero_optimization": {"stage": None}}, "zero_optimization.stage is decided by --zero_stage"),
        ({"zero_optimization": 2}, "zero_optimization must be a JSON object, not 2"),
        ({"optimizer": {"type": "AdamW"}}, "optimizer is decided by flags"),
        ({"zero_optimization": {"cpu_offload": True}}, "cpu_offload is decided by --offload"),
        # What the memory plan reads.
        ({"zero_optimization": {"sub_group_size": {"a": 1}}}, 'sub_group_size must be a number .*, not {"a": 1}'),
        ('{"zero_optimization": {"reduce_bucket_size": NaN}}', "reduce_bucket_size must be a number .*, not NaN"),
        ({"zero_optimization": {"reduce_bucket_size": 10**400}}, "reduce_bucket_size must be a number .*, not 1000"),
        ({"data_types": {"grad_accum_dtype": {}}}, "grad_accum_dtype must be one of fp32, bf16, fp16, not {}"),
        # What DeepSpeed refuses, or stumbles over.
        ({"amp": {"enabled": True}}, "DeepSpeed refuses these settings .*AMP"),
        ({"wall_clock_breakdown": "false"}, "DeepSpeed refuses these settings .*TypeError.*; correct or remove"),
        ('{"gradient_clipping": 1, "gradient_clipping": 2}', "the key 'gradient_clipping' occurs twice"),
        ("", "not valid JSON"),
        ('{"a": ' * 5000 + "1" + "}" * 5000, "not readable as JSON"),
        (None, "cannot be read: .*No such file"),
    ],
)
def test_a_deepspeed_config_that_contradicts_the_flags_or_cannot_be_read_is_refused(given, words, tmp_path):
    absent = EngineSettings(**SETTINGS, config_file=str(tmp_path / "absent.json"))
    with pytest.raises(UserError, match=f"--deepspeed_config .*{words}"):
        deepspeed_config(absent if given is None else settings_with(given, tmp_path), 1.0)


@pytest.mark.parametrize(
    ("stage", "given", "offloads"),
    [(0, {"device": "cpu"}, False), (2, {"device": "cpu"}, True), (3, {"device": "nvme", "nvme_path": "/tmp"}, True)],
)
def test_a_file_may_offload_the_optimiser(stage, given, offloads, tmp_path):
    """As --offload does; DeepSpeed does not at stage 0."""
    settings = replace(settings_with({"zero_optimization": {"offload_optimizer": given}}, tmp_path), zero_stage=stage)
    assert offloads_optimizer(deepspeed_config(settings, 1.0)) is offloads


@pytest.mark.parametrize(
    ("given", "optimizer", "parameters"),
    [
        ({}, "cpu", "cpu"),
        ({"offload_param": {"device": "none"}}, "cpu", "none"),
        ({"offload_optimizer": {"device": "nvme"}}, "nvme", "cpu"),
    ],
)
def test_a_file_moves_optimiser_states_and_parameters_each_for_itself(given, optimizer, parameters, tmp_path):
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"zero_optimization": given}))
    zero = deepspeed_settings(SETTINGS["plan"], "fp32", 3, offload=True, file=str(file))["zero_optimization"]
    assert zero["offload_optimizer"] == {"device": optimizer, "pin_memory": False}
    assert zero["offload_param"] == {"device": parameters, "pin_memory": False}


def test_dtype_by_name():
    cuda = torch.cuda.is_available()
    assert training_dtype("fp32") == torch.float32 and training_dtype("bf16") == torch.bfloat16
    assert training_dtype(None) == (torch.bfloat16 if cuda else torch.float32)
    if cuda:
        assert training_dtype("fp16") == torch.float16
    else:
        with pytest.raises(UserError, match="--dtype fp16 needs a GPU"):
            training_dtype("fp16")


@pytest.mark.parametrize(
    ("stage", "offload"), [(0, False), (3, False), *(pytest.param(n, True, marks=pytest.mark.slow) for n in (1, 2, 3))]
)
def test_in_bf16_small_gradients_add_up(stage, offload, group):
    """One micro-batch, and 32 of a 512th of its loss: bf16, with 8 digits, would forget each of these.

    With offloading, DeepSpeed compiles its optimiser, which takes minutes.
    """
    engine = engine_of(make_causal_lm(), 2, 33, dtype=torch.bfloat16, zero_stage=stage, offload=offload)
    reference = engine_of(make_causal_lm(), 2, 1, dtype=torch.bfloat16, zero_stage=stage, offload=offload)
    for number, accumulating in enumerate([reference] + [engine] * 33):
        share = 1 if number < 2 else 1 / 512
        accumulating.backward(share * loss_of(accumulating, ROWS[:2]))
        accumulating.step()
    assert engine.grad_norm == near((1 + 32 / 512) * reference.grad_norm, UPDATE)
