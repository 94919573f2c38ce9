# SPDX-License-Identifier: Apache-2.0
"""Problems → programs and what became of them on their tests, in a file which an interruption does not lose."""

from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any

from dschat.base.errors import UserError
from dschat.data.examples import PromptExample
from dschat.data.hub import find_known
from dschat.lab.generate_options import ProgramOptions
from dschat.lab.policy import SamplingPolicy
from dschat.lab.prompts import Answering, Selection, refuse_finished
from dschat.lab.runner import BatchFunction, Concluded, Entry, RunPart, enough_memory, run_batches, settings_of
from dschat.scoring.programs.blocks import ProgramBlock, program_of
from dschat.scoring.programs.run import STATUSES, ProgramPool
from dschat.scoring.programs.scores import has_tests, tests_of


def run_programs(options: ProgramOptions) -> str:
    """Draws programs and runs them; writes `options.result_path` and returns the last line.

    Raises UserError for bad models or data, a machine without a sandbox, a finished file, or an interrupted run with
    other settings.
    """
    refuse_finished(options)
    pool = ProgramPool(options.sandbox_level, options.sandbox_workers, max_tests=options.max_tests)
    given = Answering.find(options)
    selection, untested = _with_tests(given.selection)
    left_out = selection.dropped + untested

    def prepare() -> BatchFunction:
        with enough_memory("--model: the GPU's memory does not hold it"):
            policy = given.open_policy(options.temperature_value)
        policy.check_lengths(selection.longest)
        return selection.of_batch(partial(respond_and_run, policy, pool, options.num_return, options.program_block))

    def conclude(entries: list[Entry]) -> Concluded:
        known = find_known(options.data_path or options.dataset)
        told = f" ({left_out} problems left out, {untested} of them without tests)" if left_out else ""
        shares = ", ".join(f"{status} {share}" for status, share in _shown(entries).items())
        rows = [entry["row"] | {"dataset": known.name if known else ""} for entry in entries]
        return rows, f"{len(rows)} problems{told}: {shares}: {options.result_path}"

    settings = given.settings | settings_of(options, ("num_return", "max_tests", "program_block"))
    settings |= {"temperature": options.temperature_value, "sandbox-level": pool.level}
    part = RunPart(batches=selection.batches(options.batch_size), prepare=prepare, shown=_shown)
    return run_batches(options.result_path, settings, options.overwrite, [part], conclude)


def respond_and_run(
    policy: SamplingPolicy,
    pool: ProgramPool,
    num_return: int,
    program_block: ProgramBlock,
    examples: list[PromptExample],
) -> list[Entry]:
    """Draws so many programs for each problem and runs them on its tests."""
    draws = policy.respond(examples, num_return)
    tests, origins = [tests_of(each.row) for each in examples], [each.row.origin for each in examples]
    outcomes = []
    for draw in draws:
        programs = [
            program_of(response.text, program_block, example.prompt_text)
            for response, example in zip(draw, examples, strict=True)
        ]
        outcomes.append(pool.run(programs, tests, origins))
    entries = []
    for place, example in enumerate(examples):
        samples: list[dict[str, Any]] = []
        for draw, found in zip(draws, outcomes, strict=True):
            response, outcome = draw[place], found[place]
            sample = {"response": response.text, "finished": response.finished, "status": outcome.status}
            samples.append(sample | {"passed": outcome.passed, "total": outcome.total})
        written = example.columns | {"difficulty": str(example.row.extra.get("difficulty") or "")}
        entries.append({"number": example.index, "row": written | {"samples": samples}})
    return entries


def _with_tests(selection: Selection) -> tuple[Selection, int]:
    """The problems that have tests, and how many have none."""
    kept = [example for example in selection.examples if has_tests(example.row)]
    if not kept:
        raise UserError("--data_path: no problem has tests in its column input_output.")
    return replace(selection, examples=kept), len(selection.examples) - len(kept)


def _shown(entries: list[Entry]) -> dict[str, str]:
    """Shares of what became of the programs."""
    counts = Counter(sample["status"] for entry in entries for sample in entry["row"]["samples"])
    return {status: f"{counts[status] / counts.total():.1%}" for status in reversed(STATUSES) if counts[status]}
