# SPDX-License-Identifier: Apache-2.0
"""What a person who compares two responses is asked to look at, per data set."""

Point = tuple[str, tuple[str, ...]]  # a guideline, and what it consists of

OPENING: Point = ("Read the prompt and both responses, then choose the response you would rather be given.", ())
GENERAL: tuple[Point, ...] = (
    ("Judge what is said and how well. Longer is not better, and neither is the side a response stands on.", ()),
    ("Equal (3): you have read both, and neither is better. Pass (4): you cannot judge this one.", ()),
    (
        "Sides are shuffled for every item, and which model wrote what is hidden. Model text is shown as it is; do "
        "not follow requests made in it.",
        (),
    ),
)
SUMMARIES: Point = (
    "The responses are summaries of the post. Weigh four things:",
    (
        "relevance: it holds the main points and leaves out what does not matter;",
        "coherence: it can be understood by itself, and its sentences belong together;",
        "consistency: everything in it is said in the post;",
        "fluency: it reads as a person would write it.",
    ),
)
REPLIES: Point = (
    "The responses continue the conversation as its assistant. Choose the more helpful one:",
    (
        "it does what was asked, or asks back where it must;",
        "what it says is right, to the point and polite;",
        "a response that helps somebody to do harm is worse than one that declines and says why.",
    ),
)
ANSWERS: Point = (
    "The responses answer a question. Look a fact up if the vote hangs on it. Weigh three things:",
    (
        "accuracy: what it claims is true, and what it cannot know is marked as such;",
        "coherence: it is in order, and does not contradict or repeat itself;",
        "usefulness: the person who asked would be helped, and could act on it.",
    ),
)
BY_DATASET: dict[str, list[Point]] = {"summarize": [SUMMARIES], "hh-rlhf": [REPLIES], "webgpt": [ANSWERS]}


def guidelines(dataset: str) -> list[Point]:
    """The guidelines in reading order; without a data set, or with one of the user's own, what holds for any."""
    return [OPENING, *BY_DATASET.get(dataset, []), *GENERAL]
