# SPDX-License-Identifier: Apache-2.0
"""Dialogues of the policy with a user, each drawn twice from one of its turns on."""

import os
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from dschat.common.chat_servers import Endpoint, ServerFlags, checked_address, checked_key
from dschat.common.fingerprints import folder_stamp
from dschat.common.journal import Journal
from dschat.common.user_function import load_function
from dschat.data.dialogue_pairs import FIRST, LAST, SECOND, TURN
from dschat.data.dialogues import Message, state
from dschat.data.encoding import turn_end
from dschat.inference.batches import LARGER, enough_memory
from dschat.inference.devices import choose_device
from dschat.inference.policy import locate_policy
from dschat.inference.refuel.options import GenerateOptions
from dschat.inference.refuel.prompts import FLAG as PROMPTS
from dschat.inference.refuel.prompts import first_messages
from dschat.inference.refuel.work import Entry, Place, described_function, digest, go_through, kept_rows
from dschat.models.limits import position_limit
from dschat.models.load import load_causal_lm
from dschat.models.opening import choose_dtype
from dschat.models.tokenizer import load_tokenizer, own_end_ids
from dschat.rollouts.dialogues import PolicyAssistant, User, UserFromData, roll_out
from dschat.rollouts.generate import choose_engine
from dschat.rollouts.sampling import Sampling, row_seed
from dschat.rollouts.users import FunctionUser, ModelWriter, ServerWriter, SimulatedUser

SECOND_SEED = 20000  # is added to the seed for the second rollout
FILE = "train.jsonl"
CACHE = ".user-cache"  # answers of the server that plays the user, below the folder of the rows
SERVER = ServerFlags("--user-server", "--user-model", "OPENAI_API_KEY", "--max-new-tokens", "user")


def run_generate(options: GenerateOptions) -> str:
    """Draws all dialogues, writes train.jsonl and hands it over; returns the line that sums it up.

    Raises UserError for bad models or data, or a data set that is there with other settings.
    """
    device = choose_device(device=options.device)
    dtype = choose_dtype(options.dtype, device)
    path = locate_policy(options.model)
    tokenizer = load_tokenizer(path, "--model", may_add_pad=True)
    place = Place.of(options)
    endpoint = _endpoint(options)
    firsts, repeated = first_messages(options.prompts, tokenizer, options.num_data)
    settings = _settings(options, path, device, dtype) | {"prompts": f"{options.prompts} (rows {digest(firsts)})"}
    done = place.finished([FILE], settings)
    if done is not None:
        return done

    def prepare() -> Callable[[list[int]], list[Entry]]:
        with enough_memory("--model, --user-model: the GPU's memory does not hold both", f"--user-server, {LARGER}"):
            assistant = _open_assistant(path, "--model", tokenizer, options, device, dtype)
            one_turn = options.num_turns == 1
            user = UserFromData([]) if one_turn else _open_user(options, place, endpoint, device, dtype)
        return partial(_in_memory, Drawing(assistant, user, options.num_turns, options.seed), firsts)

    with closing(Journal(place.folder / FILE, settings, options.overwrite)) as journal:
        entries = go_through(journal, len(firsts), options.batch_size, prepare)
        rows, left_out = kept_rows(entries, f"dialogues of {PROMPTS} {options.prompts}")
        summary = f"{len(rows)} dialogues of {options.num_turns} turns{left_out}, {repeated} prompts were repeated"
        place.record(settings, summary)
        journal.finish(rows)
    return f"{summary}: {place.hand_over([FILE])}"


@dataclass(frozen=True)
class Drawing:
    """How dialogues are drawn.

    Attributes:
        assistant: the policy.
        user: asks.
        turns: H, of every dialogue.
        seed: of the run.
    """

    assistant: PolicyAssistant
    user: User
    turns: int
    seed: int

    def draw(self, numbers: Sequence[int], firsts: Sequence[Message]) -> list[Entry]:
        """Draws each dialogue twice: from its first message, and again from one of its turns on.

        Args:
            numbers: of the dialogues, which decide their draws.
            firsts: their first messages.
        """
        first = self._roll_out(self.seed, numbers, [[message] for message in firsts])
        reasons = {number: said.ended for number, said in zip(numbers, first, strict=True) if said.ended}
        whole = {number: said.messages for number, said in zip(numbers, first, strict=True) if not said.ended}
        places = {number: sampled_turns(self.seed, number, self.turns) for number in whole}
        starts = [state(dialogue, places[number][1]) for number, dialogue in whole.items()]
        second = self._roll_out(self.seed + SECOND_SEED, list(whole), starts) if whole else []
        rows = {}
        for number, said in zip(whole, second, strict=True):
            if said.ended:
                reasons[number] = said.ended
            else:
                last, turn = places[number]
                rows[number] = {"number": number, FIRST: whole[number], SECOND: said.messages, LAST: last, TURN: turn}
        return [{"number": n, "row": rows.get(n), "reason": reasons.get(n, "")} for n in numbers]

    def _roll_out(self, seed: int, numbers: Sequence[int], starts: Sequence[list[Message]]) -> list[Any]:
        seeds = [row_seed(seed, number) for number in numbers]
        return roll_out(starts, [self.turns] * len(starts), self.assistant, self.user, seeds)


def sampled_turns(seed: int, number: int, turns: int) -> tuple[int, int]:
    """(L, h) of a dialogue: L ~ Uniform{0, …, H−1}, the last turn that is scored; h ~ Uniform{0, …, L}, the turn whose
    replies are compared.

    Args:
        seed: of the run.
        number: of the dialogue.
        turns: H.
    """
    random = np.random.default_rng((seed, number))
    last = int(random.integers(turns))
    return last, int(random.integers(last + 1))


def _in_memory(drawing: Drawing, firsts: Sequence[Message], numbers: list[int]) -> list[Entry]:
    problem = f"--batch-size: the GPU's memory does not suffice for {len(numbers)} dialogues"
    with enough_memory(problem, "a smaller --batch-size; what is finished stays"):
        return drawing.draw(numbers, [firsts[number] for number in numbers])


def _open_assistant(
    path: str,
    flag: str,
    tokenizer: PreTrainedTokenizerBase,
    options: GenerateOptions,
    device: torch.device,
    dtype: torch.dtype,
) -> PolicyAssistant:
    end = turn_end(tokenizer)
    causal_lm = load_causal_lm(path, flag, dtype, tokenizer).to(device).eval()
    sampling = Sampling(
        max_new_tokens=options.max_new_tokens,
        end_ids=tuple(sorted({tokenizer.eos_token_id, end.token_id, *own_end_ids(path)})),
        pad_id=tokenizer.pad_token_id,
        bos_id=tokenizer.bos_token_id,
        temperature=options.temperature,
        top_p=options.top_p,
    )
    engine = choose_engine(options.rollout_engine, options.batch_size, causal_lm, "--rollout-engine")
    trained: int | None = getattr(causal_lm.config.get_text_config(), "max_position_embeddings", None)
    most = position_limit(causal_lm) or trained
    return PolicyAssistant(engine.draw_from(causal_lm), tokenizer, sampling, most, may_end=True)


def _open_user(
    options: GenerateOptions, place: Place, endpoint: Endpoint | None, device: torch.device, dtype: torch.dtype
) -> User:
    if options.user_function:
        return FunctionUser(load_function(options.user_function, "--user-function"), "--user-function")
    if endpoint is not None:
        writer = ServerWriter(endpoint, options.temperature, options.concurrency, place.folder / CACHE)
        return SimulatedUser(writer)
    path = locate_policy(options.user_model)
    tokenizer = load_tokenizer(path, "--user-model", may_add_pad=True)
    return SimulatedUser(ModelWriter(_open_assistant(path, "--user-model", tokenizer, options, device, dtype)))


def _endpoint(options: GenerateOptions) -> Endpoint | None:
    """The server that plays the user, if one does; raises UserError where address or key are bad."""
    if options.user_server is None:
        return None
    url = checked_address(options.user_server, SERVER.url)
    parts = (options.user_model, url, options.max_new_tokens, options.timeout, options.max_tries)
    bare = Endpoint(*parts, flags=SERVER)
    return Endpoint(*parts, checked_key(os.environ.get("OPENAI_API_KEY"), "OPENAI_API_KEY", bare), SERVER)


def _settings(options: GenerateOptions, path: str, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """What the rows depend on, by flag; an interrupted run goes on only with the same."""
    names = ["num_turns", "temperature", "top_p", "max_new_tokens", "seed", "rollout_engine"]
    names += ["batch_size"] if options.rollout_engine == "generate" else []  # then the draws depend on it
    settings = {name.replace("_", "-"): getattr(options, name) for name in names}
    settings |= {"device": device.type, "dtype": str(dtype).removeprefix("torch."), "model": folder_stamp(path)}
    if options.num_turns == 1:
        return settings
    if options.user_function:
        return settings | {"user-function": described_function(options.user_function)}
    on_server = options.user_server is not None
    user = options.user_model if on_server else folder_stamp(locate_policy(options.user_model))
    return settings | {"user-model": f"{user} on a server" if on_server else user}
