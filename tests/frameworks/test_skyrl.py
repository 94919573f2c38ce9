# SPDX-License-Identifier: Apache-2.0
"""The adapter in the real SkyRL, called by SkyRL's trainer and dispatcher: `make test-frameworks FRAMEWORK=skyrl`."""

import copy
from types import SimpleNamespace

import pytest
import torch

from framework_cases import GAMMA, LAM, UIDS, VALUE_FUNCTIONS, Case, assert_recorded, make_case, right

pytest.importorskip("skyrl", reason="needs SkyRL: make test-frameworks FRAMEWORK=skyrl")

from skyrl.backends.skyrl_train.training_batch import TrainingInputBatch
from skyrl.backends.skyrl_train.utils import ppo_utils
from skyrl.train.config.config import AlgorithmConfig
from skyrl.train.trainer import RayPPOTrainer

from macro_actions.frameworks import MacroActionsConfig, UnsupportedError, skyrl
from macro_actions.losses import policy_loss
from macro_actions.segments import macro_logprobs, segment


@pytest.fixture(autouse=True)
def registries(monkeypatch):
    """SkyRL as it was, after each test."""
    for registry in (ppo_utils.AdvantageEstimatorRegistry, ppo_utils.PolicyLossRegistry):
        monkeypatch.setattr(registry, "_functions", dict(registry._functions))
    monkeypatch.setattr(RayPPOTrainer, "compute_advantages_and_returns", RayPPOTrainer.compute_advantages_and_returns)


class FullyAsyncRayPPOTrainer(SimpleNamespace):
    """By its name alone SkyRL's own."""


def trainer(
    estimator: str = skyrl.ESTIMATOR_NAME, step_wise: bool = False, kind: type = SimpleNamespace
) -> SimpleNamespace:
    """What SkyRL's method reads of its trainer."""
    algorithm = SimpleNamespace(
        advantage_estimator=estimator, gamma=GAMMA, lambd=LAM, grpo_norm_by_std=True, policy_loss_type=skyrl.LOSS_NAME
    )
    cfg = SimpleNamespace(
        trainer=SimpleNamespace(algorithm=algorithm), generator=SimpleNamespace(step_wise_trajectories=step_wise)
    )
    made: SimpleNamespace = kind(cfg=cfg, all_metrics={})
    return made


def batch_of(case: Case, values: bool = True) -> TrainingInputBatch:
    """The rollout as SkyRL has it: responses at the right end, the prompt before them."""
    ids = right(case.ids)
    batch = TrainingInputBatch(
        {
            "sequences": torch.cat([torch.full((len(ids), 3), 2), ids], 1),
            "response_mask": right(case.mask.float()),
            "loss_mask": right(case.mask.float()),
            "rewards": right(case.rewards),
            "values": right(case.values) if values else None,
            "base_action_log_probs": right(case.ref_logprobs),
        }
    )
    batch.metadata = {"uids": list(UIDS), "avg_response_length": 1.0}
    return batch


def assert_that_of_step_3(found: TrainingInputBatch, case: Case) -> None:
    mask = right(case.mask.float()).bool()
    torch.testing.assert_close(found["advantages"][mask], right(case.whitened())[mask], atol=1e-6, rtol=0)
    torch.testing.assert_close(found["returns"], right(case.returns), atol=1e-6, rtol=0)


@pytest.mark.parametrize("value_function", VALUE_FUNCTIONS)
@pytest.mark.parametrize("condition", ["fixed", "randomized", "parsing", "ppl"])
def test_the_trainer_computes_what_step_3_does(condition, value_function) -> None:
    case = make_case(condition, value_function, uids=UIDS)
    skyrl.register(case.config)
    assert_that_of_step_3(RayPPOTrainer.compute_advantages_and_returns(trainer(), batch_of(case)), case)


def test_macro_actions_of_one_token_are_skyrls_own_gae() -> None:
    case = make_case("fixed", "equal", ngram=1)
    theirs = RayPPOTrainer.compute_advantages_and_returns(trainer("gae"), batch_of(case))
    skyrl.register(case.config)
    ours = RayPPOTrainer.compute_advantages_and_returns(trainer(), batch_of(case))
    mask = right(case.mask.float()).bool()
    for name in ("advantages", "returns"):
        torch.testing.assert_close(ours[name][mask], theirs[name][mask], atol=1e-6, rtol=0)
    assert_recorded("skyrl", **{name: theirs[name].masked_fill(~mask, 0) for name in ("advantages", "returns")})


def test_what_the_policy_did_not_produce_is_a_hole() -> None:
    case = make_case("fixed", "first")
    skyrl.register(case.config)
    batch = batch_of(case)
    batch["loss_mask"][0, 4:7] = 0
    found = RayPPOTrainer.compute_advantages_and_returns(trainer(), batch)
    own = batch["loss_mask"].bool()
    assert not found["returns"][~own].any()
    assert found["returns"][0, 3] != found["returns"][0, 7]


def test_the_loss_has_a_ratio_of_each_macro_action() -> None:
    case = make_case("fixed", "equal")
    skyrl.register(MacroActionsConfig("fixed", 3, policy_ratio="macro"))
    mask = right(case.mask.float())
    new, old = right(case.ref_logprobs), right(case.ref_logprobs + 0.1 * case.values)
    config = AlgorithmConfig(policy_loss_type=skyrl.LOSS_NAME, eps_clip_low=0.2, eps_clip_high=0.3)
    loss = ppo_utils.PolicyLossRegistry.get(skyrl.LOSS_NAME)
    advantages = right(case.advantages)
    found, _ = loss(new, old, advantages, config=copy.copy(config), loss_mask=mask, rollout_logprobs=None)
    macro = segment(right(case.ends.float()), mask)
    ratios = [macro_logprobs(x, macro, "macro") for x in (new, old)]
    expected, _ = policy_loss(*ratios, advantages, mask.bool(), 0.2, 1.0, cliprange_high=0.3)
    regular = copy.copy(config)
    regular.policy_loss_type = "regular"
    scale, _ = ppo_utils.ppo_policy_loss(old, old, torch.ones_like(old), regular, mask)  # −1 over SkyRL's denominator
    torch.testing.assert_close(found, -expected * scale / mask.sum(), atol=1e-5, rtol=0)
    assert config.policy_loss_type == skyrl.LOSS_NAME


@pytest.mark.parametrize(
    ("made", "with_values", "said"),
    [
        (trainer(), False, r"needs a critic; set trainer\.critic\.model\.path"),
        (trainer(step_wise=True), True, r"step_wise_trajectories=true"),
        (trainer("grpo"), True, r"advantage_estimator=macro_gae, not grpo"),
        (trainer(kind=FullyAsyncRayPPOTrainer), True, r"fully asynchronous training has no old log-probabilities"),
    ],
)
def test_what_skyrl_would_do_without_a_word_is_refused(made, with_values, said) -> None:
    case = make_case("fixed", "equal")
    skyrl.register(case.config)
    with pytest.raises(UnsupportedError, match=said):
        RayPPOTrainer.compute_advantages_and_returns(made, batch_of(case, with_values))


def test_the_name_of_skyrls_fully_asynchronous_trainer() -> None:
    from skyrl.train import fully_async_trainer

    assert issubclass(fully_async_trainer.FullyAsyncRayPPOTrainer, RayPPOTrainer)


def test_the_estimator_forgets_the_batch_of_the_check() -> None:
    """`python -m macro_actions.frameworks check skyrl` left its mask behind, which a later call outside the trainer
    would have used in place of the mask of its own batch.
    """
    mask, zeros = torch.ones(2, 5), torch.zeros(2, 5)
    _, returns = skyrl.run_dispatcher(MacroActionsConfig("fixed", 1), mask, zeros, mask)
    # Rewards of 1 and values of 0 at γ = 1 and λ = ½: each return is 1 plus half of the next one.
    torch.testing.assert_close(returns[0], torch.tensor([1.9375, 1.875, 1.75, 1.5, 1.0]))
    with pytest.raises(UnsupportedError, match="call skyrl.register in the function that ray runs"):
        ppo_utils.compute_advantages_and_returns(
            mask, mask, ["0", "1"], skyrl.ESTIMATOR_NAME, None, zeros, gamma=1.0, lambd=0.5
        )


def test_corrections_by_log_probabilities_of_tokens_are_refused() -> None:
    case = make_case("fixed", "equal")
    skyrl.register(case.config)
    config = AlgorithmConfig(policy_loss_type=skyrl.LOSS_NAME)
    config.off_policy_correction.tis_ratio_type = "sequence"
    own = [right(x) for x in (case.ref_logprobs, case.ref_logprobs, case.advantages)]
    with pytest.raises(UnsupportedError, match=r"skyrl: unset trainer\.algorithm\.off_policy_correction"):
        ppo_utils.PolicyLossRegistry.get(skyrl.LOSS_NAME)(*own, config=config, loss_mask=right(case.mask.float()))


def test_a_version_without_the_hook_is_named(monkeypatch) -> None:
    monkeypatch.delattr(ppo_utils, "ppo_policy_loss")
    with pytest.raises(UnsupportedError, match=r"skyrl: .*ppo_utils\.ppo_policy_loss, which the adapter needs"):
        skyrl.register(MacroActionsConfig())
