# SPDX-License-Identifier: Apache-2.0
"""The plan's arithmetic against sums made by hand."""

import pytest
import torch
from transformers import GemmaConfig

from dschat.plan.minimum import minimum_memory
from dschat.plan.models import roles_of
from dschat.plan.passes import sampling_logits, scoring_logits, training_logits
from dschat.plan.phases import GB, Machine, Texts, host_of
from dschat.plan.plan import make_plan
from dschat.plan.remedies import at_stage, change_as_flags, changed, smaller
from dschat.plan.sizes import HeadSize, Model, shape_of
from dschat.plan.states import (
    Weights,
    Zero,
    ema_bytes,
    model_states,
    pass_weight_bytes,
    reduction_bytes,
    sampling_weight_bytes,
    step_bytes,
)
from dschat.settings.ppo import PPOConfig

# Gemma, vocabulary 10, hidden 8, MLP 12, 2 layers, 4 heads of width 2, 1 key-value head. By hand:
# embedding 10 · 8 = 80; a layer: q and o 2 · 8 · 8 = 128, k and v 2 · 8 · 2 = 32, MLP 3 · 8 · 12 = 288, 2 norms of 8
# = 464; the last norm 8.
TINY = GemmaConfig(
    vocab_size=10,
    hidden_size=8,
    intermediate_size=12,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=1,
    head_dim=2,
)
PARAMETERS = 80 + 2 * 464 + 8


def test_the_sizes_of_a_policy():
    shape = shape_of(Model(TINY, "policy", torch.float32))
    assert (shape.parameters, shape.trained, shape.largest) == (PARAMETERS, PARAMETERS, 96)
    assert shape.head == HeadSize(10, 80, tied=True, trained=True, width=4)


def weights(parameters, trained, largest, width, stage, **zero):
    """A model's, with what DeepSpeed's configuration says."""
    return Weights(parameters, trained, largest, width, Zero(stage, **zero))


@pytest.mark.parametrize(
    ("width", "stage", "parameters", "gradients", "optimizer"),
    [
        (4, 0, 4000, 4000, 8000),  # float32: no second copy of the weights
        (4, 1, 4000, 4000, 2000),
        (2, 1, 2000, 4000, 3000),  # float32 copy and two moments, 12 · 1000 / 4
        (2, 2, 2000, 1000, 3000),  # gradients 4 · 1000 / 4
        (2, 3, 500, 1000, 3000),
    ],
)
def test_states_by_zero_stage(width, stage, parameters, gradients, optimizer):
    """1000 weights on 4 processes."""
    kept = model_states(weights(1000, 1000, 100, width, stage), 4)
    assert (kept.parameters, kept.gradients, kept.optimizer, kept.host) == (parameters, gradients, optimizer, 0)


def test_offload_moves_states_to_main_memory():
    """Stage 2: float32 weights, two moments, two gradients (20) and a bf16 copy. Stage 3: bf16 weights (2), the same
    12, two gradients (8)."""
    kept = model_states(weights(1000, 1000, 100, 2, 2, offload=True), 4)
    assert (kept.total, kept.host) == (2000, 250 * (12 + 8 + 2))
    kept = model_states(weights(1000, 1000, 100, 2, 3, offload=True, offload_weights=True), 4)
    assert (kept.total, kept.host) == (2 * 500_000_000, 250 * (2 + 12 + 8))
    kept = model_states(weights(1000, 0, 100, 2, 3, offload=True, offload_weights=True), 4)
    assert (kept.total, kept.host) == (0, 500)


def test_the_moving_average_is_shared_out():
    """1000 float32 on 4 processes; where the weights are."""
    assert ema_bytes(weights(1000, 1000, 100, 2, 2), 4) == (1000, 0)
    assert ema_bytes(weights(1000, 1000, 100, 2, 3, offload=True, offload_weights=True), 4) == (0, 1000)


def test_main_memory_of_a_node():
    """2 processes of 3 GB; of a weight that trains 22 bytes are offloaded, of a frozen one 2; both read the largest.
    A model is smaller than two files. On two nodes of one process, each holds half of what is offloaded."""
    config = ppo(offload=True, offload_reference_model=True, zero_stage=3, dtype="bf16")
    roles = roles_of(config, config.plan_batches(2), lambda path, flag: TINY, torch.device("cuda"))
    host = host_of(roles, Machine(2, 80 * GB), average=True)
    trained, weights = 2 * PARAMETERS + 8, 4 * PARAMETERS + 16
    assert host.processes == 2 * 3 * 10**9 and host.loading == 2 * 2 * 96
    assert host.offload == 20 * trained + 2 * weights and host.saving == 2 * (PARAMETERS + 8)
    assert host.average == 4 * PARAMETERS
    assert host.total == host.processes + host.offload + host.average + host.saving
    apart = host_of(roles, Machine(2, 80 * GB, gpus_per_node=1), average=True)
    assert (apart.processes, apart.loading, apart.saving) == (3 * 10**9, 2 * 96, host.saving)
    assert (2 * apart.offload, 2 * apart.average) == (host.offload, host.average)


def test_what_zero_holds_for_a_while():
    """Buckets of 5 · 10⁸ elements, in float32 below stage 2; there, in fp16, a micro-batch's own gradients are beside
    it, in bf16 they are not. At stage 3 up to 10⁹ weights, and one more tensor, are whole."""
    big = 7 * 10**9
    assert reduction_bytes(weights(big, big, 10**9, 2, 1), 8) == 2 * 10**9 + 2 * big
    assert reduction_bytes(weights(big, big, 10**9, 2, 1), 1) == 2 * big
    assert reduction_bytes(weights(big, big, 10**9, 2, 1, sums_at_once=True), 8) == 2 * 10**9
    assert reduction_bytes(weights(big, big, 10**9, 4, 0), 8) == 2 * 10**9
    assert reduction_bytes(weights(big, big, 10**9, 2, 2), 8) == 10**9
    assert reduction_bytes(weights(big, big, 10**9, 4, 0), 1) == 0
    assert pass_weight_bytes(weights(big, big, 10**9, 2, 2), 8) == 0
    assert pass_weight_bytes(weights(big, big, 10**9, 2, 3), 8) == 2 * (10**9 + 10**9)
    assert pass_weight_bytes(weights(1000, 1000, 100, 2, 3), 8) == 2000
    assert pass_weight_bytes(weights(1000, 1000, 100, 2, 3), 1) == 0
    assert sampling_weight_bytes(weights(1000, 1000, 100, 2, 3), 8) == 2000
    assert sampling_weight_bytes(weights(1000, 1000, 100, 2, 2), 8) == 0


def test_the_optimisers_own_memory():
    """Unfused, two intermediate results of the size of what is updated at a time; stage 3 flattens gradients."""
    assert step_bytes(weights(1000, 1000, 100, 4, 0), 1, fused=False) == 4 * 2 * 100
    assert step_bytes(weights(1000, 1000, 100, 2, 2), 4, fused=False) == 4 * 2 * 250
    assert step_bytes(weights(1000, 1000, 100, 2, 3), 4, fused=True) == 4 * 250
    assert step_bytes(weights(8 * 10**9, 8 * 10**9, 100, 2, 3), 4, fused=True) == 4 * 10**9
    assert step_bytes(weights(1000, 1000, 100, 2, 3, offload=True, offload_weights=True), 4, fused=False) == 0


CPU, GPU = torch.device("cpu"), torch.device("cuda")


def test_logits_that_fit_are_kept():
    """40 positions × 1000 logits of 4 bytes; in the backward pass the head's gradient of 8000 weights."""
    found = training_logits(HeadSize(1000, 8000, False, True, 4), 40, CPU)
    assert (found.forward, found.held, found.backward) == (160_000, 160_000, 160_000 + 4 * 8000)
    found = training_logits(HeadSize(1000, 8000, False, False, 4), 40, CPU)
    assert found.backward == 160_000


def test_logits_that_do_not_fit_are_computed_again():
    """78 positions of a vocabulary of 256,000 at a time, of which nothing is kept."""
    found = training_logits(HeadSize(256_000, 256_000 * 8, True, True, 4), 2048, CPU)
    chunk = 4 * 78 * 256_000
    assert (found.forward, found.held) == (chunk, 0)
    assert found.backward == chunk + (4 + 4) * 256_000 * 8


def test_logits_of_half_precision_and_of_a_soft_cap():
    """bf16: half as much for the logits' gradient, 2 bytes for the head's; one chunk needs no sum. On a CPU the head
    is converted, on a GPU the entropy takes a tensor more. A soft cap keeps a second tensor, and works on two more."""
    plain, capped = (HeadSize(1000, 8000, False, True, 2, capped=capped) for capped in (False, True))
    found = training_logits(plain, 40, GPU)
    assert (found.forward, found.held, found.backward) == (320_000, 160_000, 160_000 + 80_000 + 2 * 8000)
    found = training_logits(capped, 40, GPU)
    assert (found.forward, found.held, found.backward) == (480_000, 320_000, 320_000 + 320_000 + 2 * 8000)
    assert training_logits(plain, 40, CPU).forward == 160_000 + 4 * 8000


def test_logits_without_gradients():
    """On a GPU chunks of 2²⁸ logits, 1048 positions of a vocabulary of 256,000, and at least 512 positions."""
    head = HeadSize(256_000, 1, True, True, 4)
    assert scoring_logits(head, 2048, CPU) == 4 * 78 * 256_000
    assert scoring_logits(head, 10, CPU) == 4 * 10 * 256_000
    assert scoring_logits(head, 2048, GPU) == 4 * 1048 * 256_000
    assert scoring_logits(HeadSize(10**6, 1, True, True, 4), 2048, GPU) == 4 * 512 * 10**6
    assert sampling_logits(head, 32, GPU) == 4 * 4 * 32 * 256_000


def ppo(**flags):
    names = {"actor_model_name_or_path": "a", "critic_model_name_or_path": "c"}
    return PPOConfig(**({"data_path": ["tldr"], "output_dir": "o"} | names | flags))


@pytest.mark.parametrize(
    ("texts", "examples", "budget", "expected"),
    [
        (Texts(128, 64), 8, None, (8, 128, 8 * 64)),
        (Texts(128, 64), 8, 512, (4, 128, 8 * 64)),  # 8 short prompts may stand in the place of 4
        (Texts(128, 64), 8, 600, (5, 120, 8 * 64)),  # no text is longer than 128: 5 of 120 fill it
        (Texts(128, 64), 8, 100, (1, 128, 128)),  # a longer text passes alone
        (Texts(128, 128, 2), 4, 100, (2, 128, 2 * 128)),  # and so does a pair
        (Texts(128, 128, 2), 4, 300, (3, 100, 3 * 100)),
    ],
)
def test_the_largest_micro_batch(texts, examples, budget, expected):
    assert texts.filling(examples, budget) == expected


def test_vllm_never_sleeps_on_a_cpu():
    """Its copy of the actor and a cache of 2²⁸ bytes count in every phase, and the largest tensor is passed on."""
    plans = [
        make_plan(ppo(rollout_engine=engine), Machine(1, None), lambda path, flag: TINY)
        for engine in ("continuous", "vllm")
    ]
    for ours, vllm in zip(*(plan.phases for plan in plans), strict=True):
        assert vllm.kept - ours.kept == 4 * PARAMETERS + 2**28
    assert plans[1].phases[0].parts == {"weights passed on": 4 * 96}


@pytest.mark.parametrize("stage", [2, 3])
def test_servers_take_nothing_of_the_gpus_that_train(stage):
    """bf16: while responses are drawn the largest tensor is whole, 96 weights, and nothing of vLLM is there."""
    servers = ppo(rollout_engine="vllm", vllm_url=["http://a:8000"], zero_stage=stage, dtype="bf16")
    plan = make_plan(servers, Machine(4, 80 * GB), lambda path, flag: TINY)
    assert plan.phases[0].parts == {"weights passed on": 2 * 96} and plan.sampling_actor == 0
    found = minimum_memory(servers, 4, torch.device("cuda"), lambda path, flag: TINY)
    assert (found.gpu, found.drawing) == (plan.phases[0].kept, 0)
    on_cpus = [
        make_plan(ppo(rollout_engine=engine, vllm_url=url), Machine(2, None), lambda path, flag: TINY).phases[1]
        for engine, url in (("continuous", None), ("vllm", ["http://a:8000"]))
    ]
    assert on_cpus[0].kept == on_cpus[1].kept, "no copy of vLLM's"


def test_smaller_micro_batches_of_the_same_updates():
    """8 rows in 1 pass become 4 in 2; a global batch says so itself, unless the passes were given, too."""
    for flags, passes in (({}, 2), ({"global_batch_size": 32, "gradient_accumulation_steps": 1}, 2)):
        config = ppo(per_device_generation_batch_size=8, per_device_training_batch_size=8, **flags)
        *_, less = smaller(config)
        assert less == {"per_device_training_batch_size": 4, "gradient_accumulation_steps": passes}
        assert changed(config, less).plan_batches(4).global_batch == 32
    config = ppo(per_device_generation_batch_size=8, per_device_training_batch_size=8, global_batch_size=32)
    *_, less = smaller(config)
    assert less == {"per_device_training_batch_size": 4} and changed(config, less).plan_batches(4).global_batch == 32


def roles_on_a_cpu(config):
    """Of one process, all of TINY."""
    return roles_of(config, config.plan_batches(1), lambda path, flag: TINY, torch.device("cpu"))


def test_a_teacher_is_held_like_the_reference():
    """Whole where the reference is, sharded where it is, and with an adapter on the actor a model more."""
    names = {"teacher_model_name_or_path": "t", "reward_function": ["score.py:f"], "critic_model_name_or_path": None}
    roles = {role.name: role for role in roles_on_a_cpu(ppo(**names))}
    assert list(roles) == ["actor", "critic", "reference", "teacher"]
    assert roles["teacher"].weights == roles["reference"].weights
    assert (roles["teacher"].source, roles["reference"].source) == ("t", "a")
    sharded = {role.name: role for role in roles_on_a_cpu(ppo(zero_stage=3, **names))}
    assert sharded["teacher"].weights == sharded["reference"].weights != roles["teacher"].weights
    adapted = roles_on_a_cpu(ppo(lora_dim=3, **names))
    assert [role.name for role in adapted] == ["actor", "critic", "teacher"]
    alone = {"advantage_estimator": "distillation", "reward_function": None}
    assert [role.name for role in roles_on_a_cpu(ppo(**(names | alone)))] == ["actor", "reference", "teacher"]


def test_a_shared_base_is_counted_once():
    """Beside the actor's weights, critic and reward model keep adapters of rank 3 and a head of 8; no reference."""
    adapters = 2 * 3 * (2 * (8 + 8) + 2 * (8 + 2) + 3 * (8 + 12))
    roles = roles_on_a_cpu(ppo(lora_dim=3, share_base=True))
    assert [role.name for role in roles] == ["actor", "critic", "reward model"]
    kept = [model_states(role.weights, 1) for role in roles]
    assert [k.parameters for k in kept] == [4 * (PARAMETERS + adapters), 4 * (adapters + 8), 4 * (adapters + 8)]
    assert [k.optimizer for k in kept] == [8 * adapters, 8 * (adapters + 8), 0]
    whole = ppo(lora_dim=3, share_base=True, critic_model_name_or_path=None, reward_model_name_or_path="r")
    roles = roles_on_a_cpu(whole)
    assert model_states(roles[2].weights, 1).parameters == 4 * (PARAMETERS + 8)
    assert [model_states(role.weights, 1).parameters for role in roles[:2]] == [k.parameters for k in kept[:2]]
    sharded = roles_on_a_cpu(ppo(lora_dim=3, share_base=True, zero_stage=3))
    assert model_states(sharded[1].weights, 2).parameters == 4 * (adapters + 8) // 2
    assert pass_weight_bytes(sharded[1].weights, 2) == 4 * (PARAMETERS + adapters + 8)


@pytest.mark.parametrize(
    ("settings", "size"),
    [
        ({"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}, 4),
        ({"bf16": {"enabled": True}}, 2),
        ({"bf16": {"enabled": False}, "fp16": {"enabled": True}}, 2),
        ({"bf16": {"enabled": False}, "fp16": {"enabled": False}}, 4),
    ],
)
def test_gradients_are_summed_in_the_type_that_deepspeed_takes(settings, size):
    """The type that its file names, or else the weights' own."""
    assert Zero.of(settings | {"zero_optimization": {"stage": 1}}).gradient == size


def test_a_stage_is_set_by_the_flags_that_decide_it():
    """Those of each model win over the one of both."""
    for flags, words in (
        ({"zero_stage": 1}, "--zero_stage 3"),
        ({"actor_zero_stage": 0}, "--actor_zero_stage 3 --critic_zero_stage 3"),
        ({"critic_zero_stage": 1, "zero_stage": 2}, "--actor_zero_stage 3 --critic_zero_stage 3"),
    ):
        config = ppo(**flags)
        change = at_stage(config, 3)
        assert change_as_flags(change) == words and set(changed(config, change).zero_stages) == {3}
