# SPDX-License-Identifier: Apache-2.0
"""Episodes of several turns as rollouts (--environment): the actor's replies, and environments that answer them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from dschat.data.batches import pad
from dschat.data.encoding import decode_response
from dschat.data.examples import PromptExample
from dschat.models.layout import Lengths
from dschat.rollouts.engine import Generation
from dschat.run.distributed import device, gather_objects
from dschat.run.state import SeedKind
from dschat.scoring.source import EpisodeRecords, ResponseTexts
from dschat.training.ppo.collect import ActorSampler, with_indices
from dschat.turns.environments import environment_seed
from dschat.turns.episodes import Episode, EpisodePlayer, LogprobSource, TurnLengths
from macro_actions.types import Rollout, mapped

EPISODE_MESSAGES = "episode_messages"  # column of rows for reward functions: the messages of both sides


class EpisodeSampler(ActorSampler):
    """Samples episodes of the actor, instead of single responses."""

    def __init__(self, actor: ActorSampler, player: EpisodePlayer) -> None:
        """Takes a sampler of single replies, and what plays episodes with it."""
        super().__init__(actor.policy, actor.tokenizer, player.sampling, actor.seed, actor.engine)
        self._player = player

    def sample(
        self,
        examples: Sequence[PromptExample],
        kind: SeedKind,
        occasion: int,
        samples_per_prompt: int = 1,
        same_weights: bool = False,
    ) -> tuple[Generation, ResponseTexts]:
        """Samples `samples_per_prompt` episodes per row; those of one row are adjacent. Every rank must call it.

        The environments of all episodes of a row have the same seed, so that they begin alike. For the arguments see
        `ActorSampler`.
        """
        requested = self.request(examples, kind, occasion, samples_per_prompt)
        environment_seeds = []
        for example in requested.examples:
            environment_seeds.append(environment_seed(self.seed, kind, occasion, example.index))
        rows = [example.row for example in requested.examples]
        with self.session(same_weights) as sample_responses:
            episodes, turns = self._player.play(sample_responses, rows, requested.seeds, environment_seeds)

        for episode, example in zip(episodes, requested.examples, strict=True):
            if not episode.prompt_ids:  # the environment failed before it said anything
                episode.prompt_ids = example.prompt_ids
                episode.prompt_text = example.prompt_text
        source = agreed_source(episodes)
        generation = with_indices(assemble_episodes(episodes, self.sampling.pad_id, source), requested)
        return generation, self._texts_of(episodes, turns, generation.rollout.response_mask)

    def _texts_of(
        self, episodes: Sequence[Episode], turns: Sequence[TurnLengths], response_mask: Tensor
    ) -> ResponseTexts:
        """Texts of the episodes, with records of rewards and failures."""
        rows = []
        turn_rewards = torch.zeros(response_mask.shape)
        for number, episode in enumerate(episodes):
            columns = episode.row.extra | {EPISODE_MESSAGES: episode.messages}
            rows.append(replace(episode.row, prompt=None, messages=episode.prompt_messages, extra=columns))
            for column, reward in zip(episode.turn_ends, episode.rewards, strict=False):
                turn_rewards[number, column] = reward
        failed = [episode.failure is not None for episode in episodes]
        done = [episode.done for episode in episodes]
        records = EpisodeRecords(
            turn_rewards=turn_rewards.to(response_mask.device),
            failed=torch.tensor(failed, device=response_mask.device),
            done=torch.tensor(done, device=response_mask.device),
            messages=[episode.messages for episode in episodes],
            rewards=[episode.rewards for episode in episodes],
            samplings=list(map(_lengths_of, turns)),
        )
        prompts = [episode.prompt_text for episode in episodes]
        responses = [decode_response(self.tokenizer, episode.ids) for episode in episodes]
        finished = [episode.finished for episode in episodes]
        return ResponseTexts(prompts, responses, rows, finished, episodes=records)


def _lengths_of(turn: TurnLengths) -> Lengths:
    """Lengths of what was read and sampled in a turn."""
    return Lengths(np.array(turn.read), np.array(turn.sampled))


def agreed_source(episodes: Sequence[Episode]) -> LogprobSource:
    """Whose log-probs the engine reports, also on a rank whose environments all failed. Every rank must call it.

    Later stages depend on it, collective forward passes included, so all ranks must agree.
    """
    for source in gather_objects(_first_source(episodes)):
        if source is not None:
            return source
    return "none"


def _first_source(episodes: Sequence[Episode]) -> LogprobSource | None:
    for episode in episodes:
        if episode.logprob_source is not None:
            return episode.logprob_source
    return None


def assemble_episodes(episodes: Sequence[Episode], pad_id: int, source: LogprobSource = "actor") -> Generation:
    """Episodes as a rollout whose response masks are False on the environment's tokens.

    Args:
        episodes: B of them.
        pad_id: fills ids.
        source: whose log-probs the episodes have; with "none", none are kept.
    """
    prompts = [episode.prompt_ids for episode in episodes]
    prompt_ids, prompt_mask = pad(prompts, pad_id, "left")
    responses = [episode.ids for episode in episodes]
    response_ids, is_episode = pad(responses, pad_id, "right")
    if not response_ids.shape[1]:  # no environment said anything: one column of padding
        response_ids = torch.full((len(episodes), 1), pad_id)
        is_episode = torch.zeros(len(episodes), 1, dtype=torch.bool)
    response_mask = torch.zeros_like(is_episode)
    cut_turns = torch.zeros_like(is_episode)
    logprobs = torch.zeros(is_episode.shape)
    for row, episode in enumerate(episodes):
        length = len(episode.ids)
        response_mask[row, :length] = torch.tensor(episode.sampled, dtype=torch.bool)
        if episode.logprobs is not None:
            logprobs[row, :length] = torch.tensor(episode.logprobs)
        for column, is_cut in zip(episode.turn_ends, episode.cut, strict=True):
            cut_turns[row, column] = is_cut
    rollout = Rollout(
        input_ids=torch.cat([prompt_ids, response_ids], dim=1),
        attention_mask=torch.cat([prompt_mask, is_episode], dim=1),
        response_mask=response_mask,
        prompt_index=torch.arange(len(episodes)),
        finished=torch.tensor([episode.finished for episode in episodes]),
        drawn_logprobs=logprobs if source == "sampler" else None,
        cut_turns=cut_turns,
    )
    bad_rows = torch.tensor([episode.is_bad for episode in episodes])
    generation = Generation(rollout, logprobs if source == "actor" else None, bad_rows)
    return mapped(generation, lambda x: x.to(device()))
