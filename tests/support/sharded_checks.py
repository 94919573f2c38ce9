# SPDX-License-Identifier: Apache-2.0
"""Generation, saving, evaluation and LoRA at ZeRO 3, beside ZeRO 0; tests/distributed compares the results.

tests/distributed/workers.py calls each of `CHECKS` on each of two processes, with a folder and the function `keep`,
which writes numbers and tensors of this rank to NAME-RANK.json and NAME-RANK.safetensors in that folder.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dschat.data.examples import PairExample, PreferenceExample, PromptExample, SFTExample
from dschat.engine.adapters_off import AdaptersOff
from dschat.engine.engine import frozen_engine
from dschat.engine.zero3 import parameter_offload
from dschat.models.lora import add_lora
from dschat.models.policy import PolicyModel
from dschat.rollouts.continuous import ContinuousEngine
from dschat.rollouts.generate import GenerateEngine
from dschat.rollouts.sampling import Sampling
from dschat.run.distributed import is_main, rank
from dschat.run.model_folders import ModelFolders, SavedModel
from dschat.settings.ppo import PPOConfig
from dschat.training.ppo.models import MovingAverage
from factories import (
    BOS,
    PAD,
    make_causal_lm,
    make_classifier,
    make_prompt,
    make_tokenizer,
    pad_rows,
    ppo_config,
    ppo_loop,
    ragged_rows,
    random_ids,
    run_of,
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


def hook_counts(engine: Any) -> list[int]:
    """Number of hooks on every module; at ZeRO 3 also the lengths of DeepSpeed's lists of hooks."""
    counts = []
    for module in engine.module.modules():
        counts.append(len(module._forward_hooks) + len(module._forward_pre_hooks) + len(module._backward_hooks))
    offload = parameter_offload(engine._engine)
    if offload:
        counts.append(len(offload.forward_hooks))
        counts.append(len(offload.backward_hooks))
    return counts


def gathered_elements(engine: Any) -> int:
    """Elements of the parameters that are gathered on this process: 0 at ZeRO 3 outside of a session."""
    return sum(parameter.numel() for parameter in engine.module.parameters())


def generation(folder: Path, keep: Callable[..., None]) -> None:
    """Training with generation in between and without, at ZeRO 0 and 3; and generation by frozen engines."""
    for case in (WHOLE, SHARDED):
        notes, weights = two_updates(case, folder, generates=False)
        keep(folder, f"training-zero{case.zero_stage}", notes, weights)
        notes, weights = two_updates(case, folder, generates=True)
        keep(folder, f"generation-zero{case.zero_stage}", notes, weights)

    frozen = frozen_engine(PolicyModel(make_causal_lm()), settings_of(folder))
    keep(folder, "generation-frozen", {"held": gathered_elements(frozen), "first": greedy_responses(frozen)})
    offloaded = frozen_engine(PolicyModel(make_causal_lm()), replace(settings_of(folder), offload=True))
    keep(folder, "offloaded", {"first": greedy_responses(offloaded)}, {"logprobs": logprobs_of(offloaded)})


def two_updates(case: Case, folder: Path, generates: bool) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Two updates of step 1, with generation before each of them if `generates`.

    Returns:
        Notes of this rank: hooks and gathered elements before and after, and greedy responses before the first update
        (`first`) and after it (`later`). And the weights, on the main process alone.
    """
    trainer = supervised_trainer("sft", engine_for(make_causal_lm(), case, folder), case, folder)
    engine = trainer.algorithm.engine
    notes: dict[str, Any] = {"hooks before": hook_counts(engine), "held before": gathered_elements(engine)}
    if generates:
        notes["first"] = greedy_responses(engine)
    supervised_update(trainer, 0)
    if generates:
        # The self-check calls the Hugging Face model itself.
        task = trainer.algorithm.task
        task.self_check(engine, task.train[:2])
        notes["later"] = greedy_responses(engine)
        notes["raised"] = raises_in_session(engine)
        assert greedy_responses(engine) == notes["later"], "an exception inside a session changed the responses"
    supervised_update(trainer, 1)
    notes["hooks after"] = hook_counts(engine)
    notes["held after"] = gathered_elements(engine)
    return notes, whole_state(engine)


def raises_in_session(engine: Any) -> bool:
    """Raises an exception while the weights are gathered, on rank 1 alone: True there, False on rank 0."""
    try:
        with engine.gathered():
            if rank() == 1:
                raise KeyError("inside")
    except KeyError:
        return True
    return False


def saving(folder: Path, keep: Callable[..., None]) -> None:
    """Saves a trained ZeRO-3 actor, its moving average and a critic; keeps what the engines compute.

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

    config = ppo_config(folder)
    models = [
        SavedModel(actor, "policy", "base", "actor"),
        SavedModel(critic, "critic", "base", "critic"),
        SavedModel(actor, "moving average", "base", "actor_ema", average.whole_weights),
    ]
    ModelFolders(models, make_tokenizer(), config, run_of("ppo", config)).save_final()
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


def evaluation(folder: Path, keep: Callable[..., None]) -> None:
    """Metrics of one held-out row and of three, in every step."""
    keep(folder, "evaluation", evaluate_all(folder, SHARDED))


def evaluate_all(folder: Path, case: Case) -> dict[str, float]:
    """Evaluation metrics by "step/number of held-out rows/metric"."""
    demonstrations = []
    pairs = []
    preferences = []
    prompts = []
    for number, (prompt, response) in enumerate(ROWS):
        demonstrations.append(SFTExample(prompt, response))
        # Rejected sequences and responses only have to differ from the chosen ones, in length, too.
        pairs.append(PairExample(chosen_ids=prompt + response, rejected_ids=response + prompt[:1]))
        preferences.append(PreferenceExample(prompt, chosen_ids=response, rejected_ids=response[:1] + prompt[:1]))
        prompts.append(make_prompt(prompt, f"p{number}", number))

    metrics: dict[str, float] = {}
    for rows in (1, 3):
        for step, held_out in (("sft", demonstrations), ("reward", pairs), ("dpo", preferences)):
            model = make_classifier(seed=2) if step == "reward" else make_causal_lm()
            trainer = supervised_trainer(step, engine_for(model, case, folder), case, folder, held_out[:rows])
            for name, value in trainer.evaluate().items():
                metrics[f"{step}/{rows}/{name}"] = value
            if step == "dpo":
                for name, value in reference_logprobs(trainer).items():
                    metrics[f"dpo/{rows}/{name}"] = value
        trainer = _ppo_trainer(folder / f"ppo{rows}", case, prompts[:rows])
        for name, value in trainer.evaluate().items():
            metrics[f"ppo/{rows}/{name}"] = value
    return metrics


def reference_logprobs(trainer: Any) -> dict[str, float]:
    """The reference's log-probs of the chosen and the rejected response of each held-out pair of DPO, numbered."""
    logprobs: list[float] = []
    for pair in trainer.algorithm.task.eval:
        logprobs += pair.ref_logprobs
    return {f"reference {number}": logprob for number, logprob in enumerate(logprobs)}


def _ppo_trainer(folder: Path, case: Case, held_out: list[PromptExample]) -> Any:
    """A loop of step 3 whose scores are the lengths of the responses."""
    config: PPOConfig = ppo_config(folder, per_device_eval_batch_size=2, eval_prompts=0)
    folder.mkdir(exist_ok=True)
    models = {
        "actor": engine_for(make_causal_lm(), case, folder),
        "reference": engine_for(make_causal_lm(seed=1), case, folder),
        "critic": engine_for(make_classifier(seed=2), case, folder),
    }

    def length_scores(prompts: list[str], responses: list[str], rows: list[Any]) -> list[float]:
        return [float(len(response)) for response in responses]

    return ppo_loop(config, length_scores, held_out, held_out, **models)


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
    results = {}
    for role, state in states.items():
        for name, weight in state.items():
            results[f"{role}.{name}"] = weight
    for name, output in outputs.items():
        results[f"outputs/{name}"] = output
    return results


CHECKS = {"generation": generation, "saving": saving, "evaluation": evaluation, "lora": lora}
