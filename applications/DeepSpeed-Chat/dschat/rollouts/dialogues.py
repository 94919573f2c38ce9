# SPDX-License-Identifier: Apache-2.0
"""Multi-turn rollouts: the policy and a user answer each other, all dialogues of a batch together, turn by turn."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from transformers import PreTrainedTokenizerBase

from dschat.base.errors import UserError
from dschat.data.dialogues import Dialogue, encode_states, state
from dschat.data.encoding import decode_response, reply_contents
from dschat.rollouts.engine import Draw
from dschat.rollouts.sampling import Sampling, row_seed

OUTGROWN = "the dialogue outgrew the policy"
SILENT = "the user asked nothing more, or could not read so long a dialogue"


@dataclass(frozen=True)
class AssistantTurn:
    """What the policy drew in one turn."""

    state_ids: list[int]  # what it answered
    ids: list[int]  # drawn, the end token included
    text: str  # without special tokens, and without what the chat template puts around a content
    finished: bool  # whether it ended by itself; else it was cut


@dataclass(frozen=True)
class DialogueRollout:
    """A dialogue as far as it went."""

    messages: Dialogue  # what both said, ends with a reply; empty where even the first turn got none
    # Those that were drawn, by turn; turns that were there before the rollout are missing.
    replies: dict[int, AssistantTurn]
    ended: str = ""  # why it has fewer turns than it should, OUTGROWN or SILENT; empty where it has all of them


@dataclass(frozen=True)
class SampledPair:
    """Two dialogues with the same messages up to the user's message of one turn."""

    turn: int  # the first turn that differs, from 0
    first: DialogueRollout
    second: DialogueRollout | None  # None if the first ended early

    @property
    def replies(self) -> tuple[AssistantTurn, AssistantTurn]:
        """The replies of the first turn that differs."""
        assert self.second is not None
        return self.first.replies[self.turn], self.second.replies[self.turn]

    @property
    def ended(self) -> str:
        """Why a dialogue of the pair has fewer turns than it should; empty if both are complete."""
        return self.first.ended if self.second is None else self.second.ended


class Assistant(Protocol):
    """Answers whole batches of dialogues."""

    def __call__(self, states: Sequence[Dialogue], seeds: Sequence[int]) -> Sequence[AssistantTurn | None]:
        """One reply to each state, which ends with a user's message; None where it is too long to be answered.

        A row's seed alone decides its draws.
        """


class User(Protocol):
    """Writes the user's messages."""

    def __call__(
        self, dialogues: Sequence[Dialogue], numbers: Sequence[int], seeds: Sequence[int]
    ) -> Sequence[str | None]:
        """The next message of each dialogue, which ends with a reply; None or nothing ends the dialogue.

        `numbers` say which dialogues of the batch these are; the seeds are of the draws, where there are any.
        """


class UserFromData:
    """Says what the user of the data said, whatever the assistant answers."""

    def __init__(self, dialogues: Sequence[Dialogue]) -> None:
        self._dialogues = dialogues

    def __call__(self, dialogues: Sequence[Dialogue], numbers: Sequence[int], seeds: Sequence[int]) -> list[str]:
        pairs = zip(dialogues, numbers, strict=True)
        return [self._dialogues[number][len(dialogue)]["content"] for dialogue, number in pairs]


class PolicyAssistant:
    """A policy whose weights are ready for drawing."""

    def __init__(
        self,
        draw: Draw,
        tokenizer: PreTrainedTokenizerBase,
        sampling: Sampling,
        most: int | None,
        may_end: bool = False,
    ) -> None:
        """Takes how to draw: an engine's session, the policy's tokenizer with a chat template, and a sampling whose
        end ids hold the template's end of turn.

        `most` is how many tokens the policy reads, state and reply together; None = no limit. `may_end`: a state that
        leaves no room for a reply ends its dialogue; otherwise it is an error.
        """
        self._draw, self._tokenizer, self._sampling, self._most = draw, tokenizer, sampling, most
        self._may_end = may_end

    def __call__(self, states: Sequence[Dialogue], seeds: Sequence[int]) -> Sequence[AssistantTurn | None]:
        """See `Assistant`. Raises UserError where a state leaves no room for a reply, unless that may end it."""
        prompts = encode_states(self._tokenizer, states, "a rollout")
        room = sys.maxsize if self._most is None else self._most - self._sampling.max_new_tokens
        fitting = [n for n, prompt in enumerate(prompts) if len(prompt) <= room]
        if len(fitting) < len(prompts) and not self._may_end:
            longest = max(map(len, prompts))
            raise UserError(
                f"a dialogue has come to {longest} tokens, and with a reply of up to {self._sampling.max_new_tokens} "
                f"the policy would read more than its {self._most}: use fewer turns or shorter replies."
            )
        replies: list[AssistantTurn | None] = [None] * len(prompts)
        if fitting:
            rollout = self._draw([prompts[n] for n in fitting], self._sampling, [seeds[n] for n in fitting]).rollout
            finished = rollout.finished.tolist()
            drawn = list(zip(rollout.response_rows(), finished, strict=True))
            texts = [decode_response(self._tokenizer, ids[:-1] if end else ids) for ids, end in drawn]
            contents = reply_contents(self._tokenizer, texts)
            for n, (ids, end), content in zip(fitting, drawn, contents, strict=True):
                replies[n] = AssistantTurn(prompts[n], ids, content, end)
        return replies


def roll_out(
    starts: Sequence[Dialogue], turns: Sequence[int], assistant: Assistant, user: User, seeds: Sequence[int]
) -> list[DialogueRollout]:
    """Goes on with B dialogues until each has so many turns, or ends before: see `DialogueRollout.ended`.

    Every turn is drawn for all dialogues that still go on at once. A dialogue's draws follow from its seed and the
    turn's number alone. `starts` have at least one message; one that has its replies already, (B,) at least 1, is left
    as it is.
    """
    messages: list[Dialogue] = [list(start) for start in starts]
    replies: list[dict[int, AssistantTurn]] = [{} for _ in starts]
    ended = ["" for _ in starts]
    while True:
        going = [n for n, reason in enumerate(ended) if not reason]
        asked = [n for n in going if len(messages[n]) % 2 == 0 and len(messages[n]) < 2 * turns[n]]
        if asked:
            questions = user([messages[n] for n in asked], asked, [_turn_seed(seeds[n], messages[n]) for n in asked])
            for n, question in zip(asked, questions, strict=True):
                if question:
                    messages[n].append({"role": "user", "content": question})
                else:
                    ended[n] = SILENT
        answered = [n for n in going if len(messages[n]) % 2 == 1]
        if not answered:
            return [DialogueRollout(*parts) for parts in zip(messages, replies, ended, strict=True)]
        drawn = assistant([messages[n] for n in answered], [_turn_seed(seeds[n], messages[n]) for n in answered])
        for n, reply in zip(answered, drawn, strict=True):
            if reply is None:
                ended[n] = OUTGROWN
                messages[n].pop()
            else:
                replies[n][len(messages[n]) // 2] = reply
                messages[n].append({"role": "assistant", "content": reply.text})


def roll_out_pairs(
    starts: Sequence[Dialogue],
    num_turns: Sequence[int],
    branch_turns: Sequence[int],
    assistant: Assistant,
    user: User,
    first_seeds: Sequence[int],
    second_seeds: Sequence[int],
) -> list[SampledPair]:
    """Each dialogue twice: from its start, and again from the user's message of one of its turns on.

    Args:
        starts: B dialogues, see `roll_out`.
        num_turns: of each dialogue.
        branch_turns: the turn of each from which on it is sampled again, from 0.
        assistant: answers.
        user: writes the user's messages.
        first_seeds: of each first dialogue.
        second_seeds: of each second dialogue.
    """
    first = roll_out(starts, num_turns, assistant, user, first_seeds)
    complete = [number for number, dialogue in enumerate(first) if not dialogue.ended]
    second: dict[int, DialogueRollout] = {}
    if complete:
        branches = [state(first[number].messages, branch_turns[number]) for number in complete]
        turns = [num_turns[number] for number in complete]
        seeds = [second_seeds[number] for number in complete]
        second = dict(zip(complete, roll_out(branches, turns, assistant, user, seeds), strict=True))
    return [SampledPair(branch_turns[number], first[number], second.get(number)) for number in range(len(first))]


def _turn_seed(seed: int, messages: Dialogue) -> int:
    return row_seed(seed, len(messages))
