# SPDX-License-Identifier: Apache-2.0
"""Flags of a simulated user, who answers the policy in dialogues, and the rules of step 3 between them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dschat.base.errors import UserError
from dschat.settings.flags import AT_LEAST_0, AT_LEAST_1, FREE, flag
from dschat.settings.rewards import SIMULATED_USER
from dschat.settings.rules import Check, Rule, check_function_path


@dataclass(kw_only=True, frozen=True)
class UserFlags:
    """Who plays the user: a model, a server or a function."""

    section = "simulated user"

    user_model: str | None = flag("name of the model that plays the user on --user_server", None, path=True)
    user_server: str | None = flag(
        "address of an OpenAI-compatible server that runs --user_model; the key is read from USER_API_KEY",
        None,
        on_resume=FREE,
    )
    user_function: str | None = flag(
        "function that plays the user instead: module.py:function, called with a list of one dialogue, which returns a"
        " list of its next user message",
        None,
        path=True,
    )


@dataclass(kw_only=True, frozen=True)
class UserRequestFlags:
    """How step 3 asks the server that plays the user."""

    section = "simulated user"

    user_max_tokens: int = flag(
        "longest answer of the user's model in tokens, its justification included",
        1024,
        AT_LEAST_1,
        FREE,
        only_with="user_server",
    )
    user_temperature: float = flag(
        "sampling temperature of the user's model; 0 = greedy decoding", 0.8, AT_LEAST_0, only_with="user_server"
    )
    user_tries: int = flag(
        "how often a request to the user's server is sent until an answer comes, within environment_timeout",
        8,
        AT_LEAST_1,
        FREE,
        only_with="user_server",
    )


ONE_USER: Rule[Any] = Rule(
    lambda config: bool(config.user.user_server and config.user.user_function),
    "--user_server and --user_function both play the user: drop one of them.",
)


def _check_user_is_read(config: Any) -> None:
    """Refuse a user's flags without the environment that reads them."""
    if config.has_simulated_user:
        return
    for name in ("user_model", "user_server", "user_function"):
        value = getattr(config.user, name)
        if value is not None:
            raise UserError(
                f"--{name} {value} does nothing on its own: add --environment {SIMULATED_USER}, or drop it."
            )


def _check_user_function(config: Any) -> None:
    if config.user.user_function is not None:
        check_function_path("user_function", config.user.user_function)


SIMULATED_USER_RULES: tuple[Rule[Any] | Check[Any], ...] = (  # of step 3's configuration
    Check(_check_user_is_read),
    ONE_USER,
    Rule(
        lambda config: config.user.user_model is not None and config.user.user_server is None,
        "--user_model {user_model} without --user_server: in step 3 the user of every episode is in a process of its"
        " own, which cannot hold a model. Serve it with an OpenAI-compatible server, such as vLLM, and give the"
        " server's address as --user_server; or drop --user_model and give --user_function.",
    ),
    Rule(
        lambda config: (
            config.has_simulated_user and config.user.user_server is None and config.user.user_function is None
        ),
        "--environment simulated_user: nobody plays the user. Give --user_server, the address of an OpenAI-compatible"
        " server, and --user_model, the name of its model; or --user_function module.py:function.",
    ),
    Rule(
        lambda config: config.user.user_server is not None and config.user.user_model is None,
        "--user_server {user_server}: add --user_model, the name of the user's model on the server.",
    ),
    Check(_check_user_function),
)
