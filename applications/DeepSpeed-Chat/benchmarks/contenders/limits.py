# SPDX-License-Identifier: Apache-2.0
"""Measures a device's peak rates, the share of them that each phase of step 3 reaches, and the speed of decoding.

`dschat.models.operations` counts the operations and bytes of a phase, as it does for the metrics of a run.
"""

import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
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
from dschat.models.operations import ModelCost, cost_of, decoding_bytes
from dschat.rollouts.continuous import ContinuousEngine
from dschat.rollouts.engine import pad_prompts
from dschat.rollouts.sampling import Sampling

Figures = dict[str, float | str]
Task = Callable[[], list[Figures]]
TERA = 1e12
LIMIT_REPEATS = 20


@dataclass(frozen=True)
class DeviceLimits:
    """What a device reaches at most."""

    operations_per_second: float  # large matrix products
    bytes_per_second: float  # copies of a large tensor, bytes read plus bytes written


def measure_limits(device: str) -> DeviceLimits:
    """Multiplies large matrices and copies a large tensor: bf16 on a GPU, float32 on a CPU."""
    is_gpu = device == "cuda"
    side = 8192 if is_gpu else 1024
    dtype = torch.bfloat16 if is_gpu else torch.float32
    # Random numbers, because constants are multiplied faster than a model's weights.
    left, right = torch.randn(2, side, side, dtype=dtype, device=device)
    product = torch.empty_like(left)
    source = torch.zeros(2**30 if is_gpu else 2**26, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    multiplying = fastest(lambda: torch.mm(left, right, out=product), LIMIT_REPEATS)
    copying = fastest(lambda: target.copy_(source), LIMIT_REPEATS)
    return DeviceLimits(2 * side**3 / multiplying, 2 * source.numel() / copying)


def fastest(call: Callable[[], object], repeats: int) -> float:
    """Seconds of the fastest of `repeats` calls, after a warm-up call."""
    seconds = []
    for _ in range(repeats + 1):
        start = _now()
        call()
        seconds.append(_now() - start)
    return min(seconds[1:])


def _now() -> float:
    """The time in seconds, after the device has finished its work."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


@cache
def model_costs(work: IterationWork) -> tuple[ModelCost, ModelCost]:
    """Costs of a policy and of a scalar model. They follow from the weights' shapes, so no weights are allocated."""
    with torch.device("meta"):
        policy = cost_of(make_actor(work))
        scalar = cost_of(make_reward_model(work))
    assert policy is not None
    assert scalar is not None
    return policy, scalar


def lengths_of(work: IterationWork) -> Lengths:
    """Lengths of prompts and responses in tokens; every response has the maximum length."""
    prompts = np.array(work.prompt_lengths())
    return Lengths(prompts, np.full(work.batch, work.longest_response))


def rollout_limit(work: IterationWork, limits: DeviceLimits) -> float:
    """Lower bound of a rollout's seconds: the time to read the weights, keys and values that decoding needs."""
    policy, _ = model_costs(work)
    return decoding_bytes(policy, lengths_of(work), work.batch) / limits.bytes_per_second


def step_limit(work: IterationWork, limits: DeviceLimits) -> float:
    """Lower bound of a decoding step's seconds, averaged over the steps after the first token."""
    policy, _ = model_costs(work)
    first = policy.weight_bytes / limits.bytes_per_second
    return (rollout_limit(work, limits) - first) / (work.longest_response - 1)


def phase_operations(work: IterationWork) -> dict[str, float]:
    """Operations of scoring and of training, each summed over one policy and one scalar model."""
    lengths = lengths_of(work).totals
    scoring = 0.0
    training = 0.0
    for cost in model_costs(work):
        scoring += cost.forward_operations(lengths)
        training += cost.training_operations(lengths)
    return {"scoring": scoring, "training": training}


def decoding_rates(
    work: IterationWork, rollout_seconds: float, prefill_seconds: float, limits: DeviceLimits
) -> Figures:
    """Speed of the decoding steps after the first token, without the prefill of the prompts."""
    step = (rollout_seconds - prefill_seconds) / (work.longest_response - 1)
    limit = step_limit(work, limits)
    return {
        "first_tokens_seconds": prefill_seconds,
        "step_ms": 1e3 * step,
        "limit_ms": 1e3 * limit,
        "tokens_per_second": work.batch / step,
        "of_limit": limit / step,
    }


def phase_rates(work: IterationWork, seconds: dict[str, float], limits: DeviceLimits) -> Figures:
    """Operations per second of the phases scoring and training, and their share of the limit."""
    figures: Figures = {}
    for phase, operations in phase_operations(work).items():
        rate = operations / seconds[phase]
        figures[f"{phase}_seconds"] = seconds[phase]
        figures[f"{phase}_tflops"] = rate / TERA
        figures[f"{phase}_of_limit"] = rate / limits.operations_per_second
    return figures


def decode(
    decoder: str, works: Sequence[IterationWork], device: str, repeats: int, limits: DeviceLimits
) -> list[Figures]:
    """Measures one of gpu.py's DECODERS. Returns one row per workload; all workloads share one model."""
    with torch.device(device):
        model = make_actor(works[0]).eval()
    if decoder == "compiled":
        compile_layers(model)

    def measure(work: IterationWork) -> list[Figures]:
        launches = ["by transformers"]
        sample = sampler_of(decoder, model, prompt_ids(work), launches.append)
        rollout_seconds = fastest(partial(sample, work.longest_response), repeats)
        prefill_seconds = fastest(partial(sample, 1), repeats)
        return [decoding_rates(work, rollout_seconds, prefill_seconds, limits) | {"steps": launches[-1]}]

    rows = []
    for work in works:
        rows += attempted({"prompts": work.batch}, partial(measure, work))
    return rows


def attempted(label: Figures, task: Task) -> list[Figures]:
    """Runs a task. Returns its rows, each after the label; if the task fails, a single row with the error."""
    try:
        return [label | row for row in task()]
    except Exception as error:  # GPU time is expensive: one failure must not lose the other measurements
        traceback.print_exc()
        return [label | {"problem": f"{type(error).__name__}: {error}".splitlines()[0]}]


def sampler_of(
    decoder: str, model: GemmaForCausalLM, prompts: list[list[int]], report: Callable[[str], None]
) -> Callable[[int], object]:
    """Returns a function that samples responses to all prompts; its argument is the number of tokens per response.

    `report` receives how our own decoders launch their steps, for instance as CUDA graphs.
    """
    actor = cast(TrainedPolicy, SimpleNamespace(gathered=lambda: nullcontext(SimpleNamespace(inner=model))))
    engine = ContinuousEngine(len(prompts), decode_graphs=decoder != "dynamic", report=report)
    input_ids, mask = pad_prompts(prompts, PAD, model.device)

    def sample(tokens: int) -> object:
        sampling = Sampling(tokens, (EOS,), PAD)
        if decoder != "transformers":
            with engine.session(actor) as sample_responses:
                return sample_responses(prompts, sampling, range(len(prompts)))
        config = sampling.generation_config()
        config.cache_implementation = "static"
        options = {"attention_mask": mask.long(), "generation_config": config}
        return model.generate(input_ids, **options)  # type: ignore[misc, arg-type]

    return sample
