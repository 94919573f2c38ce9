# SPDX-License-Identifier: Apache-2.0
"""Symptoms of training on one's own responses, with causes and remedies; `alarms.py` logs the first that fits.

`python -m dschat.training.symptoms` prints the table of docs/troubleshooting.md.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

# Readings that are derived from metrics, see `readings_of`.
AGE = "rollouts since the learning rate last rose"
EARLY_KL = "KL in early rollouts"
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
        early: rollouts after the warm-up of the learning rate; a KL above its limit within them has not crept there.
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
        given: flags that the remedy needs with a value other than 0, because it changes or concerns them.
        absent: flags that the remedy needs without a value, because it adds them.
    """

    text: str
    given: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()

    def fits(self, flags: Mapping[str, object]) -> bool:
        """Whether a run with these flags can follow the remedy."""
        has_given = all(flags.get(name) for name in self.given)
        return has_given and all(name in flags and not flags[name] for name in self.absent)


@dataclass(frozen=True)
class Symptom:
    """A row of the table.

    Attributes:
        name: its name in checkpoints.
        text: what the log says; `{name}` stands for the value of a flag.
        metrics: metrics that show it, whose values the log gives.
        when: the condition in words.
        cause: the likely cause.
        remedies: what to try, the best first.
        fits: the condition.
    """

    name: str
    text: str
    metrics: tuple[str, ...]
    when: str
    cause: str
    remedies: tuple[Remedy, ...]
    fits: Callable[[Course, Limits], bool]

    def line(self, course: Course) -> str:
        """What the log says: the symptom in numbers, its cause, and the remedies that the run can follow."""
        values = []
        for name in self.metrics:
            if name in course.now:
                values.append(f"{name} {round(course.now[name], 4):.3g}, at first {round(course.first[name], 4):.3g}")
        remedies = [remedy.text for remedy in self.remedies if remedy.fits(course.flags)]
        text = f"{self.text} ({'; '.join(values)}): {self.cause}. Try {'; or '.join(remedies)}."
        return text.format_map(course.flags).replace("`", "")


def readings_of(
    metrics: Mapping[str, float],
    previous: Readings,
    limits: Limits,
) -> Readings:
    """What symptoms read of a rollout; numbers that are not finite or not known are left out.

    Args:
        metrics: metrics of the rollout.
        previous: readings of the rollout before it; empty for the first.
        limits: the limits of the symptoms.
    """
    known = Readings(metrics)
    length = known["response/length"]
    rate = known["lr"] if "lr" in known else known["lr/actor"]  # none while the critic is trained alone
    has_settled = rate <= previous["learning rate"]
    age = previous[AGE] + 1 if has_settled else 0.0
    # Where scores are normalised, their spread in training is not the source's.
    spread = known["objective/scores_std"] / (metrics.get("objective/scores_running_std") or 1.0)
    value_error = math.sqrt(2 * metrics.get("loss/value", 0.0))
    derived = {
        "learning rate": rate,
        AGE: age,
        ENTROPY: known["objective/entropy"] / length if length else math.nan,
        SPREAD: spread,
        VALUE_ERROR: value_error / spread if spread else math.nan,
        EXPLAINED: abs(known["val/explained_variance"]),
    }
    if age < limits.early:
        derived[EARLY_KL] = known["objective/kl"]
        derived[EARLY_RISE] = known["objective/kl"] - previous["objective/kl"]
    readings = Readings()
    for name in READ_METRICS:
        if math.isfinite(known[name]):
            readings[name] = known[name]
    for name, number in derived.items():
        if math.isfinite(number):
            readings[name] = number
    return readings


def usual_limit(course: Course, limits: Limits) -> float:
    """The limit for the KL in nats per response, for responses as long as now or as those of the first rollout."""
    # Responses that have become short keep their limit: always ending at once has a KL of −log p(end).
    return limits.usual_kl(max(course.first["response/length"], course.now["response/length"]))


def kl_limit(course: Course, limits: Limits) -> float:
    """--max_kl or, without the flag, the usual limit."""
    max_kl = course.flag("max_kl")
    return usual_limit(course, limits) if math.isnan(max_kl) else max_kl


def is_far(course: Course, limits: Limits) -> bool:
    """Whether the KL of the last rollout is above its limit."""
    return course.now["objective/kl"] > kl_limit(course, limits)


def _prefers_length(course: Course, limits: Limits) -> bool:
    """Whether scores followed the length of responses before training already."""
    if course.rows < limits.rows_for_correlation:
        return False
    return abs(course.first["response/score_length_correlation"]) > limits.correlation


def _jumps(course: Course, limits: Limits) -> bool:
    """Whether the KL jumped or reached its limit early, and has not come back since."""
    limit = max(kl_limit(course, limits), usual_limit(course, limits))
    large_rise = limits.jump * max(limit, limits.kl)
    first_kl = course.first["objective/kl"]
    has_jumped = course.highest[EARLY_RISE] > large_rise or course.highest[EARLY_KL] - first_kl > limit
    return has_jumped and course.now["objective/kl"] - first_kl > large_rise and not _prefers_length(course, limits)


def _follows_length(course: Course, limits: Limits) -> bool:
    """Whether scores correlate with length, or did at first, until all responses were cut at the same length."""
    if _prefers_length(course, limits) and course.now["response/eos_rate"] == 0:
        return True
    correlation = abs(course.now["response/score_length_correlation"])
    return course.rows >= limits.rows_for_correlation and correlation > limits.correlation


def _is_constant(course: Course, limits: Limits) -> bool:
    """Whether no rollout had scores that differ; in REFUEL, scores of a pair."""
    if not course.reads_scores or course.rows < limits.rows_for_spread:
        return False
    return course.highest["objective/scores_std"] == 0 or course.highest["objective/reward_gap"] == 0


def _is_outweighed(course: Course, limits: Limits) -> bool:
    """Whether the KL penalty outweighs the differences between scores, so that the policy stays at the reference."""
    if not course.scale_matters or course.rows < limits.rows_for_spread:
        return False
    return course.highest[SPREAD] < course.now["objective/kl_coef"] * limits.penalised_kl


def _ends_no_more(course: Course, limits: Limits) -> bool:
    """Whether no response ends by itself although some did, more than would be missing by chance."""
    largest_rate = course.highest["response/eos_rate"]
    return course.now["response/eos_rate"] == 0 and (1 - largest_rate) ** course.rows < limits.chance


def _is_short(course: Course, limits: Limits) -> bool:
    """Whether responses have become short, compared with the first rollout's and in tokens."""
    length = course.now["response/length"]
    first = course.first["response/length"]
    return length <= limits.shrunk * first or (length <= limits.few_tokens and length <= first / 2)


ACTOR_RATE = (
    Remedy(
        "a lower `--actor_learning_rate` ({actor_learning_rate:g}), such as a fifth of it", ("actor_learning_rate",)
    ),
    Remedy("a lower `--learning_rate` ({learning_rate:g}), such as a fifth of it", ("learning_rate",)),
)
STRONGER_PENALTY = (
    Remedy("a smaller `--adaptive_kl_target` ({adaptive_kl_target:g})", ("kl_coef", "adaptive_kl_target")),
    Remedy("a larger `--kl_ctl` ({kl_coef:g})", ("kl_coef",), ("adaptive_kl_target",)),
    Remedy("`--adaptive_kl_target 6`", ("kl_coef",), ("adaptive_kl_target",)),
    Remedy("`--kl_ctl 0.05`", absent=("kl_coef",)),
)
KL = ("objective/kl", "objective/kl_per_token")
FAR = "the KL penalty does not keep the policy near the reference, and the reward may be gamed: read `samples/`"
FASTER_CRITIC = Remedy("a higher `--critic_learning_rate` ({critic_learning_rate:g})", ("critic_learning_rate",))
NORMALIZE = Remedy("`--normalize_scores`", absent=("normalize_scores",))
EARLIER_MODEL = Remedy("fewer updates: `--save_models 50` keeps earlier models", absent=("save_models",))

# The first row that fits is logged, so that a cause comes before its effects.
SYMPTOMS = (
    Symptom(
        "unscored",
        "most responses have no score",
        ("objective/unscored",),
        f"the share is above {LIMITS.unscored:g}",
        "the source of scores fails, or gives no number",
        (Remedy("what the warnings of that source say"), Remedy("`--on_reward_error stop`, which ends a run there")),
        lambda course, limits: course.now["objective/unscored"] > limits.unscored,
    ),
    Symptom(
        "constant",
        "all scores have been equal so far",
        ("objective/scores_std", "objective/reward_gap"),
        f"every rollout had equal scores, each of at least {LIMITS.rows_for_spread} responses",
        "the reward does not tell responses apart, or none of them is good enough for another score",
        (
            Remedy("a reward whose scores differ between the responses in `samples/`"),
            Remedy("easier prompts"),
            Remedy("a larger `--samples_per_prompt` ({samples_per_prompt})", ("samples_per_prompt",)),
        ),
        _is_constant,
    ),
    Symptom(
        "wide scores",
        "the scores are on a larger scale than the critic can follow",
        ("objective/scores_std", "loss/value"),
        f"with a critic: their standard deviation is above {LIMITS.reach:g} times `--cliprange_value`",
        "a rollout moves values by at most `--cliprange_value` ({cliprange_value:g})",
        (
            NORMALIZE,
            Remedy("a larger `--cliprange_value`", ("cliprange_value",)),
            Remedy("smaller `--reward_weights`", ("reward_weights",)),
        ),
        lambda course, limits: (
            "val/explained_variance" in course.now
            and course.now[SPREAD] > limits.reach * course.flag("cliprange_value")
        ),
    ),
    Symptom(
        "jump",
        "the KL to the reference has jumped",
        KL,
        f"within {LIMITS.early} rollouts (after the warm-up) it rose from one to the next by"
        f" {LIMITS.jump * LIMITS.kl:g} nats per response ({LIMITS.jump * LIMITS.kl_per_token_of_long:g} per token of"
        ' responses over 200), or reached the limit of the row "is large"; and it is still that large',
        "the learning rate is too high",
        ACTOR_RATE,
        _jumps,
    ),
    Symptom(
        "max_kl",
        "the KL to the reference is above `--max_kl` {max_kl:g}",
        KL,
        "`--max_kl` is given, and the KL is above it",
        FAR,
        (*STRONGER_PENALTY, *ACTOR_RATE, EARLIER_MODEL),
        lambda course, limits: course.now["objective/kl"] > course.flag("max_kl"),
    ),
    Symptom(
        "length",
        "scores follow the length of responses",
        ("response/score_length_correlation", "response/length", "response/eos_rate"),
        f"the absolute correlation is above {LIMITS.correlation:g} in a rollout of at least"
        f" {LIMITS.rows_for_correlation} responses; or it was at first, and now all responses are cut",
        "the policy may learn length alone",
        (Remedy("a reward that does not depend on length"),),
        _follows_length,
    ),
    Symptom(
        "scale",
        "the KL penalty outweighs the scores",
        ("objective/scores_std", "objective/kl_coef"),
        f"the largest standard deviation of scores so far is below the penalty of {LIMITS.penalised_kl:g} nat; not"
        " where advantages are divided by a standard deviation (`grpo`, `tempo`)",
        "the policy gains more by staying at the reference than by better scores",
        (
            NORMALIZE,
            Remedy("a larger `--adaptive_kl_target` ({adaptive_kl_target:g})", ("adaptive_kl_target",)),
            Remedy("a smaller `--kl_ctl` ({kl_coef:g})", ("kl_coef",), ("adaptive_kl_target",)),
            Remedy("larger `--reward_weights`", ("reward_weights",)),
            Remedy("a reward model with a larger margin (step 2)", ("reward_model_name_or_path",)),
        ),
        _is_outweighed,
    ),
    Symptom(
        "counted",
        "no token counts in the policy's loss",
        ("policy/counted",),
        "the share of counted tokens is 0",
        "all scores of each prompt are equal, or all tokens were too likely when they were sampled",
        (
            Remedy("a reward whose scores differ within a prompt", ("drop_equal_groups",)),
            Remedy("`--refill_rounds 2`", ("drop_equal_groups",), ("refill_rounds",)),
            Remedy("a larger `--max_token_probability` ({max_token_probability:g})", ("max_token_probability",)),
        ),
        lambda course, limits: course.now["policy/counted"] == 0,
    ),
    Symptom(
        "episodes",
        "no episode is finished any more",
        ("response/eos_rate", "episode/turns", "response/length"),
        "with `--environment`: as for responses, some rows below",
        "limits of turns or tokens cut all episodes",
        (
            Remedy("a larger `--max_turns` ({max_turns})", ("environment", "max_turns")),
            Remedy("a larger `--max_answer_seq_len` ({max_answer_seq_len})", ("max_answer_seq_len",)),
            Remedy("a larger `--max_turn_seq_len` ({max_turn_seq_len})", ("max_turn_seq_len",)),
        ),
        lambda course, limits: "episode/turns" in course.now and _ends_no_more(course, limits),
    ),
    Symptom(
        "repetition",
        "responses repeat themselves",
        ("response/repetition",),
        f"more than {LIMITS.repetition:g} of their 4-grams are repeated, and were not at first",
        "the reward does not punish repetition",
        (
            Remedy("a second source of scores that does"),
            *STRONGER_PENALTY,
        ),
        lambda course, limits: (
            course.now["response/repetition"] > limits.repetition >= course.first["response/repetition"]
        ),
    ),
    Symptom(
        "repeating model",
        "responses have repeated themselves from the first rollout on",
        ("response/repetition",),
        f"more than {LIMITS.repetition:g} of their 4-grams are repeated, in the first rollout as well",
        "the model of step 1 repeats itself, or sampling is too greedy",
        (
            Remedy("a longer step 1, or better data for it"),
            Remedy("a higher `--temperature` ({temperature:g})", ("temperature",)),
        ),
        lambda course, limits: (
            min(course.now["response/repetition"], course.first["response/repetition"]) > limits.repetition
        ),
    ),
    Symptom(
        "end",
        "no response ends by itself any more",
        ("response/eos_rate", "response/length"),
        f"none ends, which has a probability below {LIMITS.chance:g} at the largest rate so far",
        "the scores of unfinished responses are as high as others",
        (
            Remedy("a `--missing_eos_penalty` larger than the spread of the scores", absent=("missing_eos_penalty",)),
            Remedy("a larger `--missing_eos_penalty` ({missing_eos_penalty:g})", ("missing_eos_penalty",)),
            Remedy("a larger `--max_answer_seq_len` ({max_answer_seq_len})", ("max_answer_seq_len",)),
        ),
        _ends_no_more,
    ),
    Symptom(
        "endless",
        "no response has ended by itself so far",
        ("response/eos_rate", "response/length"),
        f"none has ended in {LIMITS.early} rollouts",
        "all are cut, and the scores are those of unfinished texts",
        (
            Remedy("a larger `--max_answer_seq_len` ({max_answer_seq_len})", ("max_answer_seq_len",)),
            Remedy("the token that ends a turn of the chat template as `--end_of_conversation_token`"),
            Remedy("a longer step 1, which learns to end"),
        ),
        lambda course, limits: course.rollouts >= limits.early and course.highest["response/eos_rate"] == 0,
    ),
    Symptom(
        "short",
        "responses have become short",
        ("response/length",),
        f"the mean length is at most {LIMITS.shrunk:g} of the first rollout's, or at most {LIMITS.few_tokens:g} tokens"
        " and half of it",
        "the policy learns to stop at once",
        (
            Remedy(
                "a larger `--max_answer_seq_len` ({max_answer_seq_len}), so that fewer responses are cut",
                ("max_answer_seq_len",),
            ),
            Remedy("a smaller `--missing_eos_penalty` ({missing_eos_penalty:g})", ("missing_eos_penalty",)),
            Remedy("a reward that does not prefer short responses", absent=("missing_eos_penalty",)),
        ),
        _is_short,
    ),
    Symptom(
        "entropy",
        "the policy has hardly any entropy left",
        ("objective/entropy", "policy/entropy"),
        f"its entropy per token is below {LIMITS.entropy:g} of the first rollout's",
        "all responses to a prompt become the same, and nothing new is tried",
        (
            *STRONGER_PENALTY,
            *ACTOR_RATE,
            Remedy("`--cliprange_high 0.28`", absent=("cliprange_high",)),
        ),
        lambda course, limits: course.now[ENTROPY] < limits.entropy * course.first[ENTROPY],
    ),
    Symptom(
        "kl",
        "the KL to the reference is large",
        KL,
        f"it is above {LIMITS.kl:g} nats per response, or {LIMITS.kl_per_token:g} per token of responses under 20"
        f" tokens (but at least {LIMITS.kl_of_few_tokens:g}), or {LIMITS.kl_per_token_of_long:g} per token of those"
        " over 200; responses that have become short count as long as those of the first rollout",
        FAR,
        (*STRONGER_PENALTY, *ACTOR_RATE, EARLIER_MODEL),
        is_far,
    ),
    Symptom(
        "critic start",
        "the critic's values are worse than a constant, and always were",
        ("val/explained_variance",),
        f"the explained variance is below {LIMITS.explained:g}, and was never above {LIMITS.learnt:g}",
        "the model that the critic starts from gives numbers of another scale than the returns, or numbers that mean"
        " nothing inside a response",
        (
            Remedy("`--critic_warmup_updates 20`", absent=("critic_warmup_updates",)),
            Remedy("`--reward_weights` that give that model the weight 1", ("reward_weights",)),
            Remedy("no `--normalize_scores`", ("normalize_scores",)),
            Remedy("the actor's model as `--critic_model_name_or_path`", ("critic_model_name_or_path",)),
            Remedy("a reward model trained with `--reward_loss per_sample`", ("reward_model_name_or_path",)),
        ),
        lambda course, limits: (
            course.now["val/explained_variance"] < limits.explained
            and course.highest["val/explained_variance"] <= limits.learnt
        ),
    ),
    Symptom(
        "critic",
        "the critic's values have become worse than a constant",
        ("val/explained_variance", "loss/value"),
        f"the explained variance is below {LIMITS.explained:g}",
        "the critic's learning rate is too high",
        (
            Remedy(
                "a lower `--critic_learning_rate` ({critic_learning_rate:g}), such as a fifth of it",
                ("critic_learning_rate",),
            ),
        ),
        lambda course, limits: course.now["val/explained_variance"] < limits.explained,
    ),
    Symptom(
        "dead critic",
        "the critic gives every token the same value",
        ("val/explained_variance", "loss/value"),
        f"the explained variance was never outside ±{LIMITS.learnt:g} in {LIMITS.slow} rollouts",
        "it learns nothing, or far too slowly",
        (
            Remedy("a `--critic_learning_rate` above 0", absent=("critic_learning_rate",)),
            FASTER_CRITIC,
            Remedy("a critic that starts from the reward model", ("reward_model_name_or_path",)),
        ),
        lambda course, limits: course.rollouts >= limits.slow and course.highest[EXPLAINED] <= limits.learnt,
    ),
    Symptom(
        "slow critic",
        "the critic's values are still far from the returns",
        ("loss/value", "objective/scores_std"),
        f"from {LIMITS.slow} rollouts on √(2 × `loss/value`) is above {LIMITS.missed:g} standard deviations of scores",
        "the critic learns too slowly for the scale of the scores",
        (FASTER_CRITIC, NORMALIZE, Remedy("`--critic_warmup_updates 20`", absent=("critic_warmup_updates",))),
        lambda course, limits: course.rollouts >= limits.slow and course.now[VALUE_ERROR] > limits.missed,
    ),
)
# The metrics that are read.
READ_METRICS = frozenset(name for symptom in SYMPTOMS for name in symptom.metrics)


def page() -> Iterator[str]:
    """The lines of the table in docs/troubleshooting.md."""
    yield "| the log says | metrics | when | likely cause | try |"
    yield "|---|---|---|---|---|"
    for symptom in SYMPTOMS:
        metrics = ", ".join(f"`{name}`" for name in symptom.metrics)
        remedies = "; ".join(dict.fromkeys(remedy.text for remedy in symptom.remedies))
        cells = (f'"{symptom.text}"', metrics, symptom.when, symptom.cause, remedies)
        row = f"| {' | '.join(cells)} |"
        yield re.sub(r" \(?\{.*?\}\)?", "", row)  # without the values of a run


if __name__ == "__main__":
    print("\n".join(page()))
