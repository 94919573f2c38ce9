# SPDX-License-Identifier: Apache-2.0
"""Programs on one machine: problems, step 1, step 3 with rewards by execution, pass@1 and pass@5 before and after.

Runs the same commands as any training, as separate processes, on problems made in code and a small Gemma.
"""

import time
from dataclasses import dataclass
from pathlib import Path

from dschat.base.atomic import write_file
from dschat.evaluation.runs import build_report
from dschat.programs.pass_at_k import ALL, pass_rates, pass_table
from dschat.quickstart.inputs import COMMON, make_folder, supervised_flags
from dschat.quickstart.options import ProgramsOptions
from dschat.quickstart.subcommands import Processes, as_arguments, run_step


@dataclass(frozen=True)
class ProgramScale:
    """Numbers of rows, epochs and iterations."""

    demonstrations: int
    rollout: int  # problems of one PPO iteration
    iterations: int
    held_out: int
    sft_epochs: int


FULL = ProgramScale(12000, 64, 30, 128, 3)
SMALL = ProgramScale(64, 16, 2, 16, 1)  # shows that every part runs; learns nothing
# Name of each run → its folder and the tokens of a macro action.
RUNS = {"PPO (n = 1)": ("ppo", 1), "MA-PPO (n = 10)": ("ma-ppo", 10)}


def run(options: ProgramsOptions) -> str:
    """Makes problems and model, trains, answers the held-out problems and writes the report; returns its numbers."""
    folder = options.output_dir
    scale = SMALL if options.small else FULL
    start_time = time.perf_counter()

    # Training.
    data, model = make_inputs(folder, options.seed, scale)
    sft = folder / "sft"
    common = [*COMMON, "--seed", str(options.seed)]
    flags = supervised_flags(data / "demonstrations", "1,0,0", model, sft, scale.sft_epochs, 32)
    run_step("sft", [*flags, *common], Processes())
    names = {"sft": "SFT"}  # folder → name
    for name, (run_folder, ngram) in RUNS.items():
        flags = ppo_flags(data, sft, folder / run_folder, scale)
        run_step("ppo", [*flags, "--ngram", str(ngram), *common], Processes())
        names[run_folder] = name

    # Evaluation.
    results = [answer(folder / model_folder, data, folder, options.seed) for model_folder in names]
    rates = pass_rates(results, (1, 5))
    table = pass_table(rates)
    write_file(folder / "pass-at-k.txt", f"{table}\n")
    notes = ["Score: the published reward of programs, from what becomes of them on their tests."]
    for row in rates.to_dict("records"):
        if row["difficulty"] == ALL:
            shares = f"pass@1 {row['pass@1'].text()} %, pass@5 {row['pass@5'].text()} %"
            notes.append(f"{names[row['model']]}, {row['problems']} held-out problems, five programs each: {shares}.")
    runs = {name: folder / run_folder for name, (run_folder, _) in RUNS.items()}
    summary = build_report(runs, folder, title="Programs: PPO and MA-PPO with rewards by execution", about=notes)
    seconds = f"{time.perf_counter() - start_time:.0f} s in all"
    return f"{summary.text()}\n\n{table}\n\nreport: {folder / 'report.html'} ({seconds})"


def make_inputs(folder: Path, seed: int, scale: ProgramScale) -> tuple[Path, Path]:
    """Writes the problems and the random model. Returns their folders."""
    from dschat.data.formats import apps_row
    from dschat.models.tiny import make_model
    from dschat.quickstart.problems import make_row, write_problems

    data = make_folder(folder, "problems and model")
    write_problems(data, scale.demonstrations, scale.rollout * scale.iterations, scale.held_out, seed)
    texts = []
    for index in range(1000):
        row = apps_row(make_row(index, seed, "demonstrations"), str(index))
        texts.append(f"{row.prompt}{row.chosen}")
    return data, make_model(folder / "model", texts, seed, vocab_size=400)


def ppo_flags(data: Path, sft: Path, output: Path, scale: ProgramScale) -> list[str]:
    """Step 3 on the problems; both runs start from the same model and see the same problems."""
    flags = {
        "--data_path": data / "problems",
        "--data_split": "0,0,1",
        "--actor_model_name_or_path": sft,
        "--reward_source": "programs",
        "--sandbox_workers": 2,
        "--output_dir": output,
        "--per_device_generation_batch_size": scale.rollout,
        "--per_device_training_batch_size": scale.rollout,
        "--num_train_epochs": 1,
        "--eval_interval": 10,
        "--eval_prompts": 64,
        "--max_prompt_seq_len": 128,
        "--max_answer_seq_len": 48,
        "--actor_learning_rate": 1e-3,
        "--critic_learning_rate": 2e-3,
        "--kl_ctl": 0.02,
        "--warmup_ratio": 0.05,
    }
    return [*as_arguments(flags), "--whiten_advantages"]


def answer(model: Path, data: Path, folder: Path, seed: int) -> Path:
    """Generates and runs five programs for each held-out problem. Returns the file of results."""
    flags: dict[str, object] = {
        "--proj_path": folder,
        "--model": model,
        "--data_path": data / "problems",
        "--dataset": "problems",
        "--name": model.name,
        "--max_new_tokens": 48,
        "--top_k": 0,
        "--seed": seed,
        "--batch_size": 64,
        "--sandbox_workers": 2,
    }
    run_step("programs", [*as_arguments(flags), "--overwrite"], Processes())
    return folder / "results" / "problems" / "temperature=1.0" / f"{model.name}.jsonl"
