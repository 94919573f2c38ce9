# SPDX-License-Identifier: Apache-2.0
"""The judge against a real OpenAI-compatible server, `transformers serve`, with a small random model."""

import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from cli_runs import environment, read_jsonl, run_command
from fake_judge import EVALUATION, two_files
from launches import free_port

READY_WITHIN = 180  # seconds; it takes a tenth of them
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
TEXTS = ["a judge compares the first text with the second one. verdict: tie."]


@pytest.fixture(scope="module")
def serving(tmp_path_factory):
    """Address and name of the model of a running server."""
    from dschat.models.tiny import make_model

    folder = tmp_path_factory.mktemp("serve")
    model = make_model(folder / "model", TEXTS)
    (model / "chat_template.jinja").write_text(TEMPLATE)
    port = free_port()
    program = Path(sys.executable).parent / "transformers"
    command = [program, "serve", model, "--host", "127.0.0.1", "--port", port, "--device", "cpu"]
    with open(folder / "log.txt", "w") as log:
        server = subprocess.Popen([*map(str, command)], env=environment(), stdout=log, stderr=subprocess.STDOUT)
    try:
        _wait_for(f"http://127.0.0.1:{port}/health", server, folder / "log.txt")
        yield f"http://127.0.0.1:{port}/v1", str(model)
    finally:
        server.terminate()
        try:
            server.wait(10)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def _wait_for(address, server, log):
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    end = time.monotonic() + READY_WITHIN
    while time.monotonic() < end:
        assert server.poll() is None, log.read_text()
        try:
            with direct.open(address, timeout=5) as answer:
                assert answer.status == 200
                return
        except OSError:
            time.sleep(0.1)
    raise AssertionError(log.read_text())


@pytest.mark.slow
def test_noise_is_counted_item_by_item(serving, tmp_path):
    """A random model says nothing that could be read: every item is there, and invalid after one repair."""
    url, model = serving
    a, b = two_files(tmp_path, ["good", "a cat", "same"], ["bad", "a dog", "same"])
    files = ["--model_name_a", a, "--model_name_b", b, "--output", tmp_path / "o.jsonl"]
    judge = ["--base_url", url, "--judge_model", model, "--max_tokens", "6", "--timeout", "100", "--concurrency", "2"]
    script = EVALUATION / "gpt4-eval.py"
    result = run_command([sys.executable, script, *files, *judge], OPENAI_API_KEY=None).expect(0)
    assert "Traceback" not in result.stderr
    assert "0 wins, 1 ties, 0 losses, 2 invalid of 3; 8 requests (0 more from the cache)" in result.stdout
    rows = read_jsonl(tmp_path / "o.jsonl")
    assert [row["verdict"] for row in rows] == ["invalid", "invalid", "tie"]
    for order in rows[0]["orders"] + rows[1]["orders"]:
        assert order["repaired"] and order["problem"] and order["served_by"].startswith(model)
    wrong = ["--base_url", url, "--judge_model", "another", "--overwrite"]
    refused = run_command([sys.executable, script, *files, *wrong], OPENAI_API_KEY=None)
    assert refused.status == 2 and "pinned" in refused.stderr.splitlines()[-1]
