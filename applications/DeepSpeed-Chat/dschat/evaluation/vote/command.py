# SPDX-License-Identifier: Apache-2.0
"""The command `dschat vote`: a terminal that asks one rater, or a page for all."""

import os
import shutil
import sys
import threading

from dschat.base.display import for_reading, wrapped
from dschat.data.compared_sets import compared_set
from dschat.evaluation.options import VoteOptions
from dschat.evaluation.responses import read_pairs
from dschat.evaluation.vote.sessions import CHOICES, HumanSession, RaterView, ShownPair, Study, VoteFile, guidelines

KEYS = "1 A is better   2 B is better   3 equal   4 pass   |   u undo   c comment   ? guidelines   q quit"
WIDEST = 100  # characters


def vote(options: VoteOptions) -> str:
    """Ask a person for votes, in the terminal or on a page; returns the last lines of output."""
    files = options.compared
    flags = options.voting
    pairs = read_pairs(files.model_name_a, "--model_name_a", files.model_name_b, "--model_name_b")
    dataset = compared_set(flags.dataset, own=True) if flags.dataset else ""
    study = Study(pairs, VoteFile(files.output), files.names, dataset, files.seed)
    if flags.web:
        return _vote_in_browser(study, flags.rater or "", flags.port)
    sys.stdin.reconfigure(errors="replace")  # type: ignore[union-attr]
    rater = flags.rater or os.environ.get("USER", "rater")
    TerminalRating(study.session(rater)).run()
    return ""


def _vote_in_browser(study: Study, rater: str, port: int | None) -> str:
    """Serve the page until Ctrl-C; returns the progress of all raters."""
    from dschat.evaluation.vote.page import serve

    page, address = serve(study, rater, port)
    print(f"Open {address} in a browser on this machine. Ctrl-C ends; votes are in {study.votes.path}", flush=True)
    try:
        threading.Event().wait()
    except KeyboardInterrupt:
        print()
    page.close(verbose=False)
    summaries = []
    for name in study.raters():
        summaries.append(study.session(name).summary())
    return "\n".join(summaries)


class TerminalRating:
    """Asks a rater until all items have a vote, the rater quits or the input ends."""

    def __init__(self, session: HumanSession) -> None:
        self._session = session
        self._comment = ""

    def run(self) -> None:
        """Ask about item after item; a vote is saved before the next. Raises UserError if it cannot be saved."""
        print(self._guidelines())
        view: RaterView | None = self._session.view()
        try:
            while view is not None and view.item is not None:
                self._show(view, view.item)
                view = self._answer(view, view.item)
        except (EOFError, KeyboardInterrupt):
            print()
        print(self._session.summary())

    def _answer(self, view: RaterView, item: ShownPair) -> RaterView | None:
        """Handle keys until the screen changes; returns the next screen, or None to quit."""
        while True:
            word, _, rest = input("> ").strip().partition(" ")
            key = word.lower()
            if key in CHOICES and not rest:
                if not self._session.vote(item.pair.id, key, self._comment):
                    print("You have voted on this one already, elsewhere; that vote stays.")
                self._comment = ""
                return self._session.view()
            if key == "q":
                return None
            if key == "u":
                undone_vote = self._session.undo(view.last) if view.last is not None else None
                if undone_vote is not None:
                    self._comment = str(undone_vote.details.get("comment") or "")
                    print("Taken back; this was your last vote:")
                    return self._session.view(undone_vote.id)
                print("There is no vote to take back.")
            elif key == "c":
                question = "Comment (kept with your vote; empty removes it): "
                self._comment = rest.strip() or input(question).strip()
                print("Comment noted; now vote." if self._comment else "No comment.")
            elif key == "?":
                print(self._guidelines())
            else:
                print(f"Type one of the keys, then Enter. {KEYS}")

    def _show(self, view: RaterView, item: ShownPair) -> None:
        first, second = item.responses
        width = self._width()
        heading = f"== Item {view.voted + 1} of {view.total} "
        print("\n" + heading.ljust(width, "="))
        for title, text in (("PROMPT", item.pair.prompt), ("RESPONSE A", first), ("RESPONSE B", second)):
            line = f"-- {title} ".ljust(width, "-")
            print(f"{line}\n{wrapped(for_reading(text), width)}\n")
        if self._comment:
            print(f"Comment: {for_reading(self._comment)}")
        print(KEYS)

    def _guidelines(self) -> str:
        width = self._width()
        lines: list[str] = []
        for text, *parts in guidelines(self._session.study.dataset):
            lines.append(wrapped(f"* {text}", width))
            for part in parts:
                lines.append(wrapped(f"  - {part}", width))
        return "\n".join(lines)

    def _width(self) -> int:
        return min(shutil.get_terminal_size().columns, WIDEST)
