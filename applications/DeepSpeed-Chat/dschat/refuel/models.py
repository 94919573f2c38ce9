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

from dschat.data.batches import pad
from dschat.data.dialogues import DialogueExample
from dschat.data.turn_end import turn_end
from dschat.models.engines import PolicyEngine, PolicyForward, TrainedPolicy
from dschat.models.layout import Layout, Lengths, PassSize, group_by_length, lay_out
from dschat.models.limits import position_limit
from dschat.models.tokenizer import end_token_id
from dschat.refuel.online_settings import RefuelOnlineConfig
from dschat.refuel.scores import DialogueScores
from dschat.rollouts.engine import Generation, PolicySampler, RolloutEngine, pad_prompts
from dschat.rollouts.sampling import Sampling, row_seed
from dschat.run.distributed import device, largest_over_ranks
from dschat.run.state import SeedKind
from dschat.run.stop import raise_if_stopped, stopping_together
from dschat.turns.dialogues import (
    Assistant,
    AssistantTurn,
    DialogueRollout,
    PairStart,
    PolicyAssistant,
    SampledPair,
    UserFromData,
    roll_out,
    roll_out_pairs,
)
from macro_actions.types import Rollout

FIRST, SECOND, TURN = range(3)  # what the seeds of a dialogue are for in a round


@dataclass(frozen=True)
class RefuelModels:
    """Engines and the score source of a run.

    Attributes:
        policy: the policy that is trained.
        reference: its frozen start; None if no reward depends on it.
        reward: scores dialogues.
        rollouts: samples from the policy.
    """

    policy: TrainedPolicy
    reference: PolicyEngine | None
    reward: DialogueScores
    rollouts: RolloutEngine


def sampled_lengths(pairs: Sequence[SampledPair]) -> Lengths:
    """Lengths of all replies that were sampled for pairs of dialogues."""
    replies: list[AssistantTurn] = []
    for pair in pairs:
        for dialogue in pair.dialogues:
            replies += dialogue.in_order
    state_lengths = np.array([len(reply.state_ids) for reply in replies])
    return Lengths(state_lengths, np.array([len(reply.ids) for reply in replies]))


def compared_turn(seed: int, iteration: int, example: DialogueExample) -> int:
    """The turn h whose replies are compared, uniform over a dialogue's turns.

    It follows from the run's seed, the round and the row alone.
    """
    return row_seed(seed, SeedKind.TRAINING, iteration, example.index, TURN) % example.num_turns


def dialogue_sampling(config: RefuelOnlineConfig, tokenizer: PreTrainedTokenizerBase) -> Sampling:
    """How replies are sampled: they end with the template's end of a turn, EOS, or --end_of_conversation_token."""
    end_of_conversation = end_token_id(tokenizer, config.data.end_of_conversation_token)
    end_ids = {turn_end(tokenizer).token_id, tokenizer.eos_token_id, end_of_conversation}
    return Sampling(
        max_new_tokens=config.sampling.max_answer_seq_len,
        end_ids=tuple(sorted(end_ids)),
        pad_id=tokenizer.pad_token_id,
        bos_id=tokenizer.bos_token_id,
        temperature=config.sampling.temperature,
    )


class DialogueSampler(PolicySampler):
    """Samples dialogues of the policy with the users of the data.

    Every rank must call its methods; each may have another number of dialogues.
    """

    def sample_pairs(self, examples: Sequence[DialogueExample], iteration: int) -> list[SampledPair]:
        """Two dialogues of each example of this rank: all turns, then those from h on once more.

        Seeds follow from the run's seed, the round and the example's index, so that a dialogue depends neither on the
        rank nor on other rows.
        """
        starts = []
        for example in examples:
            start = PairStart(
                example.messages[:1],
                example.num_turns,
                compared_turn(self.seed, iteration, example),
                row_seed(self.seed, SeedKind.TRAINING, iteration, example.index, FIRST),
                row_seed(self.seed, SeedKind.TRAINING, iteration, example.index, SECOND),
            )
            starts.append(start)
        user = UserFromData([example.messages for example in examples])
        with self._assistant(self.sampling) as assistant:
            return roll_out_pairs(starts, assistant, user)

    def answers(self, examples: Sequence[DialogueExample], temperature: float) -> list[DialogueRollout]:
        """Whole dialogues for an evaluation, with the same seeds every time; at temperature 0 greedy."""
        starts = [example.messages[:1] for example in examples]
        num_turns = [example.num_turns for example in examples]
        user = UserFromData([example.messages for example in examples])
        seeds = [row_seed(self.seed, SeedKind.EVALUATION, example.index) for example in examples]
        with self._assistant(replace(self.sampling, temperature=temperature)) as assistant:
            return roll_out(starts, num_turns, assistant, user, seeds)

    def first_replies(self, states: Sequence[list[int]], seeds: Sequence[int]) -> Generation:
        """Replies to states, which are token ids, as the engine gives them."""
        self.policy.eval()
        with stopping_together(), self.engine.session(self.policy) as sample_responses:
            return sample_responses(states, self.sampling, seeds)

    def rollout_of(self, replies: Sequence[AssistantTurn], indices: Sequence[int]) -> Rollout:
        """B replies with their states as tensors; `indices` are the examples'."""
        pad_id = self.sampling.pad_id
        prompt_ids, prompt_mask = pad_prompts([reply.state_ids for reply in replies], pad_id, device())
        reply_ids, reply_mask = pad([reply.ids for reply in replies], pad_id, "right")
        reply_ids = reply_ids.to(device())
        reply_mask = reply_mask.to(device())
        return Rollout(
            input_ids=torch.cat([prompt_ids, reply_ids], dim=1),
            attention_mask=torch.cat([prompt_mask, reply_mask], dim=1),
            response_mask=reply_mask,
            prompt_index=torch.tensor(indices, device=device()),
            finished=torch.tensor([reply.finished for reply in replies], device=device()),
        )

    @contextmanager
    def _assistant(self, sampling: Sampling) -> Iterator[Assistant]:
        """The policy with its current weights, which are gathered once for all turns inside."""
        self.policy.eval()
        with stopping_together(), self.engine.session(self.policy) as sample_responses:
            limit = position_limit(self.policy.module.inner)
            yield PolicyAssistant(sample_responses, self.tokenizer, sampling, limit)


def pair_layouts(rollout: Rollout, size: PassSize) -> list[Layout]:
    """Layouts of forward passes with pairs of similar length together. Every rank must call it with equally many.

    The passes follow from the lengths alone, so that a policy that has not changed gives the same numbers again. Of 2N
    rows, row n and row N + n are a pair; a pass's rows are pairs, its tokens those of both replies with their states.

    Returns layouts of 2n rows; the first n are first replies, the others their partners in the same order.
    """
    lengths = Lengths.of(rollout)
    count = len(lengths.totals) // 2
    longer = np.maximum(lengths.totals[:count], lengths.totals[count:])
    groups = group_by_length(2 * longer, size, largest_over_ranks)
    passes = []
    for pairs in groups:
        rows = np.concatenate([pairs, pairs + count])
        passes.append(lay_out(rollout, rows, lengths))
    return passes


def summed_logprobs(model: PolicyForward, layout: Layout, temperature: float) -> Tensor:
    """Σ log π(y_j | s, y_<j) over each reply's tokens, (b,) float32, differentiable."""
    logprobs, _ = model(layout.input_ids, None, layout.targets, temperature, False)
    return layout.spread(logprobs).sum(1)


@torch.no_grad()
def reply_logprobs(model: PolicyForward, layouts: Sequence[Layout], temperature: float) -> Tensor:
    """Σ log π(y_j | s, y_<j) of all B rows of some layouts, (B,) float32 by row number; without gradient."""
    count = sum(len(layout.rows) for layout in layouts)
    result = torch.zeros(count, device=layouts[0].rows.device)
    for layout in layouts:
        raise_if_stopped()
        result[layout.rows] = summed_logprobs(model, layout, temperature)
    return result
