# SPDX-License-Identifier: Apache-2.0
"""Compares `--rollouts_ahead 1` with `0` on step 3 of the quickstart; a vLLM server generates the rollouts.

    python ahead.py --vllm_python ../../../.venv-vllm/bin/python --seeds 5 --json ahead.json

All runs start from the same models and use one server, to which each sends its own weights. They follow one another,
so that their seconds can be compared on a machine that does nothing else. On a CPU, server and training share its
cores.
"""

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
from transformers import PreTrainedTokenizerFast

from dschat.base.display import text_table
from dschat.base.errors import UserError
from dschat.models.tiny import make_gemma
from dschat.quickstart.inputs import (
    COMMON,
    FULL,
    SMALL,
    ReviewScale,
    critic_flags,
    make_inputs,
    ppo_flags,
    train_reward_model,
    train_sft,
)
from dschat.quickstart.subcommands import ONE, as_arguments, free_port, run_step
from dschat.vllm.client import is_healthy

MODEL_SEED = 1234  # seed of the corpus, the random model, and steps 1 and 2
MAX_TOKENS = 192  # longest prompt (128) and response (64) of the quickstart's step 3 together
START_SECONDS = 600  # for a vLLM server to load its model and to answer
STOP_SECONDS = 60  # for a vLLM server to end after SIGTERM
LOG_LINES = 20  # lines of the server's log that an error shows
# Column of the table → metric of the run's last evaluation.
FINAL_METRICS = {"gold": "eval/gold_scores", "KL": "eval/kl"}
# Column of the table → metric of every rollout, averaged over the run.
MEAN_METRICS = {"gap, nats": "rollout/logprob_gap", "clipped": "rollout/importance_clipped"}
# Seconds of an iteration. With one rollout ahead, the server generates during time/scoring and time/training, and
# time/generation is only what the run waits for the rollout and for sending its weights.
TIMED_PARTS = ["time/generation", "time/scoring", "time/training"]


@dataclass(frozen=True)
class StartModels:
    """Data and models that all runs start from."""

    data: Path
    sft: Path
    reward: Path


def main() -> None:
    """Runs everything and prints a line for each setting."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm_python", type=Path, default=Path(sys.executable), help="Python that has vLLM")
    parser.add_argument("--seeds", type=int, default=5, help="runs of each setting")
    parser.add_argument("--folder", type=Path, default=Path("runs/ahead"), help="folder of all results")
    parser.add_argument("--json", type=Path, help="file for the numbers of each run")
    parser.add_argument("--small", action="store_true", help="three iterations only: shows that every part runs")
    options = parser.parse_args()
    folder = options.folder.resolve()
    scale = SMALL if options.small else FULL

    models = train_start_models(folder, scale)
    rows = []
    with start_server(options.vllm_python.absolute(), models.sft, folder / "server.log") as url:
        for seed in range(options.seeds):
            for rollouts_ahead in (0, 1):
                run = folder / f"ahead-{rollouts_ahead}-seed-{seed}"
                run_step("ppo", run_flags(models, run, scale, url, rollouts_ahead, seed), ONE)
                rows.append({"ahead": rollouts_ahead, "seed": seed, **read_run(run)})
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2) + "\n")
    print(spread_table(pd.DataFrame(rows)))


def train_start_models(folder: Path, scale: ReviewScale) -> StartModels:
    """Writes the quickstart's corpus, and trains its steps 1 and 2 on a model that vLLM can serve."""
    data, model = make_inputs(folder, MODEL_SEED, scale)
    # Replace the quickstart's model, whose heads have 16 dimensions: vLLM's attention on a CPU needs at least 32.
    tokenizer = PreTrainedTokenizerFast.from_pretrained(model, trust_remote_code=False)
    make_gemma(tokenizer, MODEL_SEED, heads=2).save_pretrained(model)

    sft = folder / "sft"
    reward = folder / "reward"
    flags = [*COMMON, "--seed", str(MODEL_SEED)]
    train_sft(data, model, sft, scale, flags, ONE)
    train_reward_model(data / "comparisons", sft, reward, scale, flags, ONE)
    return StartModels(data, sft, reward)


def run_flags(
    models: StartModels, output: Path, scale: ReviewScale, url: str, rollouts_ahead: int, seed: int
) -> list[str]:
    """Flags of a run of step 3, whose rollouts the server at `url` generates."""
    flags = {
        "--rollout_engine": "vllm",
        "--vllm_url": url,
        "--ngram": 5,
        "--termination_condition": "fixed",
        "--rollouts_ahead": rollouts_ahead,
        "--seed": seed,
    }
    return [
        *ppo_flags(models.data, models.sft, models.reward, output, scale, ONE),
        *critic_flags(models.sft),
        *COMMON,
        *as_arguments(flags),
    ]


@contextmanager
def start_server(python: Path, model: Path, log: Path) -> Iterator[str]:
    """A vLLM server that runs as long as the context lasts.

    Args:
        python: a Python that has vLLM.
        model: folder of the model.
        log: file for the server's output.

    Yields:
        The server's address, once it answers.

    Raises:
        UserError: the server ended or did not answer in time.
    """
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    flags = as_arguments({"--model": model, "--port": port, "--max_tokens": MAX_TOKENS})
    command = [str(python), "-m", "dschat", "serve-vllm", *flags]
    with log.open("w") as output:
        # A process group of its own, so that the engine's processes can be killed with the server.
        process = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
    try:
        wait_for_server(process, url, log)
        yield url
    finally:
        stop_server(process)


def wait_for_server(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    """Waits until a server answers.

    Raises:
        UserError: it ended or did not answer within START_SECONDS; with the last lines of its log.
    """
    deadline = time.monotonic() + START_SECONDS
    while not asyncio.run(is_healthy(url)):
        status = process.poll()
        problem = ""
        if status is not None:
            problem = f"ended with status {status}"
        elif time.monotonic() > deadline:
            problem = f"did not answer within {START_SECONDS} seconds"
        if problem:
            last_lines = "\n".join(log.read_text(errors="replace").splitlines()[-LOG_LINES:])
            raise UserError(f"the vLLM server {problem}; {log} ends with:\n{last_lines}")
        time.sleep(1)


def stop_server(process: subprocess.Popen[bytes]) -> None:
    """Ends a server, and kills its process group if it has not ended after STOP_SECONDS."""
    process.terminate()
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def read_run(run: Path) -> dict[str, float]:
    """Figures of a run by column of the table.

    They are the metrics of its last evaluation, the means over its rollouts, and the total seconds spent in
    generation, scoring and training.
    """
    metrics = pd.read_json(run / "metrics.jsonl", lines=True)
    figures = {}
    for name, metric in FINAL_METRICS.items():
        figures[name] = float(metrics[metric].dropna().iloc[-1])
    for name, metric in MEAN_METRICS.items():
        if metric in metrics:
            figures[name] = float(metrics[metric].mean())
    figures["seconds"] = float(metrics[TIMED_PARTS].sum().sum())
    return figures


def spread_table(runs: pd.DataFrame) -> str:
    """Mean ± standard deviation over the seeds of each setting.

    The standard deviation shows how much runs of one setting differ: by as much as settings may differ by chance.
    """
    columns = [*FINAL_METRICS, *MEAN_METRICS, "seconds"]
    rows = []
    for rollouts_ahead, seeds in runs.groupby("ahead"):
        cells = []
        for column in columns:
            cells.append(spread_text(seeds[column].dropna()) if column in seeds else "-")
        rows.append([f"{rollouts_ahead} ahead", *cells])
    return text_table(["mean ± standard deviation", *columns], rows)


def spread_text(numbers: "pd.Series[float]") -> str:
    """Mean ± standard deviation; for a single number the mean alone, for none a dash."""
    if not len(numbers):
        return "-"
    mean = f"{numbers.mean():.4g}"
    return f"{mean} ± {numbers.std():.3g}" if len(numbers) > 1 else mean


if __name__ == "__main__":
    main()
