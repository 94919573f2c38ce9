# SPDX-License-Identifier: Apache-2.0
"""Episodes of several turns: the policy replies, an environment answers, all episodes of a batch together.

Token in, token out: the ids of an episode are its prompt, the sampled ids of each reply as they are, and between them
the environment's messages as the chat template writes them (`dschat.data.observations`). Every turn reads the episode
so far anew; nothing of it is decoded and encoded again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from transformers import PreTrainedTokenizerBase

from dschat.base.errors import UserError
from dschat.data.encoding import decode_sampled
from dschat.data.observations import ConversationEncoder
from dschat.data.rows import Row, in_words
from dschat.data.template_notes import NOT_IN_TEMPLATE, unwritten_parts
from dschat.data.turn_end import reply_contents
from dschat.rollouts.engine import Generation, ResponseSampler
from dschat.rollouts.sampling import Sampling, row_seed
from dschat.run.distributed import is_main
from dschat.turns.environment import Message, StepResult
from dschat.turns.environments import EnvironmentPool, EpisodeProcess, Failure, Result

logger = logging.getLogger(__name__)

# Whose log-probs an engine reports with its replies: the actor's, those of a sampler with other kernels, or none.
LogprobSource = Literal["actor", "sampler", "none"]


@dataclass(frozen=True)
class EpisodeLimits:
    """Maximum sizes of an episode.

    Attributes:
        turns: replies of the policy.
        prompt_tokens: tokens of the messages before the first reply.
        tokens: R: all replies, and the environment's messages between them.
        turn_tokens: tokens of one reply; None for no limit of its own.
    """

    turns: int
    prompt_tokens: int
    tokens: int
    turn_tokens: int | None = None


@dataclass
class Episode:
    """An episode as far as it went.

    Attributes:
        row: row of the data.
        seed: seed of its first reply; those of later turns follow from it.
        prompt_messages: the messages before the first reply.
        messages: messages of both sides, those included.
        prompt_text: the prompt's messages as the chat template writes them.
        prompt_ids: their ids; empty if the environment failed before it said anything.
        ids: ids of replies, and of the environment's messages between them.
        sampled: whether the policy sampled each of these ids.
        logprobs: log-prob of each id as the engine reports them, 0 for the environment's; None if it reports none.
        logprob_source: whose they are; None before the first reply.
        turn_ends: index of the last id of each turn.
        rewards: rewards of each turn.
        cut: whether each turn lacks a token that ends it.
        done: whether the environment ended the episode.
        is_over: whether there is no further turn, for whatever reason.
        failure: what went wrong, if the environment failed.
        is_bad: some logits of a reply were not finite.
    """

    row: Row
    seed: int
    prompt_messages: list[Message] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    prompt_text: str = ""
    prompt_ids: list[int] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    sampled: list[bool] = field(default_factory=list)
    logprobs: list[float] | None = field(default_factory=list)
    logprob_source: LogprobSource | None = None
    turn_ends: list[int] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    cut: list[bool] = field(default_factory=list)
    done: bool = False
    is_over: bool = False
    failure: str | None = None
    is_bad: bool = False

    @property
    def finished(self) -> bool:
        """Whether the environment ended it, after a reply that ended by itself."""
        return self.done and bool(self.cut) and not self.cut[-1]

    def append_reply(self, ids: Sequence[int], logprobs: Sequence[float] | None, has_end: bool, is_bad: bool) -> None:
        """Appends a reply as it was sampled."""
        self.ids += ids
        self.sampled += [True] * len(ids)
        if logprobs is None or self.logprobs is None:
            self.logprobs = None
        else:
            self.logprobs += logprobs
        self.turn_ends.append(len(self.ids) - 1)
        self.cut.append(not has_end)
        self.is_bad = self.is_bad or is_bad

    def append_observation(self, ids: Sequence[int]) -> None:
        """Appends an environment's messages."""
        self.ids += ids
        self.sampled += [False] * len(ids)
        if self.logprobs is not None:
            self.logprobs += [0.0] * len(ids)


def all_columns(row: Row) -> dict[str, object]:
    """A row of the data as it was read, which environments begin with."""
    return row.extra


@dataclass(frozen=True)
class TurnLengths:
    """Sizes of the samplings of one turn: tokens that were read, and tokens that were sampled, of each episode."""

    read: list[int]
    sampled: list[int]


class EpisodePlayer:
    """Plays episodes between a policy and environments."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        sampling: Sampling,
        pool: EnvironmentPool,
        limits: EpisodeLimits,
        skips_failures: bool,
        columns_of: Callable[[Row], dict[str, object]] = all_columns,
    ) -> None:
        """Takes the parts.

        Args:
            tokenizer: the policy's, with a chat template.
            sampling: how replies are sampled; the template's end of a turn is added to its end tokens.
            pool: pool of environments.
            limits: limits of an episode.
            skips_failures: an environment that fails costs its episode; otherwise it ends the run.
            columns_of: what an environment's `reset` gets of a row.

        Raises:
            UserError: the chat template cannot be used, see `dschat.data.observations`.
        """
        self._tokenizer = tokenizer
        self._pool = pool
        self._limits = limits
        self._skips_failures = skips_failures
        self._columns_of = columns_of
        self._is_first_play = True
        self._template_arguments = pool.traits.template_arguments
        self._encoder = ConversationEncoder(tokenizer, self._template_arguments, pool.traits.roles)
        end_ids = {*sampling.end_ids, self._encoder.end.token_id}
        self.sampling = replace(sampling, max_new_tokens=limits.tokens, end_ids=tuple(sorted(end_ids)))

    def play(
        self, sampler: ResponseSampler, rows: Sequence[Row], seeds: Sequence[int], environment_seeds: Sequence[int]
    ) -> tuple[list[Episode], list[TurnLengths]]:
        """Plays B episodes until all are over, and says what was sampled in each turn.

        Args:
            sampler: sampler of an engine's session.
            rows: rows of the data.
            seeds: seeds of the replies of each episode.
            environment_seeds: seeds of each environment.

        Raises:
            UserError: an environment failed, and failures are not skipped; names its row.
            Stopped: on this rank alone, after a signal.
        """
        episodes = list(map(Episode, rows, seeds))
        turns: list[TurnLengths] = []
        with self._pool.episodes(len(episodes)) as processes:
            self._begin(episodes, processes, environment_seeds)
            while live := [number for number, episode in enumerate(episodes) if not episode.is_over]:
                live_episodes = [episodes[number] for number in live]
                turns.append(self._sample_replies(sampler, live_episodes))
                self._answer(live_episodes, [processes[number] for number in live])
                for number in live:
                    if episodes[number].is_over:
                        processes[number].close()
        self._warn_of_failures(episodes)
        return episodes, turns

    def _begin(
        self, episodes: Sequence[Episode], processes: Sequence[EpisodeProcess], environment_seeds: Sequence[int]
    ) -> None:
        """Resets all environments, and encodes what they say."""
        calls = []
        for episode, seed in zip(episodes, environment_seeds, strict=True):
            calls.append(("reset", self._columns_of(episode.row), seed))
        results = self._pool.call(processes, calls)
        for episode, result in zip(episodes, results, strict=True):
            if not isinstance(result, list):
                self._fail(episode, _problem_of(result))
                continue
            episode.prompt_messages = result
            episode.messages = result
            arguments = self._arguments(episode)
            try:
                ids, text = self._encoder.prompt(result, arguments, episode.row.origin)
            except UserError as error:
                self._fail(episode, str(error))
                continue
            if len(ids) > self._limits.prompt_tokens:
                problem = (
                    f"the environment's first messages have {len(ids)} tokens, above --max_prompt_seq_len"
                    f" {self._limits.prompt_tokens}"
                )
                self._fail(episode, problem)
                continue
            episode.prompt_ids = ids
            episode.prompt_text = text
        self._warn_of_unwritten(episodes)

    def _warn_of_unwritten(self, episodes: Sequence[Episode]) -> None:
        """Logs what the chat template leaves out of the first messages, and of `tools`; once in a run."""
        if not self._is_first_play or not is_main():
            return
        self._is_first_play = False
        rows = []
        for episode in episodes:
            if episode.prompt_ids:
                arguments = self._arguments(episode)
                origin = episode.row.origin
                rows.append(Row(None, episode.prompt_messages, None, None, {}, origin, template_arguments=arguments))
        unwritten = unwritten_parts(self._tokenizer, rows)
        if unwritten:
            logger.warning("%s: %s", NOT_IN_TEMPLATE, in_words(unwritten))

    def _sample_replies(self, sampler: ResponseSampler, episodes: Sequence[Episode]) -> TurnLengths:
        """Samples the next reply of each episode, which reads the episode so far."""
        prompts = []
        seeds = []
        budgets = []
        for episode in episodes:
            turn = len(episode.turn_ends)
            prompts.append([*episode.prompt_ids, *episode.ids])
            seeds.append(row_seed(episode.seed, turn) if turn else episode.seed)
            budgets.append(self._budget(episode))
        are_full = min(budgets) == self.sampling.max_new_tokens
        generation = sampler(prompts, self.sampling, seeds, limits=None if are_full else budgets)

        replies = generation.rollout.response_rows()
        finished = generation.rollout.finished.tolist()
        are_bad = generation.bad_rows.tolist()
        source, logprobs = _reported_logprobs(generation)
        for number, episode in enumerate(episodes):
            ids = replies[number]
            episode.logprob_source = source
            reply_logprobs = None if logprobs is None else logprobs[number][: len(ids)]
            episode.append_reply(ids, reply_logprobs, finished[number], are_bad[number])
        return TurnLengths(list(map(len, prompts)), list(map(len, replies)))

    def _answer(self, episodes: Sequence[Episode], processes: Sequence[EpisodeProcess]) -> None:
        """Gives every environment the last reply, and appends what it answers."""
        calls = []
        replies = self._reply_texts(episodes)
        for episode, reply in zip(episodes, replies, strict=True):
            calls.append(("step", episode.messages, reply))
        results = self._pool.call(processes, calls)
        for episode, reply, result in zip(episodes, replies, results, strict=True):
            if not isinstance(result, StepResult):
                self._fail(episode, _problem_of(result))
                continue
            episode.rewards.append(result.reward)
            episode.done = result.done
            messages = episode.messages
            episode.messages = [*messages, {"role": "assistant", "content": reply}, *result.messages]
            if result.done or len(episode.rewards) == self._limits.turns:
                episode.is_over = True
                continue
            has_end = not episode.cut[-1]
            arguments = self._arguments(episode)
            try:
                ids = self._encoder.following(messages, result.messages, has_end, arguments, episode.row.origin)
            except UserError as error:
                self._fail(episode, str(error))
                continue
            if not ids:
                self._fail(episode, "the chat template writes nothing between two replies, which would be one turn")
            elif len(episode.ids) + len(ids) >= self._limits.tokens:
                episode.is_over = True  # no room for another reply
            else:
                episode.append_observation(ids)

    def _reply_texts(self, episodes: Sequence[Episode]) -> list[str]:
        """The last reply of each episode as an environment reads it: the content of the assistant's message."""
        texts = []
        for episode in episodes:
            start = len(episode.ids)
            while start > 0 and episode.sampled[start - 1]:
                start -= 1
            has_end = not episode.cut[-1]
            texts.append(decode_sampled(self._tokenizer, episode.ids[start:], has_end))
        return reply_contents(self._tokenizer, texts)

    def _budget(self, episode: Episode) -> int:
        """The most tokens of an episode's next reply."""
        left = self._limits.tokens - len(episode.ids)
        return left if self._limits.turn_tokens is None else min(left, self._limits.turn_tokens)

    def _arguments(self, episode: Episode) -> dict[str, object]:
        """The variables of the chat template for an episode."""
        return {**episode.row.template_arguments, **self._template_arguments}

    def _fail(self, episode: Episode, problem: str) -> None:
        """Ends an episode whose environment failed. Raises UserError if that ends the run."""
        origin = f"{episode.row.origin}: "
        episode.failure = f"{origin}{problem.removeprefix(origin).rstrip('.')}"
        episode.is_over = True
        if not self._skips_failures:
            raise UserError(f"{episode.failure}. --on_reward_error skip leaves such episodes out.")

    def _warn_of_failures(self, episodes: Sequence[Episode]) -> None:
        """Logs the first failure, and how many episodes failed."""
        failures = [episode.failure for episode in episodes if episode.failure is not None]
        if failures:
            logger.warning("%s. Episodes without a score: %d of %d.", failures[0], len(failures), len(episodes))


def _reported_logprobs(generation: Generation) -> tuple[LogprobSource, list[list[float]] | None]:
    """Whose log-probs an engine reports, and those of each reply."""
    if generation.logprobs is not None:
        return "actor", generation.logprobs.tolist()
    if generation.rollout.drawn_logprobs is not None:
        return "sampler", generation.rollout.drawn_logprobs.tolist()
    return "none", None


def _problem_of(result: Result) -> str:
    """What is wrong with an answer that is not of the kind that was asked for."""
    return result.problem if isinstance(result, Failure) else "the environment answered another call"
