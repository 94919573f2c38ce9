# SPDX-License-Identifier: Apache-2.0
"""One rollout ahead beside none: the quickstart's step 3, drawn by a vLLM server, with several seeds.

    python ahead.py --vllm_python ../../../.venv-vllm/bin/python --seeds 5 --json ahead.json

Both ways share the server, and what they begin with; they run one after the other, so that seconds can be compared on
a machine that does nothing else. On a CPU, server and training share its cores.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2
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
from dschat.quickstart.subcommands import Processes, free_port, run_step

SEED = 1234  # of corpus, model and the first two steps
EVALUATED = {"gold": "eval/gold_scores", "KL": "eval/kl"}
PARTS = ("time/generation", "time/scoring", "time/training")  # of an iteration, in seconds
ROLLOUTS = {"gap, nats": "rollout/logprob_gap", "clipped": "rollout/importance_clipped"}
NAMES = (*EVALUATED, *ROLLOUTS, "seconds")


@contextmanager
def server(python: Path, model: Path, log: Path) -> Iterator[str]:
    """The address of a server that answers, until the end."""
    url = f"http://127.0.0.1:{(port := free_port())}"
    words = [python, "-m", "dschat", "serve-vllm", "--model", model, "--port", port, "--max_tokens", 192]
    with log.open("w") as file, subprocess.Popen([*map(str, words)], stdout=file, stderr=file) as process:
        try:
            while process.poll() is None:
                try:
                    if httpx2.get(f"{url}/health").status_code == 200:
                        break
                except httpx2.HTTPError:
                    time.sleep(1)
            yield url
        finally:
            process.terminate()


def measured(folder: Path) -> dict[str, float]:
    """The last evaluation of a run, the mean of its rollouts, and the seconds of its iterations."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    last = {name: x for row in rows for name, x in row.items()}
    seconds = [row.get(name, 0.0) for row in rows for name in PARTS]
    found = {name: float(last[metric]) for name, metric in EVALUATED.items()}
    for name, metric in ROLLOUTS.items():
        numbers = [float(row[metric]) for row in rows if metric in row]
        found |= {name: statistics.mean(numbers)} if numbers else {}
    return found | {"seconds": sum(seconds)}


def main() -> None:
    """Runs everything and prints a line for each way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm_python", type=Path, default=Path(sys.executable), help="Python that has vLLM")
    parser.add_argument("--seeds", type=int, default=5, help="runs of each way")
    parser.add_argument("--folder", type=Path, default=Path("runs/ahead"), help="of everything made")
    parser.add_argument("--json", type=Path, help="file for the numbers of each run")
    parser.add_argument("--small", action="store_true", help="three iterations only: shows that every part runs")
    args = parser.parse_args()
    scale, one, folder = SMALL if args.small else FULL, Processes(), args.folder.resolve()
    data, model = make_inputs(folder, SEED, scale)
    # vLLM's attention on a CPU takes heads of 32 numbers at least.
    make_gemma(PreTrainedTokenizerFast.from_pretrained(model, trust_remote_code=False), SEED, heads=2).save_pretrained(
        model
    )
    sft, reward, common = folder / "sft", folder / "reward", [*COMMON, "--seed", str(SEED)]
    train_sft(data, model, sft, scale, common, one)
    train_reward_model(data / "comparisons", sft, reward, scale, common, one)
    runs: dict[int, list[dict[str, float]]] = {0: [], 1: []}
    with server(args.vllm_python.absolute(), sft, folder / "server.log") as url:
        for seed in range(args.seeds):
            for ahead, found in runs.items():
                place = folder / f"ahead-{ahead}-seed-{seed}"
                flags = [*ppo_flags(data, sft, reward, place, scale, one), *critic_flags(sft), "--ngram", "5"]
                flags += ["--termination_condition", "fixed", "--rollout_engine", "vllm", "--vllm_url", url]
                flags += ["--rollouts_ahead", str(ahead), *COMMON, "--seed", str(seed)]
                run_step("ppo", flags, one)
                found.append(measured(place))
    if args.json:
        args.json.write_text(json.dumps(runs, indent=2) + "\n")
    rows = [
        [f"{ahead} ahead", *(_spread([run[name] for run in found if name in run]) for name in NAMES)]
        for ahead, found in runs.items()
    ]
    print(text_table(["mean ± standard deviation", *NAMES], rows))


def _spread(numbers: list[float]) -> str:
    spread = f" ± {statistics.stdev(numbers):.3g}" if len(numbers) > 1 else ""
    return f"{statistics.mean(numbers):.4g}{spread}" if numbers else "-"


if __name__ == "__main__":
    main()
