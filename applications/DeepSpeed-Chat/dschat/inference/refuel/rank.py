# SPDX-License-Identifier: Apache-2.0
"""Scores of dialogues as they stand at the end of each of their turns."""

import logging
import math
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from typing import Any

from dschat.common.fingerprints import folder_stamp
from dschat.common.journal import Journal
from dschat.common.user_function import call_function, load_function
from dschat.data.dialogue_pairs import FAILED, FIRST, REWARD, SECOND, DialoguePair, read_dialogue_pair
from dschat.data.dialogues import Dialogue
from dschat.data.sources import open_data
from dschat.errors import UserError
from dschat.inference.batches import LARGER, enough_memory
from dschat.inference.devices import choose_device
from dschat.inference.refuel.options import RankOptions
from dschat.inference.refuel.work import Entry, Place, described_function, digest, go_through, in_words
from dschat.models.opening import choose_dtype
from dschat.scoring.reward_reader import NOT_FINITE, RewardReader, load_reward_model, load_reward_tokenizer

logger = logging.getLogger(__name__)

FILE = "train.jsonl"
PROMPTS, FUNCTION = "--prompts", "--reward-function"
NO_NUMBER = "the reward function gave no number"
AT_ONCE = 32  # rows of two dialogues that are kept together

Score = Callable[[Sequence[Dialogue]], list[float | str]]  # numbers, or why there is none


def run_rank(options: RankOptions) -> str:
    """Scores all dialogues, writes train.jsonl and hands it over; returns the line that sums it up.

    Raises UserError for bad models or data, or a data set that is there with other settings.
    """
    place = Place.of(options)
    raws = list(open_data(options.prompts, PROMPTS).train)
    pairs = [read_dialogue_pair(raw, origin, scored=False) for origin, raw in raws]
    settings = {"prompts": f"{options.prompts} (rows {digest(raw for _, raw in raws)})"} | _scorer_settings(options)
    prepare = _scorer(options, settings)
    done = place.finished([FILE], settings)
    if done is not None:
        return done

    def work() -> Callable[[list[int]], list[Entry]]:
        score = prepare()
        return lambda numbers: _entries([pairs[n] for n in numbers], numbers, score, options.batch_size)

    with closing(Journal(place.folder / FILE, settings, options.overwrite)) as journal:
        entries = go_through(journal, len(pairs), AT_ONCE, work)
        failures = sum((Counter(entry["failures"]) for entry in entries), Counter[str]())
        scored = sum(len(numbers) for entry in entries for numbers in entry["rewards"].values())
        if failures.total() == scored:
            raise UserError(f"{PROMPTS} {options.prompts}: not one of {scored} dialogues got a reward: {failures}.")
        failed = f", of which {failures.total()} failed and are {FAILED:g} ({in_words(failures)})" if failures else ""
        summary = f"{scored} rewards of {len(pairs)} pairs of dialogues{failed}"
        place.record(settings, summary)
        rewards = zip(raws, entries, strict=True)
        journal.finish({**raw, **entry["rewards"]} for (_, raw), entry in rewards)
    return f"{summary}: {place.hand_over([FILE])}"


def _entries(pairs: Sequence[DialoguePair], numbers: Sequence[int], score: Score, batch_size: int) -> list[Entry]:
    """Scores every beginning of both dialogues of each pair that ends with a reply; what both share, once."""
    beginnings: dict[str, Dialogue] = {}
    for pair in pairs:
        for dialogue in (pair.first, pair.second):
            for end in range(2, len(dialogue) + 1, 2):
                beginnings.setdefault(_key(dialogue[:end]), dialogue[:end])
    # Texts of like length together, the longest first: what does not fit into memory fails at once.
    order = sorted(beginnings, key=len, reverse=True)
    found: dict[str, float | str] = {}
    for start in range(0, len(order), batch_size):
        keys = order[start : start + batch_size]
        problem = f"--batch-size: the GPU's memory does not suffice for {len(keys)} dialogues"
        with enough_memory(problem, "a smaller --batch-size; what is finished stays"):
            found.update(zip(keys, score([beginnings[key] for key in keys]), strict=True))
    entries: list[Entry] = []
    for number, pair in zip(numbers, pairs, strict=True):
        rewards: dict[str, list[float]] = {}
        failures: Counter[str] = Counter()
        for column, dialogue in ((FIRST, pair.first), (SECOND, pair.second)):
            scores = [found[_key(dialogue[:end])] for end in range(2, len(dialogue) + 1, 2)]
            failures.update(x for x in scores if isinstance(x, str))
            rewards[column + REWARD] = [FAILED if isinstance(x, str) else x for x in scores]
        entries.append({"number": number, "rewards": rewards, "failures": dict(failures)})
    return entries


def _key(dialogue: Dialogue) -> str:
    return "\0".join(message["content"] for message in dialogue)


def _scorer_settings(options: RankOptions) -> dict[str, Any]:
    """What the rewards depend on, by flag; an interrupted run goes on only with the same."""
    settings: dict[str, Any] = {}
    if options.reward_function is not None:
        return settings | {"reward-function": described_function(options.reward_function)}
    device = choose_device(device=options.device)
    dtype = str(choose_dtype(options.dtype, device)).removeprefix("torch.")
    model = {"reward-model": folder_stamp(options.reward_model or ""), "max-length": options.max_length}
    return settings | model | {"device": device.type, "dtype": dtype}


def _scorer(options: RankOptions, settings: dict[str, Any]) -> Callable[[], Score]:
    """What opens the reward model; looks at its tokenizer, or at the function, at once."""
    if options.reward_function is not None:
        function = load_function(options.reward_function, FUNCTION)
        return lambda: partial(function_scores, function)
    path = options.reward_model or ""
    tokenizer = load_reward_tokenizer(path, rm_template=False)
    if tokenizer.chat_template is None:
        raise UserError(
            f"--reward-model {path}: its tokenizer has no chat template, so that it cannot read dialogues. Give a "
            f"reward model whose folder holds chat_template.jinja, or {FUNCTION} module.py:function."
        )
    device = choose_device(device=options.device)

    def opened() -> Score:
        with enough_memory("--reward-model: the GPU's memory does not hold it", LARGER):
            reader = load_reward_model(path, tokenizer, True, device, choose_dtype(options.dtype, device))
        return partial(_read, reader, options.max_length)

    return opened


def _read(reader: RewardReader, max_length: int, dialogues: Sequence[Dialogue]) -> list[float | str]:
    return reader.score_dialogues(dialogues, max_length)


def function_scores(function: Callable[..., Any], dialogues: Sequence[Dialogue]) -> list[float | str]:
    """What somebody's function says of dialogues; raises UserError where it fails or returns something else."""
    found = call_function(function, FUNCTION, [[dict(message) for message in dialogue] for dialogue in dialogues])
    try:
        numbers = [None if x is None else float(x) for x in found]
    except (TypeError, ValueError) as error:
        raise UserError(f"{FUNCTION}: the function returned {type(found).__name__}, no list of numbers.") from error
    if len(numbers) != len(dialogues):
        raise UserError(
            f"{FUNCTION}: the function returned {len(numbers)} numbers for {len(dialogues)} dialogues; it must return "
            "one for each, or None where there is none."
        )
    return [NO_NUMBER if x is None else x if math.isfinite(x) else NOT_FINITE for x in numbers]
