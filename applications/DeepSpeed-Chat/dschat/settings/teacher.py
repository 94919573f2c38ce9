# SPDX-License-Identifier: Apache-2.0
"""Flags of on-policy distillation, in which a teacher's log-probs are rewards, and the rules between them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dschat.settings.flags import ABOVE_0, FREE, NOT_EMPTY, flag
from dschat.settings.rules import Rule


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


TEACHER_RULES: tuple[Rule[Any], ...] = (  # of step 3's configuration
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
    Rule(
        lambda config: config.has_teacher and config.advantages.drop_equal_groups,
        "--drop_equal_groups with --teacher_model_name_or_path: prompts whose responses have the same score would be"
        " left out, and with them the teacher's log-ratios on their tokens. Drop one of them.",
    ),
)
