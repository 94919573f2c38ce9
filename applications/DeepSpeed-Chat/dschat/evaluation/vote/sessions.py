# SPDX-License-Identifier: Apache-2.0
"""Votes of people: guidelines, a rater's session, and the file of votes."""

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from dschat.base.errors import UserError
from dschat.base.fingerprints import content_hash
from dschat.base.journal import require_writable
from dschat.base.jsonl import iterate_rows, write_rows
from dschat.base.lock import Lock
from dschat.evaluation.responses import Comparison, Pair, Side, Verdict, compared, comparison_of, mirrored

FLAG = "--output"
LONGEST_NAME = 60  # characters
# Key that a rater presses → verdict, where the first model's response is shown first.
CHOICES: dict[str, Verdict] = {"1": "A", "2": "B", "3": "tie", "4": "skip"}

Point = tuple[str, *tuple[str, ...]]  # a guideline and its parts
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
    """Guidelines for raters in reading order; without a published data set the general ones."""
    if dataset in BY_DATASET:
        return [OPENING, BY_DATASET[dataset], *GENERAL]
    return [OPENING, *GENERAL]


class VoteFile:
    """A file of votes, one row per vote, in the order of voting.

    Nothing is held in memory: each change locks the file, reads it, and replaces it by a whole one. A kill at any
    moment leaves the state before a vote or after it.
    """

    def __init__(self, path: Path) -> None:
        """Opens the file, which need not exist yet; raises UserError if its folder cannot be written."""
        self.path = path
        require_writable(path.parent, f"{FLAG} {path}")

    def votes(self) -> list[Comparison]:
        """All votes of all raters, oldest first; raises UserError, with the line, where a row is not a vote."""
        return [vote for _, vote in self._read()]

    @contextmanager
    def changed(self) -> Iterator[list[Comparison]]:
        """The votes as a list that may be changed; it is saved at the end of the block, and locked until then."""
        lock_file = self.path.with_name(f".{self.path.name}.lock")
        with closing(Lock(lock_file, f"{FLAG} {self.path}", waits=True)):
            votes = self.votes()
            before = list(votes)
            yield votes
            if votes != before:
                write_rows(self.path, [vote.to_row() for vote in votes])

    def check(self, pairs: Sequence[Pair], models: tuple[str, str], dataset: str) -> None:
        """Raise UserError, with file and line, unless all rows are people's votes on these pairs of these models."""
        pair_ids = {pair.id for pair in pairs}
        for origin, vote in self._read():
            problem = None
            if vote.kind != "human":
                problem = f"a verdict of kind {vote.kind!r}, not a person's vote"
            elif vote.id not in pair_ids:
                problem = "a vote on responses that the two files do not hold"
            elif (vote.model_a, vote.model_b) != models:
                problem = f"a vote on {vote.model_a} and {vote.model_b}, and now it is {' and '.join(models)}"
            elif vote.dataset != dataset:
                problem = f"a vote with --dataset {vote.dataset!r}, and now it is {dataset!r}"
            if problem:
                raise UserError(f"{origin}: {problem}. Give another {FLAG}, or the files that these votes are on.")

    def _read(self) -> list[tuple[str, Comparison]]:
        votes: list[tuple[str, Comparison]] = []
        if not self.path.exists() or self.path.stat().st_size == 0:
            return votes
        for origin, row in iterate_rows(self.path, FLAG):
            votes.append((origin, comparison_of(row, origin)))
        return votes


@dataclass(frozen=True)
class ShownPair:
    """A pair as a rater sees it: `first` is the model whose response is shown first."""

    pair: Pair
    first: Side

    @property
    def responses(self) -> tuple[str, str]:
        """The texts in the order in which they are shown."""
        a = self.pair.a.response
        b = self.pair.b.response
        return (a, b) if self.first == "A" else (b, a)

    def verdict(self, choice: str) -> Verdict:
        """The verdict on the models that a choice, one of CHOICES, stands for."""
        verdict = CHOICES[choice]
        return verdict if self.first == "A" else mirrored(verdict)


def items_for(pairs: Sequence[Pair], rater: str, seed: int) -> list[ShownPair]:
    """The pairs that a rater is shown, in their order; pairs of equal texts are asked about once.

    Pairs are shuffled by seed, rater and texts, and every second one shows the first model first; whether that begins
    with the first or the second pair is random as well. The order of the files and the case of the rater's name change
    nothing.
    """
    pair_by_id = {pair.id: pair for pair in pairs}
    start = int(_random_key(seed, rater, "")[-1], 16) % 2
    shuffled_ids = sorted(pair_by_id, key=lambda pair_id: _random_key(seed, rater, pair_id))
    first_model_first = set(shuffled_ids[start::2])
    items: list[ShownPair] = []
    for pair_id, pair in pair_by_id.items():
        items.append(ShownPair(pair, "A" if pair_id in first_model_first else "B"))
    return items


def rater_name(text: str) -> str:
    """A rater's name, with single spaces; raises UserError if it is empty, too long or has invisible characters."""
    name = " ".join(text.split())
    if not name or len(name) > LONGEST_NAME or not name.isprintable():
        raise UserError(f"Give a name of 1 to {LONGEST_NAME} visible characters (--rater), not {name!r}.")
    return name


@dataclass(frozen=True)
class Study:
    """The study that all raters take part in: pairs, guidelines and votes.

    Attributes:
        pairs: responses to compare.
        votes: the file of votes.
        models: names of the first and the second.
        dataset: summarize, hh-rlhf, webgpt, a name of the user's own, or empty.
        seed: seed of the shuffling of sides.
    """

    pairs: Sequence[Pair]
    votes: VoteFile
    models: tuple[str, str]
    dataset: str = ""
    seed: int = 42

    def __post_init__(self) -> None:
        """Raise UserError if the file holds votes on something else."""
        self.votes.check(self.pairs, self.models, self.dataset)

    def session(self, rater: str) -> "HumanSession":
        """The session of a rater, with the votes so far; raises UserError if the name cannot be used.

        A name that differs in case alone from an earlier rater's is that rater.
        """
        name = rater_name(rater)
        for earlier in self.raters():
            if earlier.casefold() == name.casefold():
                return HumanSession(self, earlier)
        return HumanSession(self, name)

    def raters(self) -> list[str]:
        """Names of the raters, in the order of their first votes."""
        return list(dict.fromkeys(vote.rater for vote in self.votes.votes()))


@dataclass(frozen=True)
class RaterView:
    """Progress of a rater.

    Attributes:
        item: to show; None if all items have a vote.
        voted: number of items with a vote of this rater.
        total: number of items.
        last: id of the item voted on last, for `undo`; None without votes.
    """

    item: ShownPair | None
    voted: int
    total: int
    last: str | None


class HumanSession:
    """A rater's votes on the items of a study. The votes themselves are in the file alone."""

    def __init__(self, study: Study, rater: str) -> None:
        self.study = study
        self.rater = rater
        self._items: dict[str, ShownPair] = {}
        for item in items_for(study.pairs, rater, study.seed):
            self._items[item.pair.id] = item
        self._shown: dict[str, float] = {}  # item → time when it was shown last

    def view(self, item_id: str | None = None) -> RaterView:
        """The next screen: with the item of this id if it has no vote, else with the first that has none."""
        votes = self._votes_of_rater(self.study.votes.votes())
        voted_ids = {vote.id for vote in votes}
        open_ids = [name for name in self._items if name not in voted_ids]
        item = None
        if open_ids:
            next_id = item_id if item_id in open_ids else open_ids[0]
            item = self._items[next_id]
            self._shown[next_id] = time.monotonic()
        return RaterView(
            item=item,
            voted=len(self._items) - len(open_ids),
            total=len(self._items),
            last=votes[-1].id if votes else None,
        )

    def vote(self, item_id: str, choice: str, comment: str = "") -> bool:
        """Write a vote, one of CHOICES, on the item that the rater saw to the file.

        Returns:
            False if this rater had voted on the item already, elsewhere; then nothing is written.

        Raises:
            UserError: the file cannot be written.
        """
        item = self._items.get(item_id)
        if item is None:
            return False
        shown = self._shown.get(item_id)
        study = self.study
        with study.votes.changed() as votes:
            if any(vote.id == item_id for vote in self._votes_of_rater(votes)):
                return False
            seconds = None if shown is None else round(time.monotonic() - shown, 1)
            details = {"first": item.first, "comment": comment.strip(), "seconds": seconds}
            verdict = item.verdict(choice)
            votes.append(compared(item.pair, verdict, "human", self.rater, study.models, study.dataset, details))
        return True

    def undo(self, item_id: str) -> Comparison | None:
        """Remove the rater's last vote and return it; if that is not on this item, change nothing and return None."""
        with self.study.votes.changed() as votes:
            rater_votes = self._votes_of_rater(votes)
            if not rater_votes or rater_votes[-1].id != item_id:
                return None
            last_vote = rater_votes[-1]
            votes.remove(last_vote)
        return last_vote

    def summary(self) -> str:
        """One line with the number of votes and their file; with the result once all items have a vote."""
        view = self.view()
        line = f"{self.rater}: {view.voted} of {view.total} voted"
        if view.item is None:
            counts = Counter(vote.verdict for vote in self._votes_of_rater(self.study.votes.votes()))
            first, second = self.study.models
            line += f" ({first} better {counts['A']}, {second} better {counts['B']}, "
            line += f"equal {counts['tie']}, passed {counts['skip']})"
        return f"{line}: {self.study.votes.path}"

    def _votes_of_rater(self, votes: Sequence[Comparison]) -> list[Comparison]:
        return [vote for vote in votes if vote.rater == self.rater]


def _random_key(seed: int, rater: str, text: str) -> str:
    """A hash to shuffle by; the same on every machine."""
    return content_hash(f"{seed}\0{rater.casefold()}\0{text}")
