# SPDX-License-Identifier: Apache-2.0
"""The examples run: a loop of one's own learns, and the notebook says what arithmetic by hand says."""

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import pytest

import dschat
from closeness import near
from dschat.base.errors import UserError

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


@pytest.fixture(autouse=True)
def _place(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))


def test_the_notebook():
    """Three macro actions of values .2, .5, .7 and rewards 0, 0, 1: δ = .3, .2, .3; Â = .475, .35, .3 at λ = .5."""
    cells = json.loads((EXAMPLES / "macro_actions.ipynb").read_text(encoding="utf-8"))["cells"]
    names: dict[str, Any] = {}
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        for cell in cells:
            if cell["cell_type"] == "code":
                exec(compile("".join(cell["source"]), "macro_actions.ipynb", "exec"), names)
    assert names["macro"].index.tolist() == [[0, 0, 0, 1, 1, 1, 2]]
    assert names["by_macro"].tolist()[0] == near([0.475] * 3 + [0.35] * 3 + [0.3])
    # δ of the tokens is .1 six times, then .3: the first has .1 (1 + 1/2 + … + 1/32) + .3 / 64.
    assert names["by_token"][0, 0].item() == near(0.1 * (2 - 1 / 32) + 0.3 / 64)
    assert "macro action of each token: [0, 0, 0, 1, 1, 1, 2]" in said.getvalue()
    history = names["history"]
    assert history[0] < 0.1 < 0.3 < history[-1], "a token in 32 at first"


def test_names_of_the_package(monkeypatch):
    """`import dschat` is quick and knows what it promises; `train` takes configurations alone."""
    for name in dschat.__all__:
        assert getattr(dschat, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        dschat.nothing  # noqa: B018
    with pytest.raises(UserError, match="dict is not the configuration of a training step"):
        dschat.train({})
