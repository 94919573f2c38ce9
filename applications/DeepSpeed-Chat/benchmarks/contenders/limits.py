# SPDX-License-Identifier: Apache-2.0
"""Measures the limits of a device, the share of them that the phases of step 3 reach, and the speed of decoding alone.

What the phases must compute and read is counted by `dschat.models.operations`, as in every run.
"""

import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import cache, partial
from types import SimpleNamespace
from typing import cast

import numpy as np
import torch
from transformers import GemmaForCausalLM

from contenders.work import EOS, PAD, IterationWork, make_actor, make_reward_model, prompt_ids
from dschat.models.compiled import compile_layers
from dschat.models.engines import TrainedPolicy
from dschat.models.layout import Lengths
from dschat.models.operations import ModelCost, Peaks, cost_of, decoding_bytes
from dschat.rollouts.engine import pad_prompts
from dschat.rollouts.generate import ContinuousEngine
from dschat.rollouts.sampling import Sampling
from dschat.run.peaks import measure_peaks

Figures = dict[str, float | str]
Task = Callable[[], list[Figures]]
TERA = 1e12
CPU_BYTES = 2**28  # bytes of memory that a CPU's measurement may count on


def measure_limits(device: str) -> Peaks:
    """Bytes per second of memory, and operations per second of matrices in the dtype of training."""
    if device == "cuda":
        return measure_peaks(
            torch.device(device),
            torch.bfloat16,
            torch.cuda.mem_get_info()[0],
        )
    return measure_peaks(torch.device(device), torch.float32, CPU_BYTES)


def fastest(call: Callable[[], object], repeats: int) -> float:
    """Seconds of the fastest of some calls, after one that does not count."""
    seconds = []
    for _ in range(repeats + 1):
        begun = _now()
        call()
        seconds.append(_now() - begun)
    return min(seconds[1:])


def _now() -> float:
    """The time in seconds, after the device has finished its work."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


@cache
def model_costs(work: IterationWork) -> tuple[ModelCost, ModelCost]:
    """Costs of the policies and of the scalar models: a Gemma's weights say them without numbers."""
    with torch.device("meta"):
        policy = cost_of(make_actor(work))
        scalar = cost_of(make_reward_model(work))
    assert policy is not None
    assert scalar is not None
    return policy, scalar


def lengths_of(work: IterationWork) -> Lengths:
    """Tokens of prompts and responses, which all have the full length."""
    prompts = np.array(work.prompt_lengths())
    return Lengths(prompts, np.full(work.batch, work.response))


def rollout_limit(work: IterationWork, limits: Peaks) -> float:
    """Seconds of a rollout if decoding did nothing but read weights, keys and values."""
    policy, _ = model_costs(work)
    read = decoding_bytes(policy, lengths_of(work), work.batch)
    assert read is not None
    return read / limits.bytes_per_second


def step_limit(work: IterationWork, limits: Peaks) -> float:
    """Seconds of a decoding step, on average over those that follow the first tokens."""
    policy, _ = model_costs(work)
    assert policy.step_bytes is not None
    first = policy.step_bytes / limits.bytes_per_second
    return (rollout_limit(work, limits) - first) / (work.response - 1)


def phase_operations(work: IterationWork) -> dict[str, float]:
    """Operations of the phases scoring and training, each on a policy and on a scalar model."""
    policy, scalar = model_costs(work)
    lengths = lengths_of(work)
    targets = int(lengths.responses.sum())
    return {
        "scoring": policy.forward.operations(lengths.totals, targets) + scalar.forward.operations(lengths.totals, 0),
        "training": policy.training_operations(lengths.totals, targets)
        + scalar.training_operations(lengths.totals, 0),
    }


def decoding_rates(
    work: IterationWork,
    whole: float,
    first: float,
    limits: Peaks,
) -> Figures:
    """Speed of decoding steps, from the seconds of whole responses minus those of their first tokens."""
    step = (whole - first) / (work.response - 1)
    limit = step_limit(work, limits)
    return {
        "first_tokens_seconds": first,
        "step_ms": 1e3 * step,
        "limit_ms": 1e3 * limit,
        "tokens_per_second": work.batch / step,
        "of_limit": limit / step,
    }


def phase_rates(
    work: IterationWork,
    seconds: dict[str, float],
    limits: Peaks,
) -> Figures:
    """Operations per second of the phases scoring and training, and their share of the limit."""
    figures: Figures = {}
    for phase, operations in phase_operations(work).items():
        rate = operations / seconds[phase]
        figures[f"{phase}_seconds"] = seconds[phase]
        figures[f"{phase}_tflops"] = rate / TERA
        figures[f"{phase}_of_limit"] = rate / limits.operations_per_second
    return figures


def decode(
    decoder: str,
    works: Sequence[IterationWork],
    device: str,
    repeats: int,
    limits: Peaks,
) -> list[Figures]:
    """Steps of decoding by one of gpu.py's DECODERS, for several works of the same model."""
    with torch.device(device):
        model = make_actor(works[0]).eval()
    if decoder == "compiled":
        compile_layers(model)

    def measure(work: IterationWork) -> list[Figures]:
        launches = ["by transformers"]
        draw = drawer(decoder, model, prompt_ids(work), launches.append)
        whole = fastest(partial(draw, work.response), repeats)
        first = fastest(partial(draw, 1), repeats)
        return [decoding_rates(work, whole, first, limits) | {"steps": launches[-1]}]

    rows = []
    for work in works:
        rows += attempted({"prompts": work.batch}, partial(measure, work))
    return rows


def attempted(label: Figures, task: Task) -> list[Figures]:
    """The rows of a task, which begin with the label, or one that says why there are none."""
    try:
        return [label | row for row in task()]
    except Exception as error:  # a GPU's minutes are dear: the other rows are measured all the same
        traceback.print_exc()
        return [label | {"problem": f"{type(error).__name__}: {error}".splitlines()[0]}]


def drawer(
    decoder: str, model: GemmaForCausalLM, prompts: list[list[int]], report: Callable[[str], None]
) -> Callable[[int], object]:
    """Returns a function that samples responses with a given number of tokens to all prompts.

    `report` receives how our decoders launched their steps.
    """
    actor = cast(TrainedPolicy, SimpleNamespace(gathered=lambda: nullcontext(SimpleNamespace(inner=model))))
    engine = ContinuousEngine(len(prompts), decode_graphs=decoder != "dynamic", report=report)
    input_ids, mask = pad_prompts(prompts, PAD, model.device)

    def draw(tokens: int) -> object:
        sampling = Sampling(tokens, (EOS,), PAD)
        if decoder != "transformers":
            with engine.session(actor) as sample_responses:
                return sample_responses(prompts, sampling, range(len(prompts)))
        config = sampling.generation_config()
        config.cache_implementation = "static"
        options = {"attention_mask": mask.long(), "generation_config": config}
        return model.generate(input_ids, **options)  # type: ignore[misc, arg-type]

    return draw
