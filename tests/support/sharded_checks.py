# SPDX-License-Identifier: Apache-2.0
"""Checks that run on each of two processes: generation, saving, evaluation and LoRA at ZeRO 3, compared to ZeRO 0."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dschat.data.examples import PairExample, PreferenceExample, PromptExample, SFTExample
from dschat.engine.engine import AdaptersOff, frozen_engine
from dschat.engine.zero3 import parameter_offload
from dschat.models.lora import add_lora
from dschat.models.policy import PolicyModel
from dschat.rollouts.generate import ContinuousEngine, GenerateEngine
from dschat.rollouts.sampling import Sampling
from dschat.run.distributed import gather_objects, rank
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
WHOLE, SHARDED = Case(0, 2), Case(3, 2)


def prompts_of(number: int) -> list[list[int]]:
    """Three prompts of a process."""
    return [random_ids(2 + i, 50 * number + i) for i in range(3)]


def greedy(engine: Any, lengths: tuple[int, int] = LENGTHS) -> list[list[int]]:
    """This process's responses, its own length long, drawn by either engine, twice on rank 1 and once on rank 0."""
    engine.eval()
    sampling = Sampling(lengths[rank()], (NO_END,), PAD, BOS, temperature=0.0)
    drawn = []
    for rollouts in (ContinuousEngine(2), GenerateEngine(3)):
        with rollouts.session(engine) as draw:
            for _ in range(rank() + 1):
                rollout = draw(prompts_of(rank()), sampling, range(3)).rollout
        drawn.append(rollout.response_ids.tolist())
    engine.train()
    assert drawn[0] == drawn[1]
    return drawn[0]


def hooks_of(engine: Any) -> list[int]:
    """How many hooks hang on every module, and how many DeepSpeed knows of."""
    modules = list(engine.module.modules())
    counts = [len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._backward_hooks) for m in modules]
    offload = parameter_offload(engine._engine)
    return counts + ([len(offload.forward_hooks), len(offload.backward_hooks)] if offload else [])


def held_elements(engine: Any) -> int:
    """Elements of the parameters that lie whole on this process now."""
    return sum(p.numel() for p in engine.module.parameters())


def generation(folder: Path, keep: Callable[..., None]) -> None:
    """Greedy tokens at ZeRO 0 and 3, training with generation in between and without, and an exception inside."""
    for case in (WHOLE, SHARDED):
        trained = {}
        for between in (False, True):
            trainer = supervised_trainer("sft", engine_for(make_causal_lm(), case, folder), case, folder)
            engine = trainer.algorithm.engine
            notes: dict[str, Any] = {"hooks before": hooks_of(engine), "held before": held_elements(engine)}
            first = greedy(engine) if between else None
            supervised_update(trainer, 0)
            if between:
                trainer.algorithm.task.self_check(
                    engine, trainer.algorithm.task.train[:2]
                )  # calls the Hugging Face model itself
                later = greedy(engine)
                notes["raised"] = _raises_inside(engine)
                assert greedy(engine) == later, "after an exception other tokens come out"
                notes |= {"first": first, "later": later}
            supervised_update(trainer, 1)
            notes |= {"hooks after": hooks_of(engine), "held after": held_elements(engine)}
            trained[between] = whole_state(engine)
            if between:
                keep(folder, f"generation-zero{case.zero_stage}", notes, trained[True])
            else:
                keep(folder, f"training-zero{case.zero_stage}", notes, trained[False])
    frozen = frozen_engine(PolicyModel(make_causal_lm()), settings_of(folder))
    keep(folder, "generation-frozen", {"held": held_elements(frozen), "first": greedy(frozen)})
    offloaded = frozen_engine(PolicyModel(make_causal_lm()), replace(settings_of(folder), offload=True))
    keep(folder, "offloaded", {"first": greedy(offloaded)}, {"logprobs": logprobs_of(offloaded)})


def _raises_inside(engine: Any) -> bool:
    """Only rank 1 fails inside; both leave."""
    try:
        with engine.gathered():
            if rank() == 1:
                raise KeyError("inside")
    except KeyError:
        return True
    return False


def saving(folder: Path, keep: Callable[..., None]) -> None:
    """Folders of a trained ZeRO-3 actor, its moving average and critic; and what the engines say."""
    actor = engine_for(make_causal_lm(), SHARDED, folder)
    critic = engine_for(make_classifier(seed=2), SHARDED, folder)
    batch = recorded_batch()
    average = MovingAverage(actor, decay=0.75)
    states = [whole_state(actor)]
    for update in range(3):
        ppo_updates(actor, critic, batch, SHARDED.accumulation, update)
        average.update()
        states.append(whole_state(actor))
    for number, state in enumerate(states):
        keep(folder, f"ema-weights{number}", tensors=state)
    keep(folder, "ema-average", tensors=whole_state(average))
    config = ppo_config(folder)
    models = [SavedModel(actor, "policy", "base", "actor"), SavedModel(critic, "critic", "base", "critic")]
    models.append(SavedModel(actor, "moving average", "base", "actor_ema", average.whole_weights))
    ModelFolders(models, make_tokenizer(), config, run_of("ppo", config)).save_final()
    keep(folder, "saved", tensors=outputs(actor, critic))


@torch.no_grad()
def logprobs_of(policy: Any) -> Tensor:
    """Log-probs of ROWS."""
    ids, attention_mask, mask = pad_rows(ROWS)
    logprobs: Tensor = policy(ids, attention_mask, mask.shape[1])[0]
    return logprobs


@torch.no_grad()
def outputs(actor: Any, critic: Any) -> dict[str, Tensor]:
    """Log-probs and values of ROWS."""
    ids, attention_mask, _ = pad_rows(ROWS)
    actor.eval()
    critic.eval()
    return {"logprobs": logprobs_of(actor), "values": critic(ids, attention_mask)}


def evaluation(folder: Path, keep: Callable[..., None]) -> None:
    """Metrics of one held-out row and of three, in every step."""
    keep(folder, "evaluation", evaluate_all(folder, SHARDED))


def evaluate_all(folder: Path, case: Case) -> dict[str, float]:
    """Evaluation metrics by step and number of rows."""
    demonstrations = [SFTExample(p, r) for p, r in ROWS]
    pairs = [PairExample(p + r, r + p[:1]) for p, r in ROWS]
    preferences = [PreferenceExample(p, r, r[:1] + p[:1]) for p, r in ROWS]
    prompts = [make_prompt(p, f"p{i}", i) for i, (p, _) in enumerate(ROWS)]
    metrics: dict[str, float] = {}
    for rows in (1, 3):
        for step, held_out in (("sft", demonstrations), ("reward", pairs), ("dpo", preferences)):
            model = make_classifier(seed=2) if step == "reward" else make_causal_lm()
            trainer = supervised_trainer(step, engine_for(model, case, folder), case, folder, held_out[:rows])
            metrics |= {f"{step}/{rows}/{name}": number for name, number in trainer.evaluate().items()}
            if step == "dpo":
                both = [logprob for pair in trainer.algorithm.task.eval for logprob in pair.ref_logprobs]
                metrics |= {f"dpo/{rows}/reference {place}": number for place, number in enumerate(both)}
        trainer = _ppo_trainer(folder / f"ppo{rows}", case, prompts[:rows])
        metrics |= {f"ppo/{rows}/{name}": number for name, number in trainer.evaluate().items()}
    return metrics


def _ppo_trainer(folder: Path, case: Case, held_out: list[PromptExample]) -> Any:
    config: PPOConfig = ppo_config(folder, per_device_eval_batch_size=2, eval_prompts=0)
    folder.mkdir(exist_ok=True)
    models = {
        "actor": engine_for(make_causal_lm(), case, folder),
        "reference": engine_for(make_causal_lm(seed=1), case, folder),
        "critic": engine_for(make_classifier(seed=2), case, folder),
    }
    return ppo_loop(config, lambda p, responses, r: [float(len(x)) for x in responses], held_out, held_out, **models)


def lora(folder: Path, keep: Callable[..., None]) -> None:
    """Two updates of an actor and a critic with adapters, their saved folders and the reference."""
    weights, notes = lora_updates(folder, replace(SHARDED, gradient_checkpointing=True))
    keep(folder, "lora", notes, weights)


def lora_updates(folder: Path, case: Case) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Weights after two PPO updates, and log-probs of the reference before and after."""
    actor_model, critic_model = make_causal_lm(), make_classifier(seed=2)
    with torch.random.fork_rng():
        torch.manual_seed(4)
        add_lora(actor_model, 4, None, "base")
        add_lora(critic_model, 4, "mlp", "base")
    actor, critic = engine_for(actor_model, case, folder), engine_for(critic_model, case, folder)
    reference = AdaptersOff(actor)
    batch = recorded_batch()
    before = logprobs_of(reference)
    for update in range(2):
        ppo_updates(actor, critic, batch, case.accumulation, update)
        after = logprobs_of(reference)
    save_engines(folder / "lora", make_tokenizer(), actor=actor, critic=critic)
    states = {"actor": whole_state(actor), "critic": whole_state(critic)}
    weights = {f"{role}.{name}": w for role, state in states.items() for name, w in state.items()}
    extra = outputs(actor, critic) | {"before": before, "after": after}
    weights |= {f"outputs/{name}": x for name, x in extra.items()} if weights else {}
    return weights, {"everywhere": gather_objects(rank())}


CHECKS = {"generation": generation, "saving": saving, "evaluation": evaluation, "lora": lora}
