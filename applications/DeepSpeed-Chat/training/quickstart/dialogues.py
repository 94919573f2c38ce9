# SPDX-License-Identifier: Apache-2.0
"""REFUEL on dialogues of two turns: step 1, rounds of REFUEL with users from data, and the win rate by turn."""

import json
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from dschat.errors import UserError
from inputs import COMMON, TRAINING, Processes, as_arguments, run_command, run_step

ROOT = TRAINING.parents[2]
GOLD = TRAINING.parent / "dschat" / "data" / "synthetic_dialogues.py"
BATCH = 64  # pairs of a round


@dataclass(frozen=True)
class Scale:
    """How much of everything."""

    demonstrations: int
    dialogues: int
    held_out: int
    sft_epochs: int
    rounds: int  # of sampling
    every: int  # rounds from one evaluation to the next


FULL = Scale(4000, 2000, 128, 4, 30, 10)
SMALL = Scale(64, 64, 8, 1, 1, 1)  # shows that every part runs; learns nothing


def refuel_example(folder: Path, seed: int, scale: Scale) -> str:
    """Trains on dialogues made by code; what came, as Markdown."""
    data, model = make_inputs(folder, seed, scale)
    sft, run = folder / "sft", folder / "refuel"
    common = [*COMMON, "--seed", str(seed)]
    run_step("step1_supervised_finetuning", [*sft_flags(data, model, sft, scale), *common], Processes())
    script = str(TRAINING / "refuel" / "online.py")
    run_command("refuel", [sys.executable, script, *refuel_flags(data, sft, run, scale), *common])
    table = scores_by_round(run)
    samples = sorted((run / "samples").glob("update-*.jsonl"))
    compared = [folder / "refuel.jsonl", folder / "sft.jsonl"]
    for source, place in zip((samples[-1], samples[0]), compared, strict=True):
        shutil.copyfile(source, place)
    names = dict(zip(("--model_name_a", "--model_name_b"), compared, strict=True))
    flags = as_arguments(names | {"--output": folder / "win-rates.jsonl"})
    script = str(ROOT / "evaluation" / "winrate_by_turn.py")
    run_command("winrate_by_turn", [sys.executable, script, *flags, "--by-scores", "--overwrite"])
    wins = (folder / "win-rates.md").read_text(encoding="utf-8")
    return f"{table}\n\n{wins}\n![Win rate by turn]({folder.name}/win-rates.png)\n"


def make_inputs(folder: Path, seed: int, scale: Scale) -> tuple[Path, Path]:
    """The dialogues and a random model with a chat template, as files."""
    from dschat.data.synthetic_dialogues import CHAT_TEMPLATE, make_dialogue, texts_of, write_dialogues
    from dschat.models.tiny import make_model

    print("== dialogues and model", flush=True)
    try:
        write_dialogues(folder / "data", scale.demonstrations, scale.dialogues, scale.held_out, seed)
    except OSError as error:
        raise UserError(f"--output_dir {folder}: cannot be written: {error}") from error
    texts = texts_of([make_dialogue(index, seed) for index in range(1000)])
    return folder / "data", make_model(folder / "model", texts, seed, vocab_size=512, chat_template=CHAT_TEMPLATE)


def sft_flags(data: Path, model: Path, output: Path, scale: Scale) -> list[str]:
    """Step 1 on demonstrations that name words of the right kind more often than not."""
    flags = {
        "--data_path": data / "demonstrations",
        "--data_split": "1,0,0",
        "--model_name_or_path": model,
        "--output_dir": output,
        "--max_seq_len": 96,
        "--per_device_train_batch_size": 32,
        "--per_device_eval_batch_size": 64,
        "--learning_rate": 4e-3,
        "--num_train_epochs": scale.sft_epochs,
        "--num_warmup_steps": 10,
    }
    return as_arguments(flags)


def refuel_flags(data: Path, sft: Path, output: Path, scale: Scale) -> list[str]:
    """REFUEL, whose users say what the data's users say."""
    batch = min(BATCH, scale.dialogues)
    flags = {
        "--task.query_dataset": data / "dialogues",
        "--base_model": sft,
        "--reward_function": f"{GOLD}:gold_scores",
        "--output_dir": output,
        "--max_prompt_seq_len": 16,
        "--task.response_length": 8,
        "--task.total_length": 64,
        "--per_device_train_batch_size": batch,
        "--per_device_generation_batch_size": 2 * batch,
        "--total_episodes": batch * scale.rounds,
        "--print_sample_output_freq": scale.every,
        "--lr": 1e-3,
        "--refuel.eta": 8,
        "--reward.kl_coef": 0.02,
        "--task.penalty_reward_value": 0,
        "--eval_temperature": 1,
    }
    return as_arguments(flags)


def scores_by_round(run: Path) -> str:
    """The evaluations of a run as a table."""
    from dschat.common.display import markdown_table
    from dschat.common.statistics import mean_interval

    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    evaluations = [row for row in map(json.loads, lines) if "eval/scores" in row]
    rows = []
    for row in evaluations:
        place = run / "samples" / f"update-{row['update']:06d}.jsonl"
        samples = [json.loads(line) for line in place.read_text(encoding="utf-8").splitlines()]
        turns = zip(*(sample["scores"] for sample in samples), strict=True)
        rows.append(
            [f"{row['samples']:.0f}", *(mean_interval(scores).text() for scores in turns), f"{row['eval/kl']:.2f}"]
        )
    return markdown_table(["dialogues drawn", "gold score of turn 1", "of both turns", "KL of a reply"], rows)
