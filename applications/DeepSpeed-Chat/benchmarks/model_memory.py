# SPDX-License-Identifier: Apache-2.0
"""How much main memory does a process need to open a model, to train it and to save it?

A random Gemma lies in a folder in bf16 and is opened in float32. Each figure is the peak of a process's own memory
above what it held before, divided by the size of the whole weights in float32; one figure per process:

- opened: by ``load_causal_lm``, whole (ZeRO 2) and in parts (ZeRO 3);
- engine: what DeepSpeed adds when it takes the model for training (copies, gradients; Adam's moments come later);
- average: the moving average that is made, and updated once;
- saved: by ``save_model``, in files of ``--file_size``; in units of a file beside it;
- reference: a frozen model in parts beside an actor with all weights, or with LoRA, where the reference is the actor.

A thread looks at the memory every two milliseconds. Counted are pages that belong to the process alone; the files that
weights are read from are mapped, and the system gives their pages back when it needs them. The C library is told to
give tensors back at once, which it otherwise does from 32 MB on.

    deepspeed --num_gpus 2 model_memory.py
"""

import argparse
import ctypes
import gc
import json
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from machine import machine
from transformers import GemmaConfig, GemmaForCausalLM

from dschat.config.batches import plan_batches
from dschat.engine.deepspeed_config import EngineSettings
from dschat.engine.engine import AdaptersOff, Engine, OptimizerSettings, frozen_engine, train_engine
from dschat.engine.process_group import process_group
from dschat.engine.zero3 import placement_of
from dschat.models.load import load_causal_lm
from dschat.models.lora import add_lora
from dschat.models.opening import Opening
from dschat.models.policy import PolicyModel
from dschat.models.save import save_model
from dschat.models.tiny import train_tokenizer
from dschat.run.distributed import barrier, broadcast_object, gather_objects, is_main, world_size
from dschat.trainers.ppo_models import MovingAverage

EVERY = 0.002  # seconds between two looks
GB = 1e9  # bytes
C = ctypes.CDLL(None)
MMAP_THRESHOLD = -3  # glibc's M_MMAP_THRESHOLD


def main() -> None:
    """Measures every case and prints one JSON object."""
    settings = parse()
    C.mallopt(MMAP_THRESHOLD, 1_000_000)
    torch.set_num_threads(settings.threads)
    with process_group(), tempfile.TemporaryDirectory() as own:
        place = Path(broadcast_object(own))
        figures = measure(settings, place)
        if is_main():
            used = {name: value for name, value in vars(settings).items() if name != "local_rank"}
            report = {"machine": machine(), "settings": used | {"processes": world_size()}, "figures": figures}
            print(json.dumps(report, indent=2), flush=True)
        barrier()


def parse() -> argparse.Namespace:
    """The settings."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--vocabulary", type=int, default=32_000)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=13)
    parser.add_argument("--file_size", type=int, default=200_000_000, help="bytes")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--local_rank", type=int, default=0, help="given by the launcher")
    return parser.parse_args()


def measure(settings: argparse.Namespace, place: Path) -> dict[str, Any]:
    """Every case, one after another in the same processes."""
    tokenizer = train_tokenizer(["a few words"])
    whole = broadcast_object(write_model(settings, place, tokenizer) if is_main() else 0)
    found: dict[str, Any] = {"weights_gb": round(whole / GB, 3)}

    def note(name: str, call: Callable[[], Any]) -> Any:
        result, peak = peak_of(call)
        found[name] = [round(number / whole, 3) for number in gather_objects(peak)]
        return result

    def opened(stage: int) -> Any:
        opening = Opening(placement_of(engine_settings(stage)))
        return load_causal_lm(str(place / "model"), "--model", torch.float32, tokenizer, opening=opening)

    note("opened at ZeRO 2", lambda: opened(2))
    models = [note("opened at ZeRO 3", lambda: opened(3))]
    actor = note("engine at ZeRO 3", lambda: trained(models.pop(), 3))
    note("average at ZeRO 3", lambda: MovingAverage(actor).update())
    note("saved at ZeRO 3", lambda: save(actor, tokenizer, place, settings.file_size))
    files = [round(part * whole / settings.file_size, 2) for part in found["saved at ZeRO 3"]]
    found["saved at ZeRO 3, in files"] = files
    frozen = note("reference at ZeRO 3", lambda: frozen_engine(PolicyModel(opened(3)), engine_settings(3)))
    del actor, frozen
    adapted = note("opened at ZeRO 3, with LoRA", lambda: with_lora(opened(3)))
    actor = note("engine at ZeRO 3, with LoRA", lambda: trained(adapted, 3))
    note("reference at ZeRO 3, with LoRA", lambda: AdaptersOff(actor))
    return found


def write_model(settings: argparse.Namespace, place: Path, tokenizer: Any) -> int:
    """Saves a random model in bf16; bytes of its weights in float32."""
    config = GemmaConfig(
        vocab_size=settings.vocabulary,
        hidden_size=settings.hidden,
        intermediate_size=4 * settings.hidden,
        num_hidden_layers=settings.layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=settings.hidden // 4,
    )
    torch.manual_seed(0)
    model = GemmaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(place / "model")
    tokenizer.save_pretrained(place / "model")
    return 4 * sum(p.numel() for p in model.parameters())


def engine_settings(stage: int) -> EngineSettings:
    """float32, one row at a time."""
    plan = plan_batches("per_device_train_batch_size", 1, 1, None, world_size())
    return EngineSettings(torch.float32, plan, zero_stage=stage)


def trained(model: Any, stage: int) -> Engine[PolicyModel]:
    """An engine that would train the model."""
    optimizer = OptimizerSettings(1e-6, 0.0, total_updates=1, schedule="constant")
    return train_engine(PolicyModel(model), optimizer, engine_settings(stage))


def with_lora(model: Any) -> Any:
    """The model with adapters of rank 8."""
    add_lora(model, 8, None, "model")
    return model


def save(engine: Engine[PolicyModel], tokenizer: Any, place: Path, file_size: int) -> None:
    """What a run does at its end, without the cards."""
    weights = ((name.removeprefix("inner."), tensor) for name, tensor in engine.whole_weights())
    if is_main():
        save_model(engine.module.inner, weights, tokenizer, place / "saved", file_size=file_size)
    for _ in weights:
        pass
    barrier()


def peak_of(call: Callable[[], Any]) -> tuple[Any, int]:
    """A call's result, and the most bytes that this process held meanwhile above what it held before."""
    gc.collect()
    C.malloc_trim(0)
    barrier()
    before, highest, done = own_bytes(), 0, threading.Event()

    def look() -> None:
        nonlocal highest
        while not done.wait(EVERY):
            highest = max(highest, own_bytes())

    looking = threading.Thread(target=look)
    looking.start()
    result = call()
    done.set()
    looking.join()
    return result, max(highest, own_bytes()) - before


def own_bytes() -> int:
    """Resident memory that is no file's."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    sizes = {line.split(":")[0]: line.split()[1] for line in lines if line.startswith("Rss")}
    return 1024 * (int(sizes["RssAnon"]) + int(sizes["RssShmem"]))


if __name__ == "__main__":
    main()
