# SPDX-License-Identifier: Apache-2.0
"""Dialogues between the policy as it is now and the users of the data, and pairs that share a state."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase

from dschat.config.refuel import RefuelOnlineConfig
from dschat.data.dialogue_examples import DialogueExample
from dschat.data.dialogues import Dialogue, state, turn_end
from dschat.models.engines import TrainedPolicy
from dschat.models.limits import position_limit
from dschat.models.tokenizer import end_token_id
from dschat.rl.types import Rollout
from dschat.rollouts.assembly import pad_prompts
from dschat.rollouts.dialogues import Assistant, Conversation, PolicyAssistant, Reply, UserFromData, roll_out
from dschat.rollouts.engine import Drawn, RolloutEngine
from dschat.rollouts.sampling import Sampling
from dschat.rollouts.uniform import row_seed
from dschat.run.distributed import device
from dschat.run.seeds import SeedKind
from dschat.run.stop import stopping_together

FIRST, SECOND, TURN = range(3)  # what a dialogue's seeds of a round are for


@dataclass(frozen=True)
class DrawnPair:
    """Two dialogues that are one up to the user's message of a turn."""

    turn: int  # h, from 0
    first: Conversation
    second: Conversation

    @property
    def replies(self) -> tuple[Reply, Reply]:
        """Those that are compared: of turn h."""
        return self.first.replies[self.turn], self.second.replies[self.turn]


def drawn_turn(seed: int, iteration: int, example: DialogueExample) -> int:
    """h, evenly from the turns of a dialogue; it follows from the run's seed, the round and the row alone."""
    return row_seed(seed, SeedKind.TRAINING, iteration, example.index, TURN) % example.num_turns


def dialogue_sampling(config: RefuelOnlineConfig, tokenizer: PreTrainedTokenizerBase) -> Sampling:
    """Replies end with the template's end of a turn, with EOS, or with --end_of_conversation_token."""
    own = end_token_id(tokenizer, config.end_of_conversation_token)
    end_ids = {turn_end(tokenizer).token_id, tokenizer.eos_token_id, own}
    return Sampling(
        max_new_tokens=config.max_answer_seq_len,
        end_ids=tuple(sorted(end_ids)),
        pad_id=tokenizer.pad_token_id,
        bos_id=tokenizer.bos_token_id,
        temperature=config.temperature,
    )


class DialogueSampler:
    """Draws dialogues with the policy. Every rank must call its methods; each may draw another number of them."""

    def __init__(
        self,
        policy: TrainedPolicy,
        tokenizer: PreTrainedTokenizerBase,
        sampling: Sampling,
        seed: int,
        engine: RolloutEngine,
    ) -> None:
        """Takes the policy and how to draw.

        Args:
            policy: its engine.
            tokenizer: of the policy.
            sampling: how replies are drawn.
            seed: of the run.
            engine: what draws them.
        """
        self._policy, self._tokenizer, self._seed, self._engine = policy, tokenizer, seed, engine
        self._most = position_limit(policy.module.inner)
        self.sampling = sampling

    def pairs(self, examples: Sequence[DialogueExample], iteration: int) -> list[DrawnPair]:
        """Two dialogues of each example: all turns, then those from h on once more.

        Args:
            examples: of this rank.
            iteration: number of the round; seeds are made from the run's seed, it and the example's index, so that
                draws depend neither on the rank nor on the other rows.
        """
        turns = [drawn_turn(self._seed, iteration, example) for example in examples]
        user, count = self._user_of(examples)
        seeds = [
            [row_seed(self._seed, SeedKind.TRAINING, iteration, example.index, part) for example in examples]
            for part in (FIRST, SECOND)
        ]
        with self._assistant(self.sampling) as assistant:
            first = roll_out([example.messages[:1] for example in examples], count, assistant, user, seeds[0])
            shared = [state(one.messages, turn) for one, turn in zip(first, turns, strict=True)]
            second = roll_out(shared, count, assistant, user, seeds[1])
        return [DrawnPair(*pair) for pair in zip(turns, first, second, strict=True)]

    def answers(self, examples: Sequence[DialogueExample], temperature: float) -> list[Conversation]:
        """Whole dialogues for an evaluation, the same draws every time; at temperature 0 with the likeliest tokens."""
        user, count = self._user_of(examples)
        seeds = [row_seed(self._seed, SeedKind.EVALUATION, example.index) for example in examples]
        with self._assistant(replace(self.sampling, temperature=temperature)) as assistant:
            return roll_out([example.messages[:1] for example in examples], count, assistant, user, seeds)

    def first_replies(self, states: Sequence[list[int]], seeds: Sequence[int]) -> Drawn:
        """Replies to states as ids, as the engine gives them."""
        self._policy.eval()
        with stopping_together(), self._engine.session(self._policy) as draw:
            return draw(states, self.sampling, seeds)

    def rollout_of(self, replies: Sequence[Reply], indices: Sequence[int]) -> Rollout:
        """B replies with their states as tensors; `indices` are the examples'."""
        prompts, mask = pad_prompts([reply.state_ids for reply in replies], self.sampling.pad_id, device())
        drawn = [torch.tensor(reply.ids) for reply in replies]
        ids = pad_sequence(drawn, True, self.sampling.pad_id).to(device())
        drawn_mask = pad_sequence([torch.ones_like(x, dtype=torch.bool) for x in drawn], True, False).to(device())
        return Rollout(
            input_ids=torch.cat([prompts, ids], dim=1),
            attention_mask=torch.cat([mask, drawn_mask], dim=1),
            response_mask=drawn_mask,
            prompt_index=torch.tensor(indices, device=device()),
            finished=torch.tensor([reply.finished for reply in replies], device=device()),
        )

    @contextmanager
    def _assistant(self, sampling: Sampling) -> Iterator[Assistant]:
        """The policy as it is now: its weights are gathered once for all turns inside."""
        self._policy.eval()
        with stopping_together(), self._engine.session(self._policy) as draw:
            yield PolicyAssistant(draw, self._tokenizer, sampling, self._most)

    @staticmethod
    def _user_of(examples: Sequence[DialogueExample]) -> tuple[UserFromData, list[int]]:
        said: list[Dialogue] = [example.messages for example in examples]
        return UserFromData(said), [example.num_turns for example in examples]
