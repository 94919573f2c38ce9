# SPDX-License-Identifier: Apache-2.0
"""The trials of learning: their arithmetic and estimators by hand; and that PPO with macro actions learns."""

import json
import math
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import function_task
import learners
import limit
import quickstarts
import run_trial
import starts
import tables
import tasks
import variants
from learning import CURVE_COLUMNS, CURVES_OF, LIMITS, write_curves
from macro_actions.estimators import ESTIMATORS, EstimatorSettings
from macro_actions.segments import segment
from macro_actions.types import Rollout, Trajectory
from measuring import Answer
from trials import Group, Trial, read_groups, trials_of

FOLDER = Path(run_trial.__file__).parent
PPO, MACRO = "PPO, λ .95", "n = 5"
TRIALS = """
[settings]
"PPO, λ .95" = { ngram = 1 }
"n = 5" = { ngram = 5 }

[[groups]]
name = "opener"
part = "core"
task = "opener-64"
updates = 30
seeds = 1
settings = ["PPO, λ .95", "n = 5"]
"""


def curves_of(folder: Path, text: str) -> list[pd.DataFrame]:
    """Runs the trials of a text in a folder; the curves of each group."""
    trials = folder / "trials.toml"
    trials.write_text(text, encoding="utf-8")
    command = [sys.executable, str(FOLDER / "learning.py"), "--output_dir", str(folder), "--trials", str(trials)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return [group.curves(folder) for group in read_groups(trials)]


@pytest.mark.slow
def test_macro_actions_reach_the_first_token_sooner(tmp_path: Path) -> None:
    """30 updates, everything as published for step 3; at λ = .95 the score reaches the opener 63 tokens before it.

    The first word of a response decides its score.
    """
    (curves,) = curves_of(tmp_path, TRIALS)
    gold = {name: run["gold"].tail(5).mean() for name, run in curves.groupby("setting")}
    assert gold[MACRO] - gold[PPO] >= 0.10
    assert (curves["length"] > 63).all(), "EOS, which no demonstration has, ends next to no response"
    lines = (tmp_path / "tables.md").read_text(encoding="utf-8").splitlines()
    row = next(line for line in lines if line.startswith(f"| {MACRO} |"))
    assert float(row.split("|")[4]) > 1, "times faster"
    assert (tmp_path / "learning-tasks.svg").read_text(encoding="utf-8").count("gold score") == 2


def test_quick_is_one_seed_of_the_core() -> None:
    core = [group for group in read_groups() if group.part == "core"]
    assert len(trials_of(core)) == 280  # some settings are in several groups
    quick = trials_of(core, 1)
    assert len(quick) == 28 and {trial.seed for trial in quick} == {0}


class FakeStarts:
    """Names the folders of `Starts` without making them."""

    def sft(self, task: tasks.LearningTask, seed: int) -> starts.SFTModel:
        return starts.SFTModel(Path("start"), 0.5, 0.1)

    def prompts(self, task: tasks.LearningTask, seed: int, count: int) -> str:
        return f"prompts-{count}"

    def scalar(self, kind: str, task: tasks.LearningTask, seed: int) -> str:
        return kind


@pytest.mark.parametrize("group", read_groups(), ids=lambda group: group.name)
def test_every_setting_is_valid_and_sees_every_prompt_once(group: Group, tmp_path: Path) -> None:
    (tmp_path / "start").mkdir()
    for trial in trials_of([group], 1):
        task = tasks.TASKS[trial.task]
        config = run_trial.make_config(trial, task, FakeStarts(), tmp_path / "out")  # type: ignore[arg-type]
        rows = int(config.data.data_path[0].removeprefix("prompts-"))
        plan = config.plan_batches(1)
        assert config.total_updates(rows, plan) == trial.updates * plan.updates_per_iteration
        assert trial.estimator == "product" or trial.estimator in variants.VARIANTS


KINDS = """
[settings]
"PPO, λ .95" = { ngram = 1 }
"values alone" = { ngram = 5, estimator = "value_only" }
"GRPO" = { advantage_estimator = "grpo", samples_per_prompt = 4, kl_in = "loss", kl_estimator = "k3" }
"inside" = { ngram = 5, segment_rewards = "each" }

[[groups]]
name = "kinds"
part = "core"
task = "style-32"
seeds = 1
updates = 2
critic = "regressed"
settings = ["PPO, λ .95", "values alone", "GRPO", "inside"]

[[groups]]
name = "models"
part = "core"
task = "style-32"
seeds = 1
updates = 1
critic = "reward"
scores = "reward"
settings = ["PPO, λ .95"]
"""


@pytest.mark.slow
def test_every_kind_of_trial(tmp_path: Path) -> None:
    """The actor is the reference in the first rollout: a KL of 32 log-probs near 5, times float32 eps. A critic that
    learned the SFT model's scores explains some of their variance."""
    kinds, models = curves_of(tmp_path, KINDS)
    assert len(kinds) == 8 and len(models) == 1
    assert (kinds.loc[kinds["update"] == 1, "kl"].abs() < 1e-4).all()
    critics = kinds[kinds["setting"] != "GRPO"]
    assert not critics.drop(columns="lambda_eff").isna().any(axis=None)
    assert kinds.loc[kinds["setting"] == "GRPO", "return_rms"].isna().all()
    # With rewards inside, returns in the middle are of the rest, which this critic has not learned.
    at_the_end = critics[(critics["update"] == 1) & (critics["setting"] != "inside")]
    assert (at_the_end["explained_variance_middle"] > 0.1).all()
    inside = kinds[kinds["setting"] == "inside"].iloc[0]
    token = kinds[kinds["setting"] == "PPO, λ .95"].iloc[0]
    assert inside["gold"] == token["gold"] and inside["score"] == pytest.approx(token["score"], abs=1e-3)


def test_the_document_has_a_place_for_every_group() -> None:
    text = (Path(__file__).resolve().parents[2] / "docs" / "results-tables.md").read_text(encoding="utf-8")
    other_scripts = {"quickstart", "critics that keep up", "critics in groups", "advantages and the truth"}
    names = {f"limit, {name}" for name in LIMITS} | {group.name for group in read_groups()} | other_scripts
    assert (
        names == set(re.findall(r"<!-- learning (.+) -->", text)) == set(re.findall(r"<!-- /learning (.+) -->", text))
    )


def test_a_row_of_quickstarts_by_hand() -> None:
    """Ten updates, so that nothing is averaged: with the first seed PPO is where the baseline ends after 5 updates in
    the place of 10, with the second it never is, which counts as twice the updates: 2 and 0.5 have the median 1.25.
    """
    ramp = pd.Series(range(1, 11)) / 10
    tables_of_seeds = []
    for factor, end, eos_rate in ((2.0, 0.4, 0.95), (0.5, 0.2, 0.91)):
        table = quickstarts.count_updates({quickstarts.BASELINE: ramp, "PPO": factor * ramp})
        table["gold_scores"] = [0.3, end]
        table["kl"] = 4.0
        table["explained_variance"] = 0.55
        table["eos_rate"] = [1.0, eos_rate]
        tables_of_seeds.append(table.assign(**{"sft gold_scores": 0.2, "sft kl": 0.0, "sft eos_rate": 1.0}))
    lines = quickstarts.quickstart_table(pd.concat(tables_of_seeds)).splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    row = rows[-1]
    assert row[:2] == ["PPO, RM critic", "2"] and row[2].startswith("0.300 [")
    assert row[3:] == ["4.0", "0.55", "0.910", "5 (1/2)", row[-2], "1/2"]
    assert row[-2].startswith("1.25 [")
    assert rows[2] == ["SFT", "2", "0.200", "0.0", "", "1.000", "", "", ""]


def test_speed_and_kl_by_hand() -> None:
    """Ten numbers, so that nothing is averaged: the baseline ends at 10, the other is there after 5."""
    slow = pd.Series(np.arange(1.0, 11))
    fast = pd.Series(np.minimum(np.arange(2.0, 21, 2), 12))
    assert tables.updates_to(fast, 10.0) == 5 and math.isnan(tables.updates_to(slow, 10.5))
    assert tables.speed_up(fast, slow) == 2.0
    assert tables.speed_up(slow, fast) == 0.5, "to the lower of both ends"
    run = pd.DataFrame({"gold": slow, "kl": np.arange(0.0, 20, 2)})  # 0, 2, … 18
    assert tables.gold_at_kl(run, 5.0) == pytest.approx(3.5), "half-way between the third and the fourth"
    assert math.isnan(tables.gold_at_kl(run, 19.0))


def test_curves_are_smoothed_over_a_tenth() -> None:
    """Of 20 numbers two are averaged, of the first one only."""
    assert tables.smooth(pd.Series(range(20))).tolist() == [0, *(n - 0.5 for n in range(1, 20))]


def group_of(settings: dict[str, Any], **values: Any) -> Group:
    return Group("g", "core", "style-64", 2, settings, **{"kl_levels": [2.0]} | values)


def test_settings_beside_the_baseline_by_hand() -> None:
    """Ten updates: n = 5 has gold .25 more and 2.5 tokens more, each worth .01; at a KL of 2 all have their third
    number. Seed 1 has no baseline."""
    group = group_of({PPO: {"ngram": 1}, MACRO: {"ngram": 5}})
    rows = []
    for setting, seed, more in ((PPO, 0, 0.0), (MACRO, 0, 0.25), (MACRO, 1, 0.5)):
        for update in range(10):
            rest = dict.fromkeys(("lambda_eff", "advantage_rms", "return_rms", "explained_variance_middle"), 0.5)
            row = {"setting": setting, "seed": seed, "gold": update / 10 + more, "kl": float(update), **rest}
            rows.append({**row, "length": 60.0 + 10 * more, "gold_per_token": 0.01, "seconds": 7.0})
    runs = tables.compare_runs(group, pd.DataFrame(rows))
    assert list(zip(runs["setting"], runs["seed"], strict=True)) == [(PPO, 0), (MACRO, 0)]
    macro = runs.iloc[1]
    assert (macro["updates"], macro["speed_up"]) == (8, 1.25)
    assert macro["gain"] == pytest.approx(0.25) and macro["gold_at_length"] == pytest.approx(1.15 - 0.025)
    assert macro["KL 2"] == pytest.approx(0.45)
    cells = tables.learning_table(runs).splitlines()[-1].strip("| ").split(" | ")
    assert cells[:6] == [MACRO, "1", "8", "1.25", "1/1", "1.150"]
    assert cells[6:] == ["0.250", "1.125", "62.5", "9.0", "0.500", "0.50 / 0.50", "0.50", "0.50", "7"]
    ppo, macro_actions = tables.kl_table(group, runs).splitlines()[2:]
    assert ppo == f"| {PPO} | 0.200 | +0.000 |" and macro_actions == f"| {MACRO} | 0.450 | +0.250 |"


def test_the_best_token_ppo_is_one_that_most_seeds_bring_there() -> None:
    group = group_of({PPO: {"ngram": 1}, "λ": {"ngram": 1, "lam": 1.0}, MACRO: {"ngram": 5}})
    gold = pd.DataFrame({PPO: [0.3, 0.4], "λ": [0.9, math.nan], MACRO: [1.0, 1.0]})
    assert tables.best_token_ppo(group, gold) == PPO
    assert tables.best_token_ppo(group, gold * math.nan) is None


def test_intervals_over_seeds() -> None:
    median = tables.over_seeds([1.0, 2.0, 9.0], median=True)
    assert (median.value, median.low, median.high) == (2.0, 1.0, 9.0)
    assert tables.over_seeds([4.0]).text(1) == "4.0"
    assert tables.median_updates(pd.Series([math.nan, math.nan])) == "– (0/2)"
    assert tables.median_updates(pd.Series([4, math.nan])) == "4 (1/2)"


def test_sections_of_a_document(tmp_path: Path) -> None:
    file = tmp_path / "d.md"
    file.write_text("a\n<!-- learning x -->\nold\n<!-- /learning x -->\nb\n")
    tables.write_sections(file, {"learning x": "new"})
    assert file.read_text() == "a\n<!-- learning x -->\nnew\n<!-- /learning x -->\nb\n"
    with pytest.raises(ValueError, match="no section 'learning y'"):
        tables.write_sections(file, {"learning y": "new"})


COMPLAINT, OTHER, *_ = tasks.COMPLAINTS
STYLED = f"{COMPLAINT} {COMPLAINT} {OTHER} the {tasks.PRAISES[0]} {COMPLAINT} the the"


def test_scores_in_standard_deviations() -> None:
    """A gold score of 3 / 32 is 1 above a mean of 1 / 32 at a spread of 2 / 32; macro actions add up to it."""
    arguments = ("style", 1 / 32, 2 / 32, [""], [STYLED], [{}])
    assert tasks.standardized_scores(*arguments) == [pytest.approx(1)]
    ((first, last),) = tasks.standardized_scores(*arguments, [[STYLED[:20], STYLED[20:]]])  # type: ignore[misc]
    assert (first, last) == (pytest.approx(1.0), pytest.approx(0.0))


def test_what_the_curves_show_of_a_batch() -> None:
    """Values .1 and 0 in the middle, rewards to come 2 and 4: 1 − Var(1.9, 4) / Var(2, 4) = 1 − 1.05² = −.1025.
    A token less is worth 2 points more."""
    batch = credit("gae", [[1] * 4] * 2)
    assert run_trial.explained_variance_middle(batch) == pytest.approx(-0.1025)
    assert run_trial.score_per_token(trajectory()) == pytest.approx(-2)
    recorder = run_trial.CreditRecorder(ESTIMATORS["gae"])
    given = trajectory()
    recorder(given, segment(given.response_mask, given.response_mask), EstimatorSettings(kl_coef=0.0, lam=1.0))
    (row,) = recorder.rows
    assert row["return_rms"] == pytest.approx(math.sqrt((4 * 4 + 3 * 16) / 7))


def test_gold_scores_by_hand() -> None:
    assert tasks.style([], [STYLED], []) == [3 / 32], "two complaints in the first half, one praise in the second"
    assert tasks.opener([], [f"{tasks.OPENERS[-1]} the", f"{tasks.OPENERS[3]} the", "the"], []) == [1.0, 0.2, 0.0]


def test_functions_are_run_one_by_one_and_count_where_they_end() -> None:
    """Four are asked for: one is right, one wrong, one broken, one missing; the last of two of a name counts."""
    prompt = (
        "the sum plus the maximum; the last one minus the sum; the minimum times the maximum; the sum minus the sum:"
    )
    right = "def g(x): return x[-1] - sum(x)\n"
    response = f"def f(x): return sum(x) + min(x)\n{right}def h(x): return min(x) * max(x\n"
    assert function_task.programs([prompt], [response], []) == [0.25]
    assert function_task.programs([prompt], [right + response.replace(right, "def g(x): return 0\n")], []) == [0.0]
    segments = [response[:40], response[40:]]  # the second line ends in the second one
    assert function_task.programs([prompt], [response], [], [segments]) == [[0.0, 0.25]]


def trajectory() -> Trajectory:
    """Four response tokens and three, without KL; values .5 .3 .1 .2 and 1 0 0; scores 2 and 4."""
    mask = torch.tensor([[True] * 4, [True] * 3 + [False]])
    ids = torch.zeros(2, 5, dtype=torch.long)
    attention = torch.cat([torch.ones(2, 1, dtype=torch.bool), mask], 1)
    rollout = Rollout(ids, attention, mask, torch.arange(2), torch.ones(2, dtype=torch.bool))
    values = torch.tensor([[0.5, 0.3, 0.1, 0.2], [1.0, 0.0, 0.0, 0.0]])
    return Trajectory(rollout, torch.zeros(2, 4), torch.zeros(2, 4), values, torch.tensor([2.0, 4.0]))


def credit(name: str, ends: list[list[int]], given: Trajectory | None = None, **flags: float) -> Any:
    """What an estimator makes of a trajectory; macro actions end where ``ends`` is 1. λ = .5: products are easy."""
    given = given or trajectory()
    macro = segment(torch.tensor(ends).bool(), given.response_mask)
    settings = EstimatorSettings(**({"kl_coef": 0.0, "lam": 0.5} | flags))
    return (ESTIMATORS | variants.VARIANTS)[name](given, macro, settings)


PAIRS = [[0, 1, 0, 1], [0, 1, 1, 0]]


def test_values_alone() -> None:
    """Token values .4 .4 .15 .15: δ = 0, −.25, 0, 1.85 → advantages .10625, .2125, .925, 1.85."""
    batch = credit("value_only", PAIRS)
    assert batch.advantages[0].tolist() == pytest.approx([0.10625, 0.2125, 0.925, 1.85])
    assert batch.trajectory.values.tolist() == trajectory().values.tolist(), "the critic's loss clips around its own"


def test_rewards_alone() -> None:
    """With a KL of 1 per token and a coefficient of .1, the rewards 0, −.2, 0, 1.8 (2 − .2) meet token values."""
    given = replace(trajectory(), logprobs=torch.ones(2, 4))
    batch = credit("reward_only", PAIRS, given, kl_coef=0.1, lam=0.0)
    # δ = 0 + .3 − .5, −.2 + .1 − .3, 0 + .2 − .1, 1.8 − .2
    assert batch.advantages[0].tolist() == pytest.approx([-0.2, -0.4, 0.1, 1.6])


def test_ratio_alone() -> None:
    macro, tokens = credit("ratio_only", PAIRS), credit("gae", [[1] * 4] * 2)
    assert torch.equal(macro.advantages, tokens.advantages) and macro.macro.lengths.tolist() == [[2, 2], [2, 1]]


@pytest.mark.parametrize("name", ["value_only", "reward_only"])
def test_single_tokens_are_token_level_ppo_whatever_holes_a_response_has(name: str) -> None:
    """A turn of two tokens, two tokens of the other side, a turn of one: δ = −.2, −.1 and 1.8, with λ = .5."""
    mask = torch.tensor([[True, True, False, False, True]])
    rollout = Rollout(torch.zeros(1, 6), torch.ones(1, 6).bool(), mask, torch.arange(1), torch.ones(1).bool())
    values = torch.tensor([[0.5, 0.3, 9.0, 9.0, 0.2]])
    given = Trajectory(rollout, torch.zeros(1, 5), torch.zeros(1, 5), values, torch.tensor([2.0]))
    batch = credit(name, mask.tolist(), given)
    assert batch.advantages[0].tolist() == pytest.approx([0.2, 0.8, 0.0, 0.0, 1.8])
    assert batch.returns is not None and batch.returns[0].tolist() == pytest.approx([0.7, 1.1, 0.0, 0.0, 2.0])


def test_the_middle_of_a_response_with_holes() -> None:
    rows = torch.tensor([[1, 1, 0, 1, 1], [1, 1, 1, 0, 0], [1, 0, 0, 0, 0], [0, 0, 0, 0, 0]]).bool()
    assert variants.middle_columns(rows).tolist() == [3, 1, 0, 0]


def test_the_limit_by_hand() -> None:
    """Scores 0 and 1, as often: with exp(s r) the share of ones is p = e^s / (1 + e^s), the KL ln 2 − H(p)."""
    gold = torch.tensor([0.0, 1.0] * 500)
    point = limit.tilted_policy(limit.GoldScores(gold), math.log(3))
    entropy = -0.75 * math.log(0.75) - 0.25 * math.log(0.25)
    assert point.gold == pytest.approx(0.75) and point.kl == pytest.approx(math.log(2) - entropy)
    assert point.effective_responses == pytest.approx(1 / (500 * (0.75 / 500) ** 2 + 500 * (0.25 / 500) ** 2))
    found = limit.limit_at(limit.GoldScores(gold), point.kl)
    assert found is not None and found.gold == pytest.approx(0.75, abs=1e-4)
    assert limit.limit_at(limit.GoldScores(gold), 0.7) is None  # the KL of ones alone is ln 2 = .693


def test_the_limit_rests_on_enough_responses() -> None:
    gold = limit.GoldScores(torch.randn(2000, generator=torch.Generator().manual_seed(0)))
    below, above = limit.limit_at(gold, 1.0), limit.limit_at(gold, 5.0)
    assert above is None and below is not None and below.effective_responses > limit.MIN_EFFECTIVE_RESPONSES
    assert below.gold == pytest.approx(math.sqrt(2), rel=0.1)  # of a normal: a shift by s has the KL s²/2


def test_known_probabilities_give_an_exact_limit() -> None:
    """A quarter has 1: weights of 3 : 1 make it a half, with the KL ½ ln(½ / ¼) + ½ ln(½ / ¾); 7/16 of best of two."""
    scores = limit.GoldScores(torch.tensor([1.0, 0.0]), torch.tensor([0.25, 0.75]))
    point = limit.tilted_policy(scores, math.log(3))
    assert point.gold == pytest.approx(0.5) and point.effective_responses == math.inf and scores.mean == 0.25
    assert point.kl == pytest.approx(0.5 * math.log(2) + 0.5 * math.log(2 / 3))
    found = limit.limit_at(scores, point.kl)
    assert found is not None and found.gold == pytest.approx(0.5, abs=1e-3)
    assert limit.best_of(scores, 2).gold == pytest.approx(7 / 16)


def random_start(task: tasks.LearningTask, folder: Path) -> starts.SFTModel:
    """A random model as the result of step 1."""
    tokenizer = task.tokenizer()
    starts.save_model(folder / "sft", starts.Policy(starts.make_model(task, tokenizer, 0), tokenizer))
    return starts.SFTModel(folder, 0.0, 1.0)


def test_first_words_are_sampled_with_their_probabilities(group: None, tmp_path: Path) -> None:
    """The mean gold score of 1,024 responses is that of the exact probabilities, up to five errors."""
    task = tasks.TASKS["opener-64"]
    start = random_start(task, tmp_path)
    sampled = limit.sft_scores(replace(task, length=2), start, 0, 1024)
    exact = limit.first_word_scores(task, start, 0)
    assert exact.known_probabilities is not None and float(exact.known_probabilities.sum()) == pytest.approx(1)
    assert abs(float(sampled.mean()) - exact.mean) < 5 * float(sampled.std()) / 32 and exact.mean > 0


def test_a_trial_is_another_one_once_its_condition_was_edited(tmp_path: Path) -> None:
    condition = tmp_path / "mine.py"
    condition.write_text("def ends(trajectory, tokenizer): ...")
    trial = Trial("style", 0, flags={"termination_condition": f"{condition}:ends"})
    key = trial.key
    assert trial.key == key
    condition.write_text("def ends(trajectory, tokenizer): pass")
    assert trial.key != key


def test_pairs_of_the_sft_models_responses(group: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The chosen response is the one with the higher gold score."""
    task = replace(tasks.TASKS["style-32"], length=8)
    monkeypatch.setattr(starts, "SCALAR_SAMPLES", 128)
    pairs = starts.sampled_pairs(task, 0, random_start(task, tmp_path))
    assert 20 < len(pairs) <= 64
    for pair in pairs:
        better, worse = tasks.style([], [pair["chosen"], pair["rejected"]], [])
        assert better > worse  # type: ignore[operator]


def test_best_of_n_by_hand_and_below_the_limit() -> None:
    """Of 0 and 1, as often, the better of two is 1 three times in four; the lower of two is the best once in four."""
    point = limit.best_of(limit.GoldScores(torch.tensor([0.0, 1.0])), 2)
    assert point.gold == pytest.approx(0.75) and point.kl == pytest.approx(math.log(2) - 0.5)
    assert point.effective_responses == pytest.approx(1 / (0.25**2 + 0.75**2))
    gold = limit.GoldScores(torch.randn(5000, generator=torch.Generator().manual_seed(1)))
    best = limit.best_at(gold, 2.0)
    highest = limit.limit_at(gold, best.kl)
    assert highest is not None and best.gold < highest.gold
    assert best.kl <= 2.0 < limit.best_of(gold, 20).kl


def test_limits_at_the_edges() -> None:
    """Equal scores have no limit; one response is its own best."""
    assert limit.limit_at(limit.GoldScores(torch.zeros(100)), 1.0) is None
    best = limit.best_at(limit.GoldScores(torch.tensor([2.0])), 1.0)
    assert best.gold == 2.0 and best.kl == 0.0


def test_shares_of_the_limit_by_hand() -> None:
    """A run whose gold score is half-way between the SFT model's mean and the limit."""
    gold = torch.randn(20_000, generator=torch.Generator().manual_seed(2))
    scores = {0: limit.GoldScores(gold)}
    mean = float(gold.mean())
    highest = limit.limit_at(scores[0], 2.0)
    assert highest is not None
    half = (mean + highest.gold) / 2
    curves = pd.DataFrame({"kl": [0.0, 2.0, 2.0], "gold": [mean, half, half], "setting": "PPO", "seed": 0})
    text = limit.limit_table(group_of({"PPO": {"ngram": 1}}), tasks.TASKS["style-64"], curves, scores)
    row = next(line for line in text.splitlines() if line.startswith("| PPO"))
    assert float(row.split("|")[3]) == pytest.approx(0.5, abs=0.05)


# ---- Learners ----


@pytest.mark.slow
def test_learners_small(tmp_path: Path) -> None:
    folder = tmp_path / "learners"
    command = [sys.executable, str(FOLDER / "learners.py"), "--small", "--output_dir", str(folder)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0 and "Traceback" not in result.stdout + result.stderr, result.stderr
    page = (folder / "README.md").read_text(encoding="utf-8")
    for name in ("SFT", learners.DPO, *learners.LEARNERS, "best of 16 of SFT"):
        assert f"| {name} " in page and name in result.stdout
    assert "refuel against sft, scores" in page
    assert "published" not in page, "the published rates are of other dialogues"
    assert "(dialogues/win-rates.png)" in page and (folder / "dialogues" / "win-rates.png").exists()
    records = [json.loads((folder / name / "run.json").read_text()) for name in ("RLOO, K = 4", "PPO, n = 1")]
    updates = {record["batches"]["total_updates"] for record in records}
    assert len(updates) == 1, "RLOO samples as many responses as PPO"


def test_sizes_of_learners_by_hand() -> None:
    """Of 64 responses a rollout: 16 groups of four in one update, or in four; all learners see 40 rollouts."""
    sizes = {}
    for name, flags in learners.LEARNERS.items():
        words = learners.step3_flags(flags, Path("sft"), learners.FULL)
        values = dict(zip(words[::2], words[1::2], strict=True))
        sizes[name] = [values[f"--{size}"] for size in ("per_device_generation_batch_size", "global_batch_size")]
        assert values["--data_split"] == ("0,6144,2560" if "PPO" in name else "0,8064,640")
    assert sizes["PPO, n = 1"] == ["64", "64"] and sizes["RLOO, K = 4"] == ["16", "64"]
    assert sizes["GSPO, K = 4"] == sizes["segment values, 2 of 2"] == ["16", "16"]


def test_a_row_of_learners_by_hand() -> None:
    """Two answers: half a range is the standard error, Student's t with one degree of freedom is 12.706."""
    answers = [Answer("", 1.0, 1.0, 10), Answer("It was slow.", 3.0, 2.0, 12)]
    row = learners.learner_row("name", answers)
    assert row[0] == "name" and row[-1] == ""
    assert row[1].startswith("0.042 [")  # no point, and 1 of 12
    assert row[2:5] == ["2.00 [-10.71, 14.71]", "1.5 [-4.9, 7.9]", "11.0 [-1.7, 23.7]"]


def test_curves_beside_the_document(tmp_path: Path) -> None:
    """The curves of one of two groups, in four digits; a run that two groups share is there once."""
    groups = [replace(group_of({"PPO": {"ngram": 1}}), name=name) for name in (*CURVES_OF, "opener")]
    write_curves(groups, tmp_path, tmp_path / "curves.csv")
    assert not (tmp_path / "curves.csv").exists()

    row = {**dict.fromkeys(CURVE_COLUMNS, 0.123456), "update": 7, "length": 64}
    file = groups[0].trial("PPO", 0).file(tmp_path)
    file.parent.mkdir()
    pd.DataFrame([row]).drop(columns=["setting", "seed"]).to_csv(file, index=False)
    write_curves(groups, tmp_path, tmp_path / "curves.csv")
    lines = (tmp_path / "curves.csv").read_text(encoding="utf-8").splitlines()
    assert lines == [",".join(CURVE_COLUMNS), "PPO,0,7,0.1235,0.1235,0.1235,0.1235"]
