# SPDX-License-Identifier: Apache-2.0
"""A rater's session: what is shown next, votes, undo. The terminal and the page ask through the same one."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dschat.evaluation.human.items import Item, items_for, rater_name
from dschat.evaluation.human.vote_file import VoteFile
from dschat.evaluation.pairs.comparisons import Comparison
from dschat.evaluation.pairs.responses import Pair


@dataclass(frozen=True)
class Study:
    """What all raters have in common.

    Attributes:
        pairs: what is asked.
        votes: where the votes go.
        model_a: name of the first model.
        model_b: name of the second.
        dataset: summarize, hh-rlhf, webgpt, or empty.
        seed: of the shuffling of sides.
    """

    pairs: Sequence[Pair]
    votes: VoteFile
    model_a: str
    model_b: str
    dataset: str = ""
    seed: int = 42

    def __post_init__(self) -> None:
        """Refuses a file with votes on something else."""
        self.votes.check(self.pairs, self.model_a, self.model_b)

    def session(self, rater: str, clock: Callable[[], float] = time.monotonic) -> HumanSession:
        """The session of a rater, as far as it went.

        Args:
            rater: the name; one that differs in case alone from an earlier rater's is that rater.
            clock: seconds since any moment.

        Raises:
            UserError: the name cannot be used.
        """
        name = rater_name(rater)
        known = {vote.rater.casefold(): vote.rater for vote in reversed(self.votes.votes())}
        return HumanSession(self, known.get(name.casefold(), name), clock)

    def raters(self) -> list[str]:
        """Who has voted, in the order of their first votes."""
        return list(dict.fromkeys(vote.rater for vote in self.votes.votes()))


@dataclass(frozen=True)
class View:
    """Where a rater stands.

    Attributes:
        item: what to show; None if everything has a vote.
        voted: items with a vote of this rater.
        total: all items.
        last: id of the item voted on last, for `undo`; None if there is no vote.
    """

    item: Item | None
    voted: int
    total: int
    last: str | None


class HumanSession:
    """One rater's votes on the items of a study. Holds no vote itself: the file does."""

    def __init__(self, study: Study, rater: str, clock: Callable[[], float]) -> None:
        self.study, self.rater = study, rater
        self._clock = clock
        self._items = {item.pair.id: item for item in items_for(study.pairs, rater, study.seed)}
        self._shown: dict[str, float] = {}  # item → when it was shown last

    def view(self, item_id: str | None = None) -> View:
        """What to show now: the first item without a vote.

        Args:
            item_id: show this one, if it has no vote.
        """
        own = self._own()
        given = {vote.id for vote in own}
        open_ids = [name for name in self._items if name not in given]
        name = item_id if item_id in open_ids else next(iter(open_ids), None)
        if name is not None:
            self._shown[name] = self._clock()
        item = self._items[name] if name is not None else None
        return View(item, len(self._items) - len(open_ids), len(self._items), own[-1].id if own else None)

    def vote(self, item_id: str, choice: str, comment: str = "") -> bool:
        """Writes a vote; when this returns it is on the disk.

        Args:
            item_id: what the rater saw.
            choice: 1 first, 2 second, 3 equal, 4 pass.
            comment: of the rater.

        Returns:
            False if this rater had voted on the item already, elsewhere: nothing was written.

        Raises:
            UserError: the file cannot be written.
        """
        item = self._items.get(item_id)
        if item is None:
            return False
        vote = self._comparison(item, choice, comment.strip())

        def add(votes: list[Comparison]) -> list[Comparison] | None:
            return None if any(self._is_own(other, item_id) for other in votes) else [*votes, vote]

        return self.study.votes.change(add)

    def undo(self, item_id: str) -> Comparison | None:
        """Takes the last vote back.

        Args:
            item_id: what the last vote was on, as far as the rater knows.

        Returns:
            The vote; None if another one is the last by now, and nothing was changed.

        Raises:
            UserError: the file cannot be written.
        """
        taken: list[Comparison] = []

        def remove(votes: list[Comparison]) -> list[Comparison] | None:
            own = [place for place, vote in enumerate(votes) if vote.rater == self.rater]
            if not own or votes[own[-1]].id != item_id:
                return None
            taken.append(votes.pop(own[-1]))
            return votes

        self.study.votes.change(remove)
        return taken[0] if taken else None

    def summary(self) -> str:
        """One line: how many votes there are and where. Who won is said when nothing is left to vote on."""
        view = self.view()
        line = f"{self.rater}: {view.voted} of {view.total} voted"
        if view.item is None:
            counts = Counter(vote.verdict for vote in self._own())
            line += (
                f" ({self.study.model_a} better {counts['A']}, {self.study.model_b} better {counts['B']}, "
                f"equal {counts['tie']}, passed {counts['skip']})"
            )
        return f"{line}: {self.study.votes.path}"

    def _own(self) -> list[Comparison]:
        return [vote for vote in self.study.votes.votes() if vote.rater == self.rater]

    def _is_own(self, vote: Comparison, item_id: str) -> bool:
        return vote.rater == self.rater and vote.id == item_id

    def _comparison(self, item: Item, choice: str, comment: str) -> Comparison:
        shown = self._shown.get(item.pair.id)
        return Comparison(
            id=item.pair.id,
            prompt=item.pair.prompt,
            response_a=item.pair.a.response,
            response_b=item.pair.b.response,
            verdict=item.verdict(choice),
            kind="human",
            rater=self.rater,
            model_a=self.study.model_a,
            model_b=self.study.model_b,
            dataset=self.study.dataset,
            details={
                "first": item.first,
                "comment": comment,
                "seconds": None if shown is None else round(self._clock() - shown, 1),
            },
        )
