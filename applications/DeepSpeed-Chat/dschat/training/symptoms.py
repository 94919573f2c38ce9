# SPDX-License-Identifier: Apache-2.0
"""Symptoms of training on one's own responses, with causes and remedies; `alarms.py` logs the first that fits.

symptoms.toml has a row of texts for each symptom, in the order in which they are tried; its condition is in
`CONDITIONS`. A condition reads a `Course`: what the metrics of the rollouts so far say (`readings_of`). A reading that
is absent is NaN, with which every comparison is false. `python -m dschat.training.symptoms` prints the table of
docs/troubleshooting.md.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

# Readings that `readings_of` derives from metrics.
LEARNING_RATE = "learning rate"
AGE = "rollouts since the learning rate last rose"
START_KL = "KL when the learning rate last rose"
EARLY_KL = "rise of the KL since then, in early rollouts"
EARLY_RISE = "rise of the KL in early rollouts"
ENTROPY = "entropy per token"
SPREAD = "standard deviation of scores in training"
VALUE_ERROR = "error of values over the standard deviation of scores"
EXPLAINED = "absolute explained variance"


@dataclass(frozen=True)
class Limits:
    """Where a reading becomes a symptom.

    Attributes:
        kl: nats per response. The best of N samples has a KL of log N − (N − 1) / N: 20 nats are the best of a
            billion, and no reward model was trained on the like.
        kl_per_token: nats per token, for responses under 20 tokens: a token is e times as likely as under the
            reference.
        kl_of_few_tokens: nats per response, for responses under 5 tokens. A policy that always gives a response to
            which the reference gives 1 % has a KL of 4.6.
        kl_per_token_of_long: nats per token, for responses over 200 tokens.
        jump: rise of the KL from one rollout to the next, as a share of its limit, or of 20 nats if that is more. In
            runs that learn well it is at most 0.1.
        early: rollouts after the warm-up of the learning rate; a KL that rises by its limit in them does not creep.
            The start of a critic is not judged before them either.
        unscored: share of responses without a score.
        rows_for_spread: responses in a rollout; the standard deviation of fewer scores means little.
        rows_for_correlation: responses in a rollout; a large correlation of fewer may be chance.
        correlation: of scores and lengths, absolute.
        penalised_kl: nats whose penalty is a standard deviation of the scores. For Gaussian scores with standard
            deviation s and a KL coefficient β, the best policy has a KL of s² / (2 β²): half a nat.
        chance: probability that no response of a rollout ends although as many of them would end as ever before.
        repetition: share of 4-grams that the response has had before.
        shrunk: length of responses, as a share of the first rollout's.
        few_tokens: responses of this length are short in any task, if they had twice as many tokens at first.
        entropy: entropy per token, as a share of the first rollout's.
        explained: explained variance; at −1, values double the variance of the advantages.
        learnt: explained variance, negative or positive, of values that differ between tokens.
        slow: rollouts in which a critic learns the mean score at least; one with a head of zeros may take ten.
        missed: error of values, in standard deviations of the scores.
        reach: rollouts that a critic needs to move its values by a standard deviation of the scores, because one
            rollout moves them by at most --cliprange_value.
    """

    kl: float = 20.0
    kl_per_token: float = 1.0
    kl_of_few_tokens: float = 5.0
    kl_per_token_of_long: float = 0.1
    jump: float = 0.25
    early: int = 10
    unscored: float = 0.5
    rows_for_spread: int = 8
    rows_for_correlation: int = 32
    correlation: float = 0.9
    penalised_kl: float = 1.0
    chance: float = 0.01
    repetition: float = 0.5
    shrunk: float = 0.25
    few_tokens: float = 8.0
    entropy: float = 0.05
    explained: float = -1.0
    learnt: float = 0.01
    slow: int = 20
    missed: float = 2.0
    reach: float = 100.0

    def usual_kl(self, length: float) -> float:
        """The limit for the KL, in nats per response, of responses with a mean length in tokens."""
        of_short = max(self.kl_of_few_tokens, self.kl_per_token * length)
        return max(min(self.kl, of_short), self.kl_per_token_of_long * length)


LIMITS = Limits()


class Readings(dict[str, float]):
    """Metrics of a rollout and what is derived from them, by name; NaN, which fits no condition, if absent."""

    def __missing__(self, name: str) -> float:
        return math.nan


@dataclass(frozen=True)
class Course:
    """The course of a run until now.

    Attributes:
        now: readings of the last rollout.
        first: readings of the first rollout, whose policy is usually the reference.
        highest: largest value of each reading so far.
        rollouts: rollouts so far, the last included.
        rows: responses of a rollout on all ranks.
        flags: every flag's value by its name.
        reads_scores: whether scores are trained on.
        scale_matters: whether the scale of scores changes what is learnt.
    """

    now: Readings
    first: Readings
    highest: Readings
    rollouts: int
    rows: int
    flags: Mapping[str, object]
    reads_scores: bool = True
    scale_matters: bool = True

    def flag(self, name: str) -> float:
        """The value of a flag that is a number; NaN, which fits no condition, if it is not given or does not exist."""
        value = self.flags.get(name)
        return value if isinstance(value, int | float) else math.nan


@dataclass(frozen=True)
class Remedy:
    """What to try.

    Attributes:
        text: an instruction; `{name}` stands for the value of a flag.
        given: flags that must have a value other than 0.
        absent: flags that must exist without a value.
    """

    text: str
    given: list[str]
    absent: list[str]

    def fits(self, flags: Mapping[str, object]) -> bool:
        """Whether a run with these flags can follow the remedy."""
        has_given = all(flags.get(name) for name in self.given)
        return has_given and all(name in flags and not flags[name] for name in self.absent)


@dataclass(frozen=True)
class Symptom:
    """A row of symptoms.toml; `fits` is its condition."""

    name: str
    text: str
    metrics: list[str]
    when: str
    cause: str
    remedies: list[Remedy]

    def fits(self, course: Course) -> bool:
        """Whether the course of a run has the symptom."""
        return CONDITIONS[self.name](course)

    def line(self, course: Course) -> str:
        """What the log says: the symptom in numbers, its cause, and the remedies that the run can follow."""
        values = []
        for name in self.metrics:
            if name not in course.now:
                continue
            value = f"{name} {round(course.now[name], 4):.3g}"
            if name in course.first:
                value += f", at first {round(course.first[name], 4):.3g}"
            values.append(value)
        remedies = [remedy.text for remedy in self.remedies if remedy.fits(course.flags)]
        advice = f" Try {'; or '.join(remedies)}." if remedies else ""
        text = f"{self.text} ({'; '.join(values)}): {self.cause}.{advice}"
        return text.format_map(course.flags).replace("`", "")


def readings_of(metrics: Mapping[str, float], previous: Readings) -> Readings:
    """What symptoms read of a rollout; numbers that are not finite or not known are left out.

    Args:
        metrics: metrics of the rollout.
        previous: readings of the rollout before it; empty for the first.
    """
    rollout = Readings(metrics)
    kl = rollout["objective/kl"]
    length = rollout["response/length"]
    rate = rollout["lr"] if "lr" in rollout else rollout["lr/actor"]  # none while the critic is trained alone
    has_settled = rate <= previous[LEARNING_RATE]
    age = previous[AGE] + 1 if has_settled else 0.0
    start_kl = previous[START_KL] if has_settled else kl
    # Where scores are normalised, their spread in training is not the source's.
    spread = rollout["objective/scores_std"] / (rollout.get("objective/scores_running_std") or 1.0)
    value_error = math.sqrt(2 * rollout.get("loss/value", 0.0))
    derived = {
        LEARNING_RATE: rate,
        AGE: age,
        START_KL: start_kl,
        ENTROPY: rollout["objective/entropy"] / length if length else math.nan,
        SPREAD: spread,
        VALUE_ERROR: value_error / spread if spread else math.nan,
        EXPLAINED: abs(rollout["val/explained_variance"]),
    }
    if age < LIMITS.early:
        derived[EARLY_KL] = kl - start_kl
        derived[EARLY_RISE] = kl - previous["objective/kl"]
    readings = Readings()
    for name, number in {**metrics, **derived}.items():
        if math.isfinite(number) and not name.startswith("time/"):
            readings[name] = number
    return readings


def usual_limit(course: Course) -> float:
    """The limit for the KL in nats per response, for responses as long as now or as those of the first rollout."""
    # Responses that have become short keep their limit: always ending at once has a KL of −log p(end).
    return LIMITS.usual_kl(max(course.first["response/length"], course.now["response/length"]))


def kl_limit(course: Course) -> float:
    """--max_kl or, without the flag, the usual limit."""
    max_kl = course.flag("max_kl")
    return usual_limit(course) if math.isnan(max_kl) else max_kl


def is_far(course: Course) -> bool:
    """Whether the KL of the last rollout is above its limit."""
    return course.now["objective/kl"] > kl_limit(course)


def _prefers_length(course: Course) -> bool:
    """Whether scores followed the length of responses before training already."""
    if course.rows < LIMITS.rows_for_correlation:
        return False
    return abs(course.first["response/score_length_correlation"]) > LIMITS.correlation


def _jumps(course: Course) -> bool:
    """Whether the KL jumped or reached its limit early, and has not come back since."""
    limit = max(kl_limit(course), usual_limit(course))
    large_rise = LIMITS.jump * max(limit, LIMITS.kl)
    first_kl = course.first["objective/kl"]
    has_jumped = course.highest[EARLY_RISE] > large_rise or course.highest[EARLY_KL] > limit
    return has_jumped and course.now["objective/kl"] - first_kl > large_rise and not _prefers_length(course)


def _follows_length(course: Course) -> bool:
    """Whether scores correlate with length, or did at first, until all responses were cut at the same length."""
    if _prefers_length(course) and course.now["response/eos_rate"] == 0:
        return True
    correlation = abs(course.now["response/score_length_correlation"])
    return course.rows >= LIMITS.rows_for_correlation and correlation > LIMITS.correlation


def _is_constant(course: Course) -> bool:
    """Whether no rollout had scores that differ; in REFUEL, scores of a pair."""
    if not course.reads_scores or course.rows < LIMITS.rows_for_spread:
        return False
    return course.highest["objective/scores_std"] == 0 or course.highest["objective/reward_gap"] == 0


def _is_outweighed(course: Course) -> bool:
    """Whether the KL penalty outweighs the differences between scores, so that the policy stays at the reference."""
    if not course.scale_matters or course.rows < LIMITS.rows_for_spread:
        return False
    return course.highest[SPREAD] < course.now["objective/kl_coef"] * LIMITS.penalised_kl


def _ends_no_more(course: Course) -> bool:
    """Whether no response ends by itself although some did, more than would be missing by chance."""
    largest_rate = course.highest["response/eos_rate"]
    return course.now["response/eos_rate"] == 0 and (1 - largest_rate) ** course.rows < LIMITS.chance


def _is_short(course: Course) -> bool:
    """Whether responses have become short, compared with the first rollout's and in tokens."""
    length = course.now["response/length"]
    first = course.first["response/length"]
    return length <= LIMITS.shrunk * first or (length <= LIMITS.few_tokens and length <= first / 2)


def _clips_values(course: Course) -> bool:
    """Whether a critic's loss is half a squared error of clipped values, and no cross-entropy of bins."""
    return EXPLAINED in course.now and course.flags.get("value_head", "linear") == "linear"


def _are_too_wide(course: Course) -> bool:
    """Whether a critic needs too many rollouts to move its values by a standard deviation of the scores."""
    return _clips_values(course) and course.now[SPREAD] > LIMITS.reach * course.flag("cliprange_value")


def _is_slow(course: Course) -> bool:
    """Whether a critic's values stay far from the returns; the loss of one whose groups are weighted does not say."""
    is_read = _clips_values(course) and course.flags.get("critic_group_weight") is None
    return is_read and course.rollouts >= LIMITS.slow and course.now[VALUE_ERROR] > LIMITS.missed


def _never_learnt(course: Course) -> bool:
    """Whether a critic's values widen the advantages after the early rollouts, and never narrowed them."""
    is_worse = course.rollouts >= LIMITS.early and course.now["val/explained_variance"] < LIMITS.explained
    return is_worse and course.highest["val/explained_variance"] <= LIMITS.learnt


def _has_unlearnt(course: Course) -> bool:
    """Whether a critic's values widen the advantages, and narrowed them before."""
    is_worse = course.now["val/explained_variance"] < LIMITS.explained
    return is_worse and course.highest["val/explained_variance"] > LIMITS.learnt


def _repeats(readings: Readings) -> bool:
    """Whether responses repeat themselves in a rollout."""
    return readings["response/repetition"] > LIMITS.repetition


# Symptom → its condition.
CONDITIONS: dict[str, Callable[[Course], bool]] = {
    "unscored": lambda course: course.now["objective/unscored"] > LIMITS.unscored,
    "constant": _is_constant,
    "wide scores": _are_too_wide,
    "jump": _jumps,
    "max_kl": lambda course: course.now["objective/kl"] > course.flag("max_kl"),
    "length": _follows_length,
    "scale": _is_outweighed,
    "counted": lambda course: course.now["policy/counted"] == 0 and course.now["response/eos_rate"] != 0,
    "episodes": lambda course: "episode/turns" in course.now and _ends_no_more(course),
    "repetition": lambda course: _repeats(course.now) and course.first["response/repetition"] <= LIMITS.repetition,
    "repeating model": lambda course: _repeats(course.now) and _repeats(course.first),
    "end": _ends_no_more,
    "endless": lambda course: course.rollouts >= LIMITS.early and course.highest["response/eos_rate"] == 0,
    "short": _is_short,
    "entropy": lambda course: course.now[ENTROPY] < LIMITS.entropy * course.first[ENTROPY],
    "kl": is_far,
    "critic start": _never_learnt,
    "critic": _has_unlearnt,
    "dead critic": lambda course: course.rollouts >= LIMITS.slow and course.highest[EXPLAINED] <= LIMITS.learnt,
    "slow critic": _is_slow,
}


@cache
def symptoms() -> tuple[Symptom, ...]:
    """The rows of symptoms.toml in order."""
    tables = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    remedies = {}
    for name, row in tables["remedy"].items():
        shown_flags = re.findall(r"{(\w+)", row["text"])
        remedies[name] = Remedy(row["text"], [*shown_flags, *row.get("given", ())], row.get("absent", []))
    rows = []
    for row in tables["symptom"]:
        row["remedies"] = [remedies[name] for name in row["remedies"]]
        rows.append(Symptom(**row))
    return tuple(rows)


def page() -> Iterator[str]:
    """The lines of the table in docs/troubleshooting.md."""
    yield "| the log says | metrics | when | likely cause | try |"
    yield "|---|---|---|---|---|"
    for symptom in symptoms():
        metrics = ", ".join(f"`{name}`" for name in symptom.metrics)
        when = symptom.when.format_map(asdict(LIMITS))
        remedies = "; ".join(remedy.text for remedy in symptom.remedies)
        row = f'| "{symptom.text}" | {metrics} | {when} | {symptom.cause} | {remedies} |'
        yield re.sub(r" \(?\{.*?\}\)?", "", row)  # without values of a run's flags, such as " ({kl_coef:g})"


if __name__ == "__main__":
    print("\n".join(page()))
