# SPDX-License-Identifier: Apache-2.0
"""How long does a training step take until its data are ready, and how much memory do they take?

Rows of random words (a prompt of 100 to 300, two responses of 20 to 80) become pairs of at most 1,024 tokens, each
time in a new process:

- at once: every row is read, then encoded in one process, into lists of Python's integers;
- first run: encoded in worker processes and kept;
- second run: found in the cache.

Seconds go from the flags to the examples (imports not counted). peak_mb is the most memory that the process and its
workers held together (their proportional shares, sampled), file_mb what the cache takes on the disk.

    python data_loading.py
"""

import argparse
import json
import multiprocessing
import os
import random
import tempfile
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from machine import machine

VOCABULARY = 8000
WORDS = 5000
KEYS = ("prompt", "chosen", "rejected", "response", "messages")


def main() -> None:
    """Measures the three ways and prints one JSON object."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--ways", nargs="+", default=["at once", "first run", "second run"])
    settings = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        write_inputs(place, settings.rows)
        os.environ["MA_RLHF_CACHE"] = str(place / "cache")
        figures = []
        for way in settings.ways:
            with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
                figures.append({"way": way} | pool.submit(measure, way, place).result())
        size = sum(file.stat().st_size for file in (place / "data").iterdir())
    told = vars(settings) | {"data_mb": round(size / 1e6)}
    print(json.dumps({"machine": machine(), "settings": told, "figures": figures}, indent=2))


def write_inputs(place: Path, rows: int) -> None:
    """Writes `data/train.jsonl` and a tokenizer that was trained on such words."""
    from dschat.models.tiny import train_tokenizer

    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(2, 9))) for _ in range(WORDS)]

    def text(low: int, high: int) -> str:
        return " ".join(rng.choices(words, k=rng.randint(low, high)))

    (place / "data").mkdir()
    with open(place / "data" / "train.jsonl", "w", encoding="utf-8") as file:
        for _ in range(rows):
            row = {"prompt": text(100, 300), "chosen": text(20, 80), "rejected": text(20, 80)}
            file.write(json.dumps(row) + "\n")
    train_tokenizer([text(200, 200) for _ in range(2000)], VOCABULARY).save_pretrained(place / "tokenizer")


def measure(way: str, place: Path) -> dict[str, Any]:
    """Seconds and memory of one way, and how many tokens it gave."""
    from transformers import AutoTokenizer

    from dschat.data.cache import cache_folder
    from dschat.data.examples import PairExample, pair_examples
    from dschat.data.loading import ExampleLoader
    from dschat.data.stored import lengths_of

    tokenizer = AutoTokenizer.from_pretrained(place / "tokenizer", trust_remote_code=False)
    flags: Any = SimpleNamespace(data_path=[str(place / "data")], data_split="0,1,0", seed=1, step=2)
    for key in KEYS:
        setattr(flags, f"{key}_key", key)
    make = partial(pair_examples, tokenizer=tokenizer, max_seq_len=1024, eos_id=tokenizer.eos_token_id)
    before, peak, stop = _memory(), [0.0], threading.Event()
    watcher = threading.Thread(target=_watch, args=(peak, stop))
    watcher.start()
    start = time.perf_counter()
    loader = ExampleLoader(flags, PairExample, make)
    data = loader.read() if way == "at once" else (loader.find(loader.key) or loader.make())
    seconds = time.perf_counter() - start
    stop.set()
    watcher.join()
    return {
        "seconds": round(seconds, 1),
        "peak_mb": round((max(peak[0], _memory()) - before) / 1e6),
        "file_mb": round(sum(file.stat().st_size for file in cache_folder().rglob("*") if file.is_file()) / 1e6),
        "examples": len(data.train),
        "tokens": sum(lengths_of(data.train)),
    }


def _watch(peak: list[float], stop: threading.Event) -> None:
    while not stop.wait(0.2):
        peak[0] = max(peak[0], _memory())


def _memory() -> float:
    """Bytes of this process and those that it started; what they share counts once."""
    total = 0.0
    for process in [os.getpid(), *_children(os.getpid())]:
        try:
            text = Path(f"/proc/{process}/smaps_rollup").read_text(encoding="ascii")
        except OSError:  # it has ended
            continue
        total += sum(1024.0 * int(line.split()[1]) for line in text.splitlines() if line.startswith("Pss:"))
    return total


def _children(process: int) -> list[int]:
    own: list[int] = []
    for file in Path(f"/proc/{process}/task").glob("*/children"):
        try:
            own += [int(word) for word in file.read_text(encoding="ascii").split()]
        except OSError:
            continue
    return own + [below for child in own for below in _children(child)]


if __name__ == "__main__":
    main()
