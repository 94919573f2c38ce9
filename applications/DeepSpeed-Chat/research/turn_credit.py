# SPDX-License-Identifier: Apache-2.0
"""Credit by turn against credit by token: the two games of `make turns`, over seeds, at equal sampled tokens.

Finished runs are kept: the same command continues where it was stopped. The table is turn-credit.md in the output
folder, over the seeds of which all settings are finished.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
from tqdm import tqdm

from dschat.base.atomic import write_file
from dschat.quickstart.games import CLASSES, Game, share_of_best
from dschat.quickstart.inputs import COMMON, supervised_flags
from dschat.quickstart.subcommands import ONE
from dschat.quickstart.turns import FULL, RUNS, SMALL, TurnScale, make_inputs, ppo_flags
from quickstarts import NATIVE, is_run_finished, run_logged
from tables import NONE, gain_text, markdown, over_seeds, smooth

TOKEN = "PPO (token)"
# A control: with λ = .99 for each token, advantages reach as far back as with .95 for each turn.
SETTINGS = {name: flags for name, (_, flags) in RUNS.items()} | {
    "PPO (token), λ = .99": ["--ngram", "1", "--lam", "0.99"]
}
ONE_CORE = {**NATIVE, "NUM_GPUS": "1", "CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}


@dataclass(frozen=True)
class TurnRun:
    """A run of step 3: one game, one seed, one setting."""

    game: Game
    seed: int
    setting: str

    def start(self, folder: Path) -> Path:
        """The folder of its rows and its SFT model, which all settings share."""
        return folder / self.game / f"seed-{self.seed}"

    def output(self, folder: Path) -> Path:
        """Output folder of the run."""
        return self.start(folder) / f"run-{list(SETTINGS).index(self.setting)}"


def read_options() -> argparse.Namespace:
    """The flags."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output_dir", type=Path, default=Path("runs/turn-credit"), help="folder of all runs")
    parser.add_argument("--seeds", type=int, default=10, help="seeds of each game and setting")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, each on one core")
    parser.add_argument("--small", action="store_true", help="a few updates only: shows that every part runs")
    return parser.parse_args()


def main() -> None:
    """Makes the runs that are not finished, and writes and prints the table."""
    options = read_options()
    folder = options.output_dir / "small" if options.small else options.output_dir
    scale = SMALL if options.small else FULL
    runs = []
    for seed in range(options.seeds):
        for game in CLASSES:
            runs += [TurnRun(game, seed, setting) for setting in SETTINGS]
    make_starts(folder, runs, scale, options.jobs)
    with ThreadPoolExecutor(options.jobs) as pool:
        unfinished = [run for run in runs if not is_run_finished(run.output(folder))]
        for _ in tqdm(pool.map(lambda run: train(folder, run, scale), unfinished), "runs", len(unfinished)):
            pass
    rows = []
    for seed in range(options.seeds):
        for game in CLASSES:
            rows += read_seed(folder, game, seed)
    table = credit_table(pd.DataFrame(rows))
    write_file(folder / "turn-credit.md", f"{table}\n")
    print(table)


# ---- Training ----


def make_starts(folder: Path, runs: Sequence[TurnRun], scale: TurnScale, jobs: int) -> None:
    """Rows and SFT models of all games and seeds; those that are there are kept.

    Raises:
        RuntimeError: a training run failed; the message names its log.
    """
    unfinished = {}
    for run in runs:
        start = run.start(folder)
        if start not in unfinished and not (start / "sft" / "config.json").exists():
            # Here, and not in a thread of the pool: the random model comes from torch's global generator.
            unfinished[start] = (run.seed, *make_inputs(start, run.game, run.seed, scale))
    with ThreadPoolExecutor(jobs) as pool:
        results = pool.map(lambda start: train_sft(start, *unfinished[start], scale), unfinished)
        for _ in tqdm(results, "SFT models", len(unfinished)):
            pass


def train_sft(start: Path, seed: int, data: Path, model: Path, scale: TurnScale) -> None:
    """Step 1 on demonstrations. Raises RuntimeError, which names the log."""
    flags = supervised_flags(data / "demonstrations", "1,0,0", model, start / "sft", scale.sft_epochs, 32)
    flags += ["--train_on", "all", *COMMON, "--seed", str(seed)]
    run_logged(ONE.command("sft", flags), start / "sft.txt", ONE_CORE)


def train(folder: Path, run: TurnRun, scale: TurnScale) -> None:
    """Step 3. Raises RuntimeError, which names the log."""
    start = run.start(folder)
    output = run.output(folder)
    flags = ppo_flags(run.game, start / "data", start / "sft", output, scale)
    flags += [*SETTINGS[run.setting], *COMMON, "--seed", str(run.seed)]
    run_logged(ONE.command("ppo", flags), output.with_suffix(".txt"), ONE_CORE)


# ---- Results ----


def read_curves(output: Path, game: Game) -> pd.DataFrame:
    """A row for each rollout of a run.

    Columns: tokens, all that were sampled up to its end; score, as a share of what the best strategy gets; kl, nats
    per episode; lambda_eff, λ per token.
    """
    metrics = pd.read_json(output / "metrics.jsonl", lines=True).dropna(subset=["objective/scores"])
    rollout = metrics["samples"].diff().fillna(metrics["samples"])
    return pd.DataFrame(
        {
            "tokens": (metrics["response/length"] * rollout).cumsum(),
            "score": metrics["objective/scores"].map(partial(share_of_best, game)),
            "kl": metrics["objective/kl"],
            "lambda_eff": metrics["macro/lambda_eff"],
        }
    ).reset_index(drop=True)


def held_out_scores(output: Path, game: Game) -> tuple[float, float]:
    """Scores of the held-out episodes before and after training, as shares of what the best strategy gets."""
    metrics = pd.read_json(output / "metrics.jsonl", lines=True)
    scores = metrics["eval/scores"].dropna()
    return share_of_best(game, scores.iloc[0]), share_of_best(game, scores.iloc[-1])


def at_tokens(curves: pd.DataFrame, column: str, tokens: float) -> float:
    """A smoothed curve where so many tokens have been sampled."""
    return float(np.interp(tokens, curves["tokens"], smooth(curves[column])))


def read_seed(folder: Path, game: Game, seed: int) -> list[dict[str, object]]:
    """A row for each setting of a game and seed; no row until all settings are finished.

    `score` and `kl` are those where every run has sampled as many tokens as the run with the fewest in all; `early` is
    the score at a third of these tokens.
    """
    runs = {setting: TurnRun(game, seed, setting) for setting in SETTINGS}
    if not all(is_run_finished(run.output(folder)) for run in runs.values()):
        return []
    curves = {setting: read_curves(run.output(folder), game) for setting, run in runs.items()}
    tokens = min(curve["tokens"].iloc[-1] for curve in curves.values())
    rows = []
    for setting, curve in curves.items():
        start, end = held_out_scores(runs[setting].output(folder), game)
        row = {
            **asdict(runs[setting]),
            "held_out_start": start,
            "held_out_end": end,
            "equal_tokens": tokens,
            "early": at_tokens(curve, "score", tokens / 3),
            "score": at_tokens(curve, "score", tokens),
            "kl": at_tokens(curve, "kl", tokens),
            "lambda_eff": curve["lambda_eff"].mean(),
        }
        rows.append(row)
    return rows


def credit_table(runs: pd.DataFrame) -> str:
    """Start, end and equal tokens of each game and setting, over the seeds of which all settings are finished.

    Args:
        runs: rows of `read_seed`.
    """
    rows = []
    for (game, setting), seeds in runs.groupby(["game", "setting"], sort=False):
        token = runs[(runs["game"] == game) & (runs["setting"] == TOKEN)].set_index("seed")
        by_seed = seeds.set_index("seed")
        gains = by_seed["score"] - token["score"]
        is_baseline = setting == TOKEN
        row = {
            "": f"{game}: {setting}",
            "seeds": str(len(seeds)),
            "held out, start": over_seeds(seeds["held_out_start"]).text(3),
            "held out, end": over_seeds(seeds["held_out_end"]).text(3),
            "at equal tokens": over_seeds(seeds["score"]).text(3),
            "minus token": NONE if is_baseline else gain_text(gains),
            "ahead on": NONE if is_baseline else f"{(gains > 0).sum()}/{len(gains)}",
            "minus token at a third": NONE if is_baseline else gain_text(by_seed["early"] - token["early"]),
            "KL": f"{seeds['kl'].mean():.2f}",
            "λ per token": f"{seeds['lambda_eff'].mean():.3f}",
        }
        rows.append(row)
    return markdown(pd.DataFrame(rows))


if __name__ == "__main__":
    main()
