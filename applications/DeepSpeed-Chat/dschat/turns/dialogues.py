# SPDX-License-Identifier: Apache-2.0
"""Multi-turn rollouts: the policy and a user answer each other, all dialogues of a batch together, turn by turn."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from transformers import PreTrainedTokenizerBase

from dschat.base.errors import UserError
from dschat.data.dialogues import Dialogue, encode_states, state
from dschat.data.encoding import decode_sampled
from dschat.data.turn_end import reply_contents
from dschat.rollouts.engine import ResponseSampler
from dschat.rollouts.sampling import Sampling, row_seed

OUTGROWN = "the dialogue outgrew the policy"
SILENT = "the user asked nothing more, or could not read so long a dialogue"


@dataclass(frozen=True)
class AssistantTurn:
    """A reply of the policy in one turn."""

    state_ids: list[int]  # the prompt: the dialogue before the reply
    ids: list[int]  # of the reply, the end token included
    text: str  # without special tokens, and without what the chat template puts around a message's content
    finished: bool  # whether it ended with an end token; else it was cut


@dataclass
class DialogueRollout:
    """A dialogue as far as it went."""

    messages: Dialogue  # of both sides, ends with a reply; empty if even the first turn got none
    # Sampled replies by turn; turns that were there before the rollout are missing.
    replies: dict[int, AssistantTurn] = field(default_factory=dict)
    ended: str = ""  # why it has fewer turns than it should, OUTGROWN or SILENT; empty if it has all of them

    @property
    def in_order(self) -> list[AssistantTurn]:
        """The sampled replies in the order of their turns."""
        return [reply for _, reply in sorted(self.replies.items())]

    @property
    def finished(self) -> list[bool]:
        """Whether each sampled reply ended with an end token, in the order of the turns; else it was cut."""
        return [reply.finished for reply in self.in_order]


@dataclass(frozen=True)
class SampledPair:
    """Two dialogues with the same messages up to the user's message of one turn."""

    turn: int  # the first turn that differs, from 0
    first: DialogueRollout
    second: DialogueRollout | None  # None if the first ended early

    @property
    def dialogues(self) -> tuple[DialogueRollout, DialogueRollout]:
        """Both dialogues of a pair whose first one did not end early."""
        assert self.second is not None
        return self.first, self.second

    @property
    def replies(self) -> tuple[AssistantTurn, AssistantTurn]:
        """The replies of the first turn that differs."""
        first, second = self.dialogues
        return first.replies[self.turn], second.replies[self.turn]

    @property
    def ended(self) -> str:
        """Why a dialogue of the pair has fewer turns than it should; empty if both are complete."""
        return self.first.ended if self.second is None else self.second.ended


class Assistant(Protocol):
    """Answers batches of dialogues."""

    def __call__(self, states: Sequence[Dialogue], seeds: Sequence[int]) -> Sequence[AssistantTurn | None]:
        """Replies to states, each of which ends with a user's message.

        A reply is None if its state is too long to be answered. A row's seed alone decides its random numbers.
        """


class User(Protocol):
    """Writes the user's messages."""

    def __call__(
        self, dialogues: Sequence[Dialogue], numbers: Sequence[int], seeds: Sequence[int]
    ) -> Sequence[str | None]:
        """Writes the next message of dialogues, each of which ends with a reply.

        Args:
            dialogues: the messages so far.
            numbers: numbers of these dialogues in the batch.
            seeds: one per dialogue, for users that sample.

        Returns:
            The messages; None or an empty one ends the dialogue.
        """


class UserFromData:
    """Repeats the user's messages of the data, whatever the assistant answers."""

    def __init__(self, dialogues: Sequence[Dialogue]) -> None:
        self._dialogues = dialogues

    def __call__(self, dialogues: Sequence[Dialogue], numbers: Sequence[int], seeds: Sequence[int]) -> list[str]:
        """See `User`."""
        messages = []
        for dialogue, number in zip(dialogues, numbers, strict=True):
            messages.append(self._dialogues[number][len(dialogue)]["content"])
        return messages


class PolicyAssistant:
    """A policy whose weights are ready for sampling."""

    def __init__(
        self,
        sampler: ResponseSampler,
        tokenizer: PreTrainedTokenizerBase,
        sampling: Sampling,
        max_tokens: int | None,
        may_end: bool = False,
    ) -> None:
        """Stores what to sample with.

        Args:
            sampler: sampler of an engine's session.
            tokenizer: the policy's, with a chat template.
            sampling: its end ids include the template's end of turn.
            max_tokens: longest state and reply together that the policy reads; None = no limit.
            may_end: a state that leaves no room for a reply ends its dialogue; otherwise it is an error.
        """
        self._sampler = sampler
        self._tokenizer = tokenizer
        self._sampling = sampling
        self._max_tokens = max_tokens
        self._may_end = may_end

    def __call__(self, states: Sequence[Dialogue], seeds: Sequence[int]) -> Sequence[AssistantTurn | None]:
        """See `Assistant`. Raises UserError if a state leaves no room for a reply, unless that may end it."""
        prompts = encode_states(self._tokenizer, states, "a rollout")
        max_prompt = sys.maxsize if self._max_tokens is None else self._max_tokens - self._sampling.max_new_tokens
        fitting = [n for n, prompt in enumerate(prompts) if len(prompt) <= max_prompt]
        if len(fitting) < len(prompts) and not self._may_end:
            longest = max(map(len, prompts))
            raise UserError(
                f"a dialogue has come to {longest} tokens, and with a reply of up to {self._sampling.max_new_tokens} "
                f"the policy would read more than its {self._max_tokens}: use fewer turns or shorter replies."
            )
        replies: list[AssistantTurn | None] = [None] * len(prompts)
        if not fitting:
            return replies

        fitting_prompts = [prompts[n] for n in fitting]
        fitting_seeds = [seeds[n] for n in fitting]
        rollout = self._sampler(fitting_prompts, self._sampling, fitting_seeds).rollout
        responses = rollout.response_rows()
        finished = rollout.finished.tolist()
        texts = []
        for ids, has_end in zip(responses, finished, strict=True):
            texts.append(decode_sampled(self._tokenizer, ids, has_end))
        contents = reply_contents(self._tokenizer, texts)
        for n, ids, content, has_end in zip(fitting, responses, contents, finished, strict=True):
            replies[n] = AssistantTurn(prompts[n], ids, content, has_end)
        return replies


def roll_out(
    starts: Sequence[Dialogue], turns: Sequence[int], assistant: Assistant, user: User, seeds: Sequence[int]
) -> list[DialogueRollout]:
    """Continues B dialogues until each has its number of turns, or ends before; see `DialogueRollout.ended`.

    Every turn is sampled for all unfinished dialogues at once. A dialogue's random numbers follow from its seed and
    the turn's number alone.

    Args:
        starts: dialogues with at least one message.
        turns: replies that each shall have, at least 1; a dialogue that has them already is left as it is.
        assistant: writes the replies.
        user: writes the user's messages.
        seeds: one per dialogue.
    """
    dialogues = [DialogueRollout(list(start)) for start in starts]

    def turn_seeds(numbers: Sequence[int]) -> list[int]:
        return [row_seed(seeds[n], len(dialogues[n].messages)) for n in numbers]

    while True:
        going_on = [n for n, dialogue in enumerate(dialogues) if not dialogue.ended]

        # The user's turn: an even number of messages, and replies still missing.
        users_turn = []
        for n in going_on:
            length = len(dialogues[n].messages)
            if length % 2 == 0 and length < 2 * turns[n]:
                users_turn.append(n)
        if users_turn:
            messages = [dialogues[n].messages for n in users_turn]
            questions = user(messages, users_turn, turn_seeds(users_turn))
            for n, question in zip(users_turn, questions, strict=True):
                if question:
                    dialogues[n].messages.append({"role": "user", "content": question})
                else:
                    dialogues[n].ended = SILENT

        # The assistant's turn: the last message is the user's.
        assistants_turn = [n for n in going_on if len(dialogues[n].messages) % 2 == 1]
        if not assistants_turn:
            return dialogues
        states = [dialogues[n].messages for n in assistants_turn]
        replies = assistant(states, turn_seeds(assistants_turn))
        for n, reply in zip(assistants_turn, replies, strict=True):
            dialogue = dialogues[n]
            if reply is None:
                dialogue.ended = OUTGROWN
                dialogue.messages.pop()
            else:
                dialogue.replies[len(dialogue.messages) // 2] = reply
                dialogue.messages.append({"role": "assistant", "content": reply.text})


@dataclass(frozen=True)
class PairStart:
    """What a pair of dialogues begins with.

    Attributes:
        messages: at least one.
        turns: replies that each dialogue shall have.
        branch_turn: the turn from which on the second one is sampled again, from 0.
        first_seed: seed of the first dialogue.
        second_seed: seed of the second dialogue.
    """

    messages: Dialogue
    turns: int
    branch_turn: int
    first_seed: int
    second_seed: int


def roll_out_pairs(starts: Sequence[PairStart], assistant: Assistant, user: User) -> list[SampledPair]:
    """Each dialogue twice: from its start, and again from the user's message of one of its turns on; see `roll_out`.

    A dialogue that ends early is not sampled again.
    """
    messages = [start.messages for start in starts]
    turns = [start.turns for start in starts]
    first = roll_out(messages, turns, assistant, user, [start.first_seed for start in starts])

    complete = [number for number, dialogue in enumerate(first) if not dialogue.ended]
    branches = [state(first[number].messages, starts[number].branch_turn) for number in complete]
    turns = [starts[number].turns for number in complete]
    again = roll_out(branches, turns, assistant, user, [starts[number].second_seed for number in complete])
    second = dict(zip(complete, again, strict=True))

    pairs = []
    for number, start in enumerate(starts):
        pairs.append(SampledPair(start.branch_turn, first[number], second.get(number)))
    return pairs
