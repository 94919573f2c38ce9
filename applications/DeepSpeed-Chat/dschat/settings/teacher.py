# SPDX-License-Identifier: Apache-2.0
"""Flags of on-policy distillation, in which a teacher's log-probs are rewards, and the rules between them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dschat.base.errors import UserError
from dschat.settings.flags import ABOVE_0, FREE, NOT_EMPTY, default_of, flag
from dschat.settings.rules import Check, Rule

# Flags that say what becomes of scores, or of advantages that compare them.
SCORE_FLAGS = ("drop_equal_groups", "normalize_scores", "segment_rewards", "normalize_advantages", "whiten_advantages")


@dataclass(kw_only=True, frozen=True)
class TeacherFlags:
    """The teacher, and the weight of its log-ratios."""

    section = "on-policy distillation"

    teacher_model_name_or_path: str | None = flag(
        "teacher with the actor's vocabulary: add log p_teacher - log p_actor of each sampled token to the advantages,"
        " summed over a macro action and never over later ones (gamma 0); alone with advantage_estimator distillation,"
        " otherwise beside scores",
        None,
        NOT_EMPTY,
        FREE,
        path=True,
    )
    teacher_coef: float = flag(
        "weight of the teacher's log-ratios", 1.0, ABOVE_0, only_with="teacher_model_name_or_path"
    )


def _distils_alone(config: Any) -> bool:
    """Whether the estimator reads no scores."""
    return not config.advantages.needs.scores


def _check_score_flags(config: Any) -> None:
    """Raises UserError for a flag about scores with an estimator that reads none."""
    if not _distils_alone(config):
        return
    for name in SCORE_FLAGS:
        if config.flat()[name] != default_of(type(config), name):
            raise UserError(
                f"--{name} with --advantage_estimator {config.advantages.advantage_estimator}, which reads no scores:"
                " drop it."
            )


TEACHER_RULES: tuple[Rule[Any] | Check[Any], ...] = (  # of step 3's configuration
    Rule(
        lambda config: _distils_alone(config) and not config.has_teacher,
        "--advantage_estimator {advantage_estimator} learns from a teacher: add --teacher_model_name_or_path.",
    ),
    Rule(
        lambda config: _distils_alone(config) and bool(config.rewards.source_names),
        "--advantage_estimator {advantage_estimator} reads no scores, but there are some ({names}): drop their flags,"
        " or use another estimator, to which --teacher_model_name_or_path adds the teacher's log-ratios.",
        words=lambda config: {"names": ", ".join(config.rewards.source_names)},
    ),
    Check(_check_score_flags),
    Rule(
        lambda config: config.has_teacher and config.advantages.drop_equal_groups,
        "--drop_equal_groups with --teacher_model_name_or_path: prompts whose responses have the same score would be"
        " left out, and with them the teacher's log-ratios on their tokens. Drop one of them.",
    ),
)
