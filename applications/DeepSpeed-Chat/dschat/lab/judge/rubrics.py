# SPDX-License-Identifier: Apache-2.0
"""Rubrics of comparisons, also of the user's own, and the questions that they ask about two responses."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dschat.base.errors import UserError
from dschat.scoring.judge.questions import MATERIAL, JudgeQuestion, material_blocks, material_code, object_schema
from dschat.settings.rubrics import check_criterion, read_content, read_tag, read_task, refuse_response_tag

PLACES = ("first", "second", "tie")
VERDICT_KEYS = ("verdict", "overall_verdict", "final_verdict", "overall", "winner")
# Keys of a rubric file.
KEYS = ("task", "prompt", "response", "criteria", "separate")
TAKEN = ("comparison", *VERDICT_KEYS)  # keys of every answer
# Estimated tokens of an answer: for each criterion with a verdict, and for the remaining text.
PER_VERDICT = 45
PER_SENTENCE = 60


@dataclass(frozen=True)
class Rubric:
    """How two responses to a prompt of a data set are compared.

    Attributes:
        dataset: name in results.
        prompt_name: word for the prompt, in the tag around it.
        response_name: word for a response.
        task: what is compared, and which is to be preferred.
        output_tokens: length of a usual answer, for estimates.
        criteria: name → question; empty if the task says everything.
        separate: each criterion has its own verdict, before the overall one.
    """

    dataset: str
    prompt_name: str
    response_name: str
    task: str
    output_tokens: int
    criteria: Mapping[str, str] = field(default_factory=dict)
    separate: bool = False


SUMMARIES = Rubric(
    dataset="summarize",
    prompt_name="text",
    response_name="summary",
    task="You compare two summaries of one text. Prefer the one that serves a reader better who has not seen the "
    "text and wants to know what it says.",
    output_tokens=90,
    criteria={
        "relevance": "Does it carry what matters in the text and leave side issues out?",
        "coherence": "Do its sentences follow from one another and make one ordered whole?",
        "consistency": "Does the text bear out every statement, with nothing made up or turned around?",
        "fluency": "Is it written in correct language that reads without effort?",
    },
)
REPLIES = Rubric(
    dataset="hh-rlhf",
    prompt_name="conversation",
    response_name="reply",
    task="You compare two replies with which an assistant could go on in a conversation. Prefer the one that "
    "helps the person more: it takes up what they want, is right, and says what they need, harming nobody. "
    "Say in one sentence how the two differ in that.",
    output_tokens=60,
)
ANSWERS = Rubric(
    dataset="webgpt",
    prompt_name="question",
    response_name="answer",
    task="You compare two long answers to a question. Judge each criterion by itself first; then say which answer "
    "is better on the whole.",
    output_tokens=190,
    criteria={
        "factual_accuracy": "Are its statements true and free of misleading claims, as far as you know?",
        "coherence": "Is it well ordered, without gaps, repetitions or contradictions?",
        "usefulness": "Does it answer what was asked, in the breadth and depth the asker can use?",
    },
    separate=True,
)
DIALOGUES = Rubric(
    dataset="dialogue",
    prompt_name="opening",
    response_name="conversation",
    task="You compare two conversations of one person with two assistants. Both begin with the same message of the "
    "person, the opening; from there each went its own way, so what the person says later differs as well. Every line "
    "that the person or an assistant wrote begins with a bar. Judge the assistants, not the person, over all that is "
    "shown and above all in their last reply. Prefer the one that serves the person better: it takes up what they ask "
    "at each turn, keeps to what was said before, is right, and harms nobody. Say in one sentence how the two differ "
    "in that.",
    output_tokens=60,
)
RUBRICS = {rubric.dataset: rubric for rubric in (SUMMARIES, REPLIES, ANSWERS)}

FAIRNESS = (
    "The order in which the two are shown is chance and says nothing. Length by itself is neither good nor bad. If "
    'you would not know which to choose, the verdict is "tie".'
)


def messages_of(
    rubric: Rubric,
    prompt: str,
    first: str,
    second: str,
) -> list[dict[str, str]]:
    """The two messages that ask for a verdict on a prompt's responses, shown in this order.

    The texts are between tags that none of them can contain, see `dschat.scoring.judge.questions`.
    """
    code = material_code((prompt, first, second))
    parts = [rubric.task]
    if rubric.criteria:
        criteria = [f"- {name}: {text}" for name, text in rubric.criteria.items()]
        parts.append("\n".join(["Criteria:", *criteria]))
    parts += [FAIRNESS, MATERIAL.format(code=code, response=rubric.response_name)]
    parts.append(f"Answer with one JSON object and nothing before or after it: {answer_form(rubric)}")
    material = {
        rubric.prompt_name: prompt,
        f"first-{rubric.response_name}": first,
        f"second-{rubric.response_name}": second,
    }
    blocks = material_blocks(material, code)
    blocks.append("That was all the material. Give your verdict as the JSON object described.")
    return [{"role": "system", "content": "\n\n".join(parts)}, {"role": "user", "content": "\n\n".join(blocks)}]


def question_of(
    rubric: Rubric,
    prompt: str,
    first: str,
    second: str,
) -> JudgeQuestion:
    """The question about two responses to a prompt, shown in this order."""
    return JudgeQuestion(tuple(messages_of(rubric, prompt, first, second)), answer_schema(rubric))


def answer_form(rubric: Rubric) -> str:
    """The JSON object that an answer should be, as a pattern for the judge to read."""
    verdict = '"verdict": ' + " or ".join(f'"{place}"' for place in PLACES)
    if rubric.separate:
        aspect = f'{{"comparison": "one sentence", {verdict}}}'
        aspects = ", ".join(f'"{name}": {aspect}' for name in rubric.criteria)
        return f"{{{aspects}, {verdict}}}"
    length = "one or two sentences" if rubric.criteria else "one sentence"
    return f'{{"comparison": "{length}", {verdict}}}'


def answer_schema(rubric: Rubric) -> dict[str, Any]:
    """JSON schema of an answer, in the subset that servers with structured output take."""
    verdict = {"type": "string", "enum": list(PLACES)}
    compared = object_schema({"comparison": {"type": "string"}, "verdict": verdict})
    if not rubric.separate:
        return compared
    return object_schema({**dict.fromkeys(rubric.criteria, compared), "verdict": verdict})


def read_rubric(path: Path, dataset: str) -> Rubric:
    """Read a user's rubric, see docs/evaluation.md; `dataset` is the name of the data set in results.

    Raises:
        UserError: the file cannot be read, or a key is missing, unknown or has a bad value; names both.
    """
    try:
        content = read_content(path, KEYS)
        task = read_task(content, "what is compared and which is to be preferred")
        prompt_name = read_tag(content, "prompt")
        response_name = read_tag(content, "response")
        refuse_response_tag(prompt_name, f"(first|second)-{response_name}")
        criteria = _criteria(content.get("criteria", {}))
        separate = content.get("separate", False)
        if not isinstance(separate, bool):
            raise UserError("key 'separate' must be true or false.")
        if separate and not criteria:
            raise UserError("key 'separate' asks for a verdict on each of 'criteria': add some.")
    except UserError as error:
        raise UserError(f"--rubric {path}: {error}") from error
    tokens = PER_SENTENCE + PER_VERDICT * len(criteria) * separate
    return Rubric(dataset, prompt_name, response_name, task, tokens, criteria, separate)


def _criteria(value: Any) -> dict[str, str]:
    if not isinstance(value, dict):
        raise UserError("key 'criteria' must hold names, each with a question as text.")
    criteria = {}
    for name, question in value.items():
        criteria[name] = check_criterion(name, question, TAKEN)
    return criteria
