# SPDX-License-Identifier: Apache-2.0
"""Alarms: warnings in the log if the metrics of rollouts show a symptom of symptoms.py."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace

from dschat.run.distributed import is_main
from dschat.run.metrics import after
from dschat.run.state import Json
from dschat.training.symptoms import Course, Readings, is_far, kl_limit, readings_of, symptoms

logger = logging.getLogger(__name__)

USUAL_INTERVAL = 50  # updates between two lines of a symptom without --eval_interval


class Alarms:
    """Reads the metrics of every iteration and logs the first symptom that fits, each at most once per interval."""

    def __init__(
        self,
        flags: Mapping[str, object],
        interval: int,
        rows: int,
        *,
        reads_scores: bool = True,
        scale_matters: bool = True,
    ) -> None:
        """Prepares the warnings of a run.

        Args:
            flags: every flag's value by its name.
            interval: --eval_interval: updates between two lines of the same symptom; 0 for USUAL_INTERVAL.
            rows: responses of a rollout on all ranks.
            reads_scores: whether scores are trained on.
            scale_matters: whether the scale of scores changes what is learnt.
        """
        self._interval = interval or USUAL_INTERVAL
        self._course = Course(Readings(), Readings(), Readings(), 0, rows, flags, reads_scores, scale_matters)
        self._logged: dict[str, int] = {}  # symptom → updates before it was last logged

    def check(self, metrics: Mapping[str, float], update: int, may_stop: bool = True) -> str | None:
        """Logs the first symptom that fits. Returns why the run must stop, or None.

        Args:
            metrics: metrics of an iteration, equal on every rank; without those of a rollout if it was skipped.
            update: number of updates so far.
            may_stop: False in the last iteration, after which the run ends anyway; then a symptom is always logged.
        """
        if "objective/scores" not in metrics:
            return None
        course = self._continue(metrics)
        symptom = next((symptom for symptom in symptoms() if symptom.fits(course)), None)
        if symptom is None:
            return None
        line = f"{after(update)}, {symptom.line(course)}"
        if may_stop and course.flags.get("kl_action") == "stop" and is_far(course):
            return (
                f"{line} The KL is above {kl_limit(course):g} nats per response (--kl_action stop)."
                " Models and a checkpoint are saved: give a larger --max_kl to continue."
            )
        last = self._logged.get(symptom.name)
        if last is None or update - last >= self._interval or not may_stop:
            self._logged[symptom.name] = update
            if is_main():
                logger.warning("%s", line)
        return None

    def state_dict(self) -> Json:
        return {
            "rollouts": self._course.rollouts,
            "first": self._course.first,
            "highest": self._course.highest,
            "last": self._course.now,
            "logged": self._logged,
        }

    def load_state_dict(self, state: Json) -> None:
        self._course = replace(
            self._course,
            now=Readings(state["last"]),
            first=Readings(state["first"]),
            highest=Readings(state["highest"]),
            rollouts=state["rollouts"],
        )
        self._logged = dict(state["logged"])

    def _continue(self, metrics: Mapping[str, float]) -> Course:
        """The course of the run with one more rollout. A rollout in which no response has a score is no first one."""
        now = readings_of(metrics, self._course.now)
        course = replace(self._course, now=now, first=self._course.first or now)
        if now["response/length"] > 0:
            highest = Readings(course.highest)
            for name, number in now.items():
                highest[name] = max(number, highest.get(name, number))
            self._course = course = replace(course, highest=highest, rollouts=course.rollouts + 1)
        return course
