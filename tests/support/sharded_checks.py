# SPDX-License-Identifier: Apache-2.0
"""Generation, saving and LoRA at ZeRO 3, beside ZeRO 0; tests/distributed compares the results.

tests/distributed/workers.py calls each of `CHECKS` on each of two processes, with a folder and the function `keep`,
which writes numbers and tensors of this rank to NAME-RANK.json and NAME-RANK.safetensors in that folder.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dschat.engine.adapters_off import AdaptersOff
from dschat.engine.engine import frozen_engine
from dschat.models.lora import add_lora
from dschat.models.policy import PolicyModel
from dschat.rollouts.continuous import ContinuousEngine
from dschat.rollouts.generate import GenerateEngine
from dschat.rollouts.sampling import Sampling
from dschat.run.distributed import is_main, rank
from dschat.training.ppo.models import MovingAverage
from factories import (
    BOS,
    PAD,
    make_causal_lm,
    make_classifier,
    make_tokenizer,
    pad_rows,
    ragged_rows,
    random_ids,
    save_engines,
    whole_state,
)
from recorded_updates import Case, engine_for, ppo_updates, recorded_batch, supervised_trainer, supervised_update
from sharded_loading_checks import settings_of

ROWS = ragged_rows([2, 5, 9, 1], [7, 1, 4, 3], seed=7)
NO_END = 100  # an id outside the vocabulary: no token ends a response
LENGTHS = (3, 14)  # new tokens on rank 0 and on rank 1
WHOLE = Case(zero_stage=0, accumulation=2)
SHARDED = Case(zero_stage=3, accumulation=2)


def prompts_of(process_rank: int) -> list[list[int]]:
    """Three prompts of a process."""
    return [random_ids(2 + i, 50 * process_rank + i) for i in range(3)]


def greedy_responses(engine: Any) -> list[list[int]]:
    """This rank's responses, on which both rollout engines must agree.

    Ranks must not wait for each other inside a session. Therefore rank 1 samples longer responses, and samples twice
    while rank 0 samples once.
    """
    engine.eval()
    sampling = Sampling(max_new_tokens=LENGTHS[rank()], end_ids=(NO_END,), pad_id=PAD, bos_id=BOS, temperature=0.0)
    responses = []
    for rollout_engine in (ContinuousEngine(2), GenerateEngine(3)):
        with rollout_engine.session(engine) as sample:
            for _ in range(rank() + 1):
                rollout = sample(prompts_of(rank()), sampling, range(3)).rollout
        responses.append(rollout.response_ids.tolist())
    engine.train()
    continuous, generated = responses
    assert continuous == generated, "the rollout engines sample different greedy responses"
    return continuous


def generation(folder: Path, keep: Callable[..., None]) -> None:
    """Training with generation in between at ZeRO 0 and 3, and without; and generation by frozen engines."""
    keep(folder, "training-zero3", *two_updates(SHARDED, folder, generates=False))
    for case in (WHOLE, SHARDED):
        keep(folder, f"generation-zero{case.zero_stage}", *two_updates(case, folder, generates=True))
    frozen = frozen_engine(PolicyModel(make_causal_lm()), settings_of(folder))
    keep(folder, "generation-frozen", {"first": greedy_responses(frozen)})
    offloaded = frozen_engine(PolicyModel(make_causal_lm()), replace(settings_of(folder), offload=True))
    keep(folder, "offloaded", {"first": greedy_responses(offloaded)}, {"logprobs": logprobs_of(offloaded)})


def two_updates(case: Case, folder: Path, generates: bool) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Two updates of step 1, with generation before each of them if `generates`.

    Returns:
        Greedy responses of this rank before the first update (`first`) and after it (`later`). And the weights, on the
        main process alone.
    """
    trainer = supervised_trainer("sft", engine_for(make_causal_lm(), case, folder), case, folder)
    engine = trainer.algorithm.engine
    responses: dict[str, Any] = {}
    if generates:
        responses["first"] = greedy_responses(engine)
    supervised_update(trainer, 0)
    if generates:
        # The self-check calls the Hugging Face model itself.
        task = trainer.algorithm.task
        task.self_check(engine, task.train[:2])
        responses["later"] = greedy_responses(engine)
        raise_in_session(engine)
        assert greedy_responses(engine) == responses["later"], "an exception inside a session changed the responses"
    supervised_update(trainer, 1)
    return responses, whole_state(engine)


def raise_in_session(engine: Any) -> None:
    """Raises an exception while the weights are gathered, on rank 1 alone."""
    with suppress(KeyError), engine.gathered():
        if rank() == 1:
            raise KeyError("inside")


def saving(folder: Path, keep: Callable[..., None]) -> None:
    """Saves a trained ZeRO-3 actor and a critic; keeps what the engines compute.

    `ema-weightsN` are the actor's weights after N updates, `ema-average` their moving average, `saved` log-probs and
    values.
    """
    actor = engine_for(make_causal_lm(), SHARDED, folder)
    critic = engine_for(make_classifier(seed=2), SHARDED, folder)
    batch = recorded_batch()
    average = MovingAverage(actor, decay=0.75)
    keep(folder, "ema-weights0", tensors=whole_state(actor))
    for update in range(3):
        ppo_updates(actor, critic, batch, SHARDED.accumulation, update)
        average.update()
        keep(folder, f"ema-weights{update + 1}", tensors=whole_state(actor))
    keep(folder, "ema-average", tensors=whole_state(average))

    save_engines(folder, make_tokenizer(), actor=actor, critic=critic)
    keep(folder, "saved", tensors=logprobs_and_values(actor, critic))


@torch.no_grad()
def logprobs_of(policy: Any) -> Tensor:
    """Log-probs of ROWS."""
    ids, attention_mask, mask = pad_rows(ROWS)
    logprobs: Tensor = policy(ids, attention_mask, mask.shape[1])[0]
    return logprobs


@torch.no_grad()
def logprobs_and_values(actor: Any, critic: Any) -> dict[str, Tensor]:
    """Log-probs and values of ROWS."""
    ids, attention_mask, _ = pad_rows(ROWS)
    actor.eval()
    critic.eval()
    return {"logprobs": logprobs_of(actor), "values": critic(ids, attention_mask)}


def lora(folder: Path, keep: Callable[..., None]) -> None:
    """Two updates of an actor and a critic with adapters, their saved folders and the reference."""
    keep(folder, "lora", tensors=lora_updates(folder, replace(SHARDED, gradient_checkpointing=True)))


def lora_updates(folder: Path, case: Case) -> dict[str, Tensor]:
    """Makes two PPO updates of an actor and a critic with adapters, and saves both models. Every rank must call it.

    Returns:
        On the main process, else nothing: weights as `actor.NAME` and `critic.NAME`; log-probs and values after the
        updates as `outputs/logprobs` and `outputs/values`; log-probs of the reference, which is the actor without its
        adapters, before and after the updates as `outputs/before` and `outputs/after`.
    """
    actor_model = make_causal_lm()
    critic_model = make_classifier(seed=2)
    with torch.random.fork_rng():
        torch.manual_seed(4)
        add_lora(actor_model, 4, None, "base")
        add_lora(critic_model, 4, "mlp", "base")
    actor = engine_for(actor_model, case, folder)
    critic = engine_for(critic_model, case, folder)
    reference = AdaptersOff(actor)
    batch = recorded_batch()
    logprobs = [logprobs_of(reference)]
    for update in range(2):
        ppo_updates(actor, critic, batch, case.accumulation, update)
        logprobs.append(logprobs_of(reference))
    save_engines(folder / "lora", make_tokenizer(), actor=actor, critic=critic)

    # Gathering weights and computing outputs needs every rank, also those that return nothing.
    states = {"actor": whole_state(actor), "critic": whole_state(critic)}
    outputs = logprobs_and_values(actor, critic) | {"before": logprobs[0], "after": logprobs[-1]}
    if not is_main():
        return {}
    results = {f"outputs/{name}": output for name, output in outputs.items()}
    for role, state in states.items():
        results |= {f"{role}.{name}": weight for name, weight in state.items()}
    return results


CHECKS = {"generation": generation, "saving": saving, "lora": lora}
