# SPDX-License-Identifier: Apache-2.0
"""Self-checks pass on healthy models and stop each kind of broken one."""

import re
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from dschat.base.errors import UserError
from dschat.data.examples import PairExample, PreferenceExample, SFTExample
from dschat.models.classifiers import load_scalar
from dschat.models.load import load_causal_lm
from dschat.refuel.offline import RefuelTask
from dschat.refuel.token_pairs import RegressionExample
from dschat.rollouts.generate import generate
from dschat.rollouts.sampling import Sampling
from dschat.run.state import random_states
from dschat.training.packing_check import check_packing
from dschat.training.rollout_check import check_rollout
from dschat.training.scalar_check import check_scalar
from dschat.training.selfcheck import check_modes, check_policy
from factories import (
    BOS,
    EOS,
    PAD,
    engine_of,
    frozen_engine_of,
    make_causal_lm,
    make_classifier,
    make_prompts,
    make_rollout,
    make_tokenizer,
    pad_rows,
    ppo_config,
    ppo_loop,
    ragged_rows,
    random_ids,
    save_folder,
    score,
    supervised_loop,
    to_device,
)
from refuel_runs import trainer_of as refuel_trainer_of

ROWS = ragged_rows([2, 5, 9], [7, 3, 4])


def tokens_of(rows=ROWS):
    ids, attention_mask, mask = (to_device(x) for x in pad_rows(rows))
    return (ids, attention_mask), mask.shape[1]


def check(engine, temperature=1.0):
    tokens, width = tokens_of()
    check_policy(engine, tokens, width, temperature, PAD)


@pytest.mark.parametrize(
    ("kind", "dtype"), [("gemma2", torch.float32), ("gpt2", torch.float32), ("gemma2", torch.bfloat16)]
)
def test_healthy_models_pass(kind, dtype, group):
    # In bf16 a random model with logits of tens of nats would round more than a real one does.
    spread = 0.3 if dtype == torch.float32 else 0.05
    check(frozen_engine_of(make_causal_lm(kind, initializer_range=spread), dtype), temperature=0.8)
    check_scalar(frozen_engine_of(make_classifier(kind, initializer_range=spread), dtype), tokens_of()[0], PAD)


def test_a_reward_model_whose_tokenizer_cannot_pad_is_read_row_by_row(group, tmp_path):
    """transformers refuses batches without a pad token, and would read the token before EOS if EOS padded."""
    tokenizer = make_tokenizer(pad_token="<eos>")
    folder = save_folder(tmp_path, make_classifier("llama"), tokenizer)
    model = load_scalar(folder, "--m", torch.float32, tokenizer)
    assert model.config.pad_token_id is None
    ids, mask, _ = pad_rows([([5, 6, 7], [8, EOS]), ([5, 6], [9, 10, 11, EOS])])
    check_scalar(frozen_engine_of(model), (ids, mask), EOS)


def test_an_id_that_the_tokenizer_lacks_is_found(models):
    trajectory = trajectory_of(*models, sampled(models[0]))
    first = trajectory.rollout.response_ids[0, :1]
    models[0].module.inner.register_buffer("missing_ids", first, persistent=False)
    with pytest.raises(UserError, match="sampled an id that its tokenizer does not have"):
        check_rollout(models[0], trajectory, SAMPLING)


def test_positions_that_count_padding_are_found(group, monkeypatch):
    policy, scalar = frozen_engine_of(make_causal_lm("gpt2")), frozen_engine_of(make_classifier("gpt2"))
    for module in ("models.backbone", "training.selfcheck", "training.scalar_check"):
        monkeypatch.setattr(f"dschat.{module}.position_inputs", lambda *_: {})
    with pytest.raises(UserError, match="log-probs with padding differ from those without"):
        check(policy)
    rows = [(random_ids(4, 1), random_ids(4, 2)), (random_ids(4, 3), random_ids(4, 4))]
    with pytest.raises(UserError, match="scores with padding differ from those without"):
        check_scalar(scalar, tokens_of(rows)[0], PAD)


def trajectory_of(actor, reference, critic, rollout):
    return score(rollout, torch.zeros(len(rollout.input_ids)), actor, reference, critic, 0.8, 4)


@pytest.fixture
def models(group):
    actor, reference = frozen_engine_of(make_causal_lm("gemma2")), frozen_engine_of(make_causal_lm("gemma2"))
    return actor, reference, frozen_engine_of(make_classifier("gemma2"))


SAMPLING = Sampling(6, (EOS,), PAD, BOS, 0.8)


def sampled(actor):
    prompts = [random_ids(2 + i, i) for i in range(6)]
    return generate(actor.module.inner, prompts, SAMPLING, range(6), 6).rollout


def test_log_probs_may_be_rounded_as_the_logits_behind_them(group):
    """A confident model's log-probs are near 0, and its logits are not: these are rounded, by 1e-3 of their size."""
    actor, reference = (frozen_engine_of(make_causal_lm("llama")) for _ in range(2))
    for engine in (actor, reference):
        engine.module.inner.lm_head.weight.data *= 60
    trajectory = trajectory_of(actor, reference, frozen_engine_of(make_classifier("llama")), sampled(actor))
    rollout = trajectory.rollout
    logits = actor.module.inner(rollout.input_ids[:2], attention_mask=rollout.attention_mask[:2].long()).logits / 0.8
    largest = float(logits[:, -rollout.response_ids.shape[1] - 1 : -1].abs().max())
    assert largest > 2 * float(trajectory.logprobs[:2].abs().max()) and largest > 10
    check_rollout(actor, trajectory, SAMPLING, trajectory.logprobs + 0.5e-3 * largest)
    with pytest.raises(UserError, match="log-probs of the sampling pass"):
        check_rollout(actor, trajectory, SAMPLING, trajectory.logprobs + 2e-3 * largest)


def test_a_reference_that_differs_from_the_actor_is_found(models):
    actor, _, critic = models
    trajectory = trajectory_of(actor, frozen_engine_of(make_causal_lm("gemma2", seed=9)), critic, sampled(actor))
    with pytest.raises(UserError, match="actor's log-probs differ from the reference's"):
        check_rollout(actor, trajectory, SAMPLING)


def test_another_temperature_or_drawing_pass_is_found(models):
    trajectory = trajectory_of(*models, sampled(models[0]))
    with pytest.raises(UserError, match="log-probs at the update differ from those of the rollout"):
        check_rollout(models[0], trajectory, replace(SAMPLING, temperature=1.0))
    drawn = trajectory.logprobs + 1e-5
    check_rollout(models[0], trajectory, SAMPLING, drawn)
    with pytest.raises(UserError, match="log-probs of the sampling pass differ from those of the actor"):
        check_rollout(models[0], trajectory, SAMPLING, drawn - 0.1)


def test_a_policy_that_samples_bos_is_found(models):
    rollout = to_device(make_rollout([(random_ids(3, 0), [5, BOS, 6, EOS]), (random_ids(3, 1), [7, 8])]))
    with pytest.raises(UserError, match=f"the policy sampled token {BOS}"):
        check_rollout(models[0], trajectory_of(*models, rollout), SAMPLING)


@pytest.mark.parametrize("finished", [True, False])
def test_a_wrong_eos_record_is_found(finished, models):
    rollout = to_device(make_rollout([(random_ids(3, 0), [5, 6, EOS]), (random_ids(3, 1), [7, 8])]))
    lying = replace(rollout, finished=torch.tensor([finished, finished]))
    with pytest.raises(UserError, match="a finished response does not end with EOS"):
        check_rollout(models[0], trajectory_of(*models, lying), SAMPLING)


# -- training mode and evaluation mode


def randomised(engine):
    """An engine whose model adds noise in training mode, as routers of experts do."""
    layer = engine.module.inner.model.layers[0].mlp.up_proj
    layer.register_forward_hook(
        lambda module, inputs, output: output * (1 + 0.1 * torch.rand_like(output)) if module.training else output
    )
    return engine


DIFFER = "in training mode differ from those in evaluation mode .* random in training mode.* config.json"
EXAMPLES = [SFTExample(*row) for row in ROWS]


@pytest.mark.parametrize("training", [True, False])
def test_numbers_that_training_mode_changes_are_found_and_nothing_else_is_touched(training, group):
    (ids, mask), _ = tokens_of()
    engine = engine_of(make_classifier())
    (engine.train if training else engine.eval)()
    check_modes(engine, "numbers", mask, lambda: engine(ids, mask))
    before = random_states()
    with pytest.raises(UserError, match=f"self-check: numbers {DIFFER}"):
        check_modes(randomised(engine), "numbers", mask, lambda: engine(ids, mask))
    after = random_states()
    assert engine.module.training is training and all(torch.equal(before[name], after[name]) for name in before)
    assert all(p.grad is None for p in engine.module.parameters())
    frozen = randomised(frozen_engine_of(make_classifier()))
    check_modes(frozen, "numbers", mask, lambda: frozen(ids, mask))  # it is never trained


@pytest.mark.parametrize("step", ["sft", "dpo", "reward", "refuel", "refuel online", "actor", "critic"])
def test_every_step_compares_both_modes(step, group, tmp_path):
    engine = randomised(engine_of(make_classifier() if step in ("reward", "critic") else make_causal_lm(), 8))
    engine.eval()
    preferences = [PreferenceExample(p, r, r[::-1][:2]) for p, r in ROWS]
    regressions = [RegressionExample(p, r, r[::-1][:2], chosen_reward=1.0, rejected_reward=0.0) for p, r in ROWS]
    rewards = [PairExample(p + r, p + r[:1]) for p, r in ROWS]
    examples = {"sft": EXAMPLES, "dpo": preferences, "reward": rewards, "refuel": regressions}
    if step in examples:
        trainer = supervised_loop(step, tmp_path, examples[step], engine=engine)
    elif step == "refuel online":
        trainer = refuel_trainer_of(tmp_path)
        randomised(trainer.algorithm.models.policy)
    else:
        trainer = ppo_loop(ppo_config(tmp_path), lambda p, r, rows: [0.0] * len(r), make_prompts(8), **{step: engine})
    with pytest.raises(UserError, match=DIFFER):
        trainer.self_check()


# -- weights that are not finite


def spoiled_folder(folder, model, tokenizer, name):
    """A model in several files, one of whose weights holds a NaN."""
    model.save_pretrained(folder, max_shard_size="20KB")
    tokenizer.save_pretrained(folder)
    for file in sorted(folder.glob("*.safetensors")):
        weights = load_file(file)
        if name in weights:
            weights[name].view(-1)[-1] = torch.nan
            save_file(weights, file, metadata={"format": "pt"})
            return
    raise AssertionError(name)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_weight_that_is_not_finite_is_named(stage, group, tokenizer, tmp_path):
    name = "model.layers.1.mlp.down_proj.weight"
    spoiled_folder(tmp_path, make_causal_lm(), tokenizer, name)
    said = re.escape(f"self-check: {name} of {tmp_path} holds numbers that are not finite.")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    opened = load_causal_lm(str(tmp_path), "--m", torch.float32, tokenizer)
    policy = engine_of(opened, zero_stage=stage)
    scalar = engine_of(load_scalar(str(tmp_path), "--m", torch.float32, tokenizer), zero_stage=stage)
    for engine in (policy, scalar):
        engine.eval()
    regression = RegressionExample([5], [6], [7], (-1.0, -1.0), chosen_reward=1.0, rejected_reward=0.0)
    task = RefuelTask([regression], [], PAD, 1.0, 1.0)
    calls = [lambda: check(policy), lambda: check_packing(policy, EXAMPLES[:2], PAD)]
    calls += [lambda: task.check_start(policy, [regression])]
    calls += [lambda: check_scalar(scalar, tokens_of()[0], PAD)]
    for call in calls:
        with pytest.raises(UserError, match=said):
            call()
