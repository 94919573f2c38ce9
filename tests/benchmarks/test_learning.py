# SPDX-License-Identifier: Apache-2.0
"""The benchmark of learning: its arithmetic and its estimators by hand; and that PPO with macro actions learns."""

import json
import math
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from benchmark_runs import FOLDER
from dschat.lab.run_data import HeldOut, RunData
from dschat.models.load import load_scalar
from dschat.models.tokenizer import load_tokenizer
from dschat.settings.ppo import PPOConfig
from learning import LIMITS
from macro_actions.estimators import ESTIMATORS, EstimatorSettings
from macro_actions.segments import segment
from macro_actions.types import Rollout, Trajectory
from trials import figures, limit, programs, quickstarts, runner, starts, tasks, variants
from trials.matrix import Spec, read_matrix, runs_of

PPO, MACRO = "PPO, λ .95", "n = 5"
MATRIX = """
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


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output folder of two runs: the first word of a response decides its score."""
    folder = tmp_path_factory.mktemp("learning")
    (folder / "matrix.toml").write_text(MATRIX, encoding="utf-8")
    result = learning(folder)
    assert result.returncode == 0, result.stderr
    return folder


def learning(folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    """The benchmark on the matrix of a folder."""
    command = [sys.executable, FOLDER / "learning.py", "--output_dir", folder, "--matrix", folder / "matrix.toml"]
    return subprocess.run([*map(str, command), *flags], capture_output=True, text=True, env=os.environ)


def golds(folder: Path) -> dict[int, list[float]]:
    """n → gold score of each update."""
    runs = [json.loads(file.read_text()) for file in (folder / "results").glob("*.json")]
    return {dict(run["spec"]["flags"])["ngram"]: run["curves"]["gold"] for run in runs}


@pytest.mark.slow
def test_macro_actions_reach_the_first_token_sooner(finished: Path) -> None:
    """30 updates, everything as published for step 3; at λ = .95 the score reaches the opener 63 tokens before it."""
    ends = {n: sum(gold[-5:]) / 5 for n, gold in golds(finished).items()}
    assert ends[5] - ends[1] >= 0.10


@pytest.mark.slow
def test_what_is_finished_stays(finished: Path) -> None:
    files = {file: file.stat().st_mtime_ns for file in (finished / "results").glob("*.json")}
    last = max(files)
    last.unlink()
    before = json.loads(json.dumps(golds(finished)))
    result = learning(finished)
    assert result.returncode == 0, result.stderr
    after = {file: file.stat().st_mtime_ns for file in (finished / "results").glob("*.json")}
    assert after.keys() == files.keys(), "the run that was missing is made again"
    assert all(after[file] == files[file] for file in files if file != last), "the other one is not"
    assert all(golds(finished)[int(n)] == gold for n, gold in before.items())
    tables = (finished / "tables.md").read_text(encoding="utf-8")
    row = next(line for line in tables.splitlines() if line.startswith(f"| {MACRO} |"))
    assert float(row.split("|")[4]) > 1, "times faster"
    assert (finished / "learning-tasks.svg").read_text(encoding="utf-8").count("gold score") == 2
    assert json.loads((finished / "figures.json").read_text())["groups"]["opener"][1]["setting"] == MACRO


def test_quick_is_one_seed_of_the_core() -> None:
    core = [group for group in read_matrix() if group.part == "core"]
    shapes = [(group.critic, group.seeds, len(group.settings)) for group in core]
    assert shapes == [("fresh", 10, 6), ("regressed", 10, 6), *(("fresh", 10, settings) for settings in (6, 11, 6))]
    assert len(runs_of(core)) == 280  # some settings are in several groups
    quick = runs_of(core, 1)
    assert len(quick) == 28 and {spec.seed for spec in quick} == {0}


class Untrained:
    """Stands for `Starts`: random models; critics and reward models are the SFT model with a random head."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def sft(self, task: tasks.LearningTask, seed: int) -> starts.Start:
        place = self._folder / task.name
        if not place.exists():
            tokenizer = task.tokenizer()
            starts.save(place, starts.make_model(task, tokenizer, seed), tokenizer)
        return starts.Start(str(place), 0.0, 1.0)

    def scalar(self, kind: str, task: tasks.LearningTask, seed: int) -> str:
        start, place = self.sft(task, seed).sft, self._folder / f"{task.name}-{kind}"
        tokenizer = load_tokenizer(start, "sft")
        model = load_scalar(start, "sft", torch.float32, tokenizer)
        torch.nn.init.normal_(model.score.weight)
        starts.save(place, model, tokenizer)
        return str(place)


@pytest.fixture
def update(group: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Spec → curve → its only number, of one PPO iteration with 16 responses of random models."""
    monkeypatch.setattr(runner, "BATCH", 16)
    made = Untrained(tmp_path / "starts")

    def run(spec: Spec) -> dict[str, float]:
        curves = runner.run(replace(spec, updates=1), made, tmp_path / "run").curves
        assert {len(curve) for curve in curves.values()} == {1}, spec
        return {name: curve[0] for name, curve in curves.items()}

    return run


def groups_with_own_runs() -> dict[str, list[Spec]]:
    """Group → runs of its settings that no group before it has."""
    known: set[str] = set()
    found = {}
    for group in read_matrix():
        found[group.name] = [spec for spec in runs_of([group], 1) if spec.key not in known]
        known |= {spec.key for spec in found[group.name]}
    return found


GROUPS = [name for name, specs in groups_with_own_runs().items() if specs]


@pytest.mark.parametrize("name", [GROUPS[0], *(pytest.param(name, marks=pytest.mark.slow) for name in GROUPS[1:])])
def test_every_setting_of_the_matrix_runs_an_update(update: Any, name: str) -> None:
    """With and without fused credit. The actor is the reference: a KL of 128 log-probs near 6, times float32 eps.

    A rollout of 16 is one update; where a group makes several, it makes them of the same rollout.
    """
    for spec in groups_with_own_runs()[name]:
        flags = dict(spec.flags)
        PPOConfig(
            actor_model_name_or_path="a",
            reward_function=[f"{FOLDER / 'trials' / 'tasks.py'}:style"],
            output_dir="o",
            data_path=["d"],
            **({"per_device_training_batch_size": 64, "per_device_generation_batch_size": 64} | flags),
        ).validate()
        numbers = update(spec)
        has_critic = flags.get("advantage_estimator", "gae") == "gae"
        unknown = (
            set() if has_critic else {"lambda_eff", "explained_variance", "return_rms", "explained_variance_middle"}
        )
        assert {name for name, number in numbers.items() if not math.isfinite(number)} == unknown, spec
        assert abs(numbers["kl"]) < 1e-4, spec


def test_an_estimator_gets_what_the_flags_say(update: Any) -> None:
    """Normalised scores have a mean square of 1 and are, at λ = 1, the return of every token, to five digits."""
    flags = {"ngram": 1, "lam": 1.0, "kl_coef": 0.0, "normalize_scores": True}
    assert update(Spec("style-32", 0, flags=tuple(flags.items())))["return_rms"] == pytest.approx(1, abs=1e-4)


def test_the_document_has_a_place_for_every_group() -> None:
    text = (Path(__file__).resolve().parents[2] / "docs" / "results.md").read_text(encoding="utf-8")
    names = {
        "quickstart",
        "quickstart kernels",
        *(f"limit, {name}" for name in LIMITS),
    } | {group.name for group in read_matrix()}
    assert (
        names == set(re.findall(r"<!-- learning (.+) -->", text)) == set(re.findall(r"<!-- /learning (.+) -->", text))
    )


def quickstart_run(name: str, gold: list[float], end: float, eos_rate: float) -> RunData:
    """A run whose gold score is `end` in its last evaluation; its critic explains .1, .2, … of the variance."""
    rows = [
        {"update": n, "objective/gold_scores": x, "val/explained_variance": n / 10}
        for n, x in enumerate(gold, start=1)
    ]
    first = {"eval/gold_scores": 0.2, "eval/scores": -3.0, "eval/kl": 0.0, "eval/eos_rate": 1.0}
    last = {"eval/gold_scores": end, "eval/scores": -1.0, "eval/kl": 4.0, "eval/eos_rate": eos_rate}
    no_samples = pd.DataFrame()
    ends = (HeldOut("SFT", first, no_samples), HeldOut(name, last, no_samples))
    return RunData(name, {}, "gold_scores", pd.DataFrame(rows), pd.DataFrame([first, last]), *ends)


def test_a_row_of_quickstarts_by_hand() -> None:
    """Ten updates, so that nothing is averaged: with the first seed PPO is where the baseline ends after 5 updates in
    the place of 10, with the second it never is, which counts as twice the updates: 2 and 0.5 have the median 1.25.
    """
    ramp = [n / 10 for n in range(1, 11)]
    runs = [([2 * x for x in ramp], 0.4, 0.95), ([0.5 * x for x in ramp], 0.2, 0.91)]
    seeds = [
        {
            quickstarts.BASELINE: quickstart_run(quickstarts.BASELINE, ramp, 0.3, 1.0),
            "PPO (n = 1)": quickstart_run("PPO (n = 1)", *run),
        }
        for run in runs
    ]
    row = quickstarts.quickstart_row("PPO (n = 1)", seeds)
    assert row[:2] == ["PPO (n = 1)", "2"] and row[2].startswith("0.300 [")
    assert row[3:] == ["4.0", "0.55", "0.910", "5 (1/2)", row[-2], "1/2"]
    assert row[-2].startswith("1.25 [")
    assert quickstarts.start_row(seeds) == ["SFT", "2", "0.200", "0.0", "", "1.000", "", "", ""]


def test_settings_that_groups_share_are_run_once() -> None:
    spec, other = (Spec("style-64", 3, flags=(("ngram", n),)) for n in (1, 5))
    again = Spec("style-64", 3, updates=100, flags=(("ngram", 1),))
    assert spec.key == again.key != other.key


def test_speed_and_kl_by_hand() -> None:
    """Ten numbers, so that nothing is averaged: the baseline ends at 10, the other is there after 5."""
    slow, fast = np.arange(1.0, 11), np.minimum(np.arange(2.0, 21, 2), 12)
    assert figures.updates_to(fast, 10.0) == 5 and figures.updates_to(slow, 10.5) is None
    assert figures.speed_up(fast, slow) == 2.0
    assert figures.speed_up(slow, fast) == 0.5, "to the lower of both ends"
    kl = np.arange(0.0, 20, 2)  # 0, 2, … 18
    assert figures.at_kl(slow, kl, 5.0) == pytest.approx(3.5), "half-way between the third and the fourth"
    assert figures.at_kl(slow, kl, 19.0) is None


def test_intervals_over_seeds() -> None:
    median = figures.over_seeds([1.0, 2.0, 9.0], median=True)
    assert (median.value, median.low, median.high, median.seeds) == (2.0, 1.0, 9.0, 3)
    one = figures.over_seeds([4.0])
    assert (one.value, one.low, one.text(1)) == (4.0, None, "4.0")
    assert figures.usual_updates([None]) is None and figures.updates_text(None, 2) == "– (0/2)"
    assert figures.updates_text(figures.usual_updates([4, None]), 2) == "4 (1/2)"
    many = figures.over_seeds([0.0, 1.0] * 50)
    # Of 100 values with standard deviation 1/2 the mean has a standard error of 0.05.
    assert many.low == pytest.approx(0.5 - 1.96 * 0.05, abs=0.02) and many.high == pytest.approx(0.598, abs=0.02)


def test_gold_scores_by_hand() -> None:
    complaint, other, praise = tasks.COMPLAINTS[0], tasks.COMPLAINTS[1], tasks.PRAISES[0]
    text = f"{complaint} {complaint} {other} the {praise} {complaint} the the"
    assert tasks.style([], [text], []) == [3 / 32], "two complaints in the first half, one praise in the second"
    assert tasks.opener([], [f"{tasks.OPENERS[-1]} the", f"{tasks.OPENERS[3]} the", "the"], []) == [1.0, 0.2, 0.0]


def test_functions_are_run_one_by_one_and_count_where_they_end() -> None:
    """Four are asked for: one is right, one wrong, one broken, one missing; the last of two of a name counts."""
    prompt = (
        "the sum plus the maximum; the last one minus the sum; the minimum times the maximum; the sum minus the sum:"
    )
    right = "def g(x): return x[-1] - sum(x)\n"
    response = f"def f(x): return sum(x) + min(x)\n{right}def h(x): return min(x) * max(x\n"
    assert programs.programs([prompt], [response], []) == [0.25]
    assert programs.programs([prompt], [right + response.replace(right, "def g(x): return 0\n")], []) == [0.0]
    segments = [response[:40], response[40:]]  # the second line ends in the second one
    assert programs.programs([prompt], [response], [], [segments]) == [[0.0, 0.25]]


def test_the_numbers_of_programs_tell_functions_apart() -> None:
    """Two that agree on them agree on all lists: a sum or a product the other way round, or a difference of equals."""
    values: dict[object, set[str]] = {}
    for expression, value in programs.QUESTIONS.values():
        values.setdefault(value, set()).add(expression)
    others = [[3, 8, 5], [11, 2, 7, 4, 6]]
    for expressions in values.values():
        assert all(len({eval(text, {"x": x}) for text in expressions}) == 1 for x in others)


def test_demonstrations_of_programs_are_mediocre(monkeypatch: pytest.MonkeyPatch) -> None:
    """Right in all places with .6³ · .9 = .1944. Right by value, too: a sum or product (2/3) of two quantities (3/4)
    the other way round, (.4/3)² · .6 · .9; a difference of equals (1/3 · 1/4), of which there are three more.
    """
    other = (0.4 / 3) ** 2 * 0.6 * 0.9
    share = 0.1944 + 2 / 3 * 3 / 4 * other + 1 / 12 * 3 * other
    values = dict(programs.QUESTIONS.values())
    monkeypatch.setattr(programs, "returned", lambda text, name: values.get(text.partition(": return ")[2]))
    rows = tasks.TASKS["programs-72"].rows(1000, 0, "sft")
    golds = programs.programs([row.prompt for row in rows], [row.chosen or "" for row in rows], [])
    assert np.mean(golds) == pytest.approx(share, abs=3 * math.sqrt(share * (1 - share) / 4000))


def test_demonstrations_are_mediocre() -> None:
    """16 words at a rate of .2 on 32 places: each is there with 1 − (1 − .2 / 16)^32 = .331."""
    rows = tasks.TASKS["style-64"].rows(400, 0, "sft")
    assert np.mean(tasks.style([], [row.chosen for row in rows], [])) == pytest.approx(0.331, abs=0.02)
    assert {len(row.chosen.split()) for row in rows} == {64}


def trajectory() -> Trajectory:
    """Four response tokens and three, without KL; values .5 .3 .1 .2 and 1 0 0; scores 2 and 4."""
    mask = torch.tensor([[True] * 4, [True] * 3 + [False]])
    ids = torch.zeros(2, 5, dtype=torch.long)
    attention = torch.cat([torch.ones(2, 1, dtype=torch.bool), mask], 1)
    rollout = Rollout(ids, attention, mask, torch.arange(2), torch.ones(2, dtype=torch.bool))
    values = torch.tensor([[0.5, 0.3, 0.1, 0.2], [1.0, 0.0, 0.0, 0.0]])
    return Trajectory(rollout, torch.zeros(2, 4), torch.zeros(2, 4), values, torch.tensor([2.0, 4.0]))


def credit(name: str, ends: list[list[int]], **flags: float) -> Any:
    """What an estimator makes of the trajectory; macro actions end where ``ends`` is 1. λ = .5: products are easy."""
    given = trajectory()
    macro = segment(torch.tensor(ends).bool(), given.response_mask)
    return (ESTIMATORS | variants.ESTIMATORS)[name](
        given, macro, EstimatorSettings(**({"kl_coef": 0.0, "lam": 0.5} | flags))
    )


PAIRS = [[0, 1, 0, 1], [0, 1, 1, 0]]


def test_values_alone() -> None:
    """Token values .4 .4 .15 .15: δ = 0, −.25, 0, 1.85 → advantages .10625, .2125, .925, 1.85."""
    batch = credit("value_only", PAIRS)
    assert batch.advantages[0].tolist() == pytest.approx([0.10625, 0.2125, 0.925, 1.85])
    assert batch.trajectory.values.tolist() == trajectory().values.tolist(), "the critic's loss clips around its own"


def test_rewards_alone() -> None:
    """With a KL of 1 per token and a coefficient of .1, the rewards 0, −.2, 0, 1.8 (2 − .2) meet token values."""
    given = trajectory()
    object.__setattr__(given, "logprobs", torch.ones(2, 4))
    macro = segment(torch.tensor(PAIRS).bool(), given.response_mask)
    batch = variants.reward_only(given, macro, EstimatorSettings(kl_coef=0.1, lam=0.0))
    # δ = 0 + .3 − .5, −.2 + .1 − .3, 0 + .2 − .1, 1.8 − .2
    assert batch.advantages[0].tolist() == pytest.approx([-0.2, -0.4, 0.1, 1.6])


def test_ratio_alone() -> None:
    macro, tokens = credit("ratio_only", PAIRS), credit("gae", [[1] * 4] * 2)
    assert torch.equal(macro.advantages, tokens.advantages) and macro.macro.lengths.tolist() == [[2, 2], [2, 1]]


def test_lambda_of_the_token() -> None:
    """With pairs everywhere λ = √.25 = .5 on each token; the second row's last token is alone and needs no λ."""
    batch, tokens = credit("token_lambda", PAIRS, lam=0.25), credit("gae", [[1] * 4] * 2)
    assert batch.advantages.tolist() == [pytest.approx(row) for row in tokens.advantages.tolist()]
    assert batch.returns.tolist() == [pytest.approx(row) for row in tokens.returns.tolist()]


def test_mixture_is_the_mean_over_horizons() -> None:
    batch = credit("mixture", PAIRS)
    parts = [credit("gae", ends).advantages for ends in ([[1] * 4] * 2, [[0] * 4] * 2)]
    # Of four tokens, n = 5 and n = ∞ are the same: one macro action.
    expected = (parts[0] + 2 * parts[1]) / 3
    assert batch.advantages.tolist() == [pytest.approx(row) for row in expected.tolist()]


def test_decoupled_returns() -> None:
    """At λ = 1 every return is the score."""
    batch = credit("decoupled", [[1] * 4] * 2)
    assert batch.returns[0].tolist() == pytest.approx([2.0] * 4) and batch.returns[1, :3].tolist() == [4.0] * 3
    assert torch.equal(batch.advantages, credit("gae", [[1] * 4] * 2).advantages)


def test_cuts_at_the_highest() -> None:
    """One token in five of eleven and of four: two cuts beside the end, and none."""
    x = torch.tensor([[0.0, 3, 0, 0, 9, 1, 0, 0, 2, 0, 0], [5.0, 5, 5, 5] + [0] * 7])
    mask = torch.arange(11) < torch.tensor([[11], [4]])
    ends = variants.cut_at_highest(x, mask)
    assert [row.nonzero().flatten().tolist() for row in ends] == [[1, 4, 10], [3]]


def test_macro_actions_shrink_as_the_critic_learns() -> None:
    """A critic that knows half of the variance is good enough for tokens; one that knows nothing gets tens."""
    mask = torch.ones(4, 20, dtype=torch.bool)
    scores = torch.tensor([-3.0, -1, 1, 3])
    for share, length in ((0.0, 10), (1.0, 1), (1 - math.sqrt(0.8), 5.5)):
        given = SimpleNamespace(response_mask=mask, scores=scores, values=(share * scores)[:, None].repeat(1, 20))
        count = variants.shrinking(given, None)[0].sum().item()
        assert count == pytest.approx(20 / length, abs=0.5), share


def test_the_limit_by_hand() -> None:
    """Scores 0 and 1, as often: with exp(s r) the share of ones is p = e^s / (1 + e^s), the KL ln 2 − H(p)."""
    gold = torch.tensor([0.0, 1.0] * 500)
    point = limit.tilted(limit.GoldScores(gold), math.log(3))
    entropy = -0.75 * math.log(0.75) - 0.25 * math.log(0.25)
    assert point.gold == pytest.approx(0.75) and point.kl == pytest.approx(math.log(2) - entropy)
    assert point.responses == pytest.approx(1 / (500 * (0.75 / 500) ** 2 + 500 * (0.25 / 500) ** 2))
    found = limit.limit_at(limit.GoldScores(gold), point.kl)
    assert found is not None and found.gold == pytest.approx(0.75, abs=1e-4)
    assert limit.limit_at(limit.GoldScores(gold), 0.7) is None  # the KL of ones alone is ln 2 = .693


def test_the_limit_rests_on_enough_responses() -> None:
    gold = torch.randn(2000, generator=torch.Generator().manual_seed(0))
    below, above = limit.limit_at(limit.GoldScores(gold), 1.0), limit.limit_at(limit.GoldScores(gold), 5.0)
    assert above is None and below is not None and below.responses > limit.FEWEST
    assert below.gold == pytest.approx(math.sqrt(2), rel=0.1)  # of a normal: a shift by s has the KL s²/2


def test_known_probabilities_give_an_exact_limit() -> None:
    """A quarter has 1: weights of 3 : 1 make it a half, with the KL ½ ln(½ / ¼) + ½ ln(½ / ¾); 7/16 of best of two."""
    scores = limit.GoldScores(torch.tensor([1.0, 0.0]), torch.tensor([0.25, 0.75]))
    point = limit.tilted(scores, math.log(3))
    assert point.gold == pytest.approx(0.5) and point.responses == math.inf and scores.mean == 0.25
    assert point.kl == pytest.approx(0.5 * math.log(2) + 0.5 * math.log(2 / 3))
    found = limit.limit_at(scores, point.kl)
    assert found is not None and found.gold == pytest.approx(0.5, abs=1e-3)
    assert limit.best_of(scores, 2).gold == pytest.approx(7 / 16)


def test_first_words_are_as_drawn(group: None, tmp_path: Path) -> None:
    """The mean gold score of 4,096 responses is that of the known probabilities, up to five errors."""
    start, task = Untrained(tmp_path).sft(tasks.TASKS["opener-64"], 0), tasks.TASKS["opener-64"]
    drawn = limit.sft_scores(replace(task, length=2), start, 0, 4096)
    exact = limit.first_word_scores(task, start, 0)
    assert exact.mass is not None and float(exact.mass.sum()) == pytest.approx(1)
    assert abs(float(drawn.mean()) - exact.mean) < 5 * float(drawn.std()) / 64 and exact.mean > 0


def test_best_of_n_by_hand_and_below_the_limit() -> None:
    gold = torch.tensor([0.0, 1.0] * 500)
    point = limit.best_of(limit.GoldScores(gold), 2)
    assert point.gold == pytest.approx(0.75) and point.kl == pytest.approx(math.log(2) - 0.5)
    gold = torch.randn(5000, generator=torch.Generator().manual_seed(1))
    for n in (2, 8, 32):
        best = limit.best_of(limit.GoldScores(gold), n)
        assert best.gold == pytest.approx(float(gold[: 5000 // n * n].view(-1, n).amax(1).mean()), abs=0.1)
        highest = limit.limit_at(limit.GoldScores(gold), best.kl)
        assert highest is not None and best.gold < highest.gold
    assert limit.best_at(limit.GoldScores(gold), 2.0).kl <= 2.0 < limit.best_of(limit.GoldScores(gold), 20).kl


def test_shares_of_the_limit_by_hand() -> None:
    """A run whose gold score is half-way between the SFT model's mean and the limit."""
    gold = torch.randn(20_000, generator=torch.Generator().manual_seed(2))
    half = {kl: (float(gold.mean()) + limit.limit_at(limit.GoldScores(gold), kl).gold) / 2 for kl in (1.0, 2.0)}  # type: ignore[union-attr]
    curves = {"kl": [0.0, 1.0, 2.0, 2.0], "gold": [float(gold.mean()), half[1.0], half[2.0], half[2.0]]}
    runs = {"PPO": {0: SimpleNamespace(curves=curves)}}
    text = limit.limit_table(tasks.TASKS["style-64"], runs, {0: limit.GoldScores(gold)})  # type: ignore[arg-type]
    row = next(line for line in text.splitlines() if line.startswith("| PPO"))
    assert [float(cell) for cell in row.split("|")[2:4]] == pytest.approx([0.5, 0.5], abs=0.05)
