# SPDX-License-Identifier: Apache-2.0
"""The adapters without their frameworks: against what these said, on the structure of their batches; what they refuse.

With the frameworks themselves: `make test-frameworks`.
"""

import sys
import types
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from framework_cases import GAMMA, LAM, LENGTHS, PROMPTS, VALUE_FUNCTIONS, Case, make_case, recorded, right
from macro_actions.conditions import fixed
from macro_actions.frameworks import MacroActionsConfig, UnsupportedError, openrlhf, slime
from macro_actions.frameworks.__main__ import main
from macro_actions.losses import loss_weights, policy_loss
from macro_actions.segments import macro_logprobs, segment

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("framework", ["skyrl", "verl"])
def test_token_level_gae_is_what_the_framework_said(framework) -> None:
    case, said = make_case("fixed", "equal", ngram=1), recorded(framework)
    place = right if framework == "skyrl" else torch.Tensor.clone
    torch.testing.assert_close(place(case.whitened()).double(), said["advantages"].double(), atol=1e-6, rtol=0)
    torch.testing.assert_close(place(case.returns).double(), said["returns"].double(), atol=1e-6, rtol=0)


def test_the_loss_of_macro_ratios_is_what_trl_said() -> None:
    said = recorded("trl")
    mask = said["mask"].bool()
    macro = segment(fixed(mask, 3), mask)
    ratios = [macro_logprobs(said[name].float(), macro, "macro") for name in ("new", "old")]
    advantages = said["advantages"].float()[:, None].expand(mask.shape)
    loss, _ = policy_loss(*ratios, advantages, mask, 0.2, len(mask), loss_weights("response", macro, mask))
    assert float(loss) == pytest.approx(float(said["loss"]), abs=1e-5)


def rows_of(x: Tensor) -> list[Tensor]:
    """(B, R) as a tensor of each response."""
    return [row[:length].clone() for row, length in zip(x, LENGTHS, strict=True)]


def slime_batch(case: Case) -> dict[str, Any]:
    """slime's rollout_data as its advantage functions get it: lists of one entry for each sample, and no padding."""
    prompt = torch.tensor([4, 4])
    scores = (case.rewards + 0.1 * kl_of(case)).sum(1)
    return {
        "tokens": [torch.cat([prompt, row]) for row in rows_of(case.ids)],
        "response_lengths": list(LENGTHS),
        "total_lengths": [length + 2 for length in LENGTHS],
        "loss_masks": rows_of(case.mask.int()),
        "values": rows_of(case.values),
        "kl": rows_of(kl_of(case)),
        "ref_log_probs": rows_of(case.ref_logprobs),
        "rewards": scores.tolist(),
        "sample_indices": list(PROMPTS),
    }


def kl_of(case: Case) -> Tensor:
    """(B, R): what the token rewards of step 3 are without the score, by its coefficient of .1."""
    last = torch.arange(case.mask.shape[1]) == case.mask.sum(1, keepdim=True) - 1
    return torch.where(last | ~case.mask, 0.0, -case.rewards / 0.1)


SLIME = SimpleNamespace(kl_coef=0.1, gamma=GAMMA, lambd=LAM)


@pytest.mark.parametrize("value_function", VALUE_FUNCTIONS)
@pytest.mark.parametrize("condition", ["fixed", "randomized", "parsing"])
def test_slime_gets_what_step_3_computes(condition, value_function) -> None:
    case = make_case(condition, value_function)
    batch = slime_batch(case)
    slime.estimator(case.config)(SLIME, batch)
    for name, expected in (("advantages", case.advantages), ("returns", case.returns)):
        for row, own in zip(batch[name], rows_of(expected), strict=True):
            torch.testing.assert_close(row, own, atol=1e-6, rtol=0)


def test_a_score_behind_a_tools_answer_is_that_of_the_policys_last_token() -> None:
    case = make_case("fixed", "first")
    whole, cut = slime_batch(case), slime_batch(case)
    cut["loss_masks"][0][-3:] = 0
    for batch in (whole, cut):
        batch["rewards"] = [5.0] * len(LENGTHS)
        batch["kl"] = [torch.zeros_like(row) for row in batch["kl"]]
        slime.estimator(MacroActionsConfig("fixed", 1))(SimpleNamespace(kl_coef=0, gamma=1.0, lambd=1.0), batch)
    assert float(cut["returns"][0][0]) == pytest.approx(5.0) == float(whole["returns"][0][0])
    assert not cut["returns"][0][-3:].any()


def test_a_tools_answer_costs_no_kl_in_slime() -> None:
    batch = slime_batch(make_case("fixed", "first"))
    batch["loss_masks"][0][2:5] = 0
    batch["rewards"], batch["kl"] = [0.0] * len(LENGTHS), [torch.zeros_like(row) for row in batch["kl"]]
    batch["kl"][0][2:5] = 5.0
    slime.estimator(MacroActionsConfig("fixed", 1))(SimpleNamespace(kl_coef=0.1, gamma=1.0, lambd=1.0), batch)
    torch.testing.assert_close(batch["returns"][0], torch.zeros(LENGTHS[0]), atol=1e-6, rtol=0)


def test_the_check_of_slime_leaves_slime_as_it_was(monkeypatch) -> None:
    """Values .5 .25 and a score of 1: δ is −.25 and .75, and −.25 + ½·.75 = .125."""

    def dispatch(args: Any, data: dict[str, Any]) -> None:
        assert loss.mpu.is_pipeline_last_stage()
        data["kl"] = [torch.zeros_like(row) for row in data["log_probs"]]
        loss.load_function(args.custom_advantage_function_path)(args, data)

    loss = SimpleNamespace(
        mpu=SimpleNamespace(is_pipeline_last_stage=None), load_function=None, compute_advantages_and_returns=dispatch
    )
    for name in ("slime", "slime.backends", "slime.backends.megatron_utils"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setattr(sys.modules["slime.backends.megatron_utils"], "loss", loss, raising=False)
    rewards, values, mask = torch.tensor([[[0.0, 1.0]], [[0.5, 0.25]], [[1.0, 1.0]]])
    advantages, returns = slime.run_dispatcher(MacroActionsConfig("fixed", 1), rewards, values, mask)
    assert advantages.tolist() == [[0.125, 0.75]] and returns.tolist() == [[0.625, 1.0]]
    assert loss.load_function is None and loss.mpu.is_pipeline_last_stage is None


class ExperienceMaker:
    """The part of OpenRLHF's experience maker that an adapter meets, as version 0.11.2 has it."""

    advantage_estimator = "gae"

    def compute_advantages_and_returns(self, experiences: list[Any]) -> list[Any]:
        for one in experiences:
            own = (one.values, one.token_rewards, one.action_mask, GAMMA, LAM)
            one.advantages, one.returns = self.get_advantages_and_returns(*own)
        return experiences

    def get_advantages_and_returns(self, *own: Any) -> tuple[Tensor, Tensor]:
        raise AssertionError("OpenRLHF's own GAE")


def experiences(case: Case) -> list[Any]:
    """Two batches of three responses: sequences (B, T) of prompt and response, the rest (B, A)."""
    found = []
    for part in (slice(0, 3), slice(3, 6)):
        ids = case.ids[part]
        found.append(
            SimpleNamespace(
                sequences=torch.cat([torch.full((len(ids), 2), 4), ids], 1),
                action_mask=case.mask[part],
                values=case.values[part],
                base_action_log_probs=case.ref_logprobs[part],
                token_rewards=case.rewards[part],
                index=[0, 1, 2] if part.start == 0 else [3, 4, 5],
            )
        )
    return found


@pytest.mark.parametrize("value_function", VALUE_FUNCTIONS)
@pytest.mark.parametrize("condition", ["fixed", "parsing", "ppl"])
def test_openrlhf_gets_what_step_3_computes(condition, value_function) -> None:
    case = make_case(condition, value_function)
    found = openrlhf.experience_maker(ExperienceMaker, case.config)().compute_advantages_and_returns(experiences(case))
    for name, expected in (("advantages", case.advantages), ("returns", case.returns)):
        torch.testing.assert_close(torch.cat([getattr(one, name) for one in found]), expected, atol=1e-6, rtol=0)


class Forgetful(ExperienceMaker):
    """A version that has another GAE."""

    def compute_advantages_and_returns(self, experiences: list[Any]) -> list[Any]:
        return experiences


class Copying(ExperienceMaker):
    """A version that computes on copies."""

    def compute_advantages_and_returns(self, experiences: list[Any]) -> list[Any]:
        one = experiences[-1]
        self.get_advantages_and_returns(one.values.clone(), one.token_rewards, one.action_mask, GAMMA, LAM)
        return experiences


@pytest.mark.parametrize(
    ("base", "said"),
    [
        (
            type("Reinforce", (ExperienceMaker,), {"advantage_estimator": "reinforce"}),
            "estimator gae, which alone has a critic",
        ),
        (Forgetful, "did not ask get_advantages_and_returns for every batch"),
        (Copying, "does not hand over the values of each batch in turn"),
        (type("Other", (), {"compute_advantages_and_returns": None}), r"Other\.get_advantages_and_returns, which the"),
    ],
)
def test_an_openrlhf_that_would_compute_something_else_is_refused(base, said) -> None:
    case = make_case("fixed", "equal")
    with pytest.raises(UnsupportedError, match=f"openrlhf: .*{said}"):
        openrlhf.experience_maker(base, case.config)().compute_advantages_and_returns(experiences(case))


def test_a_uid_of_letters_cuts_the_same_in_every_process() -> None:
    """As in the process that these lengths are written down from."""
    config = MacroActionsConfig("randomized", ngram_lengths=(1, 2, 3, 4), seed=3)
    mask = torch.ones(3, 20)
    lengths = segment(config.ends(mask, "verl", ["3e8f", "3e8f", "9c01"]), mask).lengths
    assert lengths.tolist() == [[4, 2, 4, 3, 2, 2, 3, 0, 0], [2, 2, 4, 2, 1, 1, 3, 4, 1], [2, 4, 2, 3, 3, 3, 3, 0, 0]]


def test_the_check_says_what_is_missing(monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", ["python -m macro_actions.frameworks", "check", "slime"])
    assert main() == 1
    assert capsys.readouterr().out == "slime: ModuleNotFoundError: No module named 'slime'\n"
