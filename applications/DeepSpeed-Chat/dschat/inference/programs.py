# SPDX-License-Identifier: Apache-2.0
"""Problems → programs and what became of them on their tests, in a file which an interruption does not lose."""

from collections import Counter
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any

from dschat.common.journal import Journal
from dschat.data.examples import PromptExample
from dschat.data.hub import find_known
from dschat.data.rows import Row
from dschat.errors import UserError
from dschat.inference.options import ProgramOptions
from dschat.inference.policy import SamplingPolicy, choose_device, load_policy, locate_policy
from dschat.inference.runner import (
    LARGER,
    BatchFunction,
    Entry,
    Selection,
    enough_memory,
    prompt_settings,
    refuse_finished,
    run_batches,
    select_prompts,
    settings_of,
)
from dschat.models.opening import choose_dtype
from dschat.models.tokenizer import load_tokenizer
from dschat.scoring.programs.run import STATUSES, ProgramPool
from dschat.scoring.programs.scores import has_tests, program_of, tests_of


def run_programs(options: ProgramOptions) -> str:
    """Draws programs and runs them; writes `options.result_path` and returns the last line.

    Raises UserError for bad models or data, a machine without a sandbox, a finished file, or an interrupted run with
    other settings.
    """
    path = options.result_path
    refuse_finished(path, options.overwrite)  # before the data set is read
    pool = ProgramPool(options.level, options.sandbox_workers, max_tests=options.max_tests)
    device = choose_device(options.gpu, options.device)
    dtype = choose_dtype(options.dtype, device)
    policy_path = locate_policy(options.model)
    tokenizer = load_tokenizer(policy_path, "--model", may_add_pad=True)
    selection, untested = _with_tests(select_prompts(options, tokenizer))

    def prepare() -> BatchFunction:
        with enough_memory("--model: the GPU's memory does not hold it", LARGER):
            policy = load_policy(policy_path, tokenizer, options, options.temperature_value, device, dtype)
        policy.check_lengths(selection.longest)
        return selection.of_batch(partial(respond_and_run, policy, pool, options.num_return))

    settings = prompt_settings(options, policy_path, selection, device, dtype)
    settings |= settings_of(options, ("num_return", "max_tests"))
    settings |= {"temperature": options.temperature_value, "sandbox-level": pool.level}
    with closing(Journal(path, settings, options.overwrite)) as journal:
        entries = run_batches(journal, selection.batches(options.batch_size), prepare, _shown)
        known = find_known(options.data_path or options.dataset)
        journal.finish(entry["row"] | {"dataset": known.name if known else ""} for entry in entries)
    left_out = f" ({selection.dropped + untested} problems left out, {untested} of them without tests)"
    shares = ", ".join(f"{status} {share}" for status, share in _shown(entries).items())
    return f"{len(entries)} problems{left_out if selection.dropped + untested else ''}: {shares}: {path}"


def respond_and_run(
    policy: SamplingPolicy, pool: ProgramPool, num_return: int, examples: list[PromptExample], rows: list[Row]
) -> list[Entry]:
    """Draws so many programs for each problem and runs them on its tests."""
    draws = policy.respond(examples, num_return)
    tests, origins = [tests_of(row) for row in rows], [row.origin for row in rows]
    outcomes = [pool.run([program_of(response.text) for response in draw], tests, origins) for draw in draws]
    entries = []
    for place, (example, row) in enumerate(zip(examples, rows, strict=True)):
        samples: list[dict[str, Any]] = []
        for draw, found in zip(draws, outcomes, strict=True):
            response, outcome = draw[place], found[place]
            sample = {"response": response.text, "finished": response.finished, "status": outcome.status}
            samples.append(sample | {"passed": outcome.passed, "total": outcome.total})
        written = example.columns | {"difficulty": str(row.extra.get("difficulty") or "")}
        entries.append({"number": example.index, "row": written | {"samples": samples}})
    return entries


def _with_tests(selection: Selection) -> tuple[Selection, int]:
    """The problems that have tests, and how many have none."""
    kept = [place for place, row in enumerate(selection.rows) if has_tests(row)]
    if not kept:
        raise UserError("--data_path: no problem has tests in its column input_output.")
    examples, rows = [selection.examples[i] for i in kept], [selection.rows[i] for i in kept]
    return replace(selection, examples=examples, rows=rows), len(selection.rows) - len(rows)


def _shown(entries: list[Entry]) -> dict[str, str]:
    """Shares of what became of the programs."""
    counts = Counter(sample["status"] for entry in entries for sample in entry["row"]["samples"])
    return {status: f"{counts[status] / counts.total():.1%}" for status in reversed(STATUSES) if counts[status]}
