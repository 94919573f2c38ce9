# SPDX-License-Identifier: Apache-2.0
"""What judging costs: prices, estimates, the limit; flags and files that are refused before anything is asked."""

import re
import threading
import time

import pytest

from dschat.base.errors import UserError
from dschat.judge.costs import Prices, Spending
from fake_judge import client_of, judged, question, two_files, verdicts


def test_servers_that_count_nothing_are_estimated(server, tmp_path):
    """100 characters are 25 tokens."""
    server.usage = None
    server.answer = lambda messages: "x" * 100
    client = client_of(server, tmp_path)
    client.ask(question())
    assert client._spending.input_tokens == -(-server.sizes[0] // 4)
    assert client._spending.output_tokens == 25


def test_requests_on_their_way_count_against_the_limit():
    """Two dollars are left; of three requests that may cost one each, two go, and the third waits for them."""
    spending = Spending(Prices(0.0, 1_000_000.0), 2.0)
    went, leave = [], threading.Event()

    def request(name):
        with spending.reserve(0, 1):
            went.append(name)
            leave.wait(10)
            # nothing is added: the answers were free

    threads = [threading.Thread(target=request, args=(name,)) for name in range(3)]
    for thread in threads:
        thread.start()
    while len(went) < 2:
        time.sleep(0.005)
    time.sleep(0.05)
    assert len(went) == 2
    leave.set()
    for thread in threads:
        thread.join(10)
    assert sorted(went) == [0, 1, 2]


def test_a_dry_run_sends_and_writes_nothing(server, tmp_path):
    two_files(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    prices = ["--price_in", 5, "--price_out", 15]
    line = judged(server, tmp_path, "--dry_run", *prices, output="new/o.jsonl")
    assert server.bodies == [] and sorted(tmp_path.rglob("*")) == before
    assert "4 pairs, 8 requests to gpt-4o-2024-05-13" in line and "4 characters per token" in line
    sent, answered, cost = re.search(r"(\d+) tokens sent, (\d+) answered, about \$([\d.]+)", line).groups()
    assert float(cost) == round((int(sent) * 5 + int(answered) * 15) / 1e6, 2) > 0
    judged(server, tmp_path)
    assert abs(int(sent) - sum(server.sizes) / 4) <= 8 * 20  # spaces, and rounded up eight times
    again = judged(server, tmp_path, "--dry_run", output="p.jsonl")
    assert "0 requests" in again and "(8 more are in the cache)" in again
    assert again.endswith("0 tokens sent, 0 answered; --price_in and --price_out give the cost")


def test_a_limit_on_the_cost_stops_and_goes_on_later(server, tmp_path):
    """10 tokens at 0.1 $ each: a dollar per answer, so 5 $ are five answers of the eight."""
    price = ["--price_in", 0, "--price_out", 100_000, "--max_tokens", 10, "--max_cost", 5]
    with pytest.raises(UserError, match=r"--max_cost 5: \$5\.0000 spent .* 2 of 4 pairs are judged and kept"):
        judged(server, tmp_path, *price, "--concurrency", 1)
    assert len(server.bodies) == 5
    line = judged(server, tmp_path, *price, "--concurrency", 4)
    assert len(server.bodies) == 8 and "3 requests (5 more from the cache)" in line and "$3.0000" in line
    assert verdicts(tmp_path) == ["A", "B", "tie", "A"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--concurrency", "0"], "--concurrency .*from 1 to 1,000,000"),
        (["--timeout", "0"], "--timeout 0.0 .*above 0"),
        (["--price_in", "nan"], "--price_in nan .*a number"),
        (["--base_url", "http://me:secret@127.0.0.1/v1"], "--base_url holds a password"),
        (["--max_cost", "1"], "--max_cost needs the prices of the model: give --price_in and --price_out"),
        (["--price_in", "1"], "--price_in and --price_out: give both"),
        (["--sk", "sk-with a space"], "--sk holds characters"),
    ],
)
def test_bad_flags(server, tmp_path, words, message):
    with pytest.raises(UserError, match=message) as error:
        judged(server, tmp_path, *words)
    assert "secret" not in str(error.value) and "with a space" not in str(error.value)
    assert server.bodies == []
