# SPDX-License-Identifier: Apache-2.0
"""Which models does each way to learn from preferences hold, and how much memory do they take?

A process for each runs the step's own main program, from flags to the end of one update of as many sequences, on
random Gemmas of one shape in float32 (ZeRO 0). After the optimiser's last step it looks at itself:

- models: every policy and scalar model that is alive, named for what it is;
- parameters_mb, optimizer_mb: their tensors, and those of all optimisers' states, each counted once;
- peak_mb: the most memory of its own that the process held above what it held before it opened a model (on a GPU: the
  most that was allocated there); reading data, computing a reference, sampling and scoring are part of it.

    python learner_memory.py
"""

import argparse
import gc
import importlib.util
import json
import multiprocessing
import os
import sys
import tempfile
import threading
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from machine import machine
from model_memory import EVERY, MMAP_THRESHOLD, C, own_bytes

from dschat.config.common import CommonConfig
from dschat.config.ppo import PPOConfig
from dschat.config.supervised import DPOConfig, SFTConfig
from dschat.data.synthetic import make_rows, row_texts, write_corpus
from dschat.models.policy import PolicyModel
from dschat.models.scalar import ScalarModel
from dschat.models.tiny import make_model

MB = 1e6  # bytes
SAMPLES = 4  # responses to a prompt, where they are compared
TRAINING = Path(__file__).resolve().parents[1] / "training"
# step → folder of its main program and its configuration
MAINS: dict[str, tuple[str, type[CommonConfig]]] = {
    "sft": ("step1_supervised_finetuning", SFTConfig),
    "dpo": ("step2_dpo_finetuning", DPOConfig),
    "ppo": ("step3_rlhf_finetuning", PPOConfig),
}
# by class, and whether it is trained
ROLES = {
    (PolicyModel, True): "policy",
    (PolicyModel, False): "reference",
    (ScalarModel, True): "critic",
    (ScalarModel, False): "reward model",
}


def main() -> None:
    """Measures every way to learn and prints one JSON object."""
    settings = parse()
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        write_inputs(place, settings)
        figures = {}
        for name, (step, flags) in ways(place, settings.sequences).items():
            with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
                figures[name] = pool.submit(measure, step, flags, settings.threads).result()
    print(json.dumps({"machine": machine(), "settings": vars(settings), "figures": figures}, indent=2))


def parse() -> argparse.Namespace:
    """The settings."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--vocabulary", type=int, default=2000)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--sequences", type=int, default=8, help=f"of an update, a multiple of {SAMPLES}")
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args()


def write_inputs(place: Path, settings: argparse.Namespace) -> None:
    """model/ (a policy), reward/ (a reward model of its shape), and data-N/ with N comparisons to train on."""
    from transformers import AutoTokenizer, GemmaConfig, GemmaForSequenceClassification

    for rows in (settings.sequences // part for part in (1, 2, SAMPLES)):
        write_corpus(place / f"data-{rows}", 0, rows, 2, seed=1)
    texts = row_texts(make_rows(400, 1, "comparisons"))
    size = {"hidden_size": settings.hidden, "layers": settings.layers, "vocab_size": settings.vocabulary}
    make_model(place / "model", texts, seed=1, **size)
    config = GemmaConfig.from_pretrained(place / "model", num_labels=1)
    GemmaForSequenceClassification(config).save_pretrained(place / "reward")
    AutoTokenizer.from_pretrained(place / "model", trust_remote_code=False).save_pretrained(place / "reward")


def ways(place: Path, sequences: int) -> dict[str, tuple[str, dict[str, Any]]]:
    """Each way to learn: its step and its flags, of one update of so many sequences."""

    def data(rows: int, split: str) -> dict[str, Any]:
        return {"data_path": place / f"data-{rows}" / "comparisons", "data_split": split, "dtype": "fp32"}

    model = {"model_name_or_path": place / "model", "max_seq_len": 256}
    pairs, prompts = sequences // 2, sequences // SAMPLES
    ppo = data(sequences, "0,0,1") | {
        "actor_model_name_or_path": place / "model",
        "per_device_generation_batch_size": sequences,
        "per_device_training_batch_size": sequences,
        "max_prompt_seq_len": 192,
        "max_answer_seq_len": 64,
    }
    found = {
        "sft": ("sft", data(sequences, "1,0,0") | model | {"per_device_train_batch_size": sequences}),
        "dpo": ("dpo", data(pairs, "0,1,0") | model | {"per_device_train_batch_size": pairs}),
        "ppo, gae": ("ppo", ppo | {"critic_model_name_or_path": place / "reward"}),
    }
    if "advantage_estimator" in {field.name for field in fields(PPOConfig)}:
        own = {
            "advantage_estimator": "rloo",
            "samples_per_prompt": SAMPLES,
            "per_device_generation_batch_size": prompts,
        }
        own |= data(prompts, "0,0,1") | {"reward_model_name_or_path": place / "reward"}
        found["ppo, rloo"] = ("ppo", ppo | own)
    return {name: (step, flags | {"output_dir": place / name}) for name, (step, flags) in found.items()}


def measure(step: str, flags: dict[str, Any], threads: int) -> dict[str, Any]:
    """Runs a step in this process and looks at it at each step of an optimiser; what it prints goes to stderr."""
    import dschat.builders.ppo  # noqa: F401  # before the memory is looked at
    from dschat.engine.engine import Engine
    from dschat.main import run_main

    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    torch.set_num_threads(threads)
    C.mallopt(MMAP_THRESHOLD, 1_000_000)
    folder, config = MAINS[step]
    words = (word for name, value in flags.items() for word in (f"--{name}", str(value)))
    sys.argv = [str(TRAINING / folder / "main.py"), *words]
    highest, done, found = Highest(), threading.Event(), {}

    def noted(self: Any) -> None:
        real(self)
        if not done.is_set():
            found.update(census(), peak_mb=highest.peak_mb())

    patched: Any = Engine
    real, patched.step = Engine.step, noted
    patched = main_of(folder)
    highest.start(done)
    status = run_main(step, config, patched.train)
    done.set()
    if status:
        raise SystemExit(status)
    return found


class Highest:
    """The most memory that this process holds above what it held at the start."""

    def __init__(self) -> None:
        self._before = self._highest = 0

    def start(self, done: threading.Event) -> None:
        """Looks at it in a thread until `done`."""
        gc.collect()
        C.malloc_trim(0)
        self._before = self._highest = own_bytes()
        threading.Thread(target=self._look, args=(done,), daemon=True).start()

    def peak_mb(self) -> float:
        """Until now."""
        if torch.cuda.is_available():
            return round(torch.cuda.max_memory_allocated() / MB, 1)
        return round((max(self._highest, own_bytes()) - self._before) / MB, 1)

    def _look(self, done: threading.Event) -> None:
        while not done.wait(EVERY):
            self._highest = max(self._highest, own_bytes())


def census() -> dict[str, Any]:
    """The models that are alive in this process, and megabytes of their parameters and of optimisers' states."""
    gc.collect()
    alive = gc.get_objects()
    models = [one for one in alive if type(one) in (PolicyModel, ScalarModel)]
    optimizers = [one for one in alive if issubclass(type(one), torch.optim.Optimizer)]
    names = [ROLES[type(one), any(p.requires_grad for p in one.parameters())] for one in models]
    states = (x for one in optimizers for state in one.state.values() for x in state.values())
    return {
        "models": sorted(names, key=list(ROLES.values()).index),
        "parameters_mb": megabytes(p for one in models for p in one.parameters()),
        "optimizer_mb": megabytes(x for x in states if isinstance(x, torch.Tensor)),
    }


def megabytes(tensors: Iterable[torch.Tensor]) -> float:
    """Of their storages, each counted once."""
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}
    return round(sum(storages.values()) / MB, 1)


def main_of(folder: str) -> Any:
    """A step's main program, as a module."""
    spec = importlib.util.spec_from_file_location("step_main", TRAINING / folder / "main.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    main()
