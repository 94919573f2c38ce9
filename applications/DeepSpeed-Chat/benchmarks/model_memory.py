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
"""

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
from transformers import GemmaForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from contenders.work import make_tokenizer
from dschat.engine.deepspeed_config import EngineSettings
from dschat.engine.engine import AdaptersOff, Engine, OptimizerSettings, frozen_engine, train_engine
from dschat.engine.process_group import process_group
from dschat.engine.zero3 import placement_of
from dschat.models.load import load_causal_lm
from dschat.models.lora import add_lora
from dschat.models.opening import Opening
from dschat.models.policy import PolicyModel
from dschat.models.save import save_model
from dschat.models.tiny import make_gemma
from dschat.run.distributed import barrier, broadcast_object, gather_objects, is_main, world_size
from dschat.settings.batches import plan_batches
from dschat.training.ppo.models import MovingAverage
from harness import GB, SampledPeak, give_back_at_once, own_bytes, report, settings_parser

R = TypeVar("R")


def main() -> None:
    """Measures every case and prints one JSON object."""
    parser = settings_parser(__doc__, vocabulary=32_000, hidden=1024, layers=13, local_rank=0)
    parser.add_argument("--file_size", type=int, default=200_000_000, help="bytes")
    run_on_every_process(parser.parse_args(), measure)


def run_on_every_process(settings: argparse.Namespace, measure: Callable[[argparse.Namespace], object]) -> None:
    """Measures on all processes; the first prints one JSON object."""
    torch.set_num_threads(1)
    with process_group():
        figures = measure(settings)
        if is_main():
            report(settings, figures, processes=world_size())
        barrier()


def random_model(settings: argparse.Namespace) -> GemmaForCausalLM:
    """The same on every process, in float32; its MLP is four times as wide as its layers."""
    tokenizer = make_tokenizer(settings.vocabulary)
    return make_gemma(tokenizer, 0, settings.hidden, settings.layers, 4 * settings.hidden)


def trained(model: PreTrainedModel, stage: int) -> Engine[PolicyModel]:
    """An engine that would train the model, one row at a time."""
    return train_engine(PolicyModel(model), OptimizerSettings(1e-6, 0.0, 1, schedule="constant"), settings_at(stage))


def settings_at(stage: int) -> EngineSettings:
    """float32, one row at a time."""
    plan = plan_batches("per_device_train_batch_size", 1, 1, None, world_size())
    return EngineSettings(torch.float32, plan, zero_stage=stage)


def measure(settings: argparse.Namespace) -> dict[str, object]:
    """Every case, one after another in the same processes."""
    give_back_at_once()
    with tempfile.TemporaryDirectory() as own:
        place, tokenizer = Path(broadcast_object(own)), make_tokenizer(settings.vocabulary)
        model = random_model(settings).bfloat16()
        whole = 4 * sum(weight.numel() for weight in model.parameters())
        if is_main():
            model.save_pretrained(place / "model")
            tokenizer.save_pretrained(place / "model")
        del model
        found = measure_at(place, tokenizer, whole, settings.file_size)
        barrier()
    return {"weights_gb": round(whole / GB, 3), **found}


def measure_at(place: Path, tokenizer: PreTrainedTokenizerBase, whole: int, file_size: int) -> dict[str, list[float]]:
    """Every case of the model in a folder, whose weights are so many bytes in float32."""
    found: dict[str, list[float]] = {}

    def note(name: str, call: Callable[[], R]) -> R:
        barrier()
        peak = SampledPeak(own_bytes)
        result = call()
        found[name] = [round(number / whole, 3) for number in gather_objects(peak.stop())]
        return result

    def opened(stage: int, lora: bool = False) -> PreTrainedModel:
        opening = Opening(placement_of(settings_at(stage)))
        model: PreTrainedModel
        model = load_causal_lm(str(place / "model"), "--model", torch.float32, tokenizer, opening=opening)
        if lora:
            add_lora(model, 8, None, "model")
        return model

    note("opened at ZeRO 2", lambda: opened(2))
    models = [note("opened at ZeRO 3", lambda: opened(3))]
    actor = note("engine at ZeRO 3", lambda: trained(models.pop(), 3))
    note("average at ZeRO 3", lambda: MovingAverage(actor).update())
    note("saved at ZeRO 3", lambda: save(actor, tokenizer, place, file_size))
    found["saved at ZeRO 3, in files"] = [round(part * whole / file_size, 2) for part in found["saved at ZeRO 3"]]
    frozen = note("reference at ZeRO 3", lambda: frozen_engine(PolicyModel(opened(3)), settings_at(3)))
    del actor, frozen
    adapted = note("opened at ZeRO 3, with LoRA", lambda: opened(3, lora=True))
    actor = note("engine at ZeRO 3, with LoRA", lambda: trained(adapted, 3))
    note("reference at ZeRO 3, with LoRA", lambda: AdaptersOff(actor))
    return found


def save(engine: Engine[PolicyModel], tokenizer: PreTrainedTokenizerBase, place: Path, file_size: int) -> None:
    """What a run does at its end, without the cards."""
    weights = ((name.removeprefix("inner."), tensor) for name, tensor in engine.whole_weights())
    if is_main():
        save_model(engine.module.inner, weights, tokenizer, place / "saved", file_size=file_size)
    for _ in weights:
        pass
    barrier()


if __name__ == "__main__":
    main()
