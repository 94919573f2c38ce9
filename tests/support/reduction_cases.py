# SPDX-License-Identifier: Apache-2.0
"""Engines that reduce gradients correctly, and engines that lose some; tests/distributed looks at the results.

tests/distributed/workers.py calls each of `CHECKS` on each of two processes.
"""

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dschat.base.errors import UserError
from dschat.engine import reduction as reduction_check
from dschat.models.lora import add_lora
from dschat.run.distributed import rank
from dschat.run.state import random_states
from factories import (
    engine_of,
    largest_difference,
    make_causal_lm,
    make_classifier,
    pad_rows,
    ragged_rows,
    whole_state,
)

SPOILED = "model.layers.0.mlp.up_proj.weight"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
CASES = [(stage, dtype) for dtype in DTYPES for stage in (0, 1, 2, 3)]
SETTINGS = ("lora", "checkpointing", "offload", "scalar")  # at ZeRO 2 and 3
FAST_CASES = ((3, "fp32"),)
LATER = {"lora": ".lora_A.", "critic": SPOILED}  # parameters whose gradient is zero in the first update
LATER_CASES = [(model, stage) for model in LATER for stage in (0, 1, 2, 3)]
FAST_LATER_CASES = (("lora", 3),)


def update(engine: Any) -> str | None:
    """One update of two micro-batches, of other rows on each process. Returns the message if the check refuses it."""
    rows = ragged_rows([2, 5, 3, 1], [7, 1, 4, 3], seed=3 + rank())
    for part in (rows[:2], rows[2:]):
        ids, attention_mask, mask = pad_rows(part)
        if hasattr(engine.module.inner, "score"):
            loss = engine(ids, attention_mask)[attention_mask].sub(1).square().sum() / 50
        else:
            logprobs, _ = engine(ids, attention_mask, mask.shape[1])
            loss = -torch.where(mask, logprobs, 0.0).sum() / 30
        engine.backward(loss)
        try:
            engine.step()
        except UserError as error:
            return str(error)
    return None


def checked_update(engine: Any) -> str | None:
    """One update with the check.

    Returns:
        The check's message; "not compared" if it still waits for gradients; None if all gradients agree.
    """
    message = update(engine)
    if message is None and engine._reduction_check is not None:
        return "not compared"
    return message


def engine_at(stage: int, dtype: str = "fp32", **options: Any) -> Any:
    """An engine of the toy model."""
    model = options.pop("model", None) or make_causal_lm()
    return engine_of(model, 2, 2, zero_stage=stage, dtype=DTYPES[dtype], **options)


def adapted_lm() -> Any:
    """The toy model with adapters, whose B matrices are zero."""
    model = make_causal_lm()
    with torch.random.fork_rng():
        torch.manual_seed(4)  # A matrices are drawn
        add_lora(model, 2, ["q_proj", "v_proj"], "unused")
    return model


def fresh_critic() -> Any:
    """The toy classifier with a head of zeros, as a critic that starts from the actor has one."""
    model = make_classifier()
    torch.nn.init.zeros_(model.score.weight)
    return model


def lose(engine: Any, share: float, part: str = SPOILED) -> None:
    """Scales a gradient on this process after autograd and before the reduction, as if a part of it was lost.

    Args:
        engine: the gradient is that of its first weight with `part` in its name.
        share: factor; 0 loses the gradient.
        part: part of the weight's name.
    """

    def scaled(gradients: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(gradient * share for gradient in gradients)

    names = {name.removeprefix("inner."): parameter for name, parameter in engine.module.named_parameters()}
    spoiled = next(parameter for name, parameter in names.items() if part in name)
    engine._watch.nodes[spoiled].register_prehook(scaled)


def halve_reduced_gradients() -> None:
    """Makes the check read half of every gradient that DeepSpeed holds, for the rest of this (forked) process."""
    held = reduction_check.local_gradient

    def half(engine: Any, sample: reduction_check.GradientSample) -> Tensor:
        return held(engine, sample) / 2

    vars(reduction_check)["local_gradient"] = half


def check_later_gradients(model: str, stage: int, said: dict[str, Any], moved: dict[str, bool]) -> None:
    """A model some of whose gradients are zero in the first update: right gradients, and one that a process loses."""
    make_model = {"lora": adapted_lm, "critic": fresh_critic}[model]
    checked = engine_at(stage, model=make_model())
    unchecked = engine_at(stage, model=make_model())
    checked.check_reduction()
    said[f"{model}-first-{stage}"] = update(checked)
    if checked._reduction_check is None:
        said[f"{model}-first-{stage}"] = "over too early"
    said[f"{model}-second-{stage}"] = checked_update(checked)
    for _ in range(2):
        update(unchecked)
    states = [whole_state(engine) for engine in (checked, unchecked)]
    moved[f"{model}-{stage}"] = rank() == 0 and largest_difference(*states) > 0
    wrong = engine_at(stage, model=make_model())
    wrong.check_reduction()
    lose(wrong, float(rank() == 0), LATER[model])
    said[f"{model}-lost-first-{stage}"] = update(wrong)
    said[f"{model}-lost-second-{stage}"] = update(wrong)


def check_case(stage: int, dtype: str, said: dict[str, Any], moved: dict[str, bool]) -> None:
    """Right gradients, which the check leaves as they are; a gradient that one process loses, and half of one."""
    case = f"{stage}-{dtype}"
    checked = engine_at(stage, dtype)
    unchecked = engine_at(stage, dtype)
    checked.check_reduction()
    before = random_states()
    said[f"right-{case}"] = checked_update(checked)
    same_states = all(torch.equal(x, before[name]) for name, x in random_states().items())
    update(unchecked)
    states = [whole_state(engine) for engine in (checked, unchecked)]  # empty on rank 1
    moved[case] = not same_states or (rank() == 0 and largest_difference(*states) > 0)
    said[f"again-{case}"] = update(checked)  # nothing is left of the check
    for name, share in (("dropped", float(rank() == 0)), ("halved", 0.5)):
        engine = engine_at(stage, dtype)
        engine.check_reduction()
        lose(engine, share)
        said[f"{name}-{case}"] = update(engine)


def check_settings(stage: int, said: dict[str, Any]) -> None:
    """Right gradients with adapters, recomputed layers and offloaded states, and those of a scalar model."""
    options: dict[str, dict[str, Any]] = {
        "lora": {"model": adapted_lm()},
        "checkpointing": {"gradient_checkpointing": True, "dtype": "bf16"},
        "offload": {"offload": True},
        "scalar": {"model": make_classifier(), "dtype": "bf16"},
    }
    for name in SETTINGS:
        engine = engine_at(stage, **options[name])
        engine.check_reduction()
        said[f"{name}-{stage}"] = update(engine) or checked_update(engine)


def reduction(
    cases: Iterable[tuple[int, str]],
    later_cases: Iterable[tuple[str, int]],
    stages_of_settings: Iterable[int],
    folder: Path,
    keep: Callable[..., None],
) -> None:
    """Keeps `said`, each case's message or None, and `moved`, whether its check changed an update."""
    said: dict[str, Any] = {}
    moved: dict[str, bool] = {}
    for stage, dtype in cases:
        check_case(stage, dtype, said, moved)
    for model, stage in later_cases:
        check_later_gradients(model, stage, said, moved)
    for stage in stages_of_settings:
        check_settings(stage, said)
    keep(folder, "reduction", {"said": said, "moved": moved})


CHECKS = {
    "reduction": partial(reduction, FAST_CASES, FAST_LATER_CASES, ()),
    "reduction_everywhere": partial(reduction, CASES, LATER_CASES, (2, 3)),
}
