# SPDX-License-Identifier: Apache-2.0
"""Which share of the CPU time of a PPO step does the macro-action machinery take?

The machinery is all that turns a scored rollout into advantages and returns: termination condition, segments, pooling,
GAE over macro steps, broadcasting back to tokens. The step around it is the trainer's own code (``compacting.sample``,
the reward model, ``rollout.score``, ``ppo_update``) with random Gemma models as actor, reference, critic and reward
model, and plain PyTorch in the place of DeepSpeed. The rollout that is scored and trained on is one of random tokens,
so that every response has the full length; generation, whose end-of-sequence token lies outside the vocabulary, is
measured beside it, and the share is given with and without it.

Time is ``time.process_time``: CPU seconds of all threads of this process, blind to what else the machine does. One
thread by default, because threads that wait for work count as busy. Generation, scoring and training run once after a
small warm-up; the machinery runs ``--repeats`` times and its mean counts.

    python macro_action_cost.py
"""

import argparse
import json
import math
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from machine import machine
from torch import Tensor, nn
from transformers import GemmaConfig, GemmaForCausalLM, GemmaForSequenceClassification

from dschat.models.policy import PolicyModel
from dschat.models.scalar import ScalarModel
from dschat.rl.ppo_batch import ppo_batch
from dschat.rl.termination import fixed_ngram_ends, perplexity_ends, randomized_ngram_ends
from dschat.rl.types import PPOBatch, Rollout, Trajectory
from dschat.rollouts.compacting import sample
from dschat.rollouts.sampling import Sampling
from dschat.scoring.reward_model import RewardModelScores
from dschat.scoring.source import ResponseTexts
from dschat.trainers.ppo.trajectory import score
from dschat.trainers.ppo.update import UpdateSettings, ppo_update

CONDITIONS: dict[str, Callable[[Trajectory], Tensor]] = {
    "fixed, n = 1": lambda trajectory: fixed_ngram_ends(trajectory.response_mask, 1),
    "fixed, n = 5": lambda trajectory: fixed_ngram_ends(trajectory.response_mask, 5),
    "randomized": lambda trajectory: randomized_ngram_ends(trajectory.response_mask, 10),
    "ppl, chunk": lambda trajectory: perplexity_ends(trajectory.ref_logprobs, trajectory.response_mask, "chunk"),
}


class PlainEngine:
    """The methods of the trainer's engine that ``ppo_update`` calls, for one micro-batch per update."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._adam = torch.optim.AdamW(model.parameters(), lr=1e-5)
        self.grad_norm, self.skipped = math.nan, False

    def __call__(self, *args: Any) -> Any:
        return self._model(*args)

    def backward(self, loss: Tensor) -> None:
        """Gradients of the loss."""
        loss.backward()

    def step(self) -> None:
        """Clips and applies them."""
        self.grad_norm = float(nn.utils.clip_grad_norm_(self._model.parameters(), 1.0))
        self._adam.step()
        self._adam.zero_grad()


class Models:
    """Four random Gemmas: actor and critic under an engine, reference and reward model as they are."""

    def __init__(self, settings: argparse.Namespace) -> None:
        config = GemmaConfig(
            vocab_size=settings.vocabulary,
            hidden_size=settings.hidden,
            intermediate_size=4 * settings.hidden,
            num_hidden_layers=settings.layers,
            num_attention_heads=4,
            num_key_value_heads=4,
            head_dim=settings.hidden // 4,
            max_position_embeddings=settings.prompt + settings.response,
        )
        config.num_labels = 1
        torch.manual_seed(0)
        self.causal_lm = GemmaForCausalLM(config)
        self.actor = PlainEngine(PolicyModel(self.causal_lm))
        self.reference = PolicyModel(GemmaForCausalLM(config))
        self.critic = PlainEngine(ScalarModel(GemmaForSequenceClassification(config)))
        self.reward = RewardModelScores(ScalarModel(GemmaForSequenceClassification(config)), settings.batch_size)


def main() -> None:
    """Measures every stage and prints one JSON object."""
    settings = parse()
    torch.set_num_threads(settings.threads)
    models = Models(settings)
    run_step(models, settings, min(8, settings.prompt), min(8, settings.response))  # warm-up
    stages, machinery = run_step(models, settings, settings.prompt, settings.response)
    report = {"machine": machine(), "settings": vars(settings), "figures": figures(stages, machinery)}
    print(json.dumps(report, indent=2))


def parse() -> argparse.Namespace:
    """The settings; the defaults are a small Gemma's step of 8 responses of 512 tokens."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--batch_size", type=int, default=8, help="responses of a step, one update of one micro-batch")
    parser.add_argument("--prompt", type=int, default=64, help="tokens")
    parser.add_argument("--response", type=int, default=512, help="tokens")
    parser.add_argument("--vocabulary", type=int, default=32_000)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--repeats", type=int, default=20, help="runs of the machinery, of which the mean counts")
    parser.add_argument("--generation", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args()


def run_step(
    models: Models, settings: argparse.Namespace, prompt: int, response: int
) -> tuple[dict[str, float], dict[str, float]]:
    """One PPO step; CPU seconds of generation, scoring and training, and of the machinery by condition."""
    rollout = random_rollout(settings.batch_size, prompt, response, settings.vocabulary)
    stages = {}
    if settings.generation:
        sampling = Sampling(response, end_ids=(settings.vocabulary,), pad_id=0)  # no token ends a response
        prompts, seeds = rollout.input_ids[:, :prompt].tolist(), range(settings.batch_size)
        stages["generation"], _ = timed(lambda: sample(models.causal_lm, prompts, sampling, seeds, len(prompts)))
    stages["scoring"], trajectory = timed(lambda: score_rollout(models, rollout, settings.batch_size))
    machinery = {}
    for name, condition in CONDITIONS.items():
        batch = assign_credit(trajectory, condition)  # warm-up
        runs = [timed(partial(assign_credit, trajectory, condition))[0] for _ in range(settings.repeats)]
        machinery[name] = sum(runs) / len(runs)
    update = UpdateSettings(settings.batch_size, settings.batch_size, 1, 0.2, 0.2, 1.0)
    stages["training"], _ = timed(lambda: ppo_update(models.actor, models.critic, batch, update, seed=0))
    return stages, machinery


def random_rollout(batch_size: int, prompt: int, response: int, vocabulary: int) -> Rollout:
    """Random tokens, nothing padded."""
    return Rollout(
        input_ids=torch.randint(1, vocabulary, (batch_size, prompt + response)),
        attention_mask=torch.ones(batch_size, prompt + response, dtype=torch.bool),
        response_mask=torch.ones(batch_size, response, dtype=torch.bool),
        prompt_index=torch.arange(batch_size),
        finished=torch.ones(batch_size, dtype=torch.bool),
    )


def score_rollout(models: Models, rollout: Rollout, batch_size: int) -> Trajectory:
    """Reward model, actor, reference and critic."""
    scores = models.reward(rollout, ResponseTexts([], [], []))
    return score(rollout, scores, models.actor, models.reference, models.critic, 1.0, batch_size)


def assign_credit(trajectory: Trajectory, condition: Callable[[Trajectory], Tensor]) -> PPOBatch:
    """The machinery."""
    return ppo_batch(trajectory, condition(trajectory), kl_coef=0.05, gamma=1.0, lam=0.95)


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """CPU seconds of all threads, and the result."""
    start = time.process_time()
    result = work()
    return time.process_time() - start, result


def figures(stages: dict[str, float], machinery: dict[str, float]) -> dict[str, Any]:
    """CPU seconds of the stages; per condition, milliseconds and the share of the whole step in percent."""
    total = sum(stages.values())
    without_generation = total - stages.get("generation", 0.0)

    def row(seconds: float) -> dict[str, float]:
        shares = {"percent_of_step_without_generation": round(100 * seconds / (without_generation + seconds), 4)}
        if "generation" in stages:
            shares["percent_of_step"] = round(100 * seconds / (total + seconds), 4)
        return {"milliseconds": round(1000 * seconds, 3), **shares}

    return {
        "cpu_seconds": {name: round(seconds, 3) for name, seconds in stages.items()},
        "macro_actions": {name: row(seconds) for name, seconds in machinery.items()},
    }


if __name__ == "__main__":
    main()
