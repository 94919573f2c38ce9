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

import json
import os
import random
import tempfile
import time
from functools import partial
from pathlib import Path

import psutil

from harness import MB, SampledPeak, in_process, report, settings_parser

VOCABULARY = 8000
WORDS = 5000
WAYS = ("at once", "first run", "second run")


def main() -> None:
    """Measures the three ways and prints one JSON object."""
    parser = settings_parser(__doc__)
    parser.add_argument("--rows", type=int, default=100_000)
    settings = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        write_inputs(place, settings.rows)
        os.environ["MA_RLHF_CACHE"] = str(place / "cache")
        figures = [{"way": way} | in_process(measure, way, place) for way in WAYS]
        report(settings, figures, data_mb=megabytes_of(place / "data"))


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


def measure(way: str, place: Path) -> dict[str, object]:
    """Seconds and memory of one way, and how many tokens it gave."""
    from transformers import AutoTokenizer

    from dschat.config.supervised import RewardConfig
    from dschat.data.cache import cache_folder
    from dschat.data.examples import PairExample, pair_examples
    from dschat.data.loading import ExampleLoader
    from dschat.data.stored import lengths_of

    tokenizer = AutoTokenizer.from_pretrained(place / "tokenizer", trust_remote_code=False)
    flags = RewardConfig(
        model_name_or_path="none", output_dir="none", data_path=[str(place / "data")], data_split="0,1,0", seed=1
    )
    make = partial(pair_examples, tokenizer=tokenizer, max_seq_len=1024, eos_id=tokenizer.eos_token_id)
    peak = SampledPeak(shared_bytes, 0.2)
    start = time.perf_counter()
    loader = ExampleLoader(flags, PairExample, make)
    data = loader.read() if way == "at once" else (loader.find(loader.key) or loader.make())
    seconds = time.perf_counter() - start
    return {
        "seconds": round(seconds, 1),
        "peak_mb": round(peak.stop() / MB),
        "file_mb": megabytes_of(cache_folder()),
        "examples": len(data.train),
        "tokens": sum(lengths_of(data.train)),
    }


def shared_bytes() -> int:
    """Of this process and those that it started; what they share counts once."""
    total, this = 0, psutil.Process()
    for process in [this, *this.children(recursive=True)]:
        try:
            total += process.memory_full_info().pss
        except psutil.Error:  # it has ended
            continue
    return total


def megabytes_of(folder: Path) -> int:
    """All files of a folder."""
    return round(sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) / MB)


if __name__ == "__main__":
    main()
