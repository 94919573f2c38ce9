# SPDX-License-Identifier: Apache-2.0
"""Dialogues of the policy with a user, each sampled twice from one of its turns on."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from dschat.base.chat_servers import Endpoint, EndpointFlags, checked_address, with_key
from dschat.base.errors import UserError
from dschat.base.fingerprints import folder_stamp
from dschat.base.user_function import load_function
from dschat.data.dialogues import Message, check_dialogue, encode_states
from dschat.data.messages import messages_of_text
from dschat.data.rows import check_text, in_words
from dschat.data.turn_end import turn_end
from dschat.evaluation.generate_options import TokenSamplerFlags
from dschat.evaluation.policy import Compute, load_policy, locate_policy
from dschat.evaluation.runner import (
    LARGER,
    BatchFunction,
    Concluded,
    Entry,
    RunPart,
    described_function,
    enough_memory,
    in_batches,
    settings_of,
)
from dschat.models.limits import position_limit, trained_length
from dschat.models.template_date import SETTING, template_date
from dschat.models.tokenizer import load_tokenizer
from dschat.refuel.data_options import GenerateOptions
from dschat.refuel.datasets import OutputLocation, digest, make_rows, open_rows
from dschat.refuel.dialogue_pairs import FINISHED, FIRST, LAST, SECOND, TURN
from dschat.rollouts.sampling import row_seed
from dschat.turns.dialogues import PairStart, PolicyAssistant, User, UserFromData, roll_out_pairs
from dschat.turns.users import FunctionUser, ModelWriter, ServerWriter, SimulatedUser

SECOND_SEED = 20000  # is added to the seed for the second rollout
PROMPTS = "--prompts"
USERS = ("user", "human")  # what data sets call them
CHUNK = 1000  # messages that are encoded together
CACHE = ".user-cache"  # answers of the server that plays the user, below the folder of the rows
SERVER = EndpointFlags("--user_server", "--user_model", "USER_API_KEY", "--max_new_tokens", role="user")


def run_generate(options: GenerateOptions) -> str:
    """Sample all dialogues, write train.jsonl and hand it over; returns the line that sums it up.

    Raises:
        UserError: bad models or data, or a data set that is there with other settings.
    """
    OutputLocation(options.output).restore_date()
    flags = options.dialogues
    where = Compute.chosen(options.compute)
    path = locate_policy(flags.model)
    tokenizer = load_tokenizer(path, "--model")
    endpoint = _endpoint(options)
    openings, repeated = first_messages(flags.prompts, tokenizer, flags.num_data)

    def prepare() -> BatchFunction:
        with enough_memory("--model, --user_model: the GPU's memory does not hold both", f"--user_server, {LARGER}"):
            assistant = _open_assistant(path, "--model", tokenizer, options, where)
            user = _open_user(options, endpoint, where) if flags.num_turns > 1 else UserFromData([])
        sampling = DialogueSampling(assistant, user, flags.num_turns, flags.seed)

        def of_numbers(numbers: list[int]) -> list[Entry]:
            problem = f"--batch_size: the GPU's memory does not suffice for {len(numbers)} dialogues"
            with enough_memory(problem, "a smaller --batch_size; what is finished stays"):
                return sampling.sample(numbers, [openings[number] for number in numbers])

        return of_numbers

    def conclude(entries: list[Entry]) -> Concluded:
        rows = []
        for entry in entries:
            if entry["row"] is not None:
                rows.append(entry["row"])
        reasons = Counter(entry["reason"] for entry in entries if entry["row"] is None)
        if not rows:
            raise UserError(
                f"none of {len(entries)} dialogues of {PROMPTS} {flags.prompts} is left ({in_words(reasons)}); see "
                "--help for the limits."
            )
        left_out = f", {reasons.total()} left out ({in_words(reasons)})" if reasons else ""
        return rows, f"{len(rows)} dialogues of {flags.num_turns} turns{left_out}, {repeated} prompts were repeated"

    settings = _settings(options, path, where)
    settings["prompts"] = f"{flags.prompts} (rows {digest(openings)})"
    settings[SETTING] = template_date()
    batches = in_batches(range(len(openings)), options.generation.batch_size)
    part = RunPart(batches=batches, prepare=prepare, unit="dialogue")
    return make_rows(options.output, settings, part, conclude)


@dataclass(frozen=True)
class DialogueSampling:
    """Samples dialogues twice.

    Attributes:
        assistant: the policy.
        user: writes the user's messages.
        turns: H, turns of every dialogue.
        seed: seed of the run.
    """

    assistant: PolicyAssistant
    user: User
    turns: int
    seed: int

    def sample(self, numbers: Sequence[int], openings: Sequence[Message]) -> list[Entry]:
        """Sample each dialogue twice: from its first message, and again from one of its turns on.

        Args:
            numbers: numbers of the dialogues, which their seeds are made of.
            openings: the first message of each.
        """
        starts = []
        last_turns = []
        for number, opening in zip(numbers, openings, strict=True):
            last, turn = sampled_turns(self.seed, number, self.turns)
            last_turns.append(last)
            first_seed = row_seed(self.seed, number)
            second_seed = row_seed(self.seed + SECOND_SEED, number)
            starts.append(PairStart([opening], self.turns, turn, first_seed, second_seed))
        pairs = roll_out_pairs(starts, self.assistant, self.user)
        entries: list[Entry] = []
        for number, last, pair in zip(numbers, last_turns, pairs, strict=True):
            row: Entry | None = None
            if pair.second is not None and not pair.ended:
                # The second dialogue takes its replies before the turn from the first.
                second = replace(pair.second, replies=pair.first.replies | pair.second.replies)
                row = {
                    "number": number,
                    FIRST: pair.first.messages,
                    SECOND: pair.second.messages,
                    FIRST + FINISHED: pair.first.finished,
                    SECOND + FINISHED: second.finished,
                    LAST: last,
                    TURN: pair.turn,
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
    """A model that writes replies, which end at the end of a turn, too."""
    ends = [turn_end(tokenizer).token_id]
    sampler = TokenSamplerFlags(top_k=0, top_p=options.dialogues.top_p)
    policy = load_policy(
        path, flag, tokenizer, options.generation, sampler, options.dialogues.temperature, where, ends
    )
    longest = position_limit(policy.causal_lm) or trained_length(policy.causal_lm.config)
    return PolicyAssistant(policy.sampler, tokenizer, policy.sampling, longest, may_end=True)


def _open_user(options: GenerateOptions, endpoint: Endpoint | None, where: Compute) -> User:
    """The user: a function, a server or a model."""
    flags = options.user
    if flags.user_function:
        function = load_function(flags.user_function, "--user_function", ["dialogues"])
        return FunctionUser(function, "--user_function")
    if endpoint is not None:
        cache = OutputLocation(options.output).folder / CACHE
        remedy = "Finished dialogues are saved: give the same command again to go on."
        writer = ServerWriter(endpoint, options.dialogues.temperature, options.requests.concurrency, cache, remedy)
        return SimulatedUser(writer)
    path = locate_policy(flags.user_model or "")
    tokenizer = load_tokenizer(path, "--user_model")
    return SimulatedUser(ModelWriter(_open_assistant(path, "--user_model", tokenizer, options, where)))


def _endpoint(options: GenerateOptions) -> Endpoint | None:
    """The server that plays the user, or None; raises UserError if its address or key is bad."""
    if options.user.user_server is None:
        return None
    endpoint = Endpoint(
        model=options.user.user_model or "",
        base_url=checked_address(options.user.user_server, SERVER.url),
        max_tokens=options.generation.max_new_tokens,
        timeout=options.requests.timeout,
        tries=options.requests.max_tries,
        flags=SERVER,
    )
    return with_key(endpoint)


def _settings(options: GenerateOptions, path: str, where: Compute) -> dict[str, Any]:
    """The settings that the rows depend on, by flag."""
    names = ["num_turns", "temperature", "top_p", "max_new_tokens", "seed", "rollout_engine"]
    if options.generation.rollout_engine == "generate":  # then responses depend on their batch
        names.append("batch_size")
    settings = settings_of(options, names) | where.settings
    settings["model"] = folder_stamp(path)
    if options.dialogues.num_turns == 1:
        return settings

    user = options.user
    if user.user_function:
        settings["user-function"] = described_function(user.user_function)
    elif user.user_server is not None:
        settings["user-model"] = f"{user.user_model} on a server"
    else:
        settings["user-model"] = folder_stamp(locate_policy(user.user_model or ""))
    return settings


def first_messages(name: str, tokenizer: PreTrainedTokenizerBase, most: int) -> tuple[list[Message], int]:
    """The first messages of a data set, without repetitions.

    Two messages are equal if the policy's chat template makes the same tokens of them.

    Args:
        name: file, folder or data set of the hub.
        tokenizer: tokenizer of the policy.
        most: messages to return; 0 = all.

    Returns:
        The messages, and the number of repetitions that were left out.

    Raises:
        UserError: there is no such data set, or a row, which is named, has no message to begin with.
    """
    openings: list[Message] = []
    seen: set[tuple[int, ...]] = set()
    repeated = 0
    messages = (_first(raw, origin) for origin, raw in open_rows(name, PROMPTS))
    while chunk := list(islice(messages, CHUNK)):
        states = encode_states(tokenizer, [[message] for message in chunk], f"{PROMPTS} {name}")
        for message, ids in zip(chunk, map(tuple, states), strict=True):
            if most and len(openings) == most:
                return openings, repeated
            if ids in seen:
                repeated += 1
                continue
            openings.append(message)
            seen.add(ids)
    return openings, repeated


def _first(raw: Any, origin: str) -> Message:
    """The first message of a row's user, with role and content."""
    columns: dict[str, Any] = raw if isinstance(raw, dict) else {}
    content: Any
    if columns.get("messages") is not None:
        return check_dialogue(columns["messages"], origin)[0]
    trajectory = columns.get("trajectory")
    if isinstance(trajectory, list) and trajectory and isinstance(trajectory[0], dict):
        message = trajectory[0]
        role = message.get("role", message.get("from"))
        content = message.get("content", message.get("value"))
        if role not in USERS:
            raise UserError(
                f"{origin}: the trajectory begins with {role!r}, not with a user; correct or remove the row."
            )
    elif columns.get("prompt") is not None:
        content = columns["prompt"]
        messages = messages_of_text(content) if isinstance(content, str) else None
        if messages:
            return check_dialogue(messages[:1], origin)[0]
    else:
        names = ", ".join(map(repr, columns)) or "none"
        raise UserError(f"{origin}: no column 'messages', 'trajectory' or 'prompt' among {names}.")
    check_text(content, "the first message", origin)
    if not content.strip():
        raise UserError(f"{origin}: the first message is empty; correct or remove the row.")
    return {"role": "user", "content": content}
