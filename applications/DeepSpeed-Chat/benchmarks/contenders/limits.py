# SPDX-License-Identifier: Apache-2.0
"""What a device can do in a second, how much of it the phases of step 3 use, and how fast decoding alone is."""

import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import cast

import torch
from transformers import GemmaForCausalLM

from contenders.work import EOS, PAD, IterationWork, Size, make_actor, prompt_ids
from dschat.models.compiled import compile_layers
from dschat.models.engines import TrainedPolicy
from dschat.rollouts.engine import pad_prompts
from dschat.rollouts.generate import ContinuousEngine
from dschat.rollouts.sampling import Sampling

Figures = dict[str, float | str]
Limits = dict[str, float]
Task = Callable[[], list[Figures]]
TERA = 1e12


def measure_limits(device: str) -> Limits:
    """Bytes per second of memory, and operations per second of matrices in the dtype of training."""
    large, side = (2**32, 16_384) if device == "cuda" else (2**26, 512)
    source = torch.zeros(large // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    left, right = torch.randn(2, side, side, device=device).to(torch.bfloat16 if device == "cuda" else torch.float32)
    return {
        "bytes_per_second": 2 * large / fastest(lambda: target.copy_(source), 10),
        "operations_per_second": 2 * side**3 / fastest(lambda: left @ right, 10),
    }


def fastest(call: Callable[[], object], repeats: int) -> float:
    """Seconds of the fastest of some calls, after one that does not count."""
    seconds = []
    for _ in range(repeats + 1):
        begun = _now()
        call()
        seconds.append(_now() - begun)
    return min(seconds[1:])


def _now() -> float:
    """In seconds, when the device has done its work."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def layer_weights(size: Size) -> int:
    """Weights of the matrices of all layers."""
    attention = 2 * (size.num_attention_heads + size.num_key_value_heads) * size.head_dim
    return size.num_hidden_layers * size.hidden_size * (attention + 3 * size.intermediate_size)


def rollout_limit(work: IterationWork, limits: Limits) -> float:
    """Tokens per second if decoding did nothing but read weights, keys and values."""
    size, number = work.size, 2 if work.dtype == "bf16" else 4
    weights = layer_weights(size) + size.vocab_size * size.hidden_size
    # While token t of R is computed, a row has its prompt and t tokens; (R - 1) / 2 of them on average.
    held = sum(work.prompt_lengths()) + work.batch * (work.response - 1) / 2
    cache = 2 * size.num_hidden_layers * size.num_key_value_heads * size.head_dim * held
    return work.batch * limits["bytes_per_second"] / (number * (weights + cache))


def forward_operations(work: IterationWork) -> float:
    """Multiplications and additions of a forward of a policy and of a scalar model; a backward takes twice as many.

    Two per weight and token. The head counts for response tokens only; attention for the keys that a token sees.
    """
    size = work.size
    lengths = [prompt + work.response for prompt in work.prompt_lengths()]
    layers = 2 * layer_weights(size) * sum(lengths)
    attention = 2 * size.num_hidden_layers * size.num_attention_heads * size.head_dim * sum(n * n for n in lengths)
    head = 2 * size.vocab_size * size.hidden_size * work.batch * work.response
    return 2.0 * (layers + attention) + head


def decoding_rates(work: IterationWork, whole: float, first: float, limits: Limits) -> Figures:
    """What the seconds of whole responses and of their first tokens say of the steps between."""
    step, limit = (whole - first) / (work.response - 1), rollout_limit(work, limits)
    times: Figures = {"first_tokens_seconds": first, "step_ms": 1e3 * step, "limit_ms": 1e3 * work.batch / limit}
    return times | {"tokens_per_second": work.batch / step, "of_limit": work.batch / step / limit}


def phase_rates(work: IterationWork, seconds: dict[str, float], limits: Limits) -> Figures:
    """What the seconds of the phases scoring and training say; training goes forward and backward."""
    found: Figures = {}
    for phase, passes in (("scoring", 1), ("training", 3)):
        rate = passes * forward_operations(work) / seconds[phase]
        found |= {f"{phase}_seconds": seconds[phase], f"{phase}_tflops": rate / TERA}
        found[f"{phase}_of_limit"] = rate / limits["operations_per_second"]
    return found


def decode(way: str, works: Sequence[IterationWork], device: str, repeats: int, limits: Limits) -> list[Figures]:
    """Steps of decoding in one way, for one work after another of the same model."""
    with torch.device(device):
        model = make_actor(works[0]).eval()
    if way == "compiled":
        compile_layers(model)

    def measure(work: IterationWork) -> list[Figures]:
        launches = ["by transformers"]
        draw = drawer(way, model, prompt_ids(work), launches.append)
        whole, first = (fastest(partial(draw, tokens), repeats) for tokens in (work.response, 1))
        return [decoding_rates(work, whole, first, limits) | {"steps": launches[-1]}]

    return [row for work in works for row in attempted({"prompts": work.batch}, partial(measure, work))]


def attempted(label: Figures, task: Task) -> list[Figures]:
    """The rows of a task, which begin with the label, or one that says why there are none."""
    try:
        return [label | row for row in task()]
    except Exception as error:  # a GPU's minutes are dear: the other rows are measured all the same
        traceback.print_exc()
        return [label | {"problem": f"{type(error).__name__}: {error}".splitlines()[0]}]


def drawer(
    way: str, model: GemmaForCausalLM, prompts: list[list[int]], report: Callable[[str], None]
) -> Callable[[int], object]:
    """Draws responses of so many tokens to all prompts; of ours, the report is told how steps were launched."""
    actor = cast(TrainedPolicy, SimpleNamespace(gathered=lambda: nullcontext(SimpleNamespace(inner=model))))
    engine = ContinuousEngine(len(prompts), decode_graphs=way != "dynamic", report=report)
    input_ids, mask = pad_prompts(prompts, PAD, model.device)

    def draw(tokens: int) -> object:
        sampling = Sampling(tokens, (EOS,), PAD)
        if way != "transformers":
            with engine.session(actor) as draw_responses:
                return draw_responses(prompts, sampling, range(len(prompts)))
        config = sampling.generation_config()
        config.cache_implementation = "static"
        options = {"attention_mask": mask.long(), "generation_config": config}
        return model.generate(input_ids, **options)  # type: ignore[misc, arg-type]

    return draw
