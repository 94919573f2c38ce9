# SPDX-License-Identifier: Apache-2.0
"""How well does `dschat.plan` foresee the memory of step 3, and of online REFUEL?

One process on the CPU runs the step itself for two iterations, on random Gemmas (with `bert` the reward model is a
BERT) whose prompts and responses all have their full length. The measured figure is the most bytes of tensors alive in
a phase of the second one: torch's allocator reports every allocation to its profiler, and their running sum, from
before the models are made on, is followed here. It sees neither weights that are mapped from their file nor what
another thread allocates: so the models' folders have another dtype than the run, and one thread loads them. The
planned figure comes from the same flags and the models' configs alone.

    python plan_check.py
"""

import gc
import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForSequenceClassification, BertConfig

from contenders import ours
from contenders.process import ContenderJob
from contenders.work import DTYPES, SIZES, IterationWork, make_files, make_tokenizer
from dschat.models.load import open_config
from dschat.plan.phases import Machine
from dschat.plan.plan import make_plan
from dschat.quickstart.subcommands import as_arguments
from dschat.settings.parse import parse
from dschat.settings.ppo import PPOConfig
from dschat.settings.refuel import RefuelOnlineConfig
from dschat.training.iteration import Clock
from harness import MB, in_process, report, run_step, settings_parser

# A user's turn, and a reply that <eos> ends.
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
PHASES = {"generation": "generate", "scoring": "score", "training": "train"}  # of the trainer's clock → of the plan


def main() -> None:
    """Measures every case and prints one JSON object."""
    parser = settings_parser(__doc__, prompt=64, response=64)
    parser.add_argument("--shapes", nargs="+", choices=list(SIZES), default=["S", "M"])
    parser.add_argument("--rows", type=int, default=8, help="of a micro-batch")
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    settings = parser.parse_args()
    lengths = (settings.prompt, settings.prompt, settings.response)
    figures = []
    for shape, case in product(settings.shapes, settings.cases):
        dtype, updates, _ = CASES[case]
        batch = 2 * settings.rows * updates  # two micro-batches an update
        work = IterationWork(SIZES[shape], batch, settings.rows, *lengths, updates=updates, dtype=dtype)
        figures.append(in_process(compare, work, case))
    report(settings, figures)


def compare(work: IterationWork, case: str) -> dict[str, object]:
    """Planned and measured megabytes of each phase, of two iterations."""
    with tempfile.TemporaryDirectory() as place:
        files = Path(place) / "files"
        make_files(replace(work, dtype="bf16" if work.dtype == "fp32" else "fp32"), files)
        if case == "refuel":
            step, program, argv = "refuel", "online.py", refuel_flags(work, files)
            plan = make_plan(parse(RefuelOnlineConfig, argv), Machine(1, None), open_config)
        else:
            step, program, argv = ours.STEP, "main.py", ppo_flags(work, files, case)
            plan = make_plan(parse(PPOConfig, argv), Machine(1, None), open_config)
        measured = measure(step, program, argv)
    planned = {phase.name: phase.total for phase in plan.phases}
    planned["train"] = max(planned["train"], planned["update"])
    rows = {}
    for name, most in measured.items():
        figures = {"planned_mb": round(planned[name] / MB, 1), "measured_mb": round(most / MB, 1)}
        rows[name] = figures | {"ratio": round(planned[name] / most, 3)}
    return asdict(work) | {"case": case, "phases": rows}


def ppo_flags(work: IterationWork, files: Path, case: str) -> list[str]:
    """The command line of step 3. Half the rows fill the tokens; a BERT is twice as wide as the actor."""
    own = {"num_train_epochs": 2, "generation_batches": 2 * work.updates}
    own |= {"per_device_generation_batch_size": work.micro_batch, "per_device_eval_batch_size": work.micro_batch}
    flags = [*as_arguments({f"--{name}": value for name, value in own.items()}), *CASES[case][2]]
    if case == "tokens":
        half = work.micro_batch // 2 * (work.longest_prompt + work.response)
        flags += ["--max_tokens_per_micro_batch", str(half)]
    if case == "bert":
        flags += ["--reward_model_name_or_path", str(files / "bert")]
        size = work.size
        config = BertConfig(
            vocab_size=size.vocab_size + 1,
            hidden_size=2 * size.hidden_size,
            num_hidden_layers=size.num_hidden_layers,
            num_attention_heads=size.num_attention_heads,
            intermediate_size=4 * size.hidden_size,
            max_position_embeddings=work.longest_prompt + work.response,
        )
        config.num_labels = 1
        other = DTYPES["bf16" if work.dtype == "fp32" else "fp32"]
        bert = AutoModelForSequenceClassification.from_config(config, trust_remote_code=False, dtype=other)
        bert.save_pretrained(files / "bert")
        make_tokenizer(size.vocab_size + 1).save_pretrained(files / "bert")
    return ours.flags(ContenderJob(work, str(files), str(files.parent), flags=flags))


def refuel_flags(work: IterationWork, files: Path) -> list[str]:
    """The command line of online REFUEL on dialogues of one turn."""
    tokenizer = make_tokenizer(work.size.vocab_size)
    tokenizer.chat_template = TEMPLATE
    for name in ("actor", "reward"):
        tokenizer.save_pretrained(files / name)
    rows = []
    for prompt in (files / "prompts.txt").read_text(encoding="utf-8").splitlines():
        said = [{"role": "user", "content": prompt}, {"role": "assistant", "content": "w5"}]
        rows.append(json.dumps({"messages": said}) + "\n")
    (files / "dialogues").mkdir()
    (files / "dialogues" / "train.jsonl").write_text("".join(rows), encoding="utf-8")
    (files / "dialogues" / "valid.jsonl").write_text(rows[0], encoding="utf-8")
    options = {
        "data_path": files / "dialogues",
        "output_dir": files.parent / "run",
        "model_name_or_path": files / "actor",
        "reward_model_name_or_path": files / "reward",
        "max_prompt_seq_len": work.longest_prompt,
        "max_answer_seq_len": work.response,
        "max_seq_len": work.longest_prompt + work.response + 1,
        "per_device_generation_batch_size": work.micro_batch,
        "per_device_train_batch_size": work.micro_batch // 2,
        "per_device_eval_batch_size": work.micro_batch,
        "global_batch_size": work.update,
        "noptepochs": work.updates,
        "num_train_epochs": 2,
        "lr": 1e-6,
        "dtype": work.dtype,
    }
    return [*as_arguments({f"--{name}": value for name, value in options.items()}), "--no_self_checks"]


def measure(step: str, program: str, argv: list[str]) -> dict[str, int]:
    """Peak bytes of each phase, the last time that it runs."""
    torch.set_num_threads(1)
    os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"
    peaks: dict[str, int] = {}
    alive, profiler = 0, started_profiler()

    def followed(record: Callable[[Clock, str], None]) -> Callable[[Clock, str], None]:
        def run(clock: Clock, name: str) -> None:
            nonlocal alive, profiler
            gc.collect()  # what is given back later would not be seen
            profiler.stop()
            events = profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
            sizes = [(e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"]  # type: ignore[union-attr]
            peak = alive
            for _, size in sorted(sizes):
                alive += size
                peak = max(peak, alive)
            peaks[PHASES[name]] = peak
            profiler = started_profiler()
            record(clock, name)

        return run

    setattr(Clock, "record", followed(Clock.record))  # noqa: B010  # a method for mypy
    run_step(step, argv, program)
    profiler.stop()
    return peaks


def started_profiler() -> profile:
    """Notes every allocation from now on."""
    profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
    profiler.start()
    return profiler


if __name__ == "__main__":
    main()
