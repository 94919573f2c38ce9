# SPDX-License-Identifier: Apache-2.0
"""Which models does each learner hold, and how much memory do they take?

A process for each runs the step's own main program, from flags to the end of one update of as many sequences, on
random Gemmas of one shape in float32 (ZeRO 0). After the optimizer's last step it looks at itself:

- models: every policy and scalar model that is alive, by its role;
- parameters_mb, optimizer_mb: their tensors, and those of all optimizers' states, each counted once;
- peak_mb: the peak of the process's own memory above what it held before it opened a model (on a GPU: the peak that
  was allocated there); reading data, computing a reference, sampling and scoring are part of it.

With --share_base the cases are step 3 with whole models, with LoRA, and with LoRA on one base. The folders are then in
bf16: frozen weights that need no conversion stay in their file's mapping, which is no process's own memory.
"""

import argparse
import gc
import tempfile
from collections.abc import Iterable
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GemmaConfig, GemmaForSequenceClassification

import dschat.training.steps.ppo  # noqa: F401  # before the memory is measured
from dschat.engine.engine import Engine
from dschat.models.classifiers import load_scalar
from dschat.models.lora import add_lora
from dschat.models.policy import PolicyModel
from dschat.models.save import save_model
from dschat.models.scalar import ScalarModel
from dschat.models.tiny import make_model
from dschat.models.tokenizer import load_tokenizer
from dschat.quickstart.subcommands import as_arguments
from dschat.quickstart.synthetic import make_rows, row_texts, write_corpus
from harness import MB, SampledPeak, give_back_at_once, in_process, own_bytes, run_step

Flags = dict[str, object]
FLAG = "--model_name_or_path"
GROUP_SIZE = 4  # responses to a prompt, for RLOO
SFT = "step1_supervised_finetuning"
DPO = "step2_dpo_finetuning"
PPO = "step3_rlhf_finetuning"
# (class, whether it is trained) → role.
ROLES = {
    (PolicyModel, True): "policy",
    (PolicyModel, False): "reference",
    (ScalarModel, True): "critic",
    (ScalarModel, False): "reward model",
}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Sizes of the models and of the update."""
    parser.add_argument("--vocabulary", type=int, default=2000, help="tokens of the vocabulary")
    parser.add_argument("--hidden", type=int, default=512, help="width of the hidden states")
    parser.add_argument("--layers", type=int, default=8, help="layers")
    parser.add_argument("--share_base", action="store_true", help="step 3 whole, with LoRA and with one base")
    parser.add_argument("--rank", type=int, default=16, help="rank of the adapters, with --share_base")
    parser.add_argument("--sequences", type=int, default=8, help=f"of an update, a multiple of {GROUP_SIZE}")


def measure(settings: argparse.Namespace) -> dict[str, dict[str, object]]:
    """The figures of every learner."""
    figures = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_inputs(folder, settings)
        if settings.share_base:
            write_adapter(folder, settings.rank)
            cases = step3_cases(folder, settings.sequences, settings.rank)
        else:
            cases = learner_cases(folder, settings.sequences)
        for case, (step, flags) in cases.items():
            figures[case] = in_process(measure_step, step, {**flags, "output_dir": folder / case})
    return figures


def write_inputs(folder: Path, settings: argparse.Namespace) -> None:
    """Writes model/ (a policy), reward/ (a reward model of its shape), and data-N/ with N comparisons to train on."""
    for part in (1, 2, GROUP_SIZE):
        rows = settings.sequences // part
        write_corpus(folder / f"data-{rows}", 0, rows, 2, seed=1)
    texts = row_texts(make_rows(400, 1, "comparisons"))
    make_model(folder / "model", texts, 1, settings.hidden, settings.layers, settings.vocabulary)
    config = GemmaConfig.from_pretrained(folder / "model", num_labels=1)
    GemmaForSequenceClassification(config).save_pretrained(folder / "reward")
    AutoTokenizer.from_pretrained(folder / "model", trust_remote_code=False).save_pretrained(folder / "reward")


def write_adapter(folder: Path, rank: int) -> None:
    """Writes model/ in bf16, and adapted/ as step 2 with LoRA leaves it: merged, with the adapter beside."""
    base = str(folder / "model")
    policy = AutoModelForCausalLM.from_pretrained(base, trust_remote_code=False, dtype=torch.bfloat16)
    policy.save_pretrained(base)
    tokenizer = load_tokenizer(base, FLAG)
    model = load_scalar(base, FLAG, torch.bfloat16, tokenizer)
    add_lora(model, rank, None, base)
    torch.nn.init.normal_(model.score.weight, std=0.02)
    save_model(model, model.named_parameters(), tokenizer, folder / "adapted")


def learner_cases(folder: Path, sequences: int) -> dict[str, tuple[str, Flags]]:
    """Learner → its step and its flags, for one update of some sequences."""
    pairs = sequences // 2
    supervised = {"model_name_or_path": folder / "model", "max_seq_len": 256}
    sft = {**data_flags(folder, sequences, "1,0,0"), **supervised, "per_device_train_batch_size": sequences}
    dpo = {**data_flags(folder, pairs, "0,1,0"), **supervised, "per_device_train_batch_size": pairs}
    ppo = {**ppo_flags(folder, sequences), "critic_model_name_or_path": folder / "reward"}
    rloo = {
        **ppo_flags(folder, sequences // GROUP_SIZE),
        "per_device_training_batch_size": sequences,
        "advantage_estimator": "rloo",
        "samples_per_prompt": GROUP_SIZE,
        "reward_model_name_or_path": folder / "reward",
    }
    return {"sft": (SFT, sft), "dpo": (DPO, dpo), "ppo, gae": (PPO, ppo), "ppo, rloo": (PPO, rloo)}


def step3_cases(folder: Path, sequences: int, rank: int) -> dict[str, tuple[str, Flags]]:
    """How step 3 holds its models → its step and its flags."""
    whole = {**ppo_flags(folder, sequences), "critic_model_name_or_path": folder / "adapted"}
    lora = {**whole, "lora_dim": rank}
    shared = {**lora, "share_base": True}
    return {"whole models": (PPO, whole), "LoRA": (PPO, lora), "LoRA, --share_base": (PPO, shared)}


def ppo_flags(folder: Path, prompts: int) -> Flags:
    """One update of step 3 on some prompts."""
    return {
        **data_flags(folder, prompts, "0,0,1"),
        "per_device_generation_batch_size": prompts,
        "per_device_training_batch_size": prompts,
        "max_prompt_seq_len": 192,
        "max_answer_seq_len": 64,
        "actor_model_name_or_path": folder / "model",
    }


def data_flags(folder: Path, rows: int, split: str) -> Flags:
    """Comparisons, with the share of each step."""
    return {"data_path": folder / f"data-{rows}" / "comparisons", "data_split": split, "dtype": "fp32"}


def measure_step(step: str, flags: Flags) -> dict[str, object]:
    """Runs a step in this process and looks at it after each step of an optimizer."""
    torch.set_num_threads(1)
    give_back_at_once()
    engine_step = Engine.step
    peak = SampledPeak(own_bytes)
    figures: dict[str, object] = {}

    def step_and_look(self: Engine[PolicyModel]) -> None:
        engine_step(self)
        highest = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else peak.bytes()
        figures.update(census(), peak_mb=round(highest / MB, 1))

    setattr(Engine, "step", step_and_look)  # noqa: B010  # a method for mypy
    run_step(step, as_arguments({f"--{name}": value for name, value in flags.items()}))
    return figures


def census() -> dict[str, object]:
    """The models that are alive in this process, and megabytes of their parameters and of optimizer states."""
    gc.collect()
    names = []
    parameters: list[torch.Tensor] = []
    states: list[torch.Tensor] = []
    for item in gc.get_objects():
        if type(item) in (PolicyModel, ScalarModel):
            is_trained = any(parameter.requires_grad for parameter in item.parameters())
            names.append(ROLES[type(item), is_trained])
            parameters += item.parameters()
        elif issubclass(type(item), torch.optim.Optimizer):
            for state in item.state.values():
                for value in state.values():
                    if isinstance(value, torch.Tensor):
                        states.append(value)
    return {
        "models": sorted(names, key=list(ROLES.values()).index),
        "parameters_mb": megabytes(parameters),
        "optimizer_mb": megabytes(states),
    }


def megabytes(tensors: Iterable[torch.Tensor]) -> float:
    """The size of the tensors' storages, each counted once."""
    sizes = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
    return round(sum(sizes.values()) / MB, 1)
