# SPDX-License-Identifier: Apache-2.0
"""A simulated user as the environment of episodes: policy and user talk, and other sources score the dialogue.

It is played in the process of its episode (`dschat.turns.environment_server`), by a model on a server or by a
function. Nothing here imports torch.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from dschat.base.chat_servers import Endpoint, EndpointFlags, with_key
from dschat.base.errors import UserError
from dschat.base.user_function import load_function
from dschat.data.messages import messages_of_text
from dschat.data.rows import Row
from dschat.turns.environment import ASSISTANT, Message
from dschat.turns.users import FunctionUser, ServerWriter, SimulatedUser

if TYPE_CHECKING:
    from dschat.turns.dialogues import User

FUNCTION = "--user_function"
SERVER = EndpointFlags(
    url="--user_server",
    model="--user_model",
    key="USER_API_KEY",
    max_tokens="--user_max_tokens",
    timeout="--environment_timeout",
    tries="--user_tries",
    role="user",
)


@dataclass(frozen=True)
class UserSettings:
    """Who plays the user, and how long dialogues are.

    Attributes:
        max_turns: replies of the policy in a dialogue.
        function: ``module.py:function``; empty if a model on a server plays the user.
        endpoint: the server and its model, without a key, which is read from USER_API_KEY; None for a function.
        temperature: of the server's sampling.
        cache: folder for the server's answers.
    """

    max_turns: int
    function: str = ""
    endpoint: Endpoint | None = None
    temperature: float = 0.0
    cache: str = ""

    def to_json(self) -> str:
        """These settings for another process."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> UserSettings:
        """The settings that `to_json` wrote."""
        columns = json.loads(text)
        if columns["endpoint"] is not None:
            columns["endpoint"] = Endpoint(**columns["endpoint"] | {"flags": SERVER})
        return cls(**columns)


class SimulatedDialogue:
    """A dialogue with a simulated user, which begins with the prompt of its row and lasts a number of turns.

    The user of a function ends it earlier with an empty message. There are no rewards.
    """

    def __init__(self, user: User, max_turns: int, may_end: bool) -> None:
        """Takes the parts.

        Args:
            user: writes the user's messages.
            max_turns: replies of the policy.
            may_end: the user may end the dialogue; otherwise it is a failure if there is no message.
        """
        self._user = user
        self._max_turns = max_turns
        self._may_end = may_end
        self._turns = 0
        self._seed = 0

    def reset(self, row: dict[str, object], seed: int) -> list[Message]:
        """The messages of the prompt; `row` is that of `prompt_columns`."""
        self._seed = seed
        messages = row["messages"]
        assert isinstance(messages, list)
        return messages

    def step(self, messages: list[Message], reply: str) -> tuple[list[Message], float, bool]:
        """The user's next message. Raises UserError where the user gives none and may not end the dialogue."""
        self._turns += 1
        if self._turns == self._max_turns:  # nobody would read a further message
            return [], 0.0, True
        dialogue = [*messages, {"role": ASSISTANT, "content": reply}]
        (text,) = self._user([dialogue], [0], [self._seed])
        if text is not None:
            return [{"role": "user", "content": text}], 0.0, False
        if self._may_end:
            return [], 0.0, True
        raise UserError("the simulated user gives no message, for the reason that is logged above")


def load_simulated_user(settings: UserSettings) -> Callable[[], SimulatedDialogue]:
    """What makes the dialogues of a run: each has a process of its own, and a copy of the client or function.

    Raises:
        UserError: the function cannot be imported, or the server's address or key is invalid.
    """
    if settings.endpoint is None:
        user: User = FunctionUser(load_function(settings.function, FUNCTION, ["dialogues"]), FUNCTION)
        return partial(SimulatedDialogue, user, settings.max_turns, may_end=True)
    writer = ServerWriter(with_key(settings.endpoint), settings.temperature, 1, Path(settings.cache))
    return partial(SimulatedDialogue, SimulatedUser(writer), settings.max_turns, may_end=False)


def prompt_columns(row: Row) -> dict[str, object]:
    """A row as `SimulatedDialogue.reset` reads it: the messages of its prompt.

    A prompt in the form of HH-RLHF becomes its messages; any other text is one message of the user.
    """
    messages: list[Message] | None = row.messages
    if messages is None:
        prompt = row.prompt or ""
        messages = messages_of_text(prompt) or [{"role": "user", "content": prompt}]
    return {"messages": messages}
