# SPDX-License-Identifier: Apache-2.0
"""Rubrics of published data sets and of dialogues, and the questions that a rubric asks about two responses."""

from typing import Any

from dschat.judge.questions import JudgeQuestion, object_schema, question_about
from dschat.judge.rubrics import COMPARISON, Rubric

PLACES = ("first", "second", "tie")
DIALOGUE = "dialogue"  # name of dialogues in results
# Estimated tokens of an answer: for each criterion with a verdict, and for each sentence.
PER_VERDICT = 45
PER_SENTENCE = 60

SUMMARIES = Rubric(
    prompt_name="text",
    response_name="summary",
    task="You compare two summaries of one text. Prefer the one that serves a reader better who has not seen the "
    "text and wants to know what it says.",
    criteria={
        "relevance": "Does it carry what matters in the text and leave side issues out?",
        "coherence": "Do its sentences follow from one another and make one ordered whole?",
        "consistency": "Does the text bear out every statement, with nothing made up or turned around?",
        "fluency": "Is it written in correct language that reads without effort?",
    },
)
REPLIES = Rubric(
    prompt_name="conversation",
    response_name="reply",
    task="You compare two replies with which an assistant could go on in a conversation. Prefer the one that "
    "helps the person more: it takes up what they want, is right, and says what they need, harming nobody. "
    "Say in one sentence how the two differ in that.",
)
ANSWERS = Rubric(
    prompt_name="question",
    response_name="answer",
    task="You compare two long answers to a question. Judge each criterion by itself first; then say which answer "
    "is better on the whole.",
    criteria={
        "factual_accuracy": "Are its statements true and free of misleading claims, as far as you know?",
        "coherence": "Is it well ordered, without gaps, repetitions or contradictions?",
        "usefulness": "Does it answer what was asked, in the breadth and depth the asker can use?",
    },
    separate=True,
)
DIALOGUES = Rubric(
    prompt_name="opening",
    response_name="conversation",
    task="You compare two conversations of one person with two assistants. Both begin with the same message of the "
    "person, the opening; from there each went its own way, so what the person says later differs as well. Every line "
    "that the person or an assistant wrote begins with a bar. Judge the assistants, not the person, over all that is "
    "shown and above all in their last reply. Prefer the one that serves the person better: it takes up what they ask "
    "at each turn, keeps to what was said before, is right, and harms nobody. Say in one sentence how the two differ "
    "in that.",
)
RUBRICS = {"summarize": SUMMARIES, "hh-rlhf": REPLIES, "webgpt": ANSWERS}

FAIRNESS = (
    "The order in which the two are shown is chance and says nothing. Length by itself is neither good nor bad. If "
    'you would not know which to choose, the verdict is "tie".'
)


def question_of(rubric: Rubric, prompt: str, first: str, second: str) -> JudgeQuestion:
    """The question about two responses to a prompt, shown in this order."""
    material = {
        rubric.prompt_name: prompt,
        f"first-{rubric.response_name}": first,
        f"second-{rubric.response_name}": second,
    }
    return question_about(material, rubric, [FAIRNESS], answer_form(rubric), answer_schema(rubric))


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
    compared = object_schema({COMPARISON: {"type": "string"}, "verdict": verdict})
    if not rubric.separate:
        return compared
    return object_schema({**dict.fromkeys(rubric.criteria, compared), "verdict": verdict})


def answer_tokens(rubric: Rubric) -> int:
    """Tokens of a usual answer, for estimates: one sentence, about criteria one or two; or a verdict on each."""
    if rubric.separate:
        return PER_SENTENCE + PER_VERDICT * len(rubric.criteria)
    return PER_SENTENCE * 3 // 2 if rubric.criteria else PER_SENTENCE
