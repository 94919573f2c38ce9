# SPDX-License-Identifier: Apache-2.0
"""The adapter in the real verl, called by verl's trainer and dispatcher: `make test-frameworks FRAMEWORK=verl`."""

from types import SimpleNamespace

import pytest
import torch

from framework_cases import GAMMA, LAM, UIDS, VALUE_FUNCTIONS, Case, assert_recorded, make_case

pytest.importorskip("verl", reason="needs verl: make test-frameworks FRAMEWORK=verl")

from omegaconf import OmegaConf
from tensordict import NonTensorStack, TensorDict
from transfer_queue import KVBatchMeta
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.v1 import trainer_base
from verl.workers.config import ActorConfig

from macro_actions.frameworks import MacroActionsConfig, UnsupportedError, verl
from macro_actions.losses import policy_loss
from macro_actions.segments import macro_logprobs, segment


@pytest.fixture(autouse=True)
def hooks(monkeypatch):
    """verl as it was, after each test."""
    for name in ("compute_gae_advantage_return", "ADV_ESTIMATOR_REGISTRY", "POLICY_LOSS_REGISTRY"):
        value = getattr(core_algos, name)
        monkeypatch.setattr(core_algos, name, dict(value) if isinstance(value, dict) else value)
    monkeypatch.setattr(trainer_base.PPOTrainer, "_compute_advantage", trainer_base.PPOTrainer._compute_advantage)


def nested(rows: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """(B, R) as verl's transfer queue holds it: rows of their own lengths."""
    own = [row[: int(kept.sum())] for row, kept in zip(rows, mask, strict=True)]
    return torch.nested.as_nested_tensor(own, layout=torch.jagged)


class Queue:
    """verl's transfer queue: fields of rows by name."""

    def __init__(self, case: Case) -> None:
        self.fields = {
            "uid": NonTensorStack(*UIDS),
            "response_mask": nested(case.mask.long(), case.mask),
            "rm_scores": nested(case.rewards, case.mask),
            "values": nested(case.values, case.mask),
            "responses": nested(case.ids, case.mask),
            "ref_log_prob": nested(case.ref_logprobs, case.mask),
        }
        self.put: dict[str, torch.Tensor] = {}

    def kv_batch_get(self, keys, partition_id, select_fields):
        found = {name: self.fields[name] for name in select_fields if name in self.fields}
        return TensorDict(found, batch_size=[len(keys)])

    def kv_batch_put(self, keys, partition_id, fields):
        self.put = {name: fields[name].to_padded_tensor(0) for name in fields.keys()}


def advantages(monkeypatch, case: Case) -> dict[str, torch.Tensor]:
    """What verl's trainer puts into its queue for the rollout."""
    queue = Queue(case)
    monkeypatch.setattr(trainer_base, "tq", queue)
    algorithm = {"use_kl_in_reward": False, "adv_estimator": "gae", "gamma": GAMMA, "lam": LAM}
    config = OmegaConf.create({"algorithm": algorithm, "actor_rollout_ref": {"rollout": {"n": 2}}})
    batch = KVBatchMeta(
        keys=[f"{uid}_0_{n}" for n, uid in enumerate(UIDS)], tags=[{}] * len(UIDS), partition_id="train"
    )
    trainer_base.PPOTrainer._compute_advantage(SimpleNamespace(config=config), batch, {})
    return queue.put


@pytest.mark.parametrize("value_function", VALUE_FUNCTIONS)
@pytest.mark.parametrize("condition", ["fixed", "randomized", "parsing", "ppl"])
def test_the_trainer_computes_what_step_3_does(condition, value_function, monkeypatch) -> None:
    case = make_case(condition, value_function, uids=UIDS)
    verl.register(case.config)
    found = advantages(monkeypatch, case)
    torch.testing.assert_close(found["advantages"], case.whitened(), atol=1e-6, rtol=0)
    torch.testing.assert_close(found["returns"], case.returns, atol=1e-6, rtol=0)


def test_macro_actions_of_one_token_are_verls_own_gae(monkeypatch) -> None:
    case = make_case("fixed", "equal", ngram=1)
    theirs = advantages(monkeypatch, case)
    verl.register(case.config)
    ours = advantages(monkeypatch, case)
    for name in ("advantages", "returns"):
        torch.testing.assert_close(ours[name], theirs[name], atol=1e-6, rtol=0)
    assert_recorded("verl", advantages=theirs["advantages"], returns=theirs["returns"])


def test_with_a_hole_in_the_mask_macro_actions_of_one_token_are_verls_own_gae() -> None:
    case = make_case("fixed", "equal", ngram=1)
    mask = case.mask.float()
    mask[0, 4:7] = 0
    own = {"values": case.values, "response_mask": mask, "gamma": GAMMA, "lam": LAM}
    rewards = case.rewards * mask
    theirs = core_algos.compute_gae_advantage_return(rewards, **own)
    verl.register(case.config)
    ours = core_algos.compute_gae_advantage_return(rewards, **own)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one[mask.bool()], other[mask.bool()], atol=1e-6, rtol=0)


def test_the_loss_has_a_ratio_of_each_macro_action() -> None:
    case = make_case("fixed", "equal")
    verl.register(MacroActionsConfig("fixed", 3, policy_ratio="macro"))
    config = ActorConfig(
        strategy="fsdp", rollout_n=1, use_dynamic_bsz=True, clip_ratio=0.2, clip_ratio_low=0.2, clip_ratio_high=0.3
    )
    old, new, mask = case.ref_logprobs + 0.1 * case.values, case.ref_logprobs, case.mask.float()
    loss = core_algos.get_policy_loss_fn(verl.LOSS_NAME)
    named = {"response_mask": mask, "loss_agg_mode": "token-mean", "config": config}
    found, _ = loss(old_log_prob=old, log_prob=new, advantages=case.advantages, **named, rollout_is_weights=None)
    macro = segment(case.ends, case.mask)
    ratios = [macro_logprobs(x, macro, "macro") for x in (new, old)]
    # verl's dual clip bounds what a negative advantage costs: at three times the advantage.
    ratio = (ratios[0] - ratios[1]).exp()
    assert ratio[case.mask].max() < 3
    expected, _ = policy_loss(*ratios, case.advantages, case.mask, 0.2, cliprange_high=0.3)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


def test_a_version_without_the_hook_is_named(monkeypatch) -> None:
    monkeypatch.delattr(core_algos, "compute_gae_advantage_return")
    with pytest.raises(UnsupportedError, match=r"verl: .*core_algos\.compute_gae_advantage_return, which"):
        verl.register(MacroActionsConfig())
