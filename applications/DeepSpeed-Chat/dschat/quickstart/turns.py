# SPDX-License-Identifier: Apache-2.0
"""Episodes of several turns on one machine: a guessing game and a calculator, step 1, step 3 with an environment.

Runs the same commands as any training, as separate processes, on games made in code and a small Gemma. Each game
is trained on twice: with a macro action for each turn, and with one for each token.
"""

import time
from dataclasses import dataclass
from pathlib import Path

from dschat.base.atomic import write_file
from dschat.base.display import text_table
from dschat.evaluation.run_data import read_run
from dschat.evaluation.runs import build_report
from dschat.quickstart.games import CHAT_TEMPLATE, CLASSES, Game, demonstration_texts, share_of_best, write_game
from dschat.quickstart.inputs import COMMON, make_folder, supervised_flags
from dschat.quickstart.options import TurnsOptions
from dschat.quickstart.subcommands import Processes, as_arguments, run_step, run_steps
from dschat.turns.show import episode_table, longest_episode, read_samples

GAMES = Path(__file__).with_name("games.py")


@dataclass(frozen=True)
class TurnScale:
    """Numbers of rows, epochs and iterations."""

    demonstrations: int
    rollout: int  # episodes of one PPO iteration
    iterations: int
    held_out: int
    sft_epochs: int


FULL = TurnScale(4000, 64, 80, 128, 10)
SMALL = TurnScale(64, 16, 2, 16, 1)  # shows that every part runs; learns nothing
# Name of each run → its folder and its flags.
RUNS = {
    "PPO (token)": ("token", ["--ngram", "1"]),
    "MA-PPO (turn)": ("turn", ["--termination_condition", "turn", "--value_function", "first"]),
}


def run(options: TurnsOptions) -> str:
    """Makes games and models, trains, and writes a report on each game; returns their numbers."""
    scale = SMALL if options.small else FULL
    start_time = time.perf_counter()
    texts = [play_game(game, options, scale) for game in CLASSES]
    seconds = time.perf_counter() - start_time
    reports = ", ".join(str(options.output_dir / game / "report.html") for game in CLASSES)
    return "\n\n".join([*texts, f"reports: {reports} ({seconds:.0f} s in all)"])


def play_game(game: Game, options: TurnsOptions, scale: TurnScale) -> str:
    """Trains on one game, and writes its report; returns its numbers and an episode turn by turn."""
    folder = options.output_dir / game
    common = [*COMMON, "--seed", str(options.seed)]

    # Training.
    data, model = make_inputs(folder, game, options.seed, scale)
    sft = folder / "sft"
    flags = supervised_flags(data / "demonstrations", "1,0,0", model, sft, scale.sft_epochs, 32)
    run_step("sft", [*flags, "--train_on", "all", *common], Processes())
    steps = []
    for name, more_flags in RUNS.values():
        flags = ppo_flags(game, data, sft, folder / name, scale)
        steps.append(("ppo", [*flags, *more_flags, *common]))
    run_steps(steps, options.jobs)

    # Report.
    runs = {name: folder / run_folder for name, (run_folder, _) in RUNS.items()}
    notes = []
    tables = []
    for name, run_folder in runs.items():
        last = read_run(name, run_folder).last
        last_update = int(last.row["update"])
        samples = read_samples(run_folder / "samples" / f"update-{last_update:06d}.jsonl")
        share = share_of_best(game, last.mean("scores"))
        notes.append(f"{name}: {share:.0%} of what the best strategy gets, on {len(samples)} held-out episodes.")
        title = f"{name}: the longest of the episodes that were written token by token"
        tables.append(episode_table(longest_episode(samples), title))
    summary = build_report(runs, folder, title=f"Episodes of several turns: {game}", about=notes)
    sections = []
    for table in tables:
        sections.append(f"{table.heading}\n\n{text_table(table.headers, table.rows)}")
    episodes = "\n\n".join(sections)
    write_file(folder / "episodes.txt", f"{episodes}\n")
    return f"{summary.text()}\n\n{episodes}"


def make_inputs(folder: Path, game: Game, seed: int, scale: TurnScale) -> tuple[Path, Path]:
    """Writes the rows of a game and the random model. Returns their folders."""
    from dschat.models.tiny import make_model

    data = make_folder(folder, f"{game}: rows and model")
    write_game(data, game, scale.demonstrations, scale.rollout * scale.iterations, scale.held_out, seed)
    texts = demonstration_texts(game, 1000, seed)
    return data, make_model(folder / "model", texts, seed, vocab_size=300, chat_template=CHAT_TEMPLATE)


def ppo_flags(game: Game, data: Path, sft: Path, output: Path, scale: TurnScale) -> list[str]:
    """Step 3 on episodes; all runs start from the same model and see the same rows."""
    flags = {
        "--data_path": data / "episodes",
        "--data_split": "0,0,1",
        "--actor_model_name_or_path": sft,
        "--environment": f"{GAMES}:{CLASSES[game]}",
        "--max_turns": 4,
        "--max_turn_seq_len": 12,
        "--output_dir": output,
        "--per_device_generation_batch_size": scale.rollout,
        "--per_device_training_batch_size": scale.rollout,
        "--num_train_epochs": 1,
        "--eval_interval": max(1, scale.iterations // 4),
        "--eval_prompts": scale.held_out,
        "--max_prompt_seq_len": 32,
        "--max_answer_seq_len": 80,
        "--actor_learning_rate": 1e-3,
        "--critic_learning_rate": 2e-3,
        "--kl_ctl": 0.01,
        "--missing_eos_penalty": 0.5,
        "--warmup_ratio": 0.05,
    }
    return [*as_arguments(flags), "--whiten_advantages"]
