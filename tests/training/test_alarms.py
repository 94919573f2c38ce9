# SPDX-License-Identifier: Apache-2.0
"""Alarms of step 3: when they sound, how often, and what a stop leaves."""

import pytest

from cli_runs import read_jsonl
from dschat.base.errors import UserError
from dschat.settings.ppo_loss import AlarmFlags
from dschat.training.ppo.alarms import (
    Alarms,
    critic_alarm,
    eos_alarm,
    kl_alarm,
    length_alarm,
    repetition_alarm,
    scale_alarm,
    short_alarm,
)
from factories import ppo_config
from nonfinite_cases import trainer_for

HEALTHY = {
    "objective/kl": 3.0,
    "objective/kl_coef": 0.05,
    "objective/scores_std": 1.0,
    "response/score_length_correlation": 0.5,
    "response/repetition": 0.2,
    "response/length": 32.0,
    "response/eos_rate": 0.7,
    "val/explained_variance": 0.1,
}
UNHEALTHY = {
    "kl": ({"objective/kl": 12.5}, "after 8 updates, the KL to the reference is 12.5 nats per sequence"),
    "length": ({"response/score_length_correlation": -0.95}, "scores follow the length of responses"),
    "repetition": ({"response/repetition": 0.51}, "responses repeat themselves (51% of their 4-grams)"),
    "eos": ({"response/eos_rate": 0.0}, "no response ends with EOS any more"),
    "short": (
        {"response/length": 7.5},
        "responses have become short: 7.5 tokens on average, 32.0 in",
    ),
    "critic": ({"val/explained_variance": -1.5}, "the critic's values are worse than a constant"),
    "scale": ({"objective/kl_coef": 0.5}, "the KL penalty outweighs the scores: their standard deviation is 1, and "),
    "counted": ({"policy/counted": 0.0}, "no token counts in the policy's loss: see --drop_equal_groups"),
}


def lines_of(caplog):
    return [record.getMessage() for record in caplog.records if record.name.endswith("alarms")]


def alarms(max_kl=10.0, stops=False, interval=4, rows=32):
    return Alarms(AlarmFlags(max_kl=max_kl, kl_action="stop" if stops else "warn"), interval, rows)


def test_without_a_critic_there_is_none_to_warn_of(caplog):
    assert critic_alarm({}) is None and critic_alarm({"val/explained_variance": -1.5}) is not None
    healthy = {name: number for name, number in HEALTHY.items() if name != "val/explained_variance"}
    assert alarms().check(healthy, 4) is None and not lines_of(caplog)


def test_the_limits_themselves_are_silent():
    assert kl_alarm({"objective/kl": 10.0}, 10.0) is None and kl_alarm({"objective/kl": 1e9}, None) is None
    assert length_alarm({"response/score_length_correlation": 0.9}, 32) is None
    assert repetition_alarm({"response/repetition": 0.5}) is None
    assert critic_alarm({"val/explained_variance": -1.0}) is None
    assert eos_alarm({"response/eos_rate": 0.0}, ended_before=False) is None
    episodes = {"response/eos_rate": 0.0, "episode/turns": 2.0}
    assert "--max_turns" in str(eos_alarm(episodes, ended_before=True))
    assert short_alarm({"response/length": 8.1}, 32.0) is None and short_alarm({"response/length": 8.0}, 32.0)


@pytest.mark.parametrize(
    ("length", "first", "is_said"),
    [(6.0, 12.0, True), (6.0, 11.0, False), (9.0, 16.0, False), (40.0, 160.0, True), (2.0, 2.0, False)],
)
def test_responses_that_shrink(length, first, is_said):
    """To a quarter, or to at most 8 tokens and half; a task whose responses were short at first is left alone."""
    assert (short_alarm({"response/length": length}, first) is not None) == is_said
    assert short_alarm({"response/length": length}, None) is None


def test_the_first_length_is_known_after_a_resume(caplog):
    before = alarms()
    before.check(HEALTHY, 4)
    watch = alarms()
    watch.load_state_dict(before.state_dict())
    watch.check(HEALTHY | {"response/length": 2.0}, 8)
    assert len(lines_of(caplog)) == 1 and "--missing_eos_penalty" in lines_of(caplog)[0]


def test_scores_without_a_scale_are_seen_in_the_first_rollout(caplog):
    """Scores that differ by .015 against a penalty of .05 a nat: the best policy is .045 nats away."""
    assert alarms().check(HEALTHY | {"objective/kl": 0.0, "objective/scores_std": 0.015}, 1) is None
    (line,) = lines_of(caplog)
    assert "standard deviation is 0.015, and --kl_ctl 0.05 × 1 nats = 0.05" in line
    assert "--normalize_scores" in line and "reward model with a larger margin" in line


@pytest.mark.parametrize(
    ("metrics", "spread", "rows", "sounds"),
    [
        ({"objective/kl": 0.2, "objective/kl_coef": 0.05}, 0.0499, 8, True),
        ({"objective/kl": 0.2, "objective/kl_coef": 0.05}, 0.05, 8, False),
        ({"objective/kl": 0.2, "objective/kl_coef": 0.05}, 0.0, 7, False),  # too few to know their spread
        ({"objective/kl": 10.0, "objective/kl_coef": 0.1}, 0.99, 8, True),
        ({"objective/kl": 10.0, "objective/kl_coef": 0.1}, 1.0, 8, False),
        ({"objective/kl": 50.0, "objective/kl_coef": 0.0}, 0.0, 8, False),
    ],
)
def test_the_penalty_is_compared_with_the_spread(metrics, spread, rows, sounds):
    assert (scale_alarm(metrics, spread, rows) is not None) == sounds


def test_normalised_scores_have_their_scale(caplog):
    """Their deviation is divided by the running one; the remedy does not name what is on already."""
    normalised = {"objective/scores_std": 0.015, "objective/scores_running_std": 0.015}
    assert alarms().check(HEALTHY | normalised, 1) is None and not lines_of(caplog)
    alarms(max_kl=None).check(HEALTHY | normalised | {"objective/kl": 25.0}, 1)
    (line,) = lines_of(caplog)
    assert "their standard deviation is 1," in line and "Try a smaller --kl_ctl" in line


def test_high_scores_of_a_trained_policy_may_be_alike(caplog):
    """The largest spread counts, also after a break."""
    first, second = alarms(), alarms()
    first.check(HEALTHY, 1)
    second.load_state_dict(first.state_dict())
    second.check(HEALTHY | {"objective/scores_std": 0.0}, 2)
    assert not lines_of(caplog)


@pytest.mark.parametrize(
    ("flags", "matters"),
    [
        ({}, True),
        ({"advantage_estimator": "rloo", "samples_per_prompt": 2}, True),
        ({"advantage_estimator": "grpo", "samples_per_prompt": 2}, False),
        ({"advantage_estimator": "tempo", "samples_per_prompt": 2}, False),
        ({"whiten_advantages": True}, True),
        ({"whiten_advantages": True, "kl_in": "loss", "kl_estimator": "k3"}, False),
    ],
)
def test_where_the_scale_does_not_matter_nothing_is_said(flags, matters, caplog, tmp_path):
    config = ppo_config(tmp_path, per_device_generation_batch_size=32, per_device_training_batch_size=32, **flags)
    caplog.clear()
    found = Alarms(config.alarms, 4, 32, checks_scale=not config.scores_are_rescaled)
    found.check(HEALTHY | {"objective/scores_std": 0.0}, 1)
    assert bool(lines_of(caplog)) == matters


def test_a_correlation_over_few_rows_is_silent():
    metrics = {"response/score_length_correlation": 1.0}
    assert length_alarm(metrics, 31) is None and "correlation 1.00" in length_alarm(metrics, 32)


@pytest.mark.parametrize("name", UNHEALTHY)
def test_each_alarm_is_one_line(name, caplog):
    watch, (change, said) = alarms(), UNHEALTHY[name]
    assert watch.check(HEALTHY, 4) is None and watch.check(HEALTHY | change, 8) is None
    (line,) = lines_of(caplog)
    assert said in line and line.startswith("after 8 updates, ")


def test_an_alarm_is_repeated_once_in_an_interval(caplog):
    watch = alarms(interval=4)
    for update in range(1, 11):
        watch.check(HEALTHY | {"response/repetition": 0.8}, update)
    assert [line.split(",")[0] for line in lines_of(caplog)] == [
        "after 1 update",
        "after 5 updates",
        "after 9 updates",
    ]


def test_alarms_do_not_silence_each_other(caplog):
    watch = alarms()
    watch.check(HEALTHY | {"response/repetition": 0.8}, 1)
    watch.check(HEALTHY | {"response/repetition": 0.8, "val/explained_variance": -2.0}, 2)
    assert len(lines_of(caplog)) == 2


def test_a_rollout_that_was_left_out_says_nothing(caplog):
    assert alarms(stops=True).check({"skipped/nonfinite": 2.0}, 1) is None and not lines_of(caplog)


def test_a_stop_is_returned_not_logged_unless_it_would_spare_nothing(caplog):
    metrics = HEALTHY | {"objective/kl": 11.0}
    why = alarms(stops=True).check(metrics, 6)
    assert why.startswith("after 6 updates, the KL to the reference is 11 nats per sequence, above --max_kl 10")
    assert not lines_of(caplog)
    assert alarms(stops=True).check(metrics, 6, may_stop=False) is None and len(lines_of(caplog)) == 1


@pytest.mark.parametrize(("flags", "interval"), [({}, 50), ({"eval_interval": 7}, 7)])
def test_the_interval_is_that_of_evaluations(flags, interval, group, tmp_path):
    assert trainer_for(tmp_path, **flags).algorithm.alarms._interval == interval


@pytest.mark.parametrize("save_steps", [0, 100])
def test_a_stop_loses_nothing(save_steps, group, tmp_path):
    """The actor begins away from its reference: the KL of the first rollout is above the limit already."""
    flags = {"max_kl": 1e-3, "save_steps": save_steps, "self_checks": False}
    trainer = trainer_for(tmp_path, kl_action="stop", **flags)
    with pytest.raises(
        UserError, match=r"after 2 updates, the KL .* above --max_kl 0.001\. Models and a checkpoint are saved"
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
