# SPDX-License-Identifier: Apache-2.0
"""Multi-turn rollouts: the policy and a user answer each other, all dialogues of a batch together, turn by turn."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from transformers import PreTrainedTokenizerBase

from dschat.data.dialogues import Dialogue, encode_states
from dschat.data.encoding import decode_response
from dschat.errors import UserError
from dschat.rollouts.engine import Draw
from dschat.rollouts.sampling import Sampling
from dschat.rollouts.uniform import row_seed


@dataclass(frozen=True)
class Reply:
    """What the policy drew in one turn."""

    state_ids: list[int]  # what it answered
    ids: list[int]  # drawn, the end token included
    text: str  # without special tokens
    finished: bool  # whether it ended by itself; else it was cut


@dataclass(frozen=True)
class Conversation:
    """A dialogue as far as it went.

    Attributes:
        messages: what both said, ends with a reply.
        replies: those that were drawn, by turn; turns that were there before the rollout are missing.
    """

    messages: Dialogue
    replies: dict[int, Reply]


class Assistant(Protocol):
    """Answers whole batches of dialogues."""

    def __call__(self, states: Sequence[Dialogue], seeds: Sequence[int]) -> list[Reply]:
        """One reply to each state, which ends with a user's message; a row's seed alone decides its draws."""


class User(Protocol):
    """Writes the user's messages."""

    def __call__(self, dialogues: Sequence[Dialogue], numbers: Sequence[int], seeds: Sequence[int]) -> list[str]:
        """The next message of each dialogue, which ends with a reply.

        Args:
            dialogues: so far.
            numbers: which dialogues of the batch these are.
            seeds: of the draws, where there are any.
        """


class UserFromData:
    """Says what the user of the data said, whatever the assistant answers."""

    def __init__(self, dialogues: Sequence[Dialogue]) -> None:
        """Takes the batch's dialogues as the data have them."""
        self._dialogues = dialogues

    def __call__(self, dialogues: Sequence[Dialogue], numbers: Sequence[int], seeds: Sequence[int]) -> list[str]:
        pairs = zip(dialogues, numbers, strict=True)
        return [self._dialogues[number][len(dialogue)]["content"] for dialogue, number in pairs]


class PolicyAssistant:
    """A policy whose weights are ready for drawing."""

    def __init__(self, draw: Draw, tokenizer: PreTrainedTokenizerBase, sampling: Sampling, most: int | None) -> None:
        """Takes how to draw.

        Args:
            draw: from an engine's session.
            tokenizer: of the policy, with a chat template.
            sampling: how replies are drawn; the template's end of turn is among its end ids.
            most: tokens that the policy reads at most, state and reply together; None = no limit.
        """
        self._draw, self._tokenizer, self._sampling, self._most = draw, tokenizer, sampling, most

    def __call__(self, states: Sequence[Dialogue], seeds: Sequence[int]) -> list[Reply]:
        """See `Assistant`. Raises UserError where a state leaves no room for a reply."""
        prompts = encode_states(self._tokenizer, states, "a rollout")
        longest = max(map(len, prompts))
        if self._most is not None and longest + self._sampling.max_new_tokens > self._most:
            raise UserError(
                f"a dialogue has come to {longest} tokens, and with a reply of up to {self._sampling.max_new_tokens} "
                f"the policy would read more than its {self._most}: use fewer turns or shorter replies."
            )
        rollout = self._draw(prompts, self._sampling, seeds).rollout
        drawn = zip(prompts, rollout.response_rows(), rollout.finished.tolist(), strict=True)
        return [Reply(prompt, ids, decode_response(self._tokenizer, ids), finished) for prompt, ids, finished in drawn]


def roll_out(
    starts: Sequence[Dialogue], turns: Sequence[int], assistant: Assistant, user: User, seeds: Sequence[int]
) -> list[Conversation]:
    """Goes on with dialogues until each has so many turns.

    Every turn is drawn for all dialogues that still go on at once. A dialogue's draws follow from its seed and the
    turn's number alone.

    Args:
        starts: B dialogues of at least one message; one that has its turns already is left as it is.
        turns: (B,) replies that each shall have, at least 1.
        assistant: answers.
        user: asks.
        seeds: (B,) of the dialogues.

    Returns:
        B conversations.
    """
    messages: list[Dialogue] = [list(start) for start in starts]
    replies: list[dict[int, Reply]] = [{} for _ in starts]
    while True:
        asked = [n for n, said in enumerate(messages) if len(said) % 2 == 0 and len(said) < 2 * turns[n]]
        if asked:
            questions = user([messages[n] for n in asked], asked, [_turn_seed(seeds[n], messages[n]) for n in asked])
            for n, question in zip(asked, questions, strict=True):
                messages[n].append({"role": "user", "content": question})
        answered = [n for n, said in enumerate(messages) if len(said) % 2 == 1]
        if not answered:
            return [Conversation(said, drawn) for said, drawn in zip(messages, replies, strict=True)]
        drawn = assistant([messages[n] for n in answered], [_turn_seed(seeds[n], messages[n]) for n in answered])
        for n, reply in zip(answered, drawn, strict=True):
            replies[n][len(messages[n]) // 2] = reply
            messages[n].append({"role": "assistant", "content": reply.text})


def _turn_seed(seed: int, messages: Dialogue) -> int:
    return row_seed(seed, len(messages))
