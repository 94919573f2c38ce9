# SPDX-License-Identifier: Apache-2.0
"""Answers a data set's held-out prompts with a model and scores the responses with a reward model.

Writes PROJ_PATH/results/DATASET/temperature=T/MODEL.jsonl: prompt, response, reward, finished. Killed and started
again with the same flags, it goes on where it stood. Every flag may be spelled with dashes or underscores.
"""

import argparse
import os
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

from dschat.common.script import both_spellings, run_script
from dschat.data.formats.rows import DataKeys
from dschat.inference.options import DATASETS, DTYPES, PROTOCOL_SAMPLES, InferenceOptions


def parse() -> InferenceOptions:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)

    def add(flag: str, help: str, **details: Any) -> None:
        parser.add_argument(*both_spellings(flag), help=help, **details)

    project = os.environ.get("PROJ_PATH") or None
    add(
        "--proj-path",
        "results go below it, data sets are read from its folder data unless MA_RLHF_DATA is set ($PROJ_PATH)",
        type=Path,
        default=project and Path(project),
        required=not project,
    )
    add("--dataset", "validation set that gives the prompts", choices=DATASETS, required=True)
    add("--model", "policy: folder or hub id, with or without /actor (not needed with --ref-scores)")
    add("--reward-model", "folder or hub id of a sequence classifier with one label", required=True)
    add("--temperature", "of sampling; 0 = greedy (%(default)s)", default="0.8")
    add("--gpu", "number of the GPU (0 where there is one)", type=int)
    add("--device", "cpu, cuda or cuda:N; decides over --gpu")
    add("--dtype", "of both models (bf16 on a GPU, fp32 on a CPU)", choices=DTYPES)
    add("--batch-size", "prompts answered and scored at once (%(default)s)", type=int, default=16)
    add("--ref-scores", "score the data set's own chosen and rejected responses, into reference.jsonl", **TRUE)
    add("--num-samples", f"prompts ({PROTOCOL_SAMPLES}; webgpt: all)", type=int)
    add("--num-return", "draw N responses to a prompt, keep the best by reward (%(default)s)", **number("N", 1))
    add("--top-k", "draw from the K likeliest tokens, 0 = all (%(default)s)", **number("K", 50))
    add("--top-p", "draw from the likeliest tokens of this share, 1 = all (%(default)s)", type=float, default=1.0)
    add("--max-new-tokens", "longest response (%(default)s)", **number("TOKENS", 512))
    add("--max-prompt-len", "leave out prompts of more tokens (no limit)", **number("TOKENS", None))
    add("--seed", "of the draws (%(default)s); the choice of prompts does not depend on it", type=int, default=1234)
    add("--rm-template", "put prompt and response through the reward model's chat template", **TRUE)
    add("--data-path", "where to read the data set: file, folder or hub id (--dataset's own place)")
    for key in fields(DataKeys):
        add(f"--{key.name}-key", f"column of that data set for {key.name!r}", metavar="COLUMN", default=key.default)
    add("--name", "name of the result file, without .jsonl (the model's, or reference)")
    add("--overwrite", "start anew, dropping a finished file or a run begun without this flag", **TRUE)
    return InferenceOptions(**vars(parser.parse_args()))


TRUE: dict[str, Any] = {"action": "store_true"}


def number(name: str, default: int | None) -> dict[str, Any]:
    """Details of a flag that takes a whole number."""
    return {"type": int, "default": default, "metavar": name}


def run() -> str:
    """Answers and scores; returns the line that sums it up."""
    options = parse()
    options.check()
    os.environ.setdefault("MA_RLHF_DATA", str(options.proj_path / "data"))
    quieten_libraries()
    from dschat.inference.run import run_inference

    return run_inference(options).text()


def quieten_libraries() -> None:
    """Leaves the screen to the progress bar and our own messages."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()


if __name__ == "__main__":
    sys.exit(run_script(run, print, goes_on=True))
