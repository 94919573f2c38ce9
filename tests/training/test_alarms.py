# SPDX-License-Identifier: Apache-2.0
"""Alarms: which symptom is named, with what cause and remedies, how often, and what a stop leaves.

Courses of runs are lists of metrics. Those of collapses are rounded from runs on the quickstart's models.
"""

import re
from pathlib import Path

import pytest

from cli_runs import read_jsonl
from dschat.base.errors import UserError
from dschat.refuel.online_settings import RefuelOnlineConfig
from dschat.settings.flags import flags_of
from dschat.settings.ppo import PPOConfig
from dschat.training.alarms import Alarms
from dschat.training.symptoms import CONDITIONS, LIMITS, page, symptoms
from nonfinite_cases import trainer_for

FLAGS = {name: flag.default for name, flag in flags_of(PPOConfig).items()} | {"reward_model_name_or_path": "reward"}
HEALTHY = {
    "objective/kl": 3.0,
    "objective/kl_per_token": 0.1,
    "objective/kl_coef": 0.05,
    "objective/entropy": 64.0,
    "policy/entropy": 2.0,
    "objective/scores": 0.5,
    "objective/scores_std": 1.0,
    "response/score_length_correlation": 0.5,
    "response/repetition": 0.2,
    "response/length": 32.0,
    "response/eos_rate": 0.7,
    "val/explained_variance": 0.1,
    "loss/value": 0.4,
    "lr/actor": 1e-5,
}
KL, STD, LENGTH, EOS = "objective/kl", "objective/scores_std", "response/length", "response/eos_rate"
CORRELATION, REPETITION, ENTROPY = "response/score_length_correlation", "response/repetition", "objective/entropy"
# A critic that begins as the actor does and warms up has no flag left that would help it.
WITHOUT_REMEDY = {"critic_warmup_updates": 20, "critic_model_name_or_path": None, "reward_model_name_or_path": None}
EXPLAINED, LOSS = "val/explained_variance", "loss/value"


def said(*courses, rows=32, interval=1, flags=(), caplog=None):
    """What the log says of rollouts that are healthy but for these metrics: update → line."""
    alarms = Alarms(FLAGS | dict(flags), interval, rows)
    caplog.clear()
    for update, changed in enumerate(courses, start=1):
        assert alarms.check(HEALTHY | changed, update) is None
    lines = [record.getMessage() for record in caplog.records if record.name.endswith("alarms")]
    return {int(re.match(r"after (\d+) update", line)[1]): line for line in lines}


def names_of(*courses, **settings):
    """The symptoms that are named: update → name."""
    names = {}
    for update, line in said(*courses, **settings).items():
        (names[update],) = [
            symptom.name for symptom in symptoms() if f", {symptom.text.partition(' {')[0].replace('`', '')} " in line
        ]
    return names


def of(metric, *values, **others):
    """A course of one metric."""
    return [{metric: value} | others for value in values]


# By name: a course in which it is named after the last rollout alone, and one just before its limit, which is healthy.
OUTSIDE = [
    ("unscored", of("objective/unscored", 0.51), of("objective/unscored", 0.5)),
    ("constant", of(STD, 0.0), of(STD, 0.06)),
    # 100 × --cliprange_value 0.2 = 20
    ("wide scores", of(STD, 20.1, **{LOSS: 0.0}), of(STD, 20.0, **{LOSS: 0.0})),
    # A quarter of 20 nats from one rollout to the next.
    ("jump", of(KL, 0.0, 5.1), of(KL, 0.0, 5.0, 9.9)),
    # Twenty nats within ten rollouts in steps of two and a half, or in eleven.
    ("jump", of(KL, *(2.5 * number for number in range(9)), 20.1), of(KL, *(1.99 * number for number in range(11)))),
    ("length", of(CORRELATION, 0.5, -0.91), of(CORRELATION, 0.5, -0.9)),
    ("scale", of(STD, 0.049), of(STD, 0.05)),
    ("counted", of("policy/counted", 0.0), of("policy/counted", 0.01)),
    # All responses are cut, which has an alarm of its own.
    ("counted", of("policy/counted", 0.0, **{EOS: 0.1}), of("policy/counted", 0.0, **{EOS: 0.0})),
    ("repetition", of(REPETITION, 0.5, 0.51), of(REPETITION, 0.5, 0.5)),
    ("repeating model", of(REPETITION, 0.51), of(REPETITION, 0.5)),
    # (1 − .7)³² is small; 8 of 64 responses may all be missing by chance: (1 − .125)³² = .014.
    ("end", of(EOS, 0.7, 0.0), of(EOS, 0.125, 0.0, 0.125)),
    ("endless", of(EOS, *[0.0] * 10), of(EOS, *[0.0] * 9)),
    ("short", of(LENGTH, 160.0, 40.0), of(LENGTH, 160.0, 40.1)),
    ("short", of(LENGTH, 12.0, 6.0), of(LENGTH, 11.0, 6.0)),
    ("entropy", of(ENTROPY, 64.0, 3.1), of(ENTROPY, 64.0, 3.2)),
    ("critic start", of(EXPLAINED, *[-0.5] * 9, -1.1), of(EXPLAINED, *[-1.1] * 9, -1.0)),
    ("critic", of(EXPLAINED, 0.3, -1.1), of(EXPLAINED, 0.3, -1.0)),
    ("dead critic", of(EXPLAINED, *[0.01] * 20), of(EXPLAINED, *[0.01] * 18, -0.011, 0.01)),
    # √(2 × 2.1) is 2.05 standard deviations, √(2 × 2) is 2.
    ("slow critic", of(LOSS, *[2.1] * 20), of(LOSS, *[2.1] * 19, 2.0)),
]


@pytest.mark.parametrize(("name", "beyond", "at"), OUTSIDE)
def test_a_symptom_begins_beyond_its_limit(name, beyond, at, caplog):
    flags = {"drop_equal_groups": True}
    assert names_of(*beyond, flags=flags, caplog=caplog) == {len(beyond): name}
    assert names_of(*at, flags=flags, caplog=caplog) == {}


def creeping(end, length):
    """A KL that rises in 40 equal steps, so that none is a jump."""
    return [{KL: end * step / 40, LENGTH: length} for step in range(41)]


@pytest.mark.parametrize(
    ("length", "limit"),
    # 1 nat per token, but at least 5 and at most 20 nats; from 200 tokens on 0.1 per token.
    [(1.0, 5.0), (12.0, 12.0), (100.0, 20.0), (1000.0, 100.0)],
)
def test_the_limit_of_the_kl_depends_on_the_length(length, limit, caplog):
    settings = {"flags": {"missing_eos_penalty": 1.0}, "caplog": caplog}
    assert LIMITS.usual_kl(length) == limit
    assert names_of(*creeping(limit, length), **settings) == {}
    assert names_of(*creeping(1.001 * limit, length), **settings) == {41: "kl"}


def test_the_limit_is_that_of_the_first_length_if_responses_become_short(caplog):
    """Always ending at once has a KL of −log p(end), whatever the reason; the length then names it."""
    assert names_of(*creeping(7.5, 20.0), {KL: 7.5, LENGTH: 1.0}, caplog=caplog) == {42: "short"}
    assert names_of(*creeping(15.0, 30.0), {KL: 15.0, LENGTH: 12.0}, caplog=caplog) == {}
    assert names_of(*creeping(15.0, 12.0), caplog=caplog).keys() == set(range(34, 42)), "above 12 nats"


# Metrics of a collapse: --actor_learning_rate 5e-3 where 1e-3 is right. Scores hardly differ in the end, responses
# have one token, and the KL has fallen below 20 nats.
COLLAPSE = [
    {KL: 0.0, LENGTH: 45.0, ENTROPY: 85.6, STD: 0.83},
    {KL: 11.6, LENGTH: 50.4, ENTROPY: 98.9, STD: 0.89},
    {KL: 24.2, LENGTH: 44.1, ENTROPY: 86.3, STD: 1.09},
    {KL: 46.3, LENGTH: 38.0, ENTROPY: 80.3, STD: 1.22},
    {KL: 9.5, LENGTH: 4.8, ENTROPY: 10.0, STD: 0.44, EXPLAINED: -3.0},
    {KL: 7.5, LENGTH: 1.0, ENTROPY: 0.004, STD: 0.2, EOS: 0.0},
]
TOO_HIGH = "the learning rate is too high. Try a lower --actor_learning_rate (0.005), such as a fifth of it."


def test_a_collapse_has_one_cause(caplog):
    lines = said(*COLLAPSE, flags={"actor_learning_rate": 5e-3, "missing_eos_penalty": 5.0}, caplog=caplog)
    assert list(lines) == [2, 3, 4, 5, 6] and all(line.endswith(TOO_HIGH) for line in lines.values())
    assert lines[2].startswith(
        "after 2 updates, the KL to the reference has jumped (objective/kl 11.6, at first 0; objective/kl_per_token"
    )


def test_a_warm_up_delays_the_first_updates(caplog):
    """The KL jumps in the 31st rollout: while the learning rate rises, or long after."""
    rising = [{KL: 0.0, "lr/actor": 1e-4 * number} for number in range(30)]
    assert names_of(*rising, {KL: 12.0, "lr/actor": 3e-3}, caplog=caplog) == {31: "jump"}
    creeping = [{KL: 0.5 * number, "lr/actor": 1e-4 * number} for number in range(42)]  # half a nat per rollout
    assert names_of(*creeping, caplog=caplog) == {42: "kl"}
    alone = [{KL: 0.0, "lr/actor": float("nan")}] * 29  # the critic alone
    assert names_of(*alone, {KL: 0.0}, {KL: 12.0}, caplog=caplog) == {31: "jump"}
    settled = [{KL: 0.0}] * 30
    assert names_of(*settled, {KL: 12.0}, caplog=caplog) == {}
    assert names_of(*settled, {KL: 20.1}, caplog=caplog) == {31: "kl"}


def test_what_the_reward_asks_for_is_no_matter_of_the_learning_rate(caplog):
    """A reward of length: its correlation was there before training, and is 0 once all responses are cut."""
    course = [
        {KL: 0.0, CORRELATION: 0.99, LENGTH: 45.0},
        {KL: 9.0, CORRELATION: 0.98, LENGTH: 59.0},
        {KL: 16.2, CORRELATION: 0.0, LENGTH: 64.0, EOS: 0.0},
    ]
    assert names_of(*course, caplog=caplog) == {1: "length", 2: "length", 3: "length"}
    assert names_of(*course, rows=31, caplog=caplog) == {2: "jump", 3: "jump"}, "a correlation of few may be chance"


def test_the_penalty_is_compared_with_the_largest_spread(caplog):
    """Scores of a trained policy may all be high; normalised ones have their scale."""
    assert names_of({STD: 1.0}, {STD: 0.0}, {STD: 0.01}, caplog=caplog) == {}
    normalised = {STD: 0.015, "objective/scores_running_std": 0.015}
    assert names_of(normalised, caplog=caplog) == {}
    line = said(normalised | {"objective/kl_coef": 1.5}, flags={"normalize_scores": True}, caplog=caplog)[1]
    assert line.endswith("Try a smaller --kl_ctl (0.05); or a reward model with a larger margin (step 2).")
    assert names_of({STD: 0.01}, rows=7, caplog=caplog) == {}, "too few to know their spread"


def test_a_rollout_without_a_scored_response_is_no_first_one(caplog):
    empty = {name: 0.0 for name in HEALTHY} | {"objective/unscored": 1.0}
    course = [empty, {LENGTH: 32.0}, {LENGTH: 7.9}]
    assert names_of(*course, caplog=caplog) == {1: "unscored", 3: "short"}
    assert Alarms(FLAGS, 1, 32).check({"skipped/nonfinite": 2.0}, 1) is None


BINS = {"value_head": "hl_gauss", "value_range": [-9.0, 9.0]}


@pytest.mark.parametrize(
    ("course", "flags"),
    [(of(STD, 200.0), BINS), (of(LOSS, *[2.13] * 20), BINS), (of(LOSS, *[2.13] * 20), {"critic_group_weight": 0.5})],
)
def test_a_loss_that_is_no_squared_error_says_nothing_of_values(course, flags, caplog):
    """The least cross-entropy of bins is about 2.1, and nothing clips them; weights of groups make errors small."""
    assert names_of(*course, caplog=caplog) and not names_of(*course, flags=flags, caplog=caplog)


@pytest.mark.parametrize(
    ("course", "flags", "named", "not_named"),
    [
        ([{}, {LENGTH: 2.0}], {}, "prefer short", "missing_eos"),
        ([{}, {LENGTH: 2.0}], {"missing_eos_penalty": 1.0}, "missing_eos_penalty (1); or a reward that", "target"),
        ([{KL: 0.0}, {KL: 6.0}], {"kl_coef": 0.0}, "a fifth of it; or --kl_ctl 0.05.", "adaptive"),
        (creeping(21.0, 32.0), {}, "a larger --kl_ctl (0.05); or --adaptive_kl_target 6", "--kl_ctl 0.05"),
        (creeping(21.0, 32.0), {"adaptive_kl_target": 9.0}, "a smaller --adaptive_kl_target (9)", "--kl_ctl"),
        (of(EXPLAINED, *[0.01] * 20), {}, "; or --critic_minibatches 4 --critic_epochs 4.", "prefer short"),
        (of(EXPLAINED, *[-3.0] * 10), WITHOUT_REMEDY, "mean nothing inside a response.", "Try"),
        (of(EXPLAINED, *[0.01] * 20), {"critic_epochs": 4}, "starts from the reward model.", "--critic_minibatches"),
    ],
)
def test_a_flag_is_named_if_the_run_can_change_it(course, flags, named, not_named, caplog):
    """Neither the cause nor a remedy names a flag that the run has not; what is to be added is not there already."""
    *_, line = said(*course, flags=flags, caplog=caplog).values()
    assert named in line and not_named not in line


def test_remedies_name_what_exists():
    """A value in a text is that of a flag which the run must have."""
    assert [symptom.name for symptom in symptoms()] == list(CONDITIONS)
    known = flags_of(PPOConfig) | flags_of(RefuelOnlineConfig)
    for symptom in symptoms():
        for remedy in symptom.remedies:
            assert known.keys() >= {*remedy.given, *remedy.absent}
            assert set(re.findall(r"{(\w+)", remedy.text)) <= set(remedy.given)


def test_the_first_that_fits_is_logged_once_in_an_interval(caplog):
    """Other symptoms are quiet while it fits, also between its lines."""
    worse = {REPETITION: 0.8, EXPLAINED: -2.0}
    course = [{}, *[worse] * 6, {EXPLAINED: -2.0}, worse]
    assert names_of(*course, interval=4, caplog=caplog) == {2: "repetition", 6: "repetition", 8: "critic"}


def test_what_is_known_survives_a_resume(caplog):
    """Cut after every rollout: first length, largest values, age and earlier lines are those of one run."""
    course = [*creeping(4.0, 32.0)[:8], *COLLAPSE[1:], {LENGTH: 2.0}]
    whole = said(*course, interval=3, caplog=caplog)
    caplog.clear()
    state = Alarms(FLAGS, 3, 32).state_dict()
    for update, change in enumerate(course, start=1):
        alarms = Alarms(FLAGS, 3, 32)
        alarms.load_state_dict(state)
        alarms.check(HEALTHY | change, update)
        state = alarms.state_dict()
    assert [record.getMessage() for record in caplog.records] == list(whole.values()) and len(whole) > 1


def test_a_stop_is_returned_not_logged_unless_it_would_spare_nothing(caplog):
    alarms = Alarms(FLAGS | {"kl_action": "stop", "max_kl": 19.0}, 1, 32)
    assert alarms.check(HEALTHY, 1) is None
    why = alarms.check(HEALTHY | {KL: 21.0}, 2)
    assert why.startswith("after 2 updates, the KL to the reference has jumped")
    assert "above 19 nats per response" in why
    assert why.endswith("Models and a checkpoint are saved: give a larger --max_kl to continue.")
    assert not caplog.records
    assert alarms.check(HEALTHY | {KL: 21.0}, 3, may_stop=False) is None and len(caplog.records) == 1


def test_the_page_has_the_table():
    """Made anew by `python -m dschat.training.symptoms`, between the lines that say so."""
    text = (Path(__file__).resolve().parents[2] / "docs" / "troubleshooting.md").read_text("utf-8")
    begin, end = "<!-- made by python -m dschat.training.symptoms -->\n\n", "\n\n<!-- end -->"
    assert text.partition(begin)[2].partition(end)[0] == "\n".join(page())


def test_a_stop_loses_nothing(group, tmp_path):
    """The actor begins away from its reference: the KL of the first rollout is above the limit already.

    Without --save_steps, too, a checkpoint is left.
    """
    flags = {"max_kl": 1e-3, "save_steps": 0, "self_checks": False}
    trainer = trainer_for(tmp_path, kl_action="stop", **flags)
    with pytest.raises(
        UserError, match=r"after 2 updates, the KL .* above --max_kl 0.001 .* Models and a checkpoint are saved"
    ):
        trainer.fit()
    assert trainer.folders.saves == [2]
    assert (tmp_path / "checkpoints" / "step-2" / "manifest.json").exists()
    rows = read_jsonl(tmp_path / "metrics.jsonl")
    assert rows[-1]["update"] == 2 and rows[-1]["objective/kl"] > 1e-3
    trainer.run.metrics.close()
    resumed = trainer_for(tmp_path, **flags, resume_from_checkpoint="latest")
    resumed.fit()
    assert resumed.update == 8 and resumed.folders.saves == ["final", "described"]
