# SPDX-License-Identifier: Apache-2.0
"""The gradients that two processes reduce are checked at the first updates, at every ZeRO stage and precision."""

import pytest
import torch

from dschat.engine import reduction
from reduction_cases import CASES, FAST_CASES, FAST_LATER_CASES, LATER, LATER_CASES, SETTINGS, SPOILED

pytestmark = pytest.mark.xdist_group("launcher")


def with_slow(cases, fast):
    """Cases as parameters, of which those that are not fast are slow."""
    return [case if case in fast else pytest.param(*case, marks=pytest.mark.slow) for case in cases]


@pytest.fixture(scope="module")
def everywhere(run_cases):
    """Results at every stage and precision, and in every setting."""
    return run_cases("reduction-everywhere", (), ("reduction_everywhere",))


@pytest.fixture
def outputs(request):
    """Results of the run that holds a test's case: of all cases for the slow ones."""
    is_slow = request.node.get_closest_marker("slow") is not None
    return request.getfixturevalue("everywhere" if is_slow else "two_processes")


def said_by(outputs, case):
    """What both processes say, which must be the same."""
    first, second = (outputs.numbers("reduction", rank)["said"][case] for rank in (0, 1))
    assert first == second
    return first


@pytest.mark.parametrize(("stage", "dtype"), with_slow(CASES, FAST_CASES))
def test_right_gradients_pass_and_nothing_is_changed(stage, dtype, outputs):
    assert said_by(outputs, f"right-{stage}-{dtype}") is None
    assert said_by(outputs, f"again-{stage}-{dtype}") is None
    assert [outputs.numbers("reduction", rank)["moved"][f"{stage}-{dtype}"] for rank in (0, 1)] == [False] * 2


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("setting", SETTINGS)
def test_right_gradients_pass_in_every_setting(setting, stage, outputs):
    assert said_by(outputs, f"{setting}-{stage}") is None


@pytest.mark.parametrize("fault", ["dropped", "halved"])
@pytest.mark.parametrize(("stage", "dtype"), with_slow(CASES, FAST_CASES))
def test_a_gradient_that_is_lost_is_named(stage, dtype, fault, outputs):
    """That of one process; or of both, half of it, as where a second use of the weight is lost."""
    said = said_by(outputs, f"{fault}-{stage}-{dtype}")
    assert said is not None and f"another gradient of {SPOILED} than the 2 processes computed" in said
    assert "1 of " in said and "--no_self_checks" in said


@pytest.mark.parametrize(("model", "stage"), with_slow(LATER_CASES, FAST_LATER_CASES))
def test_a_gradient_that_is_zero_in_the_first_update_is_checked_in_the_second(model, stage, outputs):
    """LoRA's A matrices, or the backbone of a critic whose head is zero; the check changes nothing."""
    for case in ("first", "second", "lost-first"):
        assert said_by(outputs, f"{model}-{case}-{stage}") is None
    said = said_by(outputs, f"{model}-lost-second-{stage}")
    assert said is not None and "before update 2 since the start" in said and LATER[model] in said
    assert [outputs.numbers("reduction", rank)["moved"][f"{model}-{stage}"] for rank in (0, 1)] == [False] * 2


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
