# SPDX-License-Identifier: Apache-2.0
"""A judge on loopback for every test, and a client that does not wait long before it tries again."""

from collections.abc import Iterator

import pytest

from fake_judge import FakeJudge, judge_server


@pytest.fixture(autouse=True)
def quick_repeats(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits between tries begin with half a second."""
    monkeypatch.setattr("dschat.base.chat_servers.FIRST_DELAY", 0.002)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeJudge]:
    """A server without a key in the environment."""
    monkeypatch.delenv("JUDGE_API_KEY", raising=False)
    with judge_server() as judge:
        yield judge
