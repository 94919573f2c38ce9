# SPDX-License-Identifier: Apache-2.0
"""A run that is stopped anywhere and taken up again is, to the last bit, the run that was never stopped."""

import errno
import json
import os
import shutil
from contextlib import contextmanager
from functools import partial

import pytest
import torch

from dschat.base.errors import ServerLost, UserError
from dschat.refuel import online as refuel
from dschat.rollouts.continuous import ContinuousEngine
from dschat.run import checkpoint
from dschat.training import reference as pairs
from dschat.training.ppo import algorithm, update
from refuel_runs import share_of_early
from resume_runs import (
    AHEAD,
    REFILL,
    RLOO,
    DrawsAhead,
    Setup,
    as_of_other_processes,
    by_segment,
    check_every_stop,
    lengths,
    often_equal,
    ppo,
    refuel_online,
    result_of,
    stop_in_call,
    supervised,
)

CONDITIONS = {"fixed": {"ngram": 3}, "randomized": {}, "parsing": {"parser": "chunker"}, "ppl": {}}
NORMALISED = {"normalize_scores": True, "normalize_advantages": "row", "clip_reward_value": 1.5}
COMPLETIONS = {"advantage_estimator": "segment_mc", "mc_samples": 2, "ngram": 3, "mc_max_segments": 2}
SETUPS = {"ZeRO 2": Setup(zero_stage=2), "ZeRO 3": Setup(zero_stage=3), "adapters": Setup(lora_dim=2)}
STEPS = ("sft", "reward", "dpo", "refuel")
RUNS = {
    **{step: partial(supervised, step) for step in STEPS},
    **{name: partial(ppo, termination_condition=name, **flags) for name, flags in CONDITIONS.items()},
    "normalised scores": partial(ppo, **NORMALISED),  # the running moments go on where they were
    "rloo": partial(ppo, termination_condition="randomized", **RLOO),
    "segment_mc": partial(ppo, **(RLOO | COMPLETIONS)),
    "segment_mc, refilled": partial(ppo, **(REFILL | COMPLETIONS | {"reward": partial(often_equal, score=lengths)})),
    "evpo": partial(ppo, advantage_estimator="evpo", normalize_scores=True),
    "critic warm-up": partial(ppo, critic_warmup_updates=8, setup=Setup(zero_stage=2)),
    "critic warm-up, fused": partial(
        ppo, critic_warmup_updates=4, setup=Setup(zero_stage=3), ppo_epochs=1, generation_batches=1
    ),
    "critic-updates": partial(ppo, critic_minibatches=2, critic_epochs=3, num_train_epochs=1),
    "value-bins": partial(
        ppo,
        **{"value_head": "hl_gauss", "value_range": [-2.0, 12.0], "critic_epochs": 2, "ppo_epochs": 1},
        **{"num_train_epochs": 1, "setup": Setup(zero_stage=2)},
    ),
    "segment rewards": partial(ppo, reward=by_segment, segment_rewards="each", ppo_epochs=1, generation_batches=1),
    "ahead": partial(ppo, rollouts=DrawsAhead(4), **AHEAD),
    **{f"ppo, {name}": partial(ppo, setup=setup) for name, setup in SETUPS.items()},
    # Layers, passes over logits and sampling compiled.
    "ppo, compiled": partial(
        ppo, setup=Setup(options={"compile": True}), rollouts=ContinuousEngine(4, decode_graphs=True)
    ),
    "refuel online": refuel_online,
    "refuel online, adapters": partial(refuel_online, lora_dim=2),
    "refuel-online-without-KL": partial(refuel_online, kl_coef=0.0, adaptive_kl_target=None),
}
# Of the points at which a run can be stopped, every nth, beginning with which: of runs that differ in what they keep.
# A slow test stops all runs at many more.
SOME = {
    **{"sft": (2, 0), "dpo": (5, 0), "fixed": (60, 30), "refuel online": (40, 11)},
    **{"randomized": (76, 22), "ahead": (60, 28), "refuel-online-without-KL": (43, 12)},
}
SLOW = ("dpo", "randomized", "ahead", "refuel-online-without-KL")
MICRO_BATCHES = 4 * 2 + 3 * 2  # of 4 updates, and batches of 3 evaluations
POINTS = {"sft": MICRO_BATCHES, "dpo": MICRO_BATCHES + 5 + 2 + 1}  # DPO's of the reference


@pytest.mark.parametrize("name", [pytest.param(x, marks=pytest.mark.slow) if x in SLOW else x for x in SOME])
def test_a_run_stops_anywhere(name, group, tmp_path):
    """In an evaluation, in sampling, in scoring, inside an accumulation window, inside a rollout, between epochs."""
    points = check_every_stop(RUNS[name], tmp_path, *SOME[name])
    assert points == POINTS.get(name, points)


def assert_same(found, expected):
    """Metrics and weights of two runs."""
    assert found[1] == expected[1]
    assert all(torch.equal(found[0][name], x) for name, x in expected[0].items())


class LosesItsServer(ContinuousEngine):
    """An engine whose server is gone after some sessions."""

    def __init__(self, sessions):
        super().__init__(4)
        self._sessions_left = sessions

    @contextmanager
    def session(self, actor, same_weights=False):
        if not self._sessions_left:
            raise ServerLost("the server has gone")
        self._sessions_left -= 1
        with super().session(actor) as sample:
            yield sample


@pytest.mark.parametrize("sessions", [2, 3])
def test_a_lost_server_ends_the_run_with_a_checkpoint(sessions, group, tmp_path):
    """From which the run goes on exactly, whether it was lost in a rollout or in an evaluation."""
    make = partial(ppo, num_train_epochs=1)
    whole = result_of(make(tmp_path / "whole"), tmp_path / "whole")
    place = tmp_path / "lost"
    torch.manual_seed(5)  # as `result_of`
    with pytest.raises(ServerLost):
        make(place, rollouts=LosesItsServer(sessions)).fit()
    assert list((place / "checkpoints").glob("step-*"))
    assert_same(result_of(make(place, resume_from_checkpoint="latest"), place), whole)


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_a_run_stops_at_many_points(name, group, tmp_path):
    """At every point without rollouts and with macro actions of a fixed length, at every third one otherwise."""
    every = 1 if name == "fixed" or name.split(",")[0] in STEPS else 3
    if name in ("ppo, ZeRO 3", "critic warm-up, fused"):  # engines of ZeRO 3 take seconds to make
        every = 12
    check_every_stop(RUNS[name], tmp_path, every)


ONE_EPOCH = {"num_train_epochs": 1}  # of two rollouts
SAMPLED_AGAIN = [
    (partial(ppo, reward=lengths, normalize_scores=True, enable_ema=False, **ONE_EPOCH), algorithm, "ppo_update"),
    (partial(refuel_online, reward=share_of_early, **ONE_EPOCH), refuel, "refuel_update"),
]


@pytest.mark.parametrize(("make", "module", "function"), SAMPLED_AGAIN, ids=["normalised scores", "refuel online"])
def test_a_rollout_of_other_processes_is_sampled_again(make, module, function, group, tmp_path, caplog):
    """Stopped after a rollout, before its first update: moments of scores, too, are those from before the rollout."""
    whole = result_of(make(tmp_path / "whole"), tmp_path / "whole")
    place = tmp_path / "stopped"
    torch.manual_seed(5)  # as `result_of`
    stop_in_call(make(place).fit, module, function, 2)
    (folder,) = (place / "checkpoints").iterdir()
    as_of_other_processes(folder, 2)
    assert_same(result_of(make(place, resume_from_checkpoint=True), place), whole)
    assert "the rollout that 2 processes had sampled is dropped and sampled again" in caplog.text


def test_a_stop_between_the_critics_updates_leaves_the_checkpoint_before_the_rollout(group, tmp_path):
    """It counts as many updates as one inside the rollout would, and any number of processes can continue it."""
    flags = {"ppo_epochs": 1, "generation_batches": 1, "critic_minibatches": 2, "eval_interval": 0}
    make = partial(ppo, reward=lengths, enable_ema=False, save_steps=1, **flags, **ONE_EPOCH)
    whole = result_of(make(tmp_path / "whole"), tmp_path / "whole")
    place = tmp_path / "stopped"
    torch.manual_seed(5)  # as `result_of`
    stop_in_call(make(place).fit, update, "_critic_step", 2 + 2)
    newest = place / "checkpoints" / "step-1"
    assert json.loads((newest / "state.json").read_text())["rollout"] == {}

    # A run that ends before its first save makes progress all the same.
    again = shutil.copytree(place, tmp_path / "again")
    stop_in_call(make(again, resume_from_checkpoint=True).fit, update, "_critic_step", 2)
    inside = again / newest.relative_to(place)
    assert json.loads((inside / "state.json").read_text())["rollout"]
    as_of_other_processes(inside, 2)
    with pytest.raises(UserError, match="between the critic's updates, by 2 processes, and here are 1: only 2 can"):
        make(again, resume_from_checkpoint=str(inside)).fit()

    as_of_other_processes(newest, 2)
    assert_same(result_of(make(place, resume_from_checkpoint=True), place), whole)


def test_a_run_from_another_folder_that_is_stopped_at_once_has_a_checkpoint(group, tmp_path):
    """Or it would begin again at update 0, as its own folder holds none."""
    make = partial(supervised, "sft", eval_interval=1)
    make(tmp_path / "first", save_steps=1, save_total_limit=0).fit()
    origin = tmp_path / "first" / "checkpoints" / "step-1"
    fork = make(tmp_path / "fork", resume_from_checkpoint=str(origin))
    stop_in_call(fork.fit, type(fork), "evaluate", 1)
    assert [folder.name for folder in (tmp_path / "fork" / "checkpoints").iterdir()] == ["step-1"]
    assert make(tmp_path / "fork", resume_from_checkpoint=True).checkpoints.load().update == 1


def test_a_finished_run_is_not_trained_again_from_where_it_was_stopped(group, tmp_path, caplog):
    """Without --save_steps its only checkpoint is that of the stop: the same command again is refused."""
    make = partial(supervised, "sft", eval_interval=2)
    stopped = make(tmp_path)
    stop_in_call(stopped.fit, type(stopped), "evaluate", 2)
    finished = make(tmp_path, resume_from_checkpoint=True)
    finished.run.announce(4, 8)
    finished.fit()
    finished.run.finish()
    assert "the best checkpoint" not in caplog.text, "the final models are later than the only one"
    (newest,) = (tmp_path / "checkpoints").iterdir()
    assert newest.name == "step-2"
    with pytest.raises(UserError, match="holds a finished run .* or an earlier checkpoint to train again from there"):
        make(tmp_path, resume_from_checkpoint=True).checkpoints.load()
    assert make(tmp_path, resume_from_checkpoint=str(newest)).checkpoints.load().update == 2


def test_a_rollout_that_other_processes_train_on_is_given_up(group, tmp_path, caplog):
    """The rest of its updates needs it: an earlier checkpoint is used, and it is said what is done again."""
    make = partial(ppo, reward=lengths, enable_ema=False, save_steps=4, eval_interval=0, **ONE_EPOCH)
    whole = result_of(make(tmp_path / "whole"), tmp_path / "whole")
    place = tmp_path / "stopped"
    torch.manual_seed(5)  # as `result_of`
    micro_batches = 2
    stop_in_call(make(place).fit, update, "_critic_step", (4 + 1) * micro_batches + 1)
    between, inside = (place / "checkpoints" / f"step-{number}" for number in (4, 5))
    as_of_other_processes(inside, 2)
    problem = "it was written inside a rollout, after 1 of its 4 updates, by 2 processes, and here are 1: only 2 can"
    with pytest.raises(UserError, match=f"{inside}: {problem} continue it. .*or latest for"):
        make(place, resume_from_checkpoint=str(inside)).fit()

    shutil.move(between, tmp_path / "aside")
    with pytest.raises(UserError, match=f"no checkpoint in .* can be used; {inside}: {problem}"):
        make(place, resume_from_checkpoint=True).fit()
    shutil.move(tmp_path / "aside", between)
    assert_same(result_of(make(place, resume_from_checkpoint=True), place), whole)
    assert f"{inside} is not used: {problem}" in caplog.text
    assert "1 updates are given up: from step-4 to step-5" in caplog.text


def test_a_lost_reference_is_computed_before_the_checkpoint_is_loaded(group, tmp_path, monkeypatch):
    """And one that is there is used again."""
    make = partial(supervised, "dpo", tmp_path)
    whole = result_of(make(save_steps=2), tmp_path)
    resume = {"resume_from_checkpoint": f"{tmp_path}/checkpoints/step-2"}
    reference = tmp_path / "reference"
    with monkeypatch.context() as patched:
        patched.setattr(pairs, "_compute", None)
        assert_same(result_of(make(**resume), tmp_path), whole)
    shutil.rmtree(reference)
    assert_same(result_of(make(**resume), tmp_path), whole)
    assert {file.name for file in reference.iterdir()} == {"train.safetensors", "eval-3.safetensors"}


def test_a_file_that_does_not_reach_the_disk_is_no_part_of_a_checkpoint(group, tmp_path, monkeypatch):
    """A disk may be full, or fail, only when the file is flushed."""
    flush = checkpoint.flush

    def fail_on_the_state(path):
        if path.name == checkpoint.STATE:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        flush(path)

    monkeypatch.setattr(checkpoint, "flush", fail_on_the_state)
    with pytest.raises(UserError, match="could not be written: its file state.json: Input/output error. There is no"):
        supervised("sft", tmp_path, save_steps=1).fit()
    assert not list((tmp_path / "checkpoints").glob("step-*"))


def test_a_save_that_was_cut_short_is_said(group, tmp_path, caplog):
    supervised("sft", tmp_path, save_steps=1, max_steps=1).fit()
    (tmp_path / checkpoint.WRITING / "step-2").mkdir(parents=True)
    supervised("sft", tmp_path, save_steps=1, max_steps=2, resume_from_checkpoint=True).fit()
    assert "the save of step-2 was cut short when its process was ended" in caplog.text
    assert (tmp_path / "checkpoints" / "step-2").exists()
