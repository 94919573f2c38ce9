# SPDX-License-Identifier: Apache-2.0
"""Only one of two processes has a NaN, or responses: both take the same turns, and neither waits for the other."""

import json
import math

import pytest

from closeness import assert_weights_near
from factories import make_causal_lm
from nonfinite_cases import PLACES, UPDATES

pytestmark = [pytest.mark.xdist_group("launcher"), pytest.mark.slow]


@pytest.mark.parametrize("stage", [0, 2])
def test_every_process_names_the_one_that_has_it(stage, two_slow):
    first, second = (two_slow.numbers(f"nonfinite-{stage}", rank)["said"] for rank in (0, 1))
    assert first == second and first.keys() == PLACES.keys()
    for place, message in first.items():
        assert message.startswith(f"after {UPDATES} updates, {place} on rank 1 are not finite"), message
    record, _ = sorted((two_slow.folder / f"nonfinite-{stage}" / "stop" / "nonfinite").iterdir())
    assert record.name == f"update-{UPDATES}-rank-1.json"
    last = {"update": UPDATES, "rank": 1, "quantity": "losses of the critic", "rows": []}
    assert json.loads(record.read_text()) == last


@pytest.mark.parametrize("stage", [0, 2])
def test_skipping_leaves_weights_and_schedules_of_both_alone(stage, two_slow):
    for rank in (0, 1):
        notes = two_slow.numbers(f"nonfinite-{stage}", rank)["notes"]
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
        assert_weights_near(weights[0], sharded)
    start = {f"actor.inner.{name}": w.detach() for name, w in make_causal_lm().named_parameters()}
    assert max(float((weights[0][name] - w).abs().max()) for name, w in start.items()) > 1e-4
