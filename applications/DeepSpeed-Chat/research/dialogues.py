# SPDX-License-Identifier: Apache-2.0
"""REFUEL on dialogues made in code, whose second question depends on the first, with users from the data."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

from dschat.base.display import markdown_table
from dschat.base.statistics import mean_interval
from dschat.models.tiny import make_model
from dschat.quickstart import synthetic_dialogues
from dschat.quickstart.inputs import COMMON, make_folder
from dschat.quickstart.subcommands import ONE, as_arguments, run_step
from dschat.quickstart.synthetic_dialogues import CHAT_TEMPLATE, make_dialogue, texts_of, write_dialogues

DIALOGUE_GOLD = Path(synthetic_dialogues.__file__)
PAIRS = 64  # pairs of a round of REFUEL


@dataclass(frozen=True)
class DialogueScale:
    """Numbers of rows, epochs and rounds."""

    demonstrations: int
    dialogues: int
    held_out: int
    sft_epochs: int
    rounds: int  # rounds of sampling
    eval_rounds: int  # rounds from one evaluation to the next


FULL = DialogueScale(4000, 2000, 128, 4, 30, 10)
SMALL = DialogueScale(64, 64, 8, 1, 1, 1)  # shows that every part runs; learns nothing


def train_refuel(folder: Path, seed: int, small: bool) -> str:
    """Trains step 1 and REFUEL, and compares them turn by turn. Returns the results as Markdown."""
    scale = SMALL if small else FULL
    data = make_folder(folder, "dialogues and model")
    write_dialogues(data, scale.demonstrations, scale.dialogues, scale.held_out, seed)
    texts = texts_of([make_dialogue(index, seed) for index in range(1000)])
    model = make_model(folder / "model", texts, seed, vocab_size=512, chat_template=CHAT_TEMPLATE)

    sft = folder / "sft"
    refuel = folder / "refuel"
    common = [*COMMON, "--seed", str(seed)]
    run_step("sft", [*sft_flags(data, model, sft, scale), *common], ONE)
    run_step("refuel-online", [*refuel_flags(data, sft, refuel, scale), *common], ONE)

    # Win rates by turn of the last evaluation against the first one, which is of the SFT model.
    evaluations = sorted((refuel / "samples").glob("update-*.jsonl"))
    shutil.copyfile(evaluations[0], folder / "sft.jsonl")
    shutil.copyfile(evaluations[-1], folder / "refuel.jsonl")
    flags = {
        "--model_name_a": folder / "refuel.jsonl",
        "--model_name_b": folder / "sft.jsonl",
        "--output": folder / "win-rates.jsonl",
    }
    run_step("judge-turns", [*as_arguments(flags), "--by_scores", "--overwrite"], ONE)
    win_rates = (folder / "win-rates.md").read_text(encoding="utf-8")
    picture = f"![Win rate by turn]({folder.name}/win-rates.png)"
    return f"{scores_by_round(refuel)}\n\n{win_rates}\n{picture}\n"


def sft_flags(data: Path, model: Path, output: Path, scale: DialogueScale) -> list[str]:
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


def refuel_flags(data: Path, sft: Path, output: Path, scale: DialogueScale) -> list[str]:
    """REFUEL with the users of the data."""
    batch = min(PAIRS, scale.dialogues)
    flags = {
        "--task.query_dataset": data / "dialogues",
        "--base_model": sft,
        "--reward_function": f"{DIALOGUE_GOLD}:gold_scores",
        "--output_dir": output,
        "--max_prompt_seq_len": 16,
        "--task.response_length": 8,
        "--task.total_length": 64,
        "--per_device_train_batch_size": batch,
        "--per_device_generation_batch_size": 2 * batch,
        "--total_episodes": batch * scale.rounds,
        "--print_sample_output_freq": scale.eval_rounds,
        "--lr": 1e-3,
        "--refuel.eta": 8,
        "--reward.kl_coef": 0.02,
        "--task.penalty_reward_value": 0,
        "--eval_temperature": 1,
    }
    return as_arguments(flags)


def scores_by_round(run: Path) -> str:
    """The evaluations of a run as a table."""
    headers = ["dialogues sampled", "gold score of turn 1", "of both turns", "KL of a reply"]
    rows = []
    for metrics in _read_rows(run / "metrics.jsonl"):
        if "eval/scores" not in metrics:
            continue
        samples = _read_rows(run / "samples" / f"update-{metrics['update']:06d}.jsonl")
        scores_by_turn = zip(*[sample["scores"] for sample in samples], strict=True)
        turns = [mean_interval(scores).text() for scores in scores_by_turn]
        rows.append([f"{metrics['samples']:.0f}", *turns, f"{metrics['eval/kl']:.2f}"])
    return markdown_table(headers, rows)


def _read_rows(file: Path) -> list[dict]:  # type: ignore[type-arg]
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
