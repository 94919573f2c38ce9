# SPDX-License-Identifier: Apache-2.0
"""The sweep: many responses to each prompt at each temperature, scored; the rewards of the best of N of them."""

from contextlib import closing
from functools import cache, partial
from statistics import fmean

from dschat.common.journal import Journal
from dschat.data.examples import PromptExample
from dschat.data.rows import Row
from dschat.evaluation.best_of import sweep_of
from dschat.evaluation.report.build import write_best_of
from dschat.inference.batches import (
    LARGER,
    Entry,
    Work,
    batches_of,
    do_batches,
    enough_memory,
    refuse_finished,
    settings_of,
)
from dschat.inference.options import BestOfOptions
from dschat.inference.policy import Policy
from dschat.inference.run import BOTH, draw_and_score, open_inputs, open_models
from dschat.scoring.reward_reader import RewardReader


def run_best_of_n(options: BestOfOptions) -> str:
    """Draws and scores; writes `options.result_path`, table and curves beside it, and returns the table.

    At a temperature, the responses to a prompt are drawn once, as many as the largest N; the best of N is that of the
    first N of them. Raises UserError for bad models or data, a finished file, or an interrupted run with other
    settings.
    """
    path = options.result_path
    refuse_finished(path, options.overwrite)  # before the data set is read
    given = open_inputs(options, options.model)
    selection, draws = given.selection, options.draws

    @cache
    def models() -> tuple[Policy, RewardReader]:
        with enough_memory(BOTH, LARGER):
            return open_models(options, given, temperature=next(iter(draws)))

    def prepare(temperature: float) -> Work:
        policy, reader = models()
        return partial(respond_and_score_all, policy.at(temperature), reader, draws[temperature], temperature)

    batches = batches_of([len(example) for example in selection.examples], options.batch_size)
    settings = settings_of(options, given.policy_path, selection, given.device, given.dtype)
    with closing(Journal(path, settings, options.overwrite)) as journal:
        rows = []
        for temperature in draws:
            work = partial(prepare, temperature)
            part, title = ("temperature", temperature), f"temperature {temperature:g}"
            entries = do_batches(journal, selection, batches, work, _shown, part, title)
            rows += [entry["row"] for entry in entries]
        with_places = ((f"{path}:{number}", row) for number, row in enumerate(rows, start=1))
        # Before the file is there, which says that the run is over.
        table = write_best_of([sweep_of(path.stem, with_places)], options.best_of, path.parent, path.stem)
        journal.finish(rows)
    left_out = f", {selection.dropped} prompts left out" if selection.dropped else ""
    return f"{table}\n{len(selection.examples)} prompts{left_out}: {path} and beside it .md, .json and .png"


def respond_and_score_all(
    policy: Policy,
    reader: RewardReader,
    draws: int,
    temperature: float,
    examples: list[PromptExample],
    rows: list[Row],
) -> list[Entry]:
    """Draws so many responses to each prompt and keeps all of them with their rewards."""
    drawn = draw_and_score(policy, reader, draws, examples, rows)
    entries = []
    for example, candidates in zip(examples, drawn, strict=True):
        row = example.columns | {"temperature": temperature}
        row |= {"responses": [response.text for _, response in candidates]}
        row |= {"rewards": [reward for reward, _ in candidates]}
        row |= {"finished": [response.finished for _, response in candidates]}
        entries.append({"number": example.index, "temperature": temperature, "row": row})
    return entries


def _shown(entries: list[Entry]) -> dict[str, str]:
    rewards = [entry["row"]["rewards"] for entry in entries]
    return {"reward": f"{fmean(map(fmean, rewards)):.3f}", "best": f"{fmean(map(max, rewards)):.3f}"}
