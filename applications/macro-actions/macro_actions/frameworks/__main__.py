# SPDX-License-Identifier: Apache-2.0
"""Check that the installed version of a framework has what its adapter needs.

    python -m macro_actions.frameworks check verl

The dispatchers of verl, SkyRL and slime are also called on a small batch, to see that they call the adapter.
"""

import argparse
import importlib
import sys
from importlib.metadata import PackageNotFoundError, version

import torch

from macro_actions.frameworks import FRAMEWORKS, MacroActionsConfig, UnsupportedError
from macro_actions.segments import segment


def main() -> int:
    """Run the check. Returns the exit status: 0, or 1 after a line that says what is missing."""
    parser = argparse.ArgumentParser(
        prog="python -m macro_actions.frameworks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=["check"])
    parser.add_argument("framework", choices=FRAMEWORKS)
    name = parser.parse_args().framework
    try:
        report = check(name)
    except (ImportError, UnsupportedError) as error:
        print(f"{name}: {type(error).__name__}: {error}")
        return 1
    print(report)
    return 0


def check(name: str) -> str:
    """Check one framework.

    Args:
        name: one of `FRAMEWORKS`.

    Returns:
        A line with the framework's version and what was checked.

    Raises:
        ImportError: the framework cannot be imported.
        UnsupportedError: it lacks a hook, or does not call the adapter.
    """
    try:
        installed = version(name)
    except PackageNotFoundError:
        installed = "of an unknown version"
    adapter = importlib.import_module(f"macro_actions.frameworks.{name}")
    if name in ("openrlhf", "trl"):
        adapter.require_hooks()
        return f"{name} {installed}: the hooks are there"

    # Two responses through the framework's dispatcher, and through the adapter alone.
    mask = torch.tensor([[1.0, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    values = torch.linspace(0.1, 1, 10).view(2, 5) * mask
    rewards = torch.tensor([[0.0, 0, 0, 0, 1], [0, 0, 1, 0, 0]])
    config = MacroActionsConfig("fixed", ngram=2, value_function="first")
    _, returns = adapter.run_dispatcher(config, rewards, values, mask)
    ends = config.ends(mask, name)
    _, expected = config.gae(values, rewards, ends, mask, 1.0, 0.5)
    if not torch.allclose(torch.where(mask.bool(), returns, 0.0), expected, atol=1e-6):
        raise UnsupportedError(f"{installed}: the dispatcher calls something else than the adapter.")
    lengths = segment(ends, mask).lengths
    return f"{name} {installed}: the adapter is called (macro actions of {lengths[lengths > 0].tolist()} tokens)"


if __name__ == "__main__":
    sys.exit(main())
