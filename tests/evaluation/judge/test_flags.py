# SPDX-License-Identifier: Apache-2.0
"""Flags and files that the judge refuses before it asks anything."""

import sys

import pytest

from cli_runs import write_jsonl
from dschat.common.chat_servers import Endpoint
from dschat.errors import UserError
from judges import GOOD_B, judged, rows_of, two_files


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--concurrency", "0"], "--concurrency must be at least 1"),
        (["--max-tries", "0"], "--max-tries must be at least 1"),
        (["--max-tokens", "0"], "--max-tokens must be at least 1"),
        (["--timeout", "0"], "--timeout must be more than 0"),
        (["--max-cost", "-1"], "--max-cost must be a number from 0 on"),
        (["--price-in", "nan"], "--price-in must be a number"),
        (["--base-url", "127.0.0.1:8000"], "--base-url 127.0.0.1:8000: an address such as"),
        (["--base-url", "http://me:secret@127.0.0.1/v1"], "--base-url holds a password"),
        (["--max-cost", "1"], "--max-cost needs the prices of the model: give --price-in and --price-out"),
        (["--max-cost", "1", "--price-in", "1"], "--max-cost needs the prices"),
        (["--price-in", "1"], "--price-in and --price-out: give both"),
        (["--base-url", "https://judge/v1?key=secret"], "--base-url holds a password"),
        (["--base-url", "http://judge:port/v1", "--sk", "sk-long-enough"], "--base-url http://judge:port/v1: Invalid"),
        (["--sk", "sk-with a space"], "--sk holds characters"),
    ],
)
def test_bad_flags(server, tmp_path, words, message):
    a, b = two_files(tmp_path)
    with pytest.raises(UserError, match=message) as error:
        judged(server, a, b, tmp_path / "o.jsonl", *words)
    assert "secret" not in str(error.value) and "with a space" not in str(error.value)
    assert server.bodies == []


def test_bad_files(server, tmp_path):
    a, b = two_files(tmp_path)
    shorter = write_jsonl(tmp_path / "short.jsonl", rows_of(GOOD_B[:3]))
    with pytest.raises(UserError, match=r"a\.jsonl has 4 rows and --model_name_b .*short\.jsonl has 3"):
        judged(server, a, shorter, tmp_path / "o.jsonl")
    other = write_jsonl(tmp_path / "other.jsonl", rows_of(GOOD_B, prefix="q"))
    with pytest.raises(UserError, match=r"a\.jsonl:1: no row of --model_name_b .*other\.jsonl"):
        judged(server, a, other, tmp_path / "o.jsonl")
    b.write_text(b.read_text() + '{"prompt": \n')
    with pytest.raises(UserError, match=r"b\.jsonl:5: not valid JSON"):
        judged(server, a, b, tmp_path / "o.jsonl")
    with pytest.raises(UserError, match=r"--output .*a\.jsonl is the file of --model_name_a"):
        judged(server, a, b, a)
    assert server.bodies == []


def test_a_server_elsewhere_without_encryption_is_warned_of_and_needs_a_key(server, tmp_path, caplog):
    a, b = two_files(tmp_path)
    with pytest.raises(UserError, match="no key for http://judge.invalid/v1: set .* OPENAI_API_KEY"):
        judged(server, a, b, tmp_path / "o.jsonl", "--base-url", "http://judge.invalid/v1")
    assert "http://judge.invalid/v1 is not encrypted" in caplog.text


def test_without_the_openai_library_the_extra_is_named(server, tmp_path, monkeypatch):
    a, b = two_files(tmp_path)
    monkeypatch.setitem(sys.modules, "dschat.evaluation.judge.client", None)
    with pytest.raises(UserError, match=r"pip install 'ma-rlhf\[judge\]'"):
        judged(server, a, b, tmp_path / "o.jsonl")


@pytest.mark.parametrize(
    ("address", "local"),
    [
        ("http://127.0.0.1:8000/v1", True),
        ("http://localhost", True),
        ("https://[::1]:80/v1", True),
        ("http://127.0.0.1.example.org/v1", False),
        ("http://localhost.example.org/v1", False),
        ("https://api.openai.com/v1", False),
    ],
)
def test_servers_on_this_machine(address, local):
    assert Endpoint("m", address, 1, 1.0, 1).is_local is local
