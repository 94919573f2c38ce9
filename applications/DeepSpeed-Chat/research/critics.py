# SPDX-License-Identifier: Apache-2.0
"""Do macro actions help if the critic keeps up? The quickstart's step 3, with critics that are trained more often.

Every credit of the settings is combined with every training of the critic, and with each model that the critic starts
from. All settings of a seed are run before the next seed. Finished runs are kept: the same command continues where it
was stopped.
"""

import argparse
import shutil
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from filelock import FileLock

from critic_tables import draw_critics, measure_runs, remaining_table, settings_table
from dschat.base.atomic import write_file
from dschat.quickstart.inputs import (
    COMMON,
    FULL,
    MISSING_EOS_PENALTY,
    REWARD_LOSS,
    SMALL,
    critic_flags,
    make_inputs,
    ppo_flags,
    train_reward_model,
    train_sft,
)
from dschat.quickstart.subcommands import ONE, as_arguments
from dschat.settings.parse import parse
from dschat.settings.ppo import PPOConfig
from learning import origin, run_all
from quickstarts import read_run
from run_trial import train_recorded
from tables import write_sections
from trials import Trial, Value

SETTINGS = Path(__file__).with_suffix(".toml")
SCALES = {"quickstart": FULL, "small quickstart": SMALL}


def main() -> None:
    """Makes the runs of the seeds, one seed after another."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output_dir", type=Path, default=Path("runs/critics"), help="folder of all results")
    parser.add_argument("--settings", type=Path, default=SETTINGS, help="file with the settings: critics.toml")
    parser.add_argument("--seeds", type=int, default=4, help="how many seeds: 0, 1, …")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, each on one core")
    parser.add_argument("--only_tables", action="store_true", help="tables of the finished runs, and no more runs")
    parser.add_argument("--markdown", type=Path, nargs="*", default=(), help="documents whose tables are replaced")
    parser.add_argument("--small", action="store_true", help="a few updates only: shows that every part runs")
    options = parser.parse_args()
    task = "small quickstart" if options.small else "quickstart"
    content = tomllib.loads(options.settings.read_text(encoding="utf-8"))
    settings = all_settings(content)

    for seed in range(0 if options.only_tables else options.seeds):
        make_start(options.output_dir, task, seed)
        trials = [setting.trial(task, seed) for setting in settings]
        run_all(trials, options.output_dir, options.jobs, run_step3)

    curves = read_curves(settings, task, options.seeds, options.output_dir)
    publish(curves, content, options.output_dir, options.markdown)


@dataclass(frozen=True)
class CriticSetting:
    """A row of the tables: the model that the critic starts from, a credit, and a training of the critic."""

    critic: str
    credit: str
    training: str
    flags: Mapping[str, Value]

    def trial(self, task: str, seed: int) -> Trial:
        """The run of a seed."""
        scale = SCALES[task]
        return Trial(task, seed, self.critic, "reward", 2e-3, updates=scale.iterations, flags=self.flags)


def all_settings(content: Mapping[str, Any]) -> list[CriticSetting]:
    """All combinations of critics.toml, critic by critic."""
    settings = []
    for critic in content["critics"]:
        for training, training_flags in content["trainings"].items():
            for credit, credit_flags in content["credits"].items():
                settings.append(CriticSetting(critic, credit, training, credit_flags | training_flags))
    return settings


def read_curves(settings: Sequence[CriticSetting], task: str, seeds: int, folder: Path) -> pd.DataFrame:
    """The curves of the finished runs, with the columns critic, training, credit and seed."""
    tables = []
    for setting in settings:
        for seed in range(seeds):
            file = setting.trial(task, seed).file(folder)
            if not file.exists():
                continue
            names = {"critic": setting.critic, "training": setting.training, "credit": setting.credit}
            tables.append(pd.read_csv(file).assign(**names, seed=seed))
    if not tables:
        raise SystemExit(f"there is no finished run in {folder}; without --only_tables the command makes them")
    return pd.concat(tables, ignore_index=True)


def publish(curves: pd.DataFrame, content: Mapping[str, Any], folder: Path, documents: Sequence[Path]) -> None:
    """Writes the tables and the picture into the output folder, to the documents' sections, and beside these."""
    kl_levels = content["kl_levels"]
    runs = measure_runs(curves, kl_levels)
    hours = runs["seconds"].sum() / 3600
    summary = f"{origin()} {len(runs)} runs, {hours:.1f} hours of one core, without steps 1 and 2."
    tables = {
        f"learning {content['name']}, what remains": remaining_table(runs),
        f"learning {content['name']}": f"{summary}\n\n{settings_table(runs, kl_levels)}",
    }
    text = "\n\n".join(tables.values())
    print(text)
    write_file(folder / "tables.md", f"{text}\n")
    picture = draw_critics(curves[curves["training"].isin(content["drawn"])])
    for place in (folder, *[document.parent for document in documents]):
        (place / f"learning-{content['name'].replace(' ', '-')}.svg").write_bytes(picture)
    for document in documents:
        present = document.read_text(encoding="utf-8")
        write_sections(document, {name: table for name, table in tables.items() if f"<!-- {name} -->" in present})


# ---- Runs ----


def start_folder(folder: Path, task: str, seed: int) -> Path:
    """The folder of what the runs of a seed start from."""
    return folder / "starts" / f"{task.replace(' ', '-')}-seed{seed}"


def make_start(folder: Path, task: str, seed: int) -> None:
    """Makes the quickstart's data and models of steps 1 and 2, unless they are there."""
    start = start_folder(folder, task, seed)
    scale = SCALES[task]
    common = common_flags(seed)
    start.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{start}.lock"):
        if (start / "finished").exists():
            return
        data, model = make_inputs(start, seed, scale)
        train_sft(data, model, start / "sft", scale, common, ONE)
        train_reward_model(data / "comparisons", start / "sft", start / "reward", scale, [*REWARD_LOSS, *common], ONE)
        write_file(start / "finished", "")


def common_flags(seed: int) -> list[str]:
    """Flags of all steps."""
    return [*COMMON, "--seed", str(seed), "--zero_stage", str(ONE.zero_stage)]


def run_step3(trial: Trial, folder: Path) -> None:
    """Trains a policy and writes its curves, one row per rollout, with the last evaluation beside them."""
    start = start_folder(folder, trial.task, trial.seed)
    output = folder / "runs" / trial.key
    config = step3_config(trial, start, output)
    curves = train_recorded(trial, config, "objective/gold_scores")
    ends = {f"held-out {name}": number for name, number in read_run(output).items()}
    file = trial.file(folder)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_file(file, curves.assign(**ends).to_csv(index=False, float_format="%.5g"))
    shutil.rmtree(output)


def step3_config(trial: Trial, start: Path, output: Path) -> PPOConfig:
    """The quickstart's flags of step 3, and those of the trial.

    Every rollout has as many responses, so that its number of prompts follows from the responses per prompt.
    """
    scale = SCALES[trial.task]
    prompts = scale.rollout // int(trial.flags.get("samples_per_prompt", 1))
    flags = ppo_flags(start / "data", start / "sft", start / "reward", output, scale, ONE, MISSING_EOS_PENALTY)
    flags += critic_flags(start / trial.critic)
    flags += as_arguments({"--per_device_generation_batch_size": prompts, "--max_steps": scale.iterations})
    flags += as_arguments({f"--{name}": value for name, value in trial.flags.items()})
    return parse(PPOConfig, [*flags, "--termination_condition", "fixed", *common_flags(trial.seed)])


if __name__ == "__main__":
    main()
