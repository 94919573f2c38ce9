# SPDX-License-Identifier: Apache-2.0
"""Values of the states before macro actions, measured by sampling: completions from there are drawn and scored."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dschat.data.encoding import decode_response
from dschat.data.examples import PromptExample
from dschat.rollouts.sampling import row_seed
from dschat.run.distributed import device, largest_over_ranks, world_size
from dschat.run.state import Json, Progress, SeedKind, random_states, set_random_states
from dschat.scoring.source import ResponseTexts
from dschat.training.ppo.models import ActorSampler
from macro_actions.types import MacroActions, Rollout, select_rows

# Completed responses, their texts, and their lengths in tokens → a score of each, (N,), as it is trained on, and which
# could not be scored, (N,) bool, if any.
Score = Callable[[Rollout, ResponseTexts, Tensor], tuple[Tensor, Tensor | None]]


@dataclass(frozen=True)
class State:
    """What a response has come to before one of its macro actions."""

    row: int
    number: int  # of the macro action
    start: int  # tokens of the response before it


class SegmentValues:
    """V̂(s) = the mean score of K completions from s (Kazemnejad et al. 2024, "VinePPO").

    Completions without a score are left out; of a state that has none left, it is the mean over the part.

    They are drawn part by part of a rollout. A run that is stopped keeps the parts that are done: with the same
    weights it draws the same rollout again, and goes on with the next part.
    """

    def __init__(self, completions: int, rows: int) -> None:
        """Takes K, and the responses of a part."""
        self._completions, self._rows = completions, rows
        self._of = (-1, 0)  # iteration and checksum of the rollout that the parts are of
        self._parts: list[Tensor] = []  # (b, M) each
        self._tokens: list[int] = []  # drawn for each
        self._random: list[dict[str, Tensor]] = []  # the global random states after each, which scores may draw from

    def __call__(
        self,
        sample: ActorSampler,
        rollout: Rollout,
        macro: MacroActions,
        examples: Sequence[PromptExample],
        iteration: int,
        score: Score,
    ) -> tuple[Tensor, int]:
        """Every rank must call it, with as many rows.

        Args:
            sample: what draws.
            rollout: B rows.
            macro: their macro actions, M at most.
            examples: the prompt of each row.
            iteration: a part of the seeds.
            score: see `Score`.

        Returns:
            values (B, M) float32, 0 where there is no macro action; and the tokens that were drawn on this rank.

        Raises:
            Stopped: soon after a signal.
        """
        of = (iteration, _checksum(rollout, macro))
        if self._of != of:
            self._of, self._parts, self._tokens, self._random = of, [], [], []
        ids, starts = rollout.response_rows(), (macro.lengths.cumsum(1) - macro.lengths).tolist()
        counts = macro.mask.sum(1).tolist()
        done = -largest_over_ranks(-len(self._parts))
        del self._parts[done:], self._tokens[done:], self._random[done:]
        if self._random and self._random[-1]:
            set_random_states(self._random[-1])
        for first in range(done * self._rows, len(ids), self._rows):
            rows = range(first, min(first + self._rows, len(ids)))
            # A response without a token, which could not be scored, is completed all the same: no rank is without one.
            states = [
                State(row, n, starts[row][n] if counts[row] else 0) for row in rows for n in range(counts[row] or 1)
            ]
            # The actor's weights do not change from one part to the next.
            again = first > done * self._rows
            means, tokens = self._measured(sample, rollout, ids, states, examples, iteration, score, again)
            part = means.new_zeros(len(rows), max(macro.mask.shape[1], 1))
            part[[state.row - first for state in states], [state.number for state in states]] = means
            self._parts.append(part[:, : macro.mask.shape[1]])
            self._tokens.append(tokens)
            self._random.append(random_states())
        return torch.where(macro.mask, torch.cat(self._parts), 0.0), sum(self._tokens)

    def forget(self) -> None:
        """The iteration has the values."""
        self._of, self._parts, self._tokens, self._random = (-1, 0), [], [], []

    def _measured(
        self,
        sample: ActorSampler,
        rollout: Rollout,
        ids: Sequence[Sequence[int]],
        states: Sequence[State],
        examples: Sequence[PromptExample],
        iteration: int,
        score: Score,
        again: bool,
    ) -> tuple[Tensor, int]:
        """The mean score of the completions of each state, (S,), and the tokens of all."""
        each = [state for state in states for _ in range(self._completions)]
        numbers = list(range(self._completions)) * len(states)
        samples = [0] * len(ids) if rollout.sample_index is None else rollout.sample_index.tolist()
        asked = [examples[state.row] for state in each]
        seeds = [
            row_seed(sample.seed, SeedKind.COMPLETION, iteration, e.index, samples[state.row], state.number, n)
            for state, e, n in zip(each, asked, numbers, strict=True)
        ]
        before = [list(ids[state.row][: state.start]) for state in each]
        prompts = [[*example.prompt_ids, *prefix] for example, prefix in zip(asked, before, strict=True)]
        limits = [sample.sampling.max_new_tokens - state.start for state in each]
        with sample.session(again) as draw:
            drawn = draw(prompts, sample.sampling, seeds, limits=limits)
        lengths = drawn.rollout.response_mask.sum(1)
        index = torch.tensor([example.index for example in asked], device=lengths.device)
        rows = zip(before, drawn.rollout.response_rows(), strict=True)
        texts = ResponseTexts(
            [example.prompt_text for example in asked],
            [decode_response(sample.tokenizer, [*prefix, *completion]) for prefix, completion in rows],
            [example.row for example in asked],
        )
        more = largest_over_ranks(len(asked)) - len(asked)  # so that all ranks score as many
        padded = torch.tensor([*range(len(asked)), *[0] * more], device=lengths.device)
        whole = lengths + torch.tensor([state.start for state in each], device=lengths.device)
        completed = select_rows(replace(drawn.rollout, prompt_index=index), padded)
        scores, missing = score(completed, texts.repeated(more), whole[padded])
        counted = torch.ones_like(lengths, dtype=torch.bool) if missing is None else ~missing[: len(asked)]
        # Of logits that are not finite: that stops the run, or leaves the rollout out.
        scores = torch.where(drawn.bad_rows, torch.nan, torch.where(counted, scores[: len(asked)], 0.0))
        by_state, count = scores.view(-1, self._completions).sum(1), counted.view(-1, self._completions).sum(1)
        mean = scores.sum() / counted.sum().clamp(min=1)
        return torch.where(count > 0, by_state / count.clamp(min=1), mean), int(lengths.sum())

    def state(self) -> tuple[Json, dict[str, Tensor]]:
        """What a checkpoint holds of the parts that are done on all ranks. Every rank must call it."""
        done = -largest_over_ranks(-len(self._parts))
        if not done:
            return {}, {}
        tensors = {f"completions.{n}": part for n, part in enumerate(self._parts[:done])}
        tensors |= {f"completions.random.{name}": state for name, state in self._random[done - 1].items()}
        known = torch.tensor([*self._of, *self._tokens[:done]])
        return {"completions": [world_size(), done]}, tensors | {"completions.of": known}

    def load(self, state: Progress) -> None:
        """Takes that up, unless ranks have other prompts now."""
        if state.numbers.get("completions", [0])[0] == world_size():
            iteration, checksum, *self._tokens = state.tensors["completions.of"].tolist()
            self._of = iteration, checksum
            self._parts = [state.tensors[f"completions.{n}"].to(device()) for n in range(len(self._tokens))]
            start = "completions.random."
            found = {name.removeprefix(start): x for name, x in state.tensors.items() if name.startswith(start)}
            self._random = [found] * len(self._parts)  # those before the last are not needed again


def _checksum(rollout: Rollout, macro: MacroActions) -> int:
    """Checksum of the responses, without padding, and of the lengths of their macro actions."""
    lengths = [own[mask].tolist() for own, mask in zip(macro.lengths, macro.mask, strict=True)]
    return zlib.crc32(repr((rollout.response_rows(), lengths)).encode())
