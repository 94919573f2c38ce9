# SPDX-License-Identifier: Apache-2.0
"""How much main memory does a process need to open a model, to train it and to save it?

A random Gemma is saved in bf16 and opened in float32. Each figure is the peak of a process's private memory minus the
memory before, divided by the size of the whole weights in float32. Each case has one figure per process:

- opened: opening the model by ``load_causal_lm``, whole (ZeRO 2) and sharded (ZeRO 3);
- engine: what DeepSpeed's engine adds before the first update: copies and gradients, but no Adam moments;
- average: creating the moving average and updating it once;
- saved: saving by ``save_model`` in files of ``--file_size``, also divided by the size of a file;
- reference: a frozen sharded model in addition to the actor; with LoRA, the actor itself is the reference.

A thread reads the memory every two milliseconds. Only private pages count: files with weights are mapped, and the
system can take their pages back. The C library is set to return the memory of tensors at once; by default it does so
only from 32 MB on.
"""

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from contenders.work import make_tokenizer
from dschat.engine.deepspeed_config import EngineSettings
from dschat.engine.engine import AdaptersOff, Engine, OptimizerSettings, frozen_engine, train_engine
from dschat.engine.process_group import process_group
from dschat.engine.zero3 import placement_of
from dschat.models.load import load_causal_lm
from dschat.models.lora import add_lora
from dschat.models.opening import LoadOptions
from dschat.models.policy import PolicyModel
from dschat.models.save import save_model
from dschat.models.tiny import make_gemma
from dschat.run.distributed import barrier, broadcast_object, gather_objects, is_main, world_size
from dschat.settings.batches import BatchSizes, plan_batches
from dschat.training.ppo.models import MovingAverage
from harness import GB, SampledPeak, give_back_at_once, own_bytes, report

R = TypeVar("R")
FLOAT32 = 4  # bytes


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds flags for the sizes of the model and of its files."""
    parser.add_argument("--vocabulary", type=int, default=32_000, help="tokens of the vocabulary")
    parser.add_argument("--hidden", type=int, default=1024, help="width of the hidden states")
    parser.add_argument("--layers", type=int, default=13, help="number of layers")
    parser.add_argument("--file_size", type=int, default=200_000_000, help="bytes of a saved file")


def measure(settings: argparse.Namespace) -> None:
    """Measures on all processes; the main process prints one JSON object."""
    torch.set_num_threads(1)
    give_back_at_once()
    with process_group(), tempfile.TemporaryDirectory() as name:
        folder = Path(broadcast_object(name))
        tokenizer = make_tokenizer(settings.vocabulary)
        width = settings.hidden
        model = make_gemma(tokenizer, 0, width, settings.layers, 4 * width)
        model = model.bfloat16()
        whole = FLOAT32 * sum(weight.numel() for weight in model.parameters())
        if is_main():
            model.save_pretrained(folder / "model")
            tokenizer.save_pretrained(folder / "model")
        del model
        barrier()
        peaks = ModelPeaks(folder, tokenizer, whole, settings.file_size)
        peaks.measure()
        if is_main():
            report(settings, {"weights_gb": round(whole / GB, 3), **peaks.figures}, processes=world_size())
        barrier()


class ModelPeaks:
    """Peaks of one model in units of its whole weights in float32, one number per process."""

    def __init__(self, folder: Path, tokenizer: PreTrainedTokenizerBase, whole: int, file_size: int) -> None:
        """Prepares the measurements.

        Args:
            folder: folder that holds model/.
            tokenizer: the model's tokenizer.
            whole: bytes of its whole weights in float32.
            file_size: bytes of a saved file.
        """
        self.folder = folder
        self.tokenizer = tokenizer
        self.whole = whole
        self.file_size = file_size
        self.figures: dict[str, list[float]] = {}

    def measure(self) -> None:
        """Measures every case, one after another in the same processes."""
        self._peak("opened at ZeRO 2", lambda: self._open(2))
        models = [self._peak("opened at ZeRO 3", lambda: self._open(3))]
        actor = self._peak("engine at ZeRO 3", lambda: train(models.pop()))
        self._peak("average at ZeRO 3", lambda: MovingAverage(actor).update())
        self._peak("saved at ZeRO 3", lambda: self._save(actor))
        in_files = [part * self.whole / self.file_size for part in self.figures["saved at ZeRO 3"]]
        self.figures["saved at ZeRO 3, in files"] = [round(files, 2) for files in in_files]
        frozen = self._peak("reference at ZeRO 3", lambda: frozen_engine(PolicyModel(self._open(3)), settings_at(3)))
        del actor, frozen  # freed when `_peak` collects garbage
        adapted = self._peak("opened at ZeRO 3, with LoRA", lambda: self._open(3, lora=True))
        actor = self._peak("engine at ZeRO 3, with LoRA", lambda: train(adapted))
        self._peak("reference at ZeRO 3, with LoRA", lambda: AdaptersOff(actor))

    def _peak(self, name: str, call: Callable[[], R]) -> R:
        """Records the peak of a call; returns the call's result."""
        barrier()
        peak = SampledPeak(own_bytes)
        result = call()
        self.figures[name] = [round(size / self.whole, 3) for size in gather_objects(peak.stop())]
        return result

    def _open(self, stage: int, lora: bool = False) -> PreTrainedModel:
        load_options = LoadOptions(placement_of(settings_at(stage)))
        path = str(self.folder / "model")
        model: PreTrainedModel = load_causal_lm(
            path, "--model", torch.float32, self.tokenizer, load_options=load_options
        )
        if lora:
            add_lora(model, 8, None, "model")
        return model

    def _save(self, engine: Engine[PolicyModel]) -> None:
        """Saves the weights as a run does at its end."""
        weights = ((name.removeprefix("inner."), tensor) for name, tensor in engine.whole_weights())
        if is_main():
            save_model(engine.module.inner, weights, self.tokenizer, self.folder / "saved", file_size=self.file_size)
        for _ in weights:  # the other processes take part in gathering each weight
            pass
        barrier()


def train(model: PreTrainedModel) -> Engine[PolicyModel]:
    """An engine that would train the model at ZeRO 3, one row at a time."""
    return train_engine(PolicyModel(model), OptimizerSettings(1e-6, 0.0, 1, schedule="constant"), settings_at(3))


def settings_at(stage: int) -> EngineSettings:
    """Settings in float32, with one row at a time."""
    plan = plan_batches(BatchSizes("per_device_train_batch_size", 1), world_size())
    return EngineSettings(torch.float32, plan, zero_stage=stage)
