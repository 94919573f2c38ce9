# SPDX-License-Identifier: Apache-2.0
"""How much longer does generation take when ZeRO-3 keeps the weights in parts?

A random Gemma stands under the trainer's own engine, once at ZeRO 0 and once at ZeRO 3. Each repeat gathers the
weights (``engine.gathered()``), draws by continuous batching and puts the weights back; the time of all three is
measured, and the slowest process counts. The stages take turns, so that other load on the machine meets both; the
ratio is that of the medians. Each process draws its own batch greedily, and no token ends a response.

    deepspeed --num_gpus 2 zero3_generation.py
"""

import argparse
import json
import statistics
import time
from typing import Any

import torch
from machine import machine
from transformers import GemmaConfig, GemmaForCausalLM

from dschat.config.batches import plan_batches
from dschat.engine.deepspeed_config import EngineSettings
from dschat.engine.engine import Engine, OptimizerSettings, train_engine
from dschat.engine.process_group import process_group
from dschat.models.policy import PolicyModel
from dschat.rollouts.generate import ContinuousEngine
from dschat.rollouts.sampling import Sampling
from dschat.run.distributed import barrier, device, gather_objects, is_main, world_size

STAGES = (0, 3)


def main() -> None:
    """Measures both stages and prints one JSON object."""
    settings = parse()
    torch.set_num_threads(settings.threads)
    with process_group():
        seconds = measure(settings)
        if is_main():
            used = {name: value for name, value in vars(settings).items() if name != "local_rank"}
            report = {
                "machine": machine(),
                "settings": used | {"processes": world_size()},
                "figures": figures(seconds),
            }
            print(json.dumps(report, indent=2), flush=True)


def parse() -> argparse.Namespace:
    """The settings."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--batch_size", type=int, default=8, help="prompts of each process")
    parser.add_argument("--prompt", type=int, default=64, help="tokens")
    parser.add_argument("--response", type=int, default=64, help="tokens")
    parser.add_argument("--vocabulary", type=int, default=32_000)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--repeats", type=int, default=7, help="per stage, after one that does not count")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--local_rank", type=int, default=0, help="given by the launcher")
    return parser.parse_args()


def measure(settings: argparse.Namespace) -> dict[int, list[float]]:
    """Seconds of the slowest process by stage and repeat."""
    engines = {stage: make_engine(settings, stage) for stage in STAGES}
    ids = torch.randint(1, settings.vocabulary, (settings.batch_size, settings.prompt), device=device())
    seconds: dict[int, list[float]] = {stage: [] for stage in STAGES}
    for _ in range(settings.repeats + 1):
        for stage, engine in engines.items():
            seconds[stage].append(max(gather_objects(generation_time(engine, ids.tolist(), settings))))
    return {stage: times[1:] for stage, times in seconds.items()}


def make_engine(settings: argparse.Namespace, stage: int) -> Engine:
    """A random Gemma at a stage, the same at both."""
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
    torch.manual_seed(0)
    model = PolicyModel(GemmaForCausalLM(config).float())
    optimizer = OptimizerSettings(1e-6, 0.0, total_updates=settings.repeats, schedule="constant")
    plan = plan_batches("per_device_train_batch_size", 1, 1, None, world_size())
    return train_engine(model, optimizer, EngineSettings(torch.float32, plan, zero_stage=stage))


def generation_time(engine: Engine, prompts: list[list[int]], settings: argparse.Namespace) -> float:
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


def figures(seconds: dict[int, list[float]]) -> dict[str, Any]:
    """Medians and their ratio."""
    whole, sharded = (statistics.median(seconds[stage]) for stage in STAGES)
    return {
        "zero0_seconds": round(whole, 3),
        "zero3_seconds": round(sharded, 3),
        "ratio": round(sharded / whole, 3),
        "all_seconds": {f"zero{stage}": [round(t, 3) for t in times] for stage, times in seconds.items()},
    }


if __name__ == "__main__":
    main()
