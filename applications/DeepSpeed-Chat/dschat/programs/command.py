# SPDX-License-Identifier: Apache-2.0
"""Programs that a model writes for problems, and their results on the problems' tests."""

from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any

from dschat.base.errors import UserError
from dschat.data.examples import PromptExample
from dschat.data.known_sets import find_known
from dschat.evaluation.policy import SamplingPolicy
from dschat.evaluation.prompts import Answering, Selection
from dschat.evaluation.runner import BatchFunction, Concluded, Entry, RunPart, entry_rows, run_batches, settings_of
from dschat.programs.blocks import ProgramBlock, program_of
from dschat.programs.options import ProgramOptions
from dschat.programs.run import STATUSES, ProgramPool
from dschat.programs.scores import has_tests, tests_of


def run_programs(options: ProgramOptions) -> str:
    """Sample programs and run them; writes `options.result_path` and returns the last line.

    Raises:
        UserError: bad models or data, a machine without a sandbox, a finished file, or an interrupted run with other
            settings.
    """
    flags = options.programs
    pool = ProgramPool(flags.sandbox_level, flags.sandbox_workers, max_tests=flags.max_tests)
    answering = Answering.find(options)
    selection, untested = _with_tests(answering.selection)
    answering = replace(answering, selection=selection)  # the policy is opened for these problems alone
    left_out = selection.dropped + untested
    num_return = options.responses.num_return
    temperature = options.responses.temperature_value
    published = find_known(options.data.data_path or options.data.dataset)
    dataset = published.name if published else ""

    def prepare() -> BatchFunction:
        policy = answering.open_policy(temperature)
        return selection.of_batch(partial(respond_and_run, policy, pool, num_return, flags.program_block, dataset))

    def conclude(entries: list[Entry]) -> Concluded:
        rows = entry_rows(entries)
        remark = f" ({left_out} problems left out, {untested} of them without tests)" if left_out else ""
        return rows, f"{len(rows)} problems{remark}: {_status_shares(rows)}: {options.result_path}"

    settings = answering.settings | settings_of(options, ("num_return", "max_tests", "program_block", "sandbox_level"))
    settings |= {"temperature": temperature}
    batches = selection.batches(options.generation.batch_size)
    part = RunPart(batches=batches, prepare=prepare)
    return run_batches(options.result_path, settings, options.result.overwrite, [part], conclude)


def respond_and_run(
    policy: SamplingPolicy,
    pool: ProgramPool,
    num_return: int,
    program_block: ProgramBlock,
    dataset: str,
    examples: list[PromptExample],
) -> list[Entry]:
    """Sample programs for each problem of a batch, and run them on its tests.

    Args:
        policy: samples the programs.
        pool: runs them.
        num_return: programs per problem.
        program_block: which code block of a response is the program.
        dataset: short name of a published data set, empty for others.
        examples: problems that have tests.

    Returns:
        One entry per problem, with `num_return` samples each.

    Raises:
        UserError: tests have another form.
    """
    tests = []
    origins = []
    entries: list[Entry] = []
    for example in examples:
        tests.append(tests_of(example.row))
        origins.append(example.row.origin)
        difficulty = example.row.extra.get("difficulty")
        row = example.columns
        row["difficulty"] = "" if difficulty is None else str(difficulty)
        row["samples"] = []
        row["dataset"] = dataset
        entries.append({"number": example.index, "row": row})

    for responses in policy.respond(examples, num_return):
        programs: list[str | None] = []
        for response, example in zip(responses, examples, strict=True):
            programs.append(program_of(response.text, program_block, example.prompt_text))
        outcomes = pool.run(programs, tests, origins)
        for entry, response, outcome in zip(entries, responses, outcomes, strict=True):
            sample = {
                "response": response.text,
                "finished": response.finished,
                "status": outcome.status,
                "passed": outcome.passed,
                "total": outcome.total,
            }
            entry["row"]["samples"].append(sample)
    return entries


def _with_tests(selection: Selection) -> tuple[Selection, int]:
    """The problems that have tests, and the number of those without."""
    examples = [example for example in selection.examples if has_tests(example.row)]
    if not examples:
        raise UserError("no problem has tests: give rows whose column input_output holds them (docs/programs.md).")
    return replace(selection, examples=examples), len(selection.examples) - len(examples)


def _status_shares(rows: list[dict[str, Any]]) -> str:
    """Share of the programs that ended in each status, such as "passed 12.5%, wrong 87.5%"."""
    counts: Counter[str] = Counter()
    for row in rows:
        for sample in row["samples"]:
            counts[sample["status"]] += 1
    shares = []
    for status in reversed(STATUSES):
        if counts[status]:
            shares.append(f"{status} {counts[status] / counts.total():.1%}")
    return ", ".join(shares)
