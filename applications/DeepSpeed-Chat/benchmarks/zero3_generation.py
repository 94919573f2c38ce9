# SPDX-License-Identifier: Apache-2.0
"""How much longer does generation take when ZeRO-3 keeps the weights in parts?

A random Gemma stands under the trainer's own engine, once at ZeRO 0 and once at ZeRO 3. Each repeat gathers the
weights (``engine.gathered()``), draws with continuous batching and puts the weights back; the time of all three is
measured, and the slowest process counts. The stages take turns, so that other load on the machine meets both; the
ratio is that of the medians. Each process draws its own batch greedily, and no token ends a response.
"""

import argparse
import statistics
import time

import torch

from dschat.engine.engine import Engine
from dschat.models.policy import PolicyModel
from dschat.rollouts.generate import ContinuousEngine
from dschat.rollouts.sampling import Sampling
from dschat.run.distributed import barrier, device, gather_objects
from harness import settings_parser
from model_memory import random_model, run_on_every_process, trained

STAGES = (0, 3)


def main() -> None:
    """Measures both stages and prints one JSON object."""
    parser = settings_parser(
        __doc__, vocabulary=32_000, hidden=256, layers=6, prompt=64, response=64, repeats=7, local_rank=0
    )
    parser.add_argument("--batch_size", type=int, default=8, help="prompts of each process")
    run_on_every_process(parser.parse_args(), measure)


def measure(settings: argparse.Namespace) -> dict[str, object]:
    """Seconds of the slowest process by stage and repeat, medians and their ratio."""
    engines = {stage: trained(random_model(settings), stage) for stage in STAGES}
    ids = torch.randint(1, settings.vocabulary, (settings.batch_size, settings.prompt), device=device())
    seconds: dict[int, list[float]] = {stage: [] for stage in STAGES}
    for _ in range(settings.repeats + 1):
        for stage, engine in engines.items():
            seconds[stage].append(max(gather_objects(generation_time(engine, ids.tolist(), settings))))
    counted = {stage: times[1:] for stage, times in seconds.items()}
    whole, sharded = (statistics.median(counted[stage]) for stage in STAGES)
    return {
        "zero0_seconds": round(whole, 3),
        "zero3_seconds": round(sharded, 3),
        "ratio": round(sharded / whole, 3),
        "all_seconds": {f"zero{stage}": [round(t, 3) for t in times] for stage, times in counted.items()},
    }


def generation_time(engine: Engine[PolicyModel], prompts: list[list[int]], settings: argparse.Namespace) -> float:
    """Seconds of one generation on this process."""
    engine.eval()
    no_end = settings.vocabulary  # outside the vocabulary
    sampling = Sampling(settings.response, end_ids=(no_end,), pad_id=0, temperature=0.0)
    barrier()
    start = time.perf_counter()
    with ContinuousEngine(settings.batch_size).session(engine) as draw:
        draw(prompts, sampling, range(settings.batch_size))
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
