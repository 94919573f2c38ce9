# SPDX-License-Identifier: Apache-2.0
"""The same recorded inputs give the same weights, whatever the processes, ZeRO stage, accumulation and memory savers.

The updates of one process at ZeRO 0 without accumulation are those of plain torch: tests/engine shows it.
"""

import json
from pathlib import Path

import pytest
import torch

from closeness import UPDATE, assert_weights_near, near
from critic_updates import BINS, critic_updates, cut_on_first_rank, holed_batch, plain_critic, rows_of_critic
from factories import largest_difference, make_causal_lm, make_tokenizer
from recorded_updates import ALL_CASES, FAST_CASES, LEARNING_RATE, TOKEN_CASES, UPDATES, Case, run_case, untied_updates
from refuel_runs import talker, two_rounds
from shared_base_runs import separate_trainer_of, two_updates
from turn_cases import two_updates_on_episodes

pytestmark = pytest.mark.xdist_group("launcher")

STEPS = ("sft", "reward", "dpo", "ppo")
SLOW_CASES = (*(case for case in ALL_CASES if case not in FAST_CASES), *TOKEN_CASES)
SLOW_ALONE = (Case(0, 8), Case(2, 4, gradient_checkpointing=True), Case(2, tokens=18), Case(3, 1, offload=True))


def name_of(case):
    """In test ids."""
    return case.name


@pytest.fixture(scope="module")
def kept():
    """Filled by the first test that needs it, once the process group is open."""
    return {}


@pytest.fixture
def alone(group, kept, tmp_path):
    """Weights and metrics of one process at ZeRO 0."""
    if not kept:
        kept["run"] = run_case(Case(), tmp_path)
    return kept["run"]


def parts_of(weights, step, update):
    prefix = f"{step}/{update}/"
    return {name.removeprefix(prefix): w for name, w in weights.items() if name.startswith(prefix)}


def assert_same(run, expected):
    """Weights after each update within 1e-5; losses and gradient norms, of which Adam's steps say little, too."""
    (weights, metrics), (expected_weights, expected_metrics) = run, expected
    for step in STEPS:
        for update in range(UPDATES):
            parts = [parts_of(model, step, update) for model in (weights, expected_weights)]
            assert_weights_near(*parts, message=f"{step}, update {update}")
    assert {name: metrics[name] for name in expected_metrics} == near(expected_metrics, UPDATE, scale=0.1)


def test_the_recorded_updates_move_every_weight_that_they_should(alone):
    weights, metrics = alone
    for step in STEPS:
        moved = parts_of(weights, step, 0), parts_of(weights, step, 1)
        assert largest_difference(*moved) > 0.5 * LEARNING_RATE
    start = {f"model.inner.{name}": w.detach() for name, w in make_causal_lm().named_parameters()}
    for name, after in parts_of(weights, "sft", 0).items():
        assert 0.9 * LEARNING_RATE < float((after - start[name]).abs().max()) < 1.1 * LEARNING_RATE
    assert len(metrics) == UPDATES * (2 + 2 + 2 + 4)


@pytest.mark.parametrize("case", FAST_CASES, ids=name_of)
def test_two_processes_make_the_same_updates_as_one(case, alone, two_processes):
    name = f"updates-{case.name}"
    assert_same((two_processes.tensors(name), two_processes.numbers(name)), alone)
    # Metrics are reduced: every rank knows them.
    assert two_processes.numbers(name) == pytest.approx(two_processes.numbers(name, 1))


@pytest.mark.slow
def test_a_critics_own_updates_are_of_the_rows_of_both_processes(two_slow):
    weights, metrics = two_slow.tensors("critic-updates"), two_slow.numbers("critic-updates")
    expected, losses = plain_critic(holed_batch(), rows_of_critic(2))
    assert_weights_near({name: weights[name] for name in expected}, expected)
    assert metrics["loss/value"] == near(sum(losses) / len(losses), UPDATE)


@pytest.mark.slow
def test_an_actor_without_a_token_on_one_process_is_trained_on_both(alone, two_slow):
    weights = two_slow.tensors("cut-on-first-rank")
    expected, _ = critic_updates(cut_on_first_rank())
    actor = {name: x for name, x in expected.items() if name.startswith("actor")}
    assert_weights_near({name: weights[name] for name in actor}, actor)


@pytest.mark.slow
def test_a_critic_with_bins_in_parts_learns_of_the_rows_of_both_processes(two_slow):
    weights, metrics = two_slow.tensors("value-bins"), two_slow.numbers("value-bins")
    expected, losses = plain_critic(holed_batch(), rows_of_critic(2), BINS["value_range"])
    assert_weights_near({name: weights[name] for name in expected}, expected)
    assert metrics["loss/value"] == near(sum(losses) / len(losses), UPDATE)


@pytest.mark.parametrize(
    "case", [Case(3, 4), *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW_ALONE)], ids=name_of
)
def test_one_process_makes_the_same_updates(case, alone, tmp_path):
    assert_same(run_case(case, tmp_path), alone)


@pytest.fixture(scope="module")
def matrix(run_cases):
    return run_cases("matrix", SLOW_CASES, ("updates",))


@pytest.mark.slow
@pytest.mark.parametrize("case", SLOW_CASES, ids=name_of)
def test_the_whole_matrix_makes_the_same_updates(case, alone, matrix):
    name = f"updates-{case.name}"
    assert_same((matrix.tensors(name), matrix.numbers(name)), alone)


def test_a_head_of_its_own_is_trained_in_parts(two_processes, group, tmp_path):
    """A rank with longer responses uses it more often."""
    expected, _ = untied_updates(Case(), tmp_path)
    assert_weights_near(two_processes.tensors("untied"), expected)
    assert two_processes.numbers("untied", 0) == two_processes.numbers("untied", 1) == {"held": 0}


def test_whole_weights_are_on_the_main_process_only(two_processes):
    """run_case keeps what whole_state returns: at ZeRO 3 the other rank returns nothing."""
    files = {Path(file).name for file in two_processes.folder.glob("updates-*.safetensors")}
    assert files == {f"updates-{case.name}-0.safetensors" for case in FAST_CASES}
    assert all(torch.is_tensor(w) for w in two_processes.tensors("updates-zero3-accumulation4-checkpointing").values())


@pytest.mark.slow
def test_two_processes_make_the_updates_of_one(alone, run_cases):
    """One case alone, for tests/mutants.py."""
    case = Case(0, 1)
    outputs = run_cases("one-case", (case,), ("updates",))
    for rank in (0, 1):
        assert_same((outputs.tensors(f"updates-{case.name}"), outputs.numbers(f"updates-{case.name}", rank)), alone)


@pytest.mark.slow
@pytest.mark.parametrize("stage, tokens", [(0, None), (3, 150)])
def test_two_processes_make_the_rounds_of_one(stage, tokens, group, run_cases, tmp_path):
    """Dialogues of 1 to 3 turns, so that ranks draw unequally often; the evaluation, too."""
    outputs = run_cases("two-refuel", (), ("refuel",))
    expected, metrics = two_rounds(tmp_path, 0)
    found = outputs.tensors(f"refuel-zero{stage}-{tokens}")
    assert_weights_near(found, expected)
    start = {f"inner.{name}": p.detach() for name, p in talker().named_parameters()}
    assert largest_difference(found, start) > 1e-4
    for rank in (0, 1):
        assert outputs.numbers(f"refuel-zero{stage}-{tokens}", rank) == near(metrics, 8 * UPDATE, scale=0.1)


@pytest.mark.slow
def test_two_processes_make_the_updates_of_separate_models_on_one(two_slow, group, tmp_path):
    """Weights of both adapters and the critic's head within 1e-5, and the same metrics, at ZeRO 0, 2 and 3."""
    place = two_slow.folder / "shared-base"
    base, models = str(place / "base"), {"critic_model_name_or_path": str(place / "reward")}
    weights, metrics = two_updates(separate_trainer_of(tmp_path, base, make_tokenizer(), **models))
    for stage in (0, 2, 3):
        assert_weights_near(two_slow.tensors(f"shared-base-zero{stage}"), weights)
        for rank in (0, 1):
            found = two_slow.numbers(f"shared-base-zero{stage}", rank)
            assert found == near(metrics, UPDATE, scale=0.1)


def turns_of(text):
    """What was said in the episodes of a sample file."""
    columns = ("response_ids", "response_mask", "messages", "turn_rewards", "done")
    return [[row[column] for column in columns] for row in map(json.loads, text.splitlines())]


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 3])
def test_two_processes_play_the_episodes_of_one(stage, group, run_cases, tmp_path):
    """Episodes of one to three turns, of which some break, so that ranks sample unequally often; evaluations, too."""
    outputs = run_cases("two-episodes", (), ("episodes",))
    expected, expected_metrics, expected_samples = two_updates_on_episodes(tmp_path)
    assert_weights_near(outputs.tensors(f"episodes-zero{stage}"), expected)
    found = outputs.numbers(f"episodes-zero{stage}")
    for row, expected_row in zip(found["metrics"], expected_metrics, strict=True):
        assert {name: row[name] for name in expected_row} == near(expected_row, 8 * UPDATE, scale=0.1)
    assert any(0 < row.get("objective/unscored", 0) < 1 for row in expected_metrics)
    assert {name: turns_of(text) for name, text in found["samples"].items()} == {
        name: turns_of(text) for name, text in expected_samples.items()
    }


@pytest.mark.slow
def test_all_environments_of_a_rank_break(run_cases):
    """The other rank makes forward passes that both must make: `generate` reports no log-probs."""
    outputs = run_cases("two-episodes", (), ("episodes",))
    rows = [row for row in outputs.numbers("episodes-broken") if "objective/unscored" in row]
    assert [row["objective/unscored"] for row in rows] == [0.5, 0.5]
