# SPDX-License-Identifier: Apache-2.0
"""Small runs of all steps that are stopped at every point where a run can stop, and resumed."""

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from cli_runs import read_jsonl
from dschat.data.examples import PairExample, PreferenceExample, SFTExample
from dschat.engine.adapters_off import AdaptersOff
from dschat.models.lora import add_lora
from dschat.refuel.token_pairs import RegressionExample
from dschat.rollouts.continuous import ContinuousEngine
from dschat.rollouts.engine import Generation, RolloutEngine
from dschat.run import stop
from dschat.run.checkpoint import MANIFEST, digest
from dschat.run.distributed import broadcast_object, is_main, world_size
from dschat.run.stop import Stopped, raise_if_stopped_here, stopping_together
from factories import (
    engine_of,
    frozen_engine_of,
    make_binned_classifier,
    make_causal_lm,
    make_classifier,
    make_prompts,
    ppo_config,
    ppo_loop,
    ragged_rows,
    supervised_loop,
    whole_state,
)
from macro_actions.value_bins import ValueBins
from real_size import as_large_as
from refuel_runs import length as dialogue_length
from refuel_runs import trainer_of as refuel_trainer_of

ROWS = ragged_rows([2, 5, 9, 1, 3, 4, 6, 2, 3], [7, 1, 4, 3, 9, 2, 5, 8, 4], seed=1)
GLOBAL = 2  # rows of a micro-batch on all processes
SUPERVISED = {
    "gradient_accumulation_steps": 2,
    "per_device_eval_batch_size": 2,
    "learning_rate": 1e-2,
    "num_train_epochs": 2,
    "eval_interval": 3,
}
EXAMPLES: dict[str, Any] = {
    "sft": [SFTExample(p, r) for p, r in ROWS],
    "reward": [PairExample(p + r, p + r[:1]) for p, r in ROWS],
    "dpo": [PreferenceExample(p, [*r, 7], r) for p, r in ROWS],
    "refuel": [
        RegressionExample(p, [*r, 7], r, chosen_reward=n / 4, rejected_reward=0.5) for n, (p, r) in enumerate(ROWS)
    ],
}
# 2 epochs of 2 rollouts of 8 prompts in 2 generation batches; 2 PPO epochs of 2 updates of 2 micro-batches.
PPO = {
    "generation_batches": 2,
    "gradient_accumulation_steps": 2,
    "per_device_eval_batch_size": 4,
    "ppo_epochs": 2,
    "num_train_epochs": 2,
    "eval_interval": 4,
    "max_answer_seq_len": 6,
    "lr_scheduler_type": "cosine",
    "adaptive_kl_target": 2.0,
    "enable_ema": True,
}
# Rollouts of half as many prompts, so that updates are as many; one epoch of 4 rollouts.
RLOO = {
    "advantage_estimator": "rloo",
    "samples_per_prompt": 2,
    "per_device_generation_batch_size": 2,
    "num_train_epochs": 1,
}
REFUEL = {
    "noptepochs": 3,
    "num_train_epochs": 2,
    "eval_interval": 6,
    "max_answer_seq_len": 4,
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "adaptive_kl_target": 2.0,
    "kl_coef": 0.1,
    "eval_temperature": 1.0,
}


@dataclass(frozen=True)
class Setup:
    """How models are put under engines."""

    zero_stage: int = 0
    lora_dim: int = 0
    lora_dropout: float = 0.0
    dtype: torch.dtype = torch.float32
    whole: int = 0  # elements of the largest parameter that ZeRO 3 leaves whole
    gradient_clipping: float = 1.0
    model: dict[str, Any] = field(default_factory=dict)  # options of `make_causal_lm` and `make_classifier`
    options: dict[str, Any] = field(default_factory=dict)  # further ones of `engine_of`

    def engine(self, model: Any, **options: Any) -> Any:
        """A training engine of a Hugging Face model."""
        if self.lora_dim:
            with torch.random.fork_rng():
                torch.manual_seed(0)
                add_lora(model, self.lora_dim, None, "base", dropout=self.lora_dropout)
        options |= {"zero_stage": self.zero_stage, "dtype": self.dtype, "gradient_clipping": self.gradient_clipping}
        options |= {"config_file": as_large_as(7e9, model, self.whole)} if self.zero_stage else {}
        return engine_of(model, GLOBAL // world_size(), 2, **(options | self.options))


class DrawsAhead:
    """Our own loop as an engine that draws ahead: at once, with the weights of that moment."""

    def __init__(self, rows: int) -> None:
        self._engine = ContinuousEngine(rows)
        self.gone = False  # a server, so that nothing can be finished now

    @contextmanager
    def session(self, actor: Any, same_weights: bool = False) -> Iterator[Any]:
        """See `dschat.rollouts.engine.RolloutEngine`."""

        def draw(*asked: Any) -> Generation:
            drawn = own(*asked)
            return replace(drawn, rollout=replace(drawn.rollout, drawn_logprobs=drawn.logprobs), logprobs=None)

        with self._engine.session(actor) as own:
            self._draw = draw
            yield draw

    def begin(self, *asked: Any) -> "Drawn":
        """See `dschat.rollouts.engine.AheadEngine`."""
        return Drawn(self, self._draw(*asked))


@dataclass
class Drawn:
    """What it drew ahead."""

    engine: DrawsAhead
    generation: Generation

    def finish(self) -> Generation:
        """As if the last tokens were still to be waited for."""
        with stopping_together():
            raise_if_stopped_here()
        return self.generation

    def settle(self) -> Generation | None:
        """None where a server has gone."""
        return None if self.engine.gone else self.generation


AHEAD: dict[str, Any] = {"rollout_engine": "vllm", "vllm_url": ["http://elsewhere"], "rollouts_ahead": 1}

Result = tuple[dict[str, torch.Tensor], list[dict[str, float]], dict[str, str]]


def length(prompts: list[str], responses: list[str], rows: list[Any]) -> list[float]:
    """A reward that draws from the global random state, as users' functions may."""
    return [len(response) + float(torch.rand(1)) for response in responses]


def supervised(step: str, folder: Path, setup: Setup = Setup(), **flags: Any) -> Any:
    """The loop of step 1 (sft), step 2 (reward or dpo) or REFUEL on pairs: 2 epochs of 2 updates."""
    make = make_classifier if step == "reward" else make_causal_lm
    engine = setup.engine(make(**setup.model), learning_rate=1e-2)
    flags = SUPERVISED | {"per_device_train_batch_size": GLOBAL // world_size()} | flags
    flags |= {"total_episodes": 0} if step == "refuel" else {}
    examples = EXAMPLES[step]
    return supervised_loop(step, folder, examples, examples[:3], engine=engine, **flags)


def ppo(
    folder: Path,
    setup: Setup = Setup(),
    rollouts: RolloutEngine | None = None,
    reward: Any = length,
    teacher: Any = None,
    **flags: Any,
) -> Any:
    """The loop of step 3: 4 rollouts of 4 updates, drawn by `rollouts`."""
    sizes = {
        "per_device_generation_batch_size": 4 // world_size(),
        "per_device_training_batch_size": GLOBAL // world_size(),
    }
    config = ppo_config(folder, **(PPO | sizes | flags))
    actor = setup.engine(make_causal_lm())
    critic = None
    if config.advantages.needs.critic:
        plan = config.critic_plan(config.plan_batches(world_size()))
        limits = config.critic.value_range
        bins = None if limits is None else ValueBins.between(*limits)
        classifier = make_classifier() if bins is None else make_binned_classifier(bins)
        critic = setup.engine(classifier, plan=plan, bins=bins)
    reference = AdaptersOff(actor) if setup.lora_dim else frozen_engine_of(make_causal_lm(), setup.dtype)
    prompts = make_prompts(18)
    engine = rollouts or ContinuousEngine(4)
    return ppo_loop(config, reward, prompts, prompts[:5], actor, reference, critic, engine, teacher=teacher)


def refuel_online(folder: Path, **flags: Any) -> Any:
    """The loop of REFUEL with users from data: 2 epochs of 2 rounds of 8 pairs in 2 micro-batches, 3 updates each."""
    return refuel_trainer_of(folder, **({"reward": dialogue_length} | REFUEL | flags))


def by_segment(prompts: list[str], responses: list[str], rows: list[Any], segments: list[list[str]]) -> list[Any]:
    """Rewards of macro actions."""
    return [[float(len(text)) for text in own] for own in segments]


def lengths(prompts: list[str], responses: list[str], rows: list[Any]) -> list[float]:
    """A reward that is the same on any number of processes."""
    return [float(len(response)) for response in responses]


def often_equal(prompts: list[str], responses: list[str], rows: list[Any], score: Any = length) -> list[float]:
    """As another reward, but all responses to every other prompt have the same score."""
    return [0.5 if row["n"] % 2 else x for row, x in zip(rows, score(prompts, responses, rows), strict=True)]


# Rollouts whose places are taken by further prompts, in up to two rounds.
REFILL: dict[str, Any] = RLOO | {"reward": often_equal, "drop_equal_groups": True, "refill_rounds": 2}


DECAYED: dict[str, Any] = {"weight_decay": 0.1, "schedule": "linear"}
ODD = {"kind": "llama", "intermediate_size": 33, "mlp_bias": True}  # two processes cannot share these biases evenly
ONE_UPDATE: dict[str, Any] = {"ppo_epochs": 1, "generation_batches": 1}  # of a rollout


def decayed(zero_stage: int, offload: bool = False, **options: Any) -> Setup:
    """With weight decay and a learning rate that falls."""
    return Setup(zero_stage, options=DECAYED | ({"offload": True} if offload else {}), **options)


def _refilled(folder: Path, **flags: Any) -> Any:
    """Such rollouts of two prompts."""
    sizes = {"per_device_generation_batch_size": 2 // world_size()}
    score = partial(often_equal, score=lengths)
    return ppo(folder, decayed(3), **(REFILL | {"reward": score} | sizes | ONE_UPDATE | flags))


def _distilled(folder: Path, **flags: Any) -> Any:
    """Scores beside a teacher; an update's forward passes give the policy's log-probs."""
    teacher: dict[str, Any] = {"teacher_model_name_or_path": "unused", "teacher_coef": 0.1}
    made = make_causal_lm(seed=3)
    return ppo(folder, decayed(3), reward=lengths, teacher=made, **(ONE_UPDATE | teacher | flags))


# Runs with running moments of scores, at each ZeRO stage.
NORMALISED: dict[str, Callable[..., Any]] = {
    f"normalised-{stage}": partial(ppo, setup=decayed(stage), reward=lengths, normalize_scores=True, **ONE_UPDATE)
    for stage in range(4)
}
# Runs whose updates are the same on any number of processes.
RESIZED: dict[str, Callable[..., Any]] = {
    "zero1-offload": partial(supervised, "reward", setup=decayed(1, offload=True)),
    "whole-vectors-offload": partial(supervised, "sft", setup=decayed(3, offload=True, whole=33, model=ODD)),
    "adapters": partial(supervised, "dpo", setup=decayed(3, lora_dim=3, model=ODD)),
    "ppo": partial(ppo, setup=decayed(3), reward=lengths, **ONE_UPDATE),
    "critic-warm-up": partial(ppo, setup=decayed(2), reward=lengths, critic_warmup_updates=3, **ONE_UPDATE),
    "critic-epochs": partial(ppo, setup=decayed(2), reward=lengths, critic_epochs=2, **ONE_UPDATE),
    "refilled": _refilled,
    "distilled": _distilled,
}


def result_of(loop: Any, folder: Path) -> Result:
    """Weights, metrics and samples of a run to its end; on the main process."""
    torch.manual_seed(5)
    loop.fit()
    loop.run.finish()
    states = {name: whole_state(engine) for name, engine in loop.checkpoints._engines.items()}
    average = getattr(loop.algorithm, "average", None)
    if average is not None:
        states["average"] = whole_state(average)
    weights = {f"{name}.{key}": x.float().clone() for name, state in states.items() for key, x in state.items()}
    if not is_main():
        return {}, [], {}
    rows = read_jsonl(folder / "metrics.jsonl")
    other = re.compile("seconds|time/|judge/cached")  # what a run that was resumed measures otherwise
    rows = [{name: x for name, x in row.items() if not other.search(name)} for row in rows]
    return weights, rows, {file.name: file.read_text() for file in sorted(folder.glob("samples/*"))}


def check_every_stop(make: Callable[..., Any], folder: Path, every: int, first: int = 0) -> int:
    """Stops a run at every nth point at which it can be stopped, and compares what becomes of it.

    Returns:
        The number of such points.
    """
    whole, points = _stopped_at(None, lambda: result_of(make(folder / "whole"), folder / "whole"))
    for number in range(first, points, every):
        place = folder / f"stopped-{number}"
        torch.manual_seed(5)
        stopped, _ = _stopped_at(number, make(place).fit)
        assert stopped is None, f"the run did not stop at point {number}"
        resumed = make(place, resume_from_checkpoint="latest")
        found, _ = _stopped_at(None, partial(result_of, resumed, place))
        problem = _difference(whole, found)
        assert broadcast_object(problem) is None, f"stopped at point {number} of {points}: {problem}"
    return points


def stop_in_call(run: Callable[[], Any], module: Any, function: str, number: int) -> None:
    """Runs until a module's function is called for the nth time, from 1; it finds a signal then."""
    real = getattr(module, function)
    calls = 0

    def counted(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == number:
            raise Stopped(15)
        return real(*arguments)

    with mock.patch.object(module, function, counted), suppress(Stopped):
        run()
        raise AssertionError(f"{function} was called {calls} times")


def as_of_other_processes(folder: Path, world_size: int) -> None:
    """Rewrites a checkpoint's manifest as if another number of processes had written it."""
    file = folder / MANIFEST
    manifest = json.loads(file.read_text()) | {"world_size": world_size}
    del manifest["sha256"]
    file.write_text(json.dumps(manifest | {"sha256": digest(manifest)}))


def _stopped_at(number: int | None, run: Callable[[], Any]) -> tuple[Any, int]:
    """What a run gives (None if it is stopped) whose call of this number of `raise_if_stopped` finds a signal.

    Returns:
        That, and the number of calls.
    """
    calls = 0

    def noted(_: int) -> int:
        nonlocal calls
        calls += 1
        return 15 if calls - 1 == number else 0

    with mock.patch.object(stop, "largest_over_ranks", noted):
        try:
            return run(), calls
        except Stopped:
            return None, calls


def _difference(first: Result, second: Result) -> str | None:
    """The first thing in which two runs differ."""
    if first[1] != second[1]:
        return f"metrics: {first[1]} and {second[1]}"
    if first[2] != second[2]:
        return "samples"
    names = [name for name in first[0] if not torch.equal(first[0][name], second[0][name])]
    return f"weights: {names[:3]}" if names or first[0].keys() != second[0].keys() else None
