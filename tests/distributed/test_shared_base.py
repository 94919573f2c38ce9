# SPDX-License-Identifier: Apache-2.0
"""--share_base on two processes makes the updates of separate models on one."""

import pytest

from closeness import UPDATE, WEIGHT_GAP, near
from factories import largest_difference, make_tokenizer
from shared_base_runs import separate_trainer_of, two_updates


@pytest.mark.slow
@pytest.mark.xdist_group("launcher")
def test_two_processes_make_the_updates_of_separate_models_on_one(two_processes, group, tmp_path):
    """Weights of both adapters and the critic's head within 1e-5, and the same metrics, at ZeRO 0, 2 and 3."""
    place = two_processes.folder / "shared-base"
    base, models = str(place / "base"), {"critic_model_name_or_path": str(place / "reward")}
    weights, metrics = two_updates(separate_trainer_of(tmp_path, base, make_tokenizer(), **models))
    for stage in (0, 2, 3):
        assert largest_difference(two_processes.tensors(f"shared-base-zero{stage}"), weights) < WEIGHT_GAP
        for rank in (0, 1):
            found = two_processes.numbers(f"shared-base-zero{stage}", rank)
            assert found == near(metrics, UPDATE, scale=0.1)
