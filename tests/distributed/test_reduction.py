# SPDX-License-Identifier: Apache-2.0
"""The gradients that two processes reduce are checked at the first updates, at every ZeRO stage and precision."""

import pytest
import torch

from dschat.engine import reduction
from reduction_cases import (
    CASES,
    LARGE_STAGES,
    LATER,
    LATER_CASES,
    OTHERS,
    SLOW_LARGE_STAGES,
    SLOW_LATER_CASES,
    SPOILED,
)

pytestmark = pytest.mark.xdist_group("launcher")


@pytest.fixture(scope="module")
def other_stages(run_cases):
    """Results of the checks at ZeRO stages that `two_processes` leaves out."""
    return run_cases("reduction-at-other-stages", (), ("reduction_at_other_stages",))


def said_by(outputs, case):
    """What both processes say, which must be the same."""
    first, second = (outputs.numbers("reduction", rank)["said"][case] for rank in (0, 1))
    assert first == second
    return first


@pytest.mark.parametrize(("stage", "dtype"), CASES)
def test_right_gradients_pass_and_nothing_is_changed(stage, dtype, two_processes):
    assert said_by(two_processes, f"right-{stage}-{dtype}") is None
    assert said_by(two_processes, f"again-{stage}-{dtype}") is None
    assert [two_processes.numbers("reduction", rank)["moved"][f"{stage}-{dtype}"] for rank in (0, 1)] == [False] * 2


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("setting", OTHERS)
def test_right_gradients_pass_in_every_setting(setting, stage, two_processes):
    assert said_by(two_processes, f"{setting}-{stage}") is None


@pytest.mark.parametrize("fault", ["dropped", "halved"])
@pytest.mark.parametrize(("stage", "dtype"), CASES)
def test_a_gradient_that_is_lost_is_named(stage, dtype, fault, two_processes):
    """That of one process; or of both, half of it, as where a second use of the weight is lost."""
    said = said_by(two_processes, f"{fault}-{stage}-{dtype}")
    assert said is not None and f"another gradient of {SPOILED} than the 2 processes computed" in said
    assert "1 of " in said and "--no_self_checks" in said


def assert_a_lost_end_is_named(outputs, stage):
    """16,384 elements, of which one process loses the last tenth: far from the first 4,096."""
    assert said_by(outputs, f"large-{stage}") is None
    said = said_by(outputs, f"large-lost-{stage}")
    assert said is not None and f"another gradient of {SPOILED} than the 2 processes computed" in said
    assert "1 of " in said


@pytest.mark.parametrize("stage", LARGE_STAGES)
def test_weights_with_more_elements_than_are_sampled(stage, two_processes):
    assert_a_lost_end_is_named(two_processes, stage)


@pytest.mark.slow
@pytest.mark.parametrize("stage", SLOW_LARGE_STAGES)
def test_weights_with_more_elements_than_are_sampled_at_other_stages(stage, other_stages):
    assert_a_lost_end_is_named(other_stages, stage)


def assert_a_later_gradient_is_checked(outputs, model, stage):
    """LoRA's A matrices, or the backbone of a critic whose head is zero; the check changes nothing."""
    for case in ("first", "second", "lost-first"):
        assert said_by(outputs, f"{model}-{case}-{stage}") is None
    said = said_by(outputs, f"{model}-lost-second-{stage}")
    assert said is not None and "before update 2 since the start" in said and LATER[model] in said
    assert [outputs.numbers("reduction", rank)["moved"][f"{model}-{stage}"] for rank in (0, 1)] == [False] * 2


@pytest.mark.parametrize(("model", "stage"), LATER_CASES)
def test_a_gradient_that_is_zero_in_the_first_update_is_checked_in_the_second(model, stage, two_processes):
    assert_a_later_gradient_is_checked(two_processes, model, stage)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "stage"), SLOW_LATER_CASES)
def test_a_gradient_that_is_zero_at_first_is_checked_at_other_stages(model, stage, other_stages):
    assert_a_later_gradient_is_checked(other_stages, model, stage)


def test_gradients_that_stay_zero_are_given_up(two_processes):
    """After the same number of updates on each process."""
    assert said_by(two_processes, "bound") is None


def test_what_rounding_explains_by_hand():
    """bf16 rounds by at most 2^-8 of a number: three times of 4 are 3/64; fp32 beside it counts for nothing."""
    magnitudes = torch.tensor([4.0, 0.0], dtype=torch.float64)
    found = reduction.rounding_error(magnitudes, torch.tensor([3, 3]), (torch.float32, torch.bfloat16))
    assert found[0].item() == pytest.approx(3 / 64) and 0 < found[1] < 1e-30


@pytest.mark.parametrize("numel", [1, 5, 4096, 4097, 1_000_003])
def test_sampled_elements_are_everywhere(numel, group):
    places = reduction.sampled_indices(numel)
    assert len(places) == min(numel, reduction.SAMPLED) == len(set(places.tolist()))
    stretch = -(-numel // len(places))
    assert 0 <= int(places.min()) < stretch and numel - stretch <= int(places.max()) < numel
    assert int(places.diff().max() if len(places) > 1 else 0) <= 2 * stretch


def test_sampled_elements_are_not_of_one_column(group):
    """Of a weight of 1024 times 4096, whose rows are as long as the stretches are many."""
    assert len(set((reduction.sampled_indices(1024 * 4096 * 4) % 4096).tolist())) > 1000
