# SPDX-License-Identifier: Apache-2.0
"""A signal or --max_time ends drawing at the next token, and ranks that draw unequally long stop together."""

import signal
import time

import pytest

from dschat.base import signals
from dschat.rollouts.continuous import sample
from dschat.rollouts.generate import generate
from dschat.rollouts.scheduler import BatchScheduler
from dschat.run import stop
from dschat.run.stop import Stopped, raise_if_stopped_here, stopping_together
from factories import make_causal_lm, random_ids, sampling_of


def test_a_signal_ends_drawing_at_the_next_token(monkeypatch):
    monkeypatch.setattr(stop, "_received", 0)
    steps, real = [], BatchScheduler.step

    def step(pool):
        steps.append(pool)
        if len(steps) == 3:
            stop._record(signal.SIGTERM, None)
        real(pool)

    monkeypatch.setattr(BatchScheduler, "step", step)
    prompts = [random_ids(4, row) for row in range(6)]
    with pytest.raises(Stopped) as stopped:
        sample(make_causal_lm(), prompts, sampling_of(50), range(6), 3)
    assert len(steps) == 3 and stopped.value.status == 143
    with pytest.raises(Stopped):
        generate(make_causal_lm(), prompts, sampling_of(4), range(6), 3)


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
def test_a_second_ctrl_c_ends_at_once(first, monkeypatch):
    """Whatever signal came before: a run that hangs can be ended from its terminal."""
    monkeypatch.setattr(signals, "SAME_CTRL_C", 0.0)
    with stop.stop_signals():
        signal.raise_signal(first)
        if first != signal.SIGINT:
            signal.raise_signal(signal.SIGINT)
        assert stop.is_stopping_here()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        with pytest.raises(Stopped) as stopped:
            raise_if_stopped_here()
        assert stopped.value.status == 128 + first
    with stop.stop_signals():
        assert not stop.is_stopping_here()


def test_one_ctrl_c_that_arrives_twice_lets_the_run_save():
    """From the terminal, and from the launcher that passes it on."""
    with stop.stop_signals():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        assert stop.is_stopping_here()
    with stop.stop_signals():  # nothing of it stays
        assert not stop.is_stopping_here()


@pytest.mark.parametrize(("own", "everywhere"), [(15, 15), (0, 15), (0, 0)])
def test_every_rank_asks_once_and_all_stop(own, everywhere, monkeypatch):
    """Also the rank that no signal reached: it draws to the end, and stops with the others."""
    asked = []
    monkeypatch.setattr(stop, "_received", own)
    monkeypatch.setattr(stop, "largest_over_ranks", lambda number: asked.append(number) or everywhere)
    drawn = False
    try:
        with stopping_together():
            raise_if_stopped_here()
            drawn = True
    except Stopped as stopped:
        assert stopped.status == 143 and everywhere
    else:
        assert not everywhere
    assert asked == [own] and drawn == (own == 0)


@pytest.mark.parametrize("first", [None, signal.SIGINT])
def test_the_end_of_max_time_stops_like_sigterm(first):
    """A signal that has arrived before is the reason, nevertheless."""
    with stop.stopping_at(time.monotonic() + 1000), stop.stop_signals():
        assert not stop.is_stopping_here()
        stop.raise_if_stopped()
    with stop.stopping_at(time.monotonic()), stop.stop_signals():
        if first is not None:
            signal.raise_signal(first)
        assert stop.is_stopping_here()
        for ask in (stop.raise_if_stopped, raise_if_stopped_here):
            with pytest.raises(Stopped) as stopped:
                ask()
            expected = ("--max_time", 143) if first is None else ("SIGINT", 130)
            assert (str(stopped.value), stopped.value.status) == expected
    with stop.stop_signals():  # nothing of it stays
        assert not stop.is_stopping_here()
