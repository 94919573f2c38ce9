# SPDX-License-Identifier: Apache-2.0
"""Environments, which answer the policy turn by turn: their interface, and the checks of what they return.

A user's class is named on the command line as ``module.py:Class``; one object of it plays one episode:

    class Guess:
        def reset(self, row: dict, seed: int) -> list[dict]:  # the messages before the first reply
        def step(self, messages: list[dict], reply: str) -> tuple[list[dict], float, bool]:  # messages, reward, done

gymnasium's returns are accepted, too: ``(messages, info)`` of reset, and ``(messages, reward, terminated, truncated,
info)`` of step. Nothing here imports torch, because every environment lives in a process of its own.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, SupportsFloat

from dschat.base.errors import UserError
from dschat.base.user_function import call_function, takes
from dschat.data.messages import TOOLS
from dschat.data.rows import kind_of

FLAG = "--environment"
ASSISTANT = "assistant"  # the policy's role
METHODS = {"reset": ("row", "seed"), "step": ("messages", "reply")}  # of a user's class, with their arguments
LARGEST_REWARD = 1e38  # just below float32's largest number

Message = dict[str, Any]  # type: ignore[explicit-any]  # role, content and the template's other fields


class Environment(Protocol):
    """What a user's class offers. `tools` and `roles` are optional attributes of the class.

    A method `close()`, if there is one, is called at the end of the episode.
    """

    def reset(self, row: dict[str, object], seed: int) -> list[Message]:
        """Begins an episode.

        Args:
            row: row of the data, as it was read.
            seed: for the environment's random choices; the same for all episodes of a prompt in an iteration.

        Returns:
            The messages before the policy's first reply.
        """

    def step(self, messages: list[Message], reply: str) -> tuple[list[Message], float, bool]:
        """Answers a reply of the policy.

        Args:
            messages: those before the reply.
            reply: its text.

        Returns:
            The messages that follow the reply, its reward, and whether the episode is over.
        """


@dataclass(frozen=True)
class StepResult:
    """What an environment answers to a reply."""

    messages: list[Message]
    reward: float
    done: bool


@dataclass(frozen=True)
class EnvironmentTraits:
    """Attributes of a user's class.

    Attributes:
        tools: for the chat template, as in a row's column `tools`; None without them.
        roles: roles of the messages that `step` returns.
    """

    tools: list[dict[str, object]] | None = None
    roles: Sequence[str] = field(default_factory=lambda: ["user"])

    @property
    def template_arguments(self) -> dict[str, object]:
        """Further variables of the chat template."""
        return {} if self.tools is None else {TOOLS: self.tools}


def traits_of(environment_class: object) -> EnvironmentTraits:
    """The attributes of a user's class. Raises UserError if they have another form, or a method cannot be called."""
    for method, arguments in METHODS.items():
        function = getattr(environment_class, method, None)
        usage = f"{method}({', '.join(arguments)})"
        # Arguments of static methods, class methods and the like are counted otherwise; they are tried by the call.
        is_plain = inspect.isfunction(inspect.getattr_static(environment_class, method, None))
        if not callable(function) or (is_plain and not takes(function, 1 + len(arguments))):
            raise UserError(f"{FLAG}: the class has no method {usage}: give one with reset and step.")
        if inspect.iscoroutinefunction(function):
            raise UserError(f"{FLAG}: {method} is an async function; give a plain one (def).")
    if not callable(environment_class) or not takes(environment_class, 0):
        raise UserError(f"{FLAG}: the class is made without arguments: give each of its own a default.")
    tools = getattr(environment_class, "tools", None)
    if tools is not None:
        if not isinstance(tools, list):
            raise UserError(f"{FLAG}: `tools` must be a list of JSON schemas, not {kind_of(tools)}.")
        tools = plain_copy(tools, "`tools`")
    roles = getattr(environment_class, "roles", ["user"])
    if not isinstance(roles, list | tuple):
        raise UserError(f"{FLAG}: `roles` must be a list or tuple of strings, such as ['user'], not {kind_of(roles)}.")
    roles = plain_copy(roles, "`roles`")
    if not roles or ASSISTANT in roles or not all(isinstance(role, str) for role in roles):
        raise UserError(f"{FLAG}: `roles` must name the roles of the environment's messages, such as ['user'].")
    return EnvironmentTraits(tools, roles)


def reset_environment(environment: Environment, row: dict[str, object], seed: int) -> list[Message]:
    """The messages with which an episode begins. Raises UserError if `reset` fails or returns something else."""
    result = call_function(environment.reset, FLAG, row, seed)
    if isinstance(result, tuple) and len(result) == 2:  # gymnasium's (observation, info)
        result = result[0]
    return _checked_messages(result, "reset", may_be_empty=False)


def step_environment(environment: Environment, messages: list[Message], reply: str) -> StepResult:
    """The answer to a reply. Raises UserError if `step` fails or returns something else."""
    result = call_function(environment.step, FLAG, messages, reply)
    if not isinstance(result, tuple) or len(result) not in (3, 5):
        raise UserError(
            f"{FLAG}: step must return (messages, reward, done), or gymnasium's five values, not {kind_of(result)}."
        )
    if len(result) == 5:
        new_messages, reward, terminated, truncated, _ = result
        is_terminated = _checked_flag(terminated, "terminated")
        done = _checked_flag(truncated, "truncated") or is_terminated
    else:
        new_messages, reward, is_over = result
        done = _checked_flag(is_over, "done")
    return StepResult(_checked_messages(new_messages, "step", may_be_empty=done), _checked_reward(reward), done)


def _checked_messages(result: object, method: str, may_be_empty: bool) -> list[Message]:
    """Copies of messages, of plain JSON values. Raises UserError if they are something else."""
    if not isinstance(result, list) or not (result or may_be_empty):
        kind = "an empty list" if result == [] else kind_of(result)
        raise UserError(f"{FLAG}: {method} must return a list of messages with role and content, not {kind}.")
    messages: list[Message] = plain_copy(result, f"a message of {method}")
    for number, message in enumerate(messages):
        texts = (message.get("role"), message.get("content")) if isinstance(message, dict) else (None,)
        if not all(isinstance(text, str) for text in texts):
            raise UserError(f"{FLAG}: message {number + 1} of {method} must have a role and a content of text.")
    roles = [message["role"] for message in messages]
    if method == "step" and ASSISTANT in roles:
        raise UserError(f"{FLAG}: step returned a message of the assistant, which the policy alone writes.")
    if roles and roles[-1] == ASSISTANT:
        raise UserError(f"{FLAG}: {method} returned a last message of the assistant, which the policy is to write.")
    return messages


def plain_copy(value: object, name: str) -> Any:  # type: ignore[explicit-any]  # any JSON value
    """Copy of a JSON value without objects of a user's classes, which another process could not read.

    Args:
        value: what `json.dumps` accepts.
        name: name of the value, for messages.

    Raises:
        UserError: it holds anything else, a number that is not finite, or text that UTF-8 cannot encode.
    """
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise UserError(f"{FLAG}: {name} is not a JSON value: {error}") from error
    return json.loads(text)


def _checked_reward(reward: object) -> float:
    """A reward that is finite in float32. Raises UserError if it is something else."""
    if not isinstance(reward, SupportsFloat):
        raise UserError(f"{FLAG}: the reward of a step must be a number, not {kind_of(reward)}.")
    number = float(reward)
    if not abs(number) <= LARGEST_REWARD:
        raise UserError(f"{FLAG}: the reward of a step is {number:g}, which is not finite in float32.")
    return number


def _checked_flag(value: object, name: str) -> bool:
    """Whether an episode is over: True or False, also those of NumPy and torch. Raises UserError for anything else.

    That includes a number, which may be the reward in the place of the flag.
    """
    flag: object = value.item() if hasattr(value, "item") else value
    if not isinstance(flag, bool):
        raise UserError(f"{FLAG}: {name} of a step must be true or false, not {kind_of(value)}.")
    return flag
