# SPDX-License-Identifier: Apache-2.0
"""The models of an online REFUEL run: what talks with the users of the data, and log-probs of whole replies."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from dschat.data.collate import pad
from dschat.data.dialogues import Dialogue, DialogueExample, state
from dschat.data.encoding import turn_end
from dschat.models.engines import PolicyEngine, PolicyForward, TrainedPolicy
from dschat.models.layout import Layout, Lengths, PassSize, group_by_length, lay_out
from dschat.models.limits import position_limit
from dschat.models.tokenizer import end_token_id
from dschat.rollouts.dialogues import (
    Assistant,
    AssistantTurn,
    DialogueRollout,
    PolicyAssistant,
    UserFromData,
    roll_out,
)
from dschat.rollouts.engine import Generation, PolicySampler, RolloutEngine, pad_prompts
from dschat.rollouts.sampling import Sampling, row_seed
from dschat.run.distributed import device, largest_over_ranks
from dschat.run.state import SeedKind
from dschat.run.stop import raise_if_stopped, stopping_together
from dschat.scoring.source import DialogueScores
from dschat.settings.refuel import RefuelOnlineConfig
from macro_actions.types import Rollout

FIRST, SECOND, TURN = range(3)  # what a dialogue's seeds of a round are for


@dataclass(frozen=True)
class DrawnPair:
    """Two dialogues that are one up to the user's message of a turn."""

    turn: int  # h, from 0
    first: DialogueRollout
    second: DialogueRollout

    @property
    def replies(self) -> tuple[AssistantTurn, AssistantTurn]:
        """Those that are compared: of turn h."""
        return self.first.replies[self.turn], self.second.replies[self.turn]


def draws_of(pairs: Sequence[DrawnPair]) -> list[Lengths]:
    """Lengths of the replies that were sampled together: those of one turn, in the first dialogues or the second."""
    draws = []
    for rollouts in ([pair.first for pair in pairs], [pair.second for pair in pairs]):
        turns = {turn for rollout in rollouts for turn in rollout.replies}
        for turn in sorted(turns):
            replies = [rollout.replies[turn] for rollout in rollouts if turn in rollout.replies]
            states = np.array([len(reply.state_ids) for reply in replies])
            draws.append(Lengths(states, np.array([len(reply.ids) for reply in replies])))
    return draws


def drawn_turn(seed: int, iteration: int, example: DialogueExample) -> int:
    """h, evenly from the turns of a dialogue; it follows from the run's seed, the round and the row alone."""
    return row_seed(seed, SeedKind.TRAINING, iteration, example.index, TURN) % example.num_turns


def dialogue_sampling(config: RefuelOnlineConfig, tokenizer: PreTrainedTokenizerBase) -> Sampling:
    """Replies end with the template's end of a turn, with EOS, or with --end_of_conversation_token."""
    own = end_token_id(tokenizer, config.data.end_of_conversation_token)
    end_ids = {turn_end(tokenizer).token_id, tokenizer.eos_token_id, own}
    return Sampling(
        max_new_tokens=config.sampling.max_answer_seq_len,
        end_ids=tuple(sorted(end_ids)),
        pad_id=tokenizer.pad_token_id,
        bos_id=tokenizer.bos_token_id,
        temperature=config.sampling.temperature,
    )


class DialogueSampler(PolicySampler):
    """Draws dialogues with the policy. Every rank must call its methods; each may draw another number of them."""

    def pairs(self, examples: Sequence[DialogueExample], iteration: int) -> list[DrawnPair]:
        """Two dialogues of each example of this rank: all turns, then those from h on once more.

        Seeds are made from the run's seed, the round and the example's index: draws depend neither on the rank nor on
        other rows.
        """
        turns = [drawn_turn(self.seed, iteration, example) for example in examples]
        user, count = self._user_of(examples)
        seeds = [
            [row_seed(self.seed, SeedKind.TRAINING, iteration, example.index, part) for example in examples]
            for part in (FIRST, SECOND)
        ]
        with self._assistant(self.sampling) as assistant:
            first = roll_out([example.messages[:1] for example in examples], count, assistant, user, seeds[0])
            shared = [state(one.messages, turn) for one, turn in zip(first, turns, strict=True)]
            second = roll_out(shared, count, assistant, user, seeds[1])
        return [DrawnPair(*pair) for pair in zip(turns, first, second, strict=True)]

    def answers(self, examples: Sequence[DialogueExample], temperature: float) -> list[DialogueRollout]:
        """Whole dialogues for an evaluation, the same draws every time; at temperature 0 with the likeliest tokens."""
        user, count = self._user_of(examples)
        seeds = [row_seed(self.seed, SeedKind.EVALUATION, example.index) for example in examples]
        with self._assistant(replace(self.sampling, temperature=temperature)) as assistant:
            return roll_out([example.messages[:1] for example in examples], count, assistant, user, seeds)

    def first_replies(self, states: Sequence[list[int]], seeds: Sequence[int]) -> Generation:
        """Replies to states as ids, as the engine gives them."""
        self.policy.eval()
        with stopping_together(), self.engine.session(self.policy) as draw:
            return draw(states, self.sampling, seeds)

    def rollout_of(self, replies: Sequence[AssistantTurn], indices: Sequence[int]) -> Rollout:
        """B replies with their states as tensors; `indices` are the examples'."""
        prompts, mask = pad_prompts([reply.state_ids for reply in replies], self.sampling.pad_id, device())
        ids, drawn_mask = (
            x.to(device()) for x in pad([reply.ids for reply in replies], self.sampling.pad_id, "right")
        )
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
        self.policy.eval()
        with stopping_together(), self.engine.session(self.policy) as draw:
            yield PolicyAssistant(draw, self.tokenizer, sampling, position_limit(self.policy.module.inner))

    @staticmethod
    def _user_of(examples: Sequence[DialogueExample]) -> tuple[UserFromData, list[int]]:
        said: list[Dialogue] = [example.messages for example in examples]
        return UserFromData(said), [example.num_turns for example in examples]


@dataclass(frozen=True)
class RefuelModels:
    """Engines and the source of scores of a run, and what draws from the policy."""

    policy: TrainedPolicy
    reference: PolicyEngine | None  # None where no reward depends on it
    reward: DialogueScores
    rollouts: RolloutEngine


def pair_layouts(rollout: Rollout, size: PassSize) -> list[Layout]:
    """All pairs for forward passes, those of similar length together. Every rank must call it with as many.

    The passes follow from the lengths alone, so that a policy that has not changed gives the same numbers again. Of 2N
    rows, row n and row N + n are a pair; a pass's rows are pairs, its tokens those of both replies with their states.

    Returns layouts of 2n rows; the first n are first replies, the others their partners in the same order.
    """
    lengths = Lengths.of(rollout)
    count = len(lengths.totals) // 2
    longer = np.maximum(lengths.totals[:count], lengths.totals[count:])
    groups = group_by_length(2 * longer, size, largest_over_ranks)
    return [lay_out(rollout, np.concatenate([pairs, pairs + count]), lengths) for pairs in groups]


def summed_logprobs(model: PolicyForward, rows: Layout, temperature: float) -> Tensor:
    """Σ log π(y_j | s, y_<j) over each reply's tokens, (b,) float32, differentiable."""
    logprobs, _ = model(rows.input_ids, None, rows.targets, temperature, False)
    return rows.spread(logprobs).sum(1)


@torch.no_grad()
def reply_logprobs(model: PolicyForward, layouts: Sequence[Layout], temperature: float) -> Tensor:
    """The same for all B rows of some layouts, by row number; without gradient."""
    result = torch.zeros(sum(len(rows.rows) for rows in layouts), device=layouts[0].rows.device)
    for rows in layouts:
        raise_if_stopped()
        result[rows.rows] = summed_logprobs(model, rows, temperature)
    return result
