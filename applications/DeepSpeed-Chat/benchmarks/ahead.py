# SPDX-License-Identifier: Apache-2.0
"""Compares sampling one rollout ahead with sampling the current one, by a vLLM server on the quickstart's step 3.

    python ahead.py --vllm_python ../../../.venv-vllm/bin/python --seeds 5 --json ahead.json

Both settings share the server and the models that they start from. Runs follow one another, so that seconds can be
compared on a machine that does nothing else. On a CPU, server and training share its cores.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2
import pandas as pd
from transformers import PreTrainedTokenizerFast

from dschat.base.display import text_table
from dschat.models.tiny import make_gemma
from dschat.quickstart.inputs import (
    COMMON,
    FULL,
    SMALL,
    critic_flags,
    make_inputs,
    ppo_flags,
    train_reward_model,
    train_sft,
)
from dschat.quickstart.subcommands import ONE, free_port, run_step

SEED = 1234  # seed of corpus, model and the first two steps
LAST = {"gold": "eval/gold_scores", "KL": "eval/kl"}  # column → metric of the last evaluation
MEANS = {"gap, nats": "rollout/logprob_gap", "clipped": "rollout/importance_clipped"}  # column → metric of rollouts
PARTS = ["time/generation", "time/scoring", "time/training"]  # parts of an iteration, in seconds


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

    # Models that all runs start from. vLLM's attention on a CPU needs heads of at least 32 numbers.
    data, model = make_inputs(folder, SEED, scale)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(model, trust_remote_code=False)
    make_gemma(tokenizer, SEED, heads=2).save_pretrained(model)
    sft = folder / "sft"
    reward = folder / "reward"
    common = [*COMMON, "--seed", str(SEED)]
    train_sft(data, model, sft, scale, common, ONE)
    train_reward_model(data / "comparisons", sft, reward, scale, common, ONE)

    # Runs.
    rows = []
    with start_server(options.vllm_python.absolute(), sft, folder / "server.log") as url:
        vllm = ["--rollout_engine", "vllm", "--vllm_url", url, "--ngram", "5", "--termination_condition", "fixed"]
        for seed in range(options.seeds):
            for ahead in (0, 1):
                run = folder / f"ahead-{ahead}-seed-{seed}"
                flags = [
                    *ppo_flags(data, sft, reward, run, scale, ONE),
                    *critic_flags(sft),
                    *vllm,
                ]
                flags += ["--rollouts_ahead", str(ahead), *COMMON, "--seed", str(seed)]
                run_step("ppo", flags, ONE)
                rows.append({"ahead": ahead, "seed": seed, **read_run(run)})
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2) + "\n")
    print(spread_table(pd.DataFrame(rows)))


@contextmanager
def start_server(
    python: Path,
    model: Path,
    log: Path,
) -> Iterator[str]:
    """A server with a model; yields its address when it answers."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    words = [
        str(python),
        "-m",
        "dschat",
        "serve-vllm",
        "--model",
        str(model),
        "--port",
        port,
        "--max_tokens",
        "192",
    ]
    with (
        log.open("w") as file,
        subprocess.Popen(
            words,
            stdout=file,
            stderr=file,
        ) as process,
    ):
        try:
            while process.poll() is None and not is_healthy(url):
                time.sleep(1)
            yield url
        finally:
            process.terminate()


def is_healthy(url: str) -> bool:
    """Whether a server answers."""
    try:
        return httpx2.get(f"{url}/health").status_code == 200
    except httpx2.HTTPError:
        return False


def read_run(run: Path) -> dict[str, float]:
    """The last evaluation of a run, the mean of its rollouts, and the seconds of its iterations."""
    metrics = pd.read_json(run / "metrics.jsonl", lines=True)
    figures = {}
    for name, metric in LAST.items():
        figures[name] = float(metrics[metric].dropna().iloc[-1])
    for name, metric in MEANS.items():
        if metric in metrics:
            figures[name] = float(metrics[metric].mean())
    figures["seconds"] = float(metrics[PARTS].sum().sum())
    return figures


def spread_table(runs: pd.DataFrame) -> str:
    """Mean ± standard deviation over the seeds of each setting."""
    names = [*LAST, *MEANS, "seconds"]
    rows = []
    for ahead, seeds in runs.groupby("ahead"):
        cells = []
        for name in names:
            cells.append(spread_text(seeds[name].dropna()) if name in seeds else "-")
        rows.append([f"{ahead} ahead", *cells])
    return text_table(["mean ± standard deviation", *names], rows)


def spread_text(numbers: "pd.Series[float]") -> str:
    """A mean, with its standard deviation if there are several numbers."""
    if not len(numbers):
        return "-"
    mean = f"{numbers.mean():.4g}"
    return f"{mean} ± {numbers.std():.3g}" if len(numbers) > 1 else mean


if __name__ == "__main__":
    main()
