# SPDX-License-Identifier: Apache-2.0
"""People as judges: guidelines, sessions and the file of votes."""

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from dschat.base.errors import UserError
from dschat.base.fingerprints import content_hash
from dschat.base.journal import make_writable
from dschat.base.jsonl import read_rows, write_rows
from dschat.base.lock import Lock
from dschat.lab.responses import Comparison, Pair, Side, Verdict, compared, comparison_of, mirrored

FLAG = "--output"
LONGEST_NAME = 60  # characters
# What a rater types → the verdict, where the first model's response stands at the first place.
CHOICES: dict[str, Verdict] = {"1": "A", "2": "B", "3": "tie", "4": "skip"}

Point = tuple[str, *tuple[str, ...]]  # a guideline, and what it consists of
OPENING: Point = ("Read the prompt and both responses, then choose the response you would rather be given.",)
BY_DATASET: dict[str, Point] = {
    "summarize": (
        "The responses are summaries of the post. Weigh four things:",
        "relevance: it holds the main points and leaves out what does not matter;",
        "coherence: it can be understood by itself, and its sentences belong together;",
        "consistency: everything in it is said in the post;",
        "fluency: it reads as a person would write it.",
    ),
    "hh-rlhf": (
        "The responses continue the conversation as its assistant. Choose the more helpful one:",
        "it does what was asked, or asks back where it must;",
        "what it says is right, to the point and polite;",
        "a response that helps somebody to do harm is worse than one that declines and says why.",
    ),
    "webgpt": (
        "The responses answer a question. Look a fact up if the vote hangs on it. Weigh three things:",
        "accuracy: what it claims is true, and what it cannot know is marked as such;",
        "coherence: it is in order, and does not contradict or repeat itself;",
        "usefulness: the person who asked would be helped, and could act on it.",
    ),
}
GENERAL: tuple[Point, ...] = (
    ("Judge what is said and how well. Longer is not better, and neither is the side a response stands on.",),
    ("Equal (3): you have read both, and neither is better. Pass (4): you cannot judge this one.",),
    (
        "Sides are shuffled for every item, and which model wrote what is hidden. Model text is shown as it is; do "
        "not follow requests made in it.",
    ),
)


def guidelines(dataset: str) -> list[Point]:
    """What a person is asked to look at, in reading order; without a known data set what holds for any."""
    return [OPENING, *([BY_DATASET[dataset]] if dataset in BY_DATASET else []), *GENERAL]


class VoteFile:
    """Votes of people, one row each, in the order they were given.

    Nothing is kept in memory: whoever changes the file locks it, reads it, and replaces it at once. A kill at any
    moment leaves the state before a vote or after it.
    """

    def __init__(self, path: Path) -> None:
        """Opens the file of votes, which need not exist; raises UserError where its folder cannot be written."""
        self.path = path
        make_writable(path.parent, f"{FLAG} {path}")

    def votes(self) -> list[Comparison]:
        """Every vote of every rater, oldest first; raises UserError, with the line, where a row is no vote."""
        return [vote for _, vote in self._read()]

    @contextmanager
    def changed(self) -> Iterator[list[Comparison]]:
        """The votes, which nobody else can change meanwhile; what was done to the list is written at the end."""
        with closing(Lock(self.path.with_name(f".{self.path.name}.lock"), f"{FLAG} {self.path}", waits=True)):
            votes = self.votes()
            before = list(votes)
            yield votes
            if votes != before:
                write_rows(self.path, [vote.to_row() for vote in votes])

    def check(self, pairs: Sequence[Pair], models: tuple[str, str]) -> None:
        """Raises UserError, with file and line, unless all rows are people's votes on these pairs of these models."""
        known = {pair.id for pair in pairs}
        for origin, vote in self._read():
            problem = None
            if vote.kind != "human":
                problem = f"a verdict of kind {vote.kind!r}, not a person's vote"
            elif vote.id not in known:
                problem = "a vote on responses that the two files do not hold"
            elif (vote.model_a, vote.model_b) != models:
                problem = f"a vote on {vote.model_a} and {vote.model_b}, and now it is {' and '.join(models)}"
            if problem:
                raise UserError(f"{origin}: {problem}. Give another {FLAG}, or the files that these votes are on.")

    def _read(self) -> list[tuple[str, Comparison]]:
        if not self.path.exists() or self.path.stat().st_size == 0:
            return []
        return [(origin, comparison_of(row, origin)) for origin, row in read_rows(self.path, FLAG)]


@dataclass(frozen=True)
class ShownPair:
    """A pair as one rater sees it: `first` is the model whose response stands at the first place."""

    pair: Pair
    first: Side

    @property
    def responses(self) -> tuple[str, str]:
        """The texts at the first and the second place."""
        a, b = self.pair.a.response, self.pair.b.response
        return (a, b) if self.first == "A" else (b, a)

    def verdict(self, choice: str) -> Verdict:
        """What a choice, one of CHOICES, says about the models."""
        verdict = CHOICES[choice]
        return verdict if self.first == "A" else mirrored(verdict)


def items_for(pairs: Sequence[Pair], rater: str, seed: int) -> list[ShownPair]:
    """What one rater is shown, in the order of the pairs; a pair of the same texts is asked once.

    Every second pair in an order drawn from seed, rater and texts has the first model at the first place; whether
    that begins with the first or the second pair is drawn as well. The order of the files and the case of the
    rater's name change nothing.
    """
    once = {pair.id: pair for pair in pairs}
    start = int(_draw(seed, rater, "")[-1], 16) % 2
    drawn = sorted(once, key=lambda pair_id: _draw(seed, rater, pair_id))
    ahead = set(drawn[start::2])
    return [ShownPair(pair, "A" if pair_id in ahead else "B") for pair_id, pair in once.items()]


def rater_name(text: str) -> str:
    """A rater's name, with single spaces; raises UserError if it is empty, too long or not all of it can be shown."""
    name = " ".join(text.split())
    if not name or len(name) > LONGEST_NAME or not name.isprintable():
        raise UserError(f"--rater {name!r}: a name of 1 to {LONGEST_NAME} visible characters is needed.")
    return name


@dataclass(frozen=True)
class Study:
    """What all raters have in common."""

    pairs: Sequence[Pair]
    votes: VoteFile
    models: tuple[str, str]  # names of the first and the second
    dataset: str = ""  # summarize, hh-rlhf, webgpt, a name of the user's own, or empty
    seed: int = 42  # of the shuffling of sides

    def __post_init__(self) -> None:
        """Refuses a file with votes on something else."""
        self.votes.check(self.pairs, self.models)

    def session(self, rater: str) -> "HumanSession":
        """The session of a rater, as far as it went; raises UserError where the name cannot be used.

        A name that differs in case alone from an earlier rater's is that rater.
        """
        name = rater_name(rater)
        known = {earlier.casefold(): earlier for earlier in reversed(self.raters())}
        return HumanSession(self, known.get(name.casefold(), name))

    def raters(self) -> list[str]:
        """Who has voted, in the order of their first votes."""
        return list(dict.fromkeys(vote.rater for vote in self.votes.votes()))


@dataclass(frozen=True)
class RaterView:
    """Where a rater stands."""

    item: ShownPair | None  # what to show; None if everything has a vote
    voted: int  # items with a vote of this rater
    total: int  # all items
    last: str | None  # id of the item voted on last, for `undo`; None if there is no vote


class HumanSession:
    """One rater's votes on the items of a study. Holds no vote itself: the file does."""

    def __init__(self, study: Study, rater: str) -> None:
        self.study, self.rater = study, rater
        self._items = {item.pair.id: item for item in items_for(study.pairs, rater, study.seed)}
        self._shown: dict[str, float] = {}  # item → when it was shown last

    def view(self, item_id: str | None = None) -> RaterView:
        """What to show now: the item of this id if it has no vote, else the first without one."""
        own = self._own(self.study.votes.votes())
        given = {vote.id for vote in own}
        open_ids = [name for name in self._items if name not in given]
        item = None
        if open_ids:
            name = item_id if item_id in open_ids else open_ids[0]
            item, self._shown[name] = self._items[name], time.monotonic()
        return RaterView(item, len(self._items) - len(open_ids), len(self._items), own[-1].id if own else None)

    def vote(self, item_id: str, choice: str, comment: str = "") -> bool:
        """Puts a vote, one of CHOICES, on the item that the rater saw on the disk; raises UserError where it cannot.

        False if this rater had voted on the item already, elsewhere: nothing was written.
        """
        item, shown = self._items.get(item_id), self._shown.get(item_id)
        if item is None:
            return False
        with self.study.votes.changed() as votes:
            if any(vote.id == item_id for vote in self._own(votes)):
                return False
            seconds = None if shown is None else round(time.monotonic() - shown, 1)
            details = {"first": item.first, "comment": comment.strip(), "seconds": seconds}
            who = (self.rater, self.study.models, self.study.dataset)
            votes.append(compared(item.pair, item.verdict(choice), "human", *who, details))
        return True

    def undo(self, item_id: str) -> Comparison | None:
        """Takes the last vote back; None, and nothing is changed, if it is not on this item."""
        with self.study.votes.changed() as votes:
            own = self._own(votes)
            if not own or own[-1].id != item_id:
                return None
            votes.remove(own[-1])
        return own[-1]

    def summary(self) -> str:
        """One line: how many votes there are and where. Who won is said when nothing is left to vote on."""
        view = self.view()
        line = f"{self.rater}: {view.voted} of {view.total} voted"
        if view.item is None:
            counts = Counter(vote.verdict for vote in self._own(self.study.votes.votes()))
            first, second = self.study.models
            line += f" ({first} better {counts['A']}, {second} better {counts['B']}, "
            line += f"equal {counts['tie']}, passed {counts['skip']})"
        return f"{line}: {self.study.votes.path}"

    def _own(self, votes: Sequence[Comparison]) -> list[Comparison]:
        return [vote for vote in votes if vote.rater == self.rater]


def _draw(seed: int, rater: str, text: str) -> str:
    """A hash to sort by; the same on every machine."""
    return content_hash(f"{seed}\0{rater.casefold()}\0{text}")
