# SPDX-License-Identifier: Apache-2.0
"""Only one of two processes has a NaN, or responses: both take the same turns, and neither waits for the other."""

import math

import pytest

from closeness import WEIGHT_GAP
from factories import largest_difference, make_causal_lm
from nonfinite_cases import PLACES, UPDATES

pytestmark = [pytest.mark.xdist_group("launcher"), pytest.mark.slow]


def test_every_process_names_the_one_that_has_it(two_slow):
    first, second = (two_slow.numbers("nonfinite", rank)["said"] for rank in (0, 1))
    assert first == second and first.keys() == PLACES.keys()
    for place, message in first.items():
        assert message.startswith(f"after {UPDATES} updates, {place} on rank 1 are not finite"), message
    written = sorted(file.name for file in (two_slow.folder / "nonfinite-stop" / "nonfinite").iterdir())
    assert written == [f"update-{UPDATES}-rank-1.json", f"update-{UPDATES}-rank-1.safetensors"]


def test_skipping_leaves_weights_and_schedules_of_both_alone(two_slow):
    for rank in (0, 1):
        notes = two_slow.numbers("nonfinite", rank)["notes"]
        after = notes.pop("after")
        assert notes.keys() == PLACES.keys()
        for place, note in notes.items():
            assert note["counted"] == UPDATES, place
            for number, role in enumerate(("actor", "critic")):
                if role in place or " of the " not in place:
                    assert note["moved"][number] == 0 and note["stood"][number], place
        assert all(map(math.isfinite, after.values())) and "skipped/nonfinite" not in after


def test_a_process_without_responses_keeps_step(two_slow):
    """The same metrics on both, means of the responses that hold tokens; the same weights at every ZeRO stage."""
    weights = [two_slow.tensors(f"empty-{stage}") for stage in (0, 2, 3)]
    for stage in (0, 2, 3):
        first, second = (two_slow.numbers(f"empty-{stage}", rank) for rank in (0, 1))
        assert first == second
        assert all(math.isfinite(number) for row in first for number in row.values())
        assert all(3 < row["response/length"] <= 6 and row["loss/value"] > 0 for row in first[:2])
    for sharded in weights[1:]:
        assert largest_difference(weights[0], sharded) < WEIGHT_GAP
    start = {f"actor.inner.{name}": w.detach() for name, w in make_causal_lm().named_parameters()}
    assert max(float((weights[0][name] - w).abs().max()) for name, w in start.items()) > 1e-4
