# SPDX-License-Identifier: Apache-2.0
"""Dialogues of the policy with a user, each drawn twice from one of its turns on."""

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from dschat.base.errors import UserError
from dschat.base.fingerprints import folder_stamp
from dschat.base.user_function import load_function
from dschat.data.dialogue_pairs import FIRST, LAST, SECOND, TURN
from dschat.data.dialogues import Message, check_dialogue, encode_states
from dschat.data.encoding import turn_end
from dschat.data.rows import check_text, in_words
from dschat.data.sources import open_data
from dschat.lab.policy import Compute, load_sampler, locate_policy
from dschat.lab.refuel.datasets import Place, described_function, digest, make_rows
from dschat.lab.refuel.options import GenerateOptions
from dschat.lab.runner import (
    LARGER,
    BatchFunction,
    Concluded,
    Entry,
    RunPart,
    enough_memory,
    in_batches,
    settings_of,
)
from dschat.models.limits import position_limit, trained_length
from dschat.models.template_date import SETTING, template_date
from dschat.models.tokenizer import load_tokenizer
from dschat.rollouts.chat_servers import Endpoint, EndpointFlags, checked_address, checked_key
from dschat.rollouts.dialogues import PolicyAssistant, User, UserFromData, roll_out_pairs
from dschat.rollouts.sampling import row_seed
from dschat.rollouts.users import FunctionUser, ModelWriter, ServerWriter, SimulatedUser

SECOND_SEED = 20000  # is added to the seed for the second rollout
PROMPTS = "--prompts"
USERS = ("user", "human")  # what data sets call them
CHUNK = 1000  # messages that are encoded together
CACHE = ".user-cache"  # answers of the server that plays the user, below the folder of the rows
SERVER = EndpointFlags("--user_server", "--user_model", "OPENAI_API_KEY", "--max_new_tokens", "user")


def run_generate(options: GenerateOptions) -> str:
    """Draws all dialogues, writes train.jsonl and hands it over; returns the line that sums it up.

    Raises UserError for bad models or data, or a data set that is there with other settings.
    """
    Place(options).go_on_with_date()
    where = Compute.chosen(options)
    path = locate_policy(options.model)
    tokenizer = load_tokenizer(path, "--model")
    endpoint = _endpoint(options)
    firsts, repeated = first_messages(options.prompts, tokenizer, options.num_data)
    settings = _settings(options, path, where)
    settings |= {"prompts": f"{options.prompts} (rows {digest(firsts)})", SETTING: template_date()}

    def prepare() -> BatchFunction:
        with enough_memory("--model, --user_model: the GPU's memory does not hold both", f"--user_server, {LARGER}"):
            assistant = _open_assistant(path, "--model", tokenizer, options, where)
            user = _open_user(options, endpoint, where) if options.num_turns > 1 else UserFromData([])
        drawing = DialogueSampling(assistant, user, options.num_turns, options.seed)

        def of_numbers(numbers: list[int]) -> list[Entry]:
            problem = f"--batch_size: the GPU's memory does not suffice for {len(numbers)} dialogues"
            with enough_memory(problem, "a smaller --batch_size; what is finished stays"):
                return drawing.draw(numbers, [firsts[number] for number in numbers])

        return of_numbers

    def conclude(entries: list[Entry]) -> Concluded:
        rows = [entry["row"] for entry in entries if entry["row"] is not None]
        reasons = Counter(entry["reason"] for entry in entries if entry["row"] is None)
        if not rows:
            raise UserError(
                f"none of {len(entries)} dialogues of {PROMPTS} {options.prompts} is left ({in_words(reasons)}); see "
                "--help for the limits."
            )
        left_out = f", {reasons.total()} left out ({in_words(reasons)})" if reasons else ""
        return rows, f"{len(rows)} dialogues of {options.num_turns} turns{left_out}, {repeated} prompts were repeated"

    part = RunPart(batches=in_batches(range(len(firsts)), options.batch_size), prepare=prepare, unit="dialogue")
    return make_rows(options, settings, part, conclude)


@dataclass(frozen=True)
class DialogueSampling:
    """How dialogues are drawn."""

    assistant: PolicyAssistant  # the policy
    user: User  # asks
    turns: int  # H, of every dialogue
    seed: int  # of the run

    def draw(self, numbers: Sequence[int], firsts: Sequence[Message]) -> list[Entry]:
        """Samples each dialogue, by its number, twice: from its first message, and again from one of its turns on."""
        turns = [sampled_turns(self.seed, number, self.turns) for number in numbers]
        pairs = roll_out_pairs(
            [[message] for message in firsts],
            [self.turns] * len(numbers),
            [turn for _, turn in turns],
            self.assistant,
            self.user,
            [row_seed(self.seed, number) for number in numbers],
            [row_seed(self.seed + SECOND_SEED, number) for number in numbers],
        )
        entries: list[Entry] = []
        for number, (last, turn), pair in zip(numbers, turns, pairs, strict=True):
            row: Entry | None = None
            if pair.second is not None and not pair.ended:
                row = {
                    "number": number,
                    FIRST: pair.first.messages,
                    SECOND: pair.second.messages,
                    LAST: last,
                    TURN: turn,
                }
            entries.append({"number": number, "row": row, "reason": pair.ended})
        return entries


def sampled_turns(seed: int, number: int, turns: int) -> tuple[int, int]:
    """(L, h) of a dialogue with H turns, from the run's seed and its number.

    L ~ Uniform{0, …, H−1} is the last turn that is scored, h ~ Uniform{0, …, L} the turn whose replies are compared.
    """
    random = np.random.default_rng((seed, number))
    last = int(random.integers(turns))
    return last, int(random.integers(last + 1))


def _open_assistant(
    path: str, flag: str, tokenizer: PreTrainedTokenizerBase, options: GenerateOptions, where: Compute
) -> PolicyAssistant:
    ends = [turn_end(tokenizer).token_id]
    causal_lm, sampling, draw = load_sampler(path, flag, tokenizer, options, options.temperature, where, ends)
    most = position_limit(causal_lm) or trained_length(causal_lm.config)
    return PolicyAssistant(draw, tokenizer, sampling, most, may_end=True)


def _open_user(options: GenerateOptions, endpoint: Endpoint | None, where: Compute) -> User:
    if options.user_function:
        return FunctionUser(load_function(options.user_function, "--user_function"), "--user_function")
    if endpoint is not None:
        writer = ServerWriter(endpoint, options.temperature, options.concurrency, Place(options).folder / CACHE)
        return SimulatedUser(writer)
    path = locate_policy(options.user_model)
    tokenizer = load_tokenizer(path, "--user_model")
    return SimulatedUser(ModelWriter(_open_assistant(path, "--user_model", tokenizer, options, where)))


def _endpoint(options: GenerateOptions) -> Endpoint | None:
    """The server that plays the user, if one does; raises UserError where address or key are bad."""
    if options.user_server is None:
        return None
    url = checked_address(options.user_server, SERVER.url)
    limits = (options.max_new_tokens, options.timeout, options.max_tries)
    endpoint = Endpoint(options.user_model, url, *limits, flags=SERVER)
    return replace(endpoint, key=checked_key(os.environ.get("OPENAI_API_KEY"), "OPENAI_API_KEY", endpoint))


def _settings(options: GenerateOptions, path: str, where: Compute) -> dict[str, Any]:
    """What the rows depend on, by flag."""
    names = ["num_turns", "temperature", "top_p", "max_new_tokens", "seed", "rollout_engine"]
    names += ["batch_size"] if options.rollout_engine == "generate" else []  # then the draws depend on it
    settings = settings_of(options, names) | where.settings | {"model": folder_stamp(path)}
    if options.num_turns == 1:
        return settings
    if options.user_function:
        return settings | {"user-function": described_function(options.user_function)}
    on_server = options.user_server is not None
    user = options.user_model if on_server else folder_stamp(locate_policy(options.user_model))
    return settings | {"user-model": f"{user} on a server" if on_server else user}


def first_messages(name: str, tokenizer: PreTrainedTokenizerBase, most: int) -> tuple[list[Message], int]:
    """So many first messages of a data set (0 = all), and how many others were the same.

    Two are the same where the policy's chat template makes the same tokens of them. Raises UserError where there is no
    such data set, or a row, which it names, has no message to begin with.
    """
    found: list[Message] = []
    seen: set[tuple[int, ...]] = set()
    repeated = 0
    messages = (_first(raw, origin) for origin, raw in open_data(name, PROMPTS).train)
    while chunk := list(islice(messages, CHUNK)):
        states = encode_states(tokenizer, [[message] for message in chunk], f"{PROMPTS} {name}")
        for message, ids in zip(chunk, map(tuple, states), strict=True):
            if most and len(found) == most:
                return found, repeated
            repeated += ids in seen
            if ids not in seen:
                found.append(message)
                seen.add(ids)
    return found, repeated


def _first(raw: Any, origin: str) -> Message:
    """What the user of a row says first, with role and content."""
    columns: dict[str, Any] = raw if isinstance(raw, dict) else {}
    content: Any
    if columns.get("messages") is not None:
        return check_dialogue(columns["messages"], origin)[0]
    trajectory = columns.get("trajectory")
    if isinstance(trajectory, list) and trajectory and isinstance(trajectory[0], dict):
        message = trajectory[0]
        role, content = message.get("role", message.get("from")), message.get("content", message.get("value"))
        if role not in USERS:
            raise UserError(
                f"{origin}: the trajectory begins with {role!r}, not with a user; correct or remove the row."
            )
    elif columns.get("prompt") is not None:
        content = columns["prompt"]
    else:
        names = ", ".join(map(repr, columns)) or "none"
        raise UserError(f"{origin}: no column 'messages', 'trajectory' or 'prompt' among {names}.")
    check_text(content, "the first message", origin)
    if not content.strip():
        raise UserError(f"{origin}: the first message is empty; correct or remove the row.")
    return {"role": "user", "content": content}
