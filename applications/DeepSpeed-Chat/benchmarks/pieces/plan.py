# SPDX-License-Identifier: Apache-2.0
"""How close is the memory that `dschat plan` expects of step 3 and of online REFUEL to the measured one?

One process on the CPU runs the step itself for two iterations, on random Gemmas (in case `bert` the reward model is a
BERT) whose prompts and responses all have their full length. The measured figure is the most bytes of tensors that are
alive in a phase of the second iteration: torch's allocator reports every allocation to its profiler, and their running
sum is followed from before the models are created. It sees neither weights that are mapped from their file nor what
another thread allocates: therefore the models' folders have another dtype than the run, and one thread loads them. The
planned figure comes from the same flags and the models' configs alone.
"""

import argparse
import gc
import json
import os
import tempfile
from dataclasses import asdict, replace
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForSequenceClassification, BertConfig

from contenders import ours
from contenders.process import ContenderJob
from contenders.work import DTYPES, SIZES, IterationWork, make_files, make_tokenizer
from dschat.models.pretrained import open_config
from dschat.plan.phases import Machine
from dschat.plan.plan import make_plan
from dschat.quickstart.subcommands import as_arguments
from dschat.refuel.online_settings import RefuelOnlineConfig
from dschat.settings.parse import parse
from dschat.settings.ppo import PPOConfig
from dschat.training.iteration import Clock
from harness import MB, in_process, run_step

# A user's turn, and a reply that ends with <eos>.
TEMPLATE = "{% for m in messages %}{{ m.content }} {% if m.role == 'assistant' %}<eos> {% endif %}{% endfor %}"
RECOMPUTED = ["--actor_gradient_checkpointing", "--critic_gradient_checkpointing"]
# Case → dtype, updates per rollout, flags.
CASES: dict[str, tuple[str, int, list[str]]] = {
    "float32": ("fp32", 1, []),
    "recomputed": ("fp32", 1, RECOMPUTED),
    "two_updates": ("fp32", 2, []),
    "bf16": ("bf16", 1, []),
    "tokens": ("fp32", 1, []),
    "bert": ("fp32", 1, []),
    "refuel": ("fp32", 1, []),
}
PHASES = {"generation": "generate", "scoring": "score", "training": "train"}  # phase of the trainer → of the plan


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Shapes of the models, sizes of the batches, and cases."""
    parser.add_argument("--prompt", type=int, default=64, help="tokens of a prompt")
    parser.add_argument("--response", type=int, default=64, help="tokens of a response")
    parser.add_argument("--shapes", nargs="+", choices=list(SIZES), default=["S", "M"], help="of the models")
    parser.add_argument("--rows", type=int, default=8, help="rows of a micro-batch")
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES), help="see CASES")


def measure(settings: argparse.Namespace) -> list[dict[str, object]]:
    """Measures every case with every shape."""
    figures = []
    for shape in settings.shapes:
        for case in settings.cases:
            dtype, updates, _ = CASES[case]
            work = IterationWork(
                size=SIZES[shape],
                batch=2 * settings.rows * updates,  # two micro-batches an update
                micro_batch=settings.rows,
                shortest_prompt=settings.prompt,
                longest_prompt=settings.prompt,
                longest_response=settings.response,
                updates=updates,
                dtype=dtype,
            )
            figures.append(in_process(compare, work, case))
    return figures


def compare(work: IterationWork, case: str) -> dict[str, object]:
    """Planned and measured megabytes of each phase."""
    with tempfile.TemporaryDirectory() as folder:
        files = Path(folder) / "files"
        make_files(replace(work, dtype=other_dtype(work)), files)
        if case == "refuel":
            argv = refuel_flags(work, files)
            plan = make_plan(parse(RefuelOnlineConfig, argv), Machine(1, None), open_config)
            measured = measure_phases("refuel", argv, "online.py")
        else:
            argv = ppo_flags(work, files, case)
            plan = make_plan(parse(PPOConfig, argv), Machine(1, None), open_config)
            measured = measure_phases(ours.STEP, argv)
    planned = {phase.name: phase.total for phase in plan.phases}
    planned["train"] = max(planned["train"], planned["update"])
    rows = {}
    for name, size in measured.items():
        rows[name] = {
            "planned_mb": round(planned[name] / MB, 1),
            "measured_mb": round(size / MB, 1),
            "ratio": round(planned[name] / size, 3),
        }
    return {**asdict(work), "case": case, "phases": rows}


def other_dtype(work: IterationWork) -> str:
    """The dtype of the files, which differs from that of the run."""
    return "bf16" if work.dtype == "fp32" else "fp32"


def ppo_flags(work: IterationWork, files: Path, case: str) -> list[str]:
    """The command line of step 3. In case `tokens` half of the rows fill a micro-batch."""
    flags = {
        "--num_train_epochs": 2,
        "--generation_batches": 2 * work.updates,
        "--per_device_generation_batch_size": work.micro_batch,
        "--per_device_eval_batch_size": work.micro_batch,
    }
    if case == "tokens":
        flags["--max_tokens_per_micro_batch"] = work.micro_batch // 2 * (work.longest_prompt + work.longest_response)
    words = [*as_arguments(flags), *CASES[case][2]]
    if case == "bert":
        write_bert(work, files / "bert")
        words += ["--reward_model_name_or_path", str(files / "bert")]
    return ours.flags(ContenderJob(work, str(files), str(files.parent), flags=words))


def write_bert(work: IterationWork, folder: Path) -> None:
    """A random BERT as reward model, twice as wide as the actor."""
    size = work.size
    config = BertConfig(
        vocab_size=size.vocab_size + 1,
        hidden_size=2 * size.hidden_size,
        num_hidden_layers=size.num_hidden_layers,
        num_attention_heads=size.num_attention_heads,
        intermediate_size=4 * size.hidden_size,
        max_position_embeddings=work.longest_prompt + work.longest_response,
    )
    config.num_labels = 1
    dtype = DTYPES[other_dtype(work)]
    bert = AutoModelForSequenceClassification.from_config(config, trust_remote_code=False, dtype=dtype)
    bert.save_pretrained(folder)
    make_tokenizer(size.vocab_size + 1).save_pretrained(folder)


def refuel_flags(work: IterationWork, files: Path) -> list[str]:
    """The command line of online REFUEL on dialogues of one turn, which it writes."""
    tokenizer = make_tokenizer(work.size.vocab_size)
    tokenizer.chat_template = TEMPLATE
    for name in ("actor", "reward"):
        tokenizer.save_pretrained(files / name)
    rows = []
    for prompt in (files / "prompts.txt").read_text(encoding="utf-8").splitlines():
        messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": "w5"}]
        rows.append(json.dumps({"messages": messages}) + "\n")
    (files / "dialogues").mkdir()
    (files / "dialogues" / "train.jsonl").write_text("".join(rows), encoding="utf-8")
    (files / "dialogues" / "valid.jsonl").write_text(rows[0], encoding="utf-8")
    flags = {
        "--data_path": files / "dialogues",
        "--output_dir": files.parent / "run",
        "--model_name_or_path": files / "actor",
        "--reward_model_name_or_path": files / "reward",
        "--max_prompt_seq_len": work.longest_prompt,
        "--max_answer_seq_len": work.longest_response,
        "--max_seq_len": work.longest_prompt + work.longest_response + 1,
        "--per_device_generation_batch_size": work.micro_batch,
        "--per_device_train_batch_size": work.micro_batch // 2,
        "--per_device_eval_batch_size": work.micro_batch,
        "--global_batch_size": work.update_prompts,
        "--noptepochs": work.updates,
        "--num_train_epochs": 2,
        "--lr": 1e-6,
        "--dtype": work.dtype,
    }
    return [*as_arguments(flags), "--no_self_checks"]


def measure_phases(step: str, argv: list[str], program: str = "main.py") -> dict[str, int]:
    """Runs a step and returns the peak bytes of each phase, the last time that it runs."""
    torch.set_num_threads(1)
    os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"
    peaks: dict[str, int] = {}
    alive = 0
    profiler = start_profiler()
    record = Clock.record

    def profiled_record(clock: Clock, name: str) -> None:
        nonlocal alive, profiler
        gc.collect()  # an allocation that is freed later would not be seen
        profiler.stop()
        peak = alive
        for size in allocations(profiler):
            alive += size
            peak = max(peak, alive)
        peaks[PHASES[name]] = peak
        profiler = start_profiler()
        record(clock, name)

    setattr(Clock, "record", profiled_record)  # noqa: B010  # a method for mypy
    run_step(step, argv, program)
    profiler.stop()
    return peaks


def start_profiler() -> profile:
    """Records every allocation from now on."""
    profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
    profiler.start()
    return profiler


def allocations(profiler: profile) -> list[int]:
    """Bytes of each allocation in order; negative for memory that was freed."""
    events = profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
    sizes = []
    for event in events:
        if event.name() == "[memory]":
            sizes.append((event.start_ns(), event.nbytes()))  # type: ignore[union-attr]
    return [size for _, size in sorted(sizes)]
