# SPDX-License-Identifier: Apache-2.0
"""Which models does each way to learn from preferences hold, and how much memory do they take?

A process for each runs the step's own main program, from flags to the end of one update of as many sequences, on
random Gemmas of one shape in float32 (ZeRO 0). After the optimiser's last step it looks at itself:

- models: every policy and scalar model that is alive, named for what it is;
- parameters_mb, optimizer_mb: their tensors, and those of all optimisers' states, each counted once;
- peak_mb: the most memory of its own that the process held above what it held before it opened a model (on a GPU: the
  most that was allocated there); reading data, computing a reference, sampling and scoring are part of it.

With --share_base the ways are those to hold the models of step 3: whole, with LoRA, and with LoRA on one base. The
folders are then in bf16: frozen weights that need no conversion stay in their file's mapping, which is nobody's own
memory.
"""

import argparse
import gc
import tempfile
from collections.abc import Iterable
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GemmaConfig, GemmaForSequenceClassification

import dschat.training.build.ppo  # noqa: F401  # before the memory is looked at
from dschat.engine.engine import Engine
from dschat.models.load import load_scalar
from dschat.models.lora import add_lora
from dschat.models.policy import PolicyModel
from dschat.models.save import save_model
from dschat.models.scalar import ScalarModel
from dschat.models.tiny import make_model
from dschat.models.tokenizer import load_tokenizer
from dschat.quickstart.subcommands import as_arguments
from dschat.quickstart.synthetic import make_rows, row_texts, write_corpus
from harness import MB, SampledPeak, give_back_at_once, in_process, own_bytes, report, run_step, settings_parser

Flags = dict[str, object]
FLAG = "--model_name_or_path"
SAMPLES = 4  # responses to a prompt, where they are compared
SFT, DPO, PPO = "step1_supervised_finetuning", "step2_dpo_finetuning", "step3_rlhf_finetuning"
# by class, and whether it is trained
ROLES = {
    (PolicyModel, True): "policy",
    (PolicyModel, False): "reference",
    (ScalarModel, True): "critic",
    (ScalarModel, False): "reward model",
}


def main() -> None:
    """Measures every way and prints one JSON object."""
    parser = settings_parser(__doc__, vocabulary=2000, hidden=512, layers=8)
    parser.add_argument("--share_base", action="store_true", help="the ways to hold the models of step 3")
    parser.add_argument("--rank", type=int, default=16, help="of the adapters, with --share_base")
    parser.add_argument("--sequences", type=int, default=8, help=f"of an update, a multiple of {SAMPLES}")
    settings = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        write_inputs(place, settings)
        found = ways(place, settings.sequences)
        if settings.share_base:
            write_adapter(place, settings.rank)
            found = ways_to_hold(place, settings.sequences, settings.rank)
        figures = {
            name: in_process(measure, step, {"output_dir": place / name, **flags})
            for name, (step, flags) in found.items()
        }
    report(settings, figures)


def write_inputs(place: Path, settings: argparse.Namespace) -> None:
    """model/ (a policy), reward/ (a reward model of its shape), and data-N/ with N comparisons to train on."""
    for rows in (settings.sequences // part for part in (1, 2, SAMPLES)):
        write_corpus(place / f"data-{rows}", 0, rows, 2, seed=1)
    texts = row_texts(make_rows(400, 1, "comparisons"))
    make_model(place / "model", texts, 1, settings.hidden, settings.layers, settings.vocabulary)
    config = GemmaConfig.from_pretrained(place / "model", num_labels=1)
    GemmaForSequenceClassification(config).save_pretrained(place / "reward")
    AutoTokenizer.from_pretrained(place / "model", trust_remote_code=False).save_pretrained(place / "reward")


def write_adapter(place: Path, rank: int) -> None:
    """model/ in bf16; and adapted/, what step 2 leaves of a reward model with LoRA: merged, and the adapter beside."""
    base = str(place / "model")
    AutoModelForCausalLM.from_pretrained(base, trust_remote_code=False, dtype=torch.bfloat16).save_pretrained(base)
    tokenizer = load_tokenizer(base, FLAG)
    model = load_scalar(base, FLAG, torch.bfloat16, tokenizer)
    add_lora(model, rank, None, base)
    torch.nn.init.normal_(model.score.weight, std=0.02)
    save_model(model, model.named_parameters(), tokenizer, place / "adapted")


def ways(place: Path, sequences: int) -> dict[str, tuple[str, Flags]]:
    """Each way to learn: its step and its flags, of one update of so many sequences."""
    pairs, prompts = sequences // 2, sequences // SAMPLES
    supervised = {FLAG[2:]: place / "model", "max_seq_len": 256}
    ppo = ppo_flags(place, sequences)
    rloo = ppo_flags(place, prompts) | {"per_device_training_batch_size": sequences}
    rloo |= {"advantage_estimator": "rloo", "samples_per_prompt": SAMPLES}
    return {
        "sft": (SFT, data(place, sequences, "1,0,0") | supervised | {"per_device_train_batch_size": sequences}),
        "dpo": (DPO, data(place, pairs, "0,1,0") | supervised | {"per_device_train_batch_size": pairs}),
        "ppo, gae": (PPO, ppo | {"critic_model_name_or_path": place / "reward"}),
        "ppo, rloo": (PPO, rloo | {"reward_model_name_or_path": place / "reward"}),
    }


def ways_to_hold(place: Path, sequences: int, rank: int) -> dict[str, tuple[str, Flags]]:
    """Each way to hold the models of step 3, and its flags."""
    whole = ppo_flags(place, sequences) | {"critic_model_name_or_path": place / "adapted"}
    lora = whole | {"lora_dim": rank}
    return {
        "whole models": (PPO, whole),
        "LoRA": (PPO, lora),
        "LoRA, --share_base": (PPO, lora | {"share_base": True}),
    }


def ppo_flags(place: Path, rows: int) -> Flags:
    """Of one update of step 3 on so many prompts."""
    sizes = {"per_device_generation_batch_size": rows, "per_device_training_batch_size": rows}
    lengths = {"max_prompt_seq_len": 192, "max_answer_seq_len": 64}
    return data(place, rows, "0,0,1") | sizes | lengths | {"actor_model_name_or_path": place / "model"}


def data(place: Path, rows: int, split: str) -> Flags:
    """So many comparisons, shared out among the steps."""
    return {"data_path": place / f"data-{rows}" / "comparisons", "data_split": split, "dtype": "fp32"}


def measure(step: str, flags: Flags) -> dict[str, object]:
    """Runs a step in this process and looks at it after each step of an optimiser."""
    torch.set_num_threads(1)
    give_back_at_once()
    real, peak = Engine.step, SampledPeak(own_bytes)
    found: dict[str, object] = {}

    def step_and_look(self: Engine[PolicyModel]) -> None:
        real(self)
        highest = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else peak.bytes()
        found.update(census(), peak_mb=round(highest / MB, 1))

    setattr(Engine, "step", step_and_look)  # noqa: B010  # a method for mypy
    run_step(step, as_arguments({f"--{name}": value for name, value in flags.items()}))
    return found


def census() -> dict[str, object]:
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


if __name__ == "__main__":
    main()
