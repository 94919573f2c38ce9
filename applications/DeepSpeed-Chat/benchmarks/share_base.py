# SPDX-License-Identifier: Apache-2.0
"""How much memory do the models of step 3 take, whole, with LoRA, and with LoRA on one base (--share_base)?

A process for each runs step 3's own main program, from flags to the end of one update, on random Gemmas of one shape
in float32 (ZeRO 0), as `learner_memory.py` does, and counts the same: parameters_mb and optimizer_mb of the models
that are alive, each tensor once, and the peak of the process's own memory. The folders are in bf16: frozen weights
that need no conversion stay in their file's mapping, which is nobody's own memory.

    python share_base.py
"""

import argparse
import json
import multiprocessing
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from learner_memory import measure, write_inputs
from machine import machine
from transformers import AutoModelForCausalLM

from dschat.models.load import load_scalar
from dschat.models.lora import add_lora
from dschat.models.save import save_model
from dschat.models.tokenizer import load_tokenizer

FLAG = "--model_name_or_path"


def main() -> None:
    """Measures every way to hold the models and prints one JSON object."""
    settings = parse()
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        write_inputs(place, settings)
        model = AutoModelForCausalLM.from_pretrained(place / "model", trust_remote_code=False, dtype=torch.bfloat16)
        model.save_pretrained(place / "model")
        write_adapter(place / "model", place / "adapted", settings.rank)
        figures = {}
        for name, flags in ways(place, settings.sequences, settings.rank).items():
            with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
                figures[name] = pool.submit(measure, "ppo", flags, settings.threads).result()
    print(json.dumps({"machine": machine(), "settings": vars(settings), "figures": figures}, indent=2))


def parse() -> argparse.Namespace:
    """The settings."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--vocabulary", type=int, default=2000)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16, help="of the adapters")
    parser.add_argument("--sequences", type=int, default=8, help="of an update, a multiple of 4")
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args()


def write_adapter(base: Path, folder: Path, rank: int) -> None:
    """What step 2 leaves of a reward model with LoRA: the merged model, and in adapter/ the adapter."""
    tokenizer = load_tokenizer(str(base), FLAG)
    model = load_scalar(str(base), FLAG, torch.bfloat16, tokenizer)
    add_lora(model, rank, None, str(base))
    torch.nn.init.normal_(model.score.weight, std=0.02)
    save_model(model, model.named_parameters(), tokenizer, folder)


def ways(place: Path, sequences: int, rank: int) -> dict[str, dict[str, Any]]:
    """Each way to hold the models, and its flags."""
    common = {
        "data_path": place / f"data-{sequences}" / "comparisons",
        "data_split": "0,0,1",
        "dtype": "fp32",
        "actor_model_name_or_path": place / "model",
        "critic_model_name_or_path": place / "adapted",
        "per_device_generation_batch_size": sequences,
        "per_device_training_batch_size": sequences,
        "max_prompt_seq_len": 192,
        "max_answer_seq_len": 64,
    }
    own: dict[str, dict[str, Any]] = {
        "whole models": {},
        "LoRA": {"lora_dim": rank},
        "LoRA, --share_base": {"lora_dim": rank, "share_base": True},
    }
    return {name: common | flags | {"output_dir": place / name} for name, flags in own.items()}


if __name__ == "__main__":
    main()
