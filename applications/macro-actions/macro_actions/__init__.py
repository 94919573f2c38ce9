# SPDX-License-Identifier: Apache-2.0
"""Credit assignment over macro actions as pure functions of tensors.

    from macro_actions import fixed, macro_gae

    ends = fixed(response_mask, n=5)  # (B, R) bool
    advantages, returns = macro_gae(values, rewards, ends, response_mask, gamma=1.0, lam=0.95, value_function="first")

Its functions read no file, no flag and no clock, use no global random state and know no trainer; but
`macro_actions.constituents` loads a parser, and `macro_actions.frameworks` knows trainers.
Shapes: B rows, P prompt positions, R response positions, M macro actions.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from macro_actions.conditions import fixed, parsing, ppl, randomized, surprise
    from macro_actions.groups import dr_grpo, grpo, prefix_values, rloo
    from macro_actions.returns import gae, macro_gae
    from macro_actions.segments import macro_logprobs, pool_rewards, pool_values, segment, to_tokens, value_weights

# Name → the module that defines it, imported when the name is first used: `macro_actions.settings` loads no torch.
_MODULES = {
    "dr_grpo": "groups",
    "fixed": "conditions",
    "gae": "returns",
    "grpo": "groups",
    "macro_gae": "returns",
    "macro_logprobs": "segments",
    "parsing": "conditions",
    "pool_rewards": "segments",
    "pool_values": "segments",
    "ppl": "conditions",
    "prefix_values": "groups",
    "randomized": "conditions",
    "rloo": "groups",
    "segment": "segments",
    "surprise": "conditions",
    "to_tokens": "segments",
    "value_weights": "segments",
}

__all__ = [
    "dr_grpo",
    "fixed",
    "gae",
    "grpo",
    "macro_gae",
    "macro_logprobs",
    "parsing",
    "pool_rewards",
    "pool_values",
    "ppl",
    "prefix_values",
    "randomized",
    "rloo",
    "segment",
    "surprise",
    "to_tokens",
    "value_weights",
]


def __getattr__(name: str) -> Any:
    """A function of this package."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
