# SPDX-License-Identifier: Apache-2.0
"""A stand-in for a judge model: an OpenAI-compatible server on loopback with scripted answers and failures.

`judge_server()` starts one. `two_files` writes the responses of two models, `judged` runs `dschat judge` on them, and
`judged_rows` and `verdicts` read its output.
"""

import json
import re
import subprocess
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from html import unescape
from pathlib import Path
from typing import Any

from cli_runs import ROOT, environment, read_jsonl, write_jsonl
from dschat.judge.published_rubrics import RUBRICS
from fake_score_server import Handler, served

EVALUATION = ROOT / "evaluation"
KEY = "sk-test-0123456789"
OUTPUT = "o.jsonl"
WAIT = 60  # seconds for something that a process does, at most
SHOWN = re.compile(r"<(first|second|[a-z]+)(?:-([a-z]+))?-([0-9a-f]{16})>\n(.*?)\n</", re.DOTALL)
GRADED = re.compile(r"<([a-z]+(?:-\d+)?)-([0-9a-f]{16})>\n(.*?)\n</", re.DOTALL)
KEY_OF_ANSWER = re.compile(r'"([A-Za-z_]+)": 0 to 10')
USAGE = {"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 110}
# Files of two models. By `more_good`, A wins p0 and p3, B wins p1, p2 is a tie.
GOOD_A = ["good good", "bad", "good one", "good good good"]
GOOD_B = ["good", "good", "one good", "bad"]


def rows_of(responses: Sequence[str], prefix: str = "p") -> list[dict[str, Any]]:
    """Rows of responses to the prompts p0, p1, …"""
    return [{"prompt": f"{prefix}{number}", "response": text} for number, text in enumerate(responses)]


def two_files(folder: Path, first: Sequence[str] = GOOD_A, second: Sequence[str] = GOOD_B) -> tuple[Path, Path]:
    """Response files a.jsonl and b.jsonl."""
    return write_jsonl(folder / "a.jsonl", rows_of(first)), write_jsonl(folder / "b.jsonl", rows_of(second))


def shown_in(messages: list[dict[str, str]]) -> dict[str, str]:
    """What a question shows: `prompt`, `first` and `second`, as the judge may read them."""
    found = SHOWN.findall(messages[1]["content"])
    return {(name if name in ("first", "second") else "prompt"): unescape(text) for name, _, _, text in found}


def more_good(messages: list[dict[str, str]]) -> str:
    """An answer as asked for: the response that says "good" more often is better."""
    shown = shown_in(messages)
    first, second = (shown[name].count("good") for name in ("first", "second"))
    return json.dumps({"comparison": "counted", "verdict": "tie" if first == second else better(first > second)})


def graded_in(messages: list[dict[str, str]]) -> dict[str, str]:
    """What a question of --reward_judge shows: the texts by the words in their tags, the prompt first."""
    return {name: unescape(text) for name, _, text in GRADED.findall(messages[1]["content"])}


def points_by_good(messages: list[dict[str, str]]) -> str:
    """Points: "good" in the response, for each key that is asked for, times its place among the keys; 10 at most."""
    _, response = graded_in(messages).values()
    keys = KEY_OF_ANSWER.findall(messages[0]["content"].rpartition("after it: ")[2])
    numbers = {key: min(10, place * response.count("good")) for place, key in enumerate(keys, start=1)}
    return json.dumps({"reason": "counted"} | numbers)


def places_by_good(messages: list[dict[str, str]]) -> str:
    """A ranking: whatever says "good" more often comes first, and equal numbers share a place."""
    texts = graded_in(messages)
    counts = {name: text.count("good") for name, text in list(texts.items())[1:]}
    places = {name: 1 + sum(other > count for other in counts.values()) for name, count in counts.items()}
    return json.dumps({"reason": "counted"} | places)


def better(first: bool) -> str:
    """first or second."""
    return "first" if first else "second"


class FakeJudge:
    """The server's state. Requests are numbered from 0 in the order they come.

    `plan` says what becomes of the next requests, in turn; "ok" of all that follow. A word names a way of failing, a
    triple (status, body, headers) is sent as it is, and asks to come back at once unless it says otherwise; a pair
    (finish_reason, message) is what the completion says instead of the answer.
    """

    def __init__(self) -> None:
        self.answer: Callable[[list[dict[str, str]]], str] = more_good  # messages → the text of the answer
        self.plan: deque[Any] = deque()
        self.bodies: list[dict[str, Any]] = []  # of all requests
        self.sizes: list[int] = []  # of the same in bytes
        self.keys: list[str] = []  # their Authorization headers
        self.headers: list[dict[str, str]] = []  # all of their headers
        self.answered: Counter[str] = Counter()  # how often each conversation got an answer
        self.usage: dict[str, int] | None = USAGE
        self.busy = 0  # requests at the same time
        self.answers_before_gate: int | None = None
        self.gate = threading.Event()  # closed, requests wait; those that waited when it opens get no answer
        self.lock, self.over = threading.Lock(), threading.Event()
        self.url = ""
        self._refused: Callable[[dict[str, Any]], str | None] = lambda body: None
        self._fails: Callable[[dict[str, Any]], Any] = lambda body: None

    def refuse_when(self, refused: Callable[[dict[str, Any]], str | None]) -> None:
        """Every request for which there is a message gets a 400 with it."""
        self._refused = refused

    def fail_on(self, text: str, step: Any) -> None:
        """Every request that holds a text fails in one way, as in `plan`, whenever it comes."""
        self._fails = lambda body: step if text in json.dumps(body["messages"]) else None

    def words(self) -> list[str]:
        """Arguments of the scripts that lead here."""
        return ["--base_url", self.url, "--timeout", "5"]

    def handle(self, handler: Handler, body: dict[str, Any]) -> None:
        """Answers one request."""
        with self.lock:
            self.bodies.append(body)
            self.keys.append(handler.headers.get("Authorization", ""))
            self.headers.append(dict(handler.headers))
            step = self._fails(body) or (self.plan.popleft() if self.plan else "ok")
            self.busy += 1
            waits = self.answers_before_gate is not None and self.answered.total() >= self.answers_before_gate
            if step == "ok" and not waits and self._refused(body) is None:
                self.answered[json.dumps(body["messages"])] += 1
        try:
            if waits:
                self.gate.wait(30)
                handler.close_connection = True
            else:
                self._carry_out(handler, body, step)
        finally:
            with self.lock:
                self.busy -= 1

    def _carry_out(self, handler: Handler, body: dict[str, Any], step: Any) -> None:
        refusal = self._refused(body)
        if isinstance(step, tuple) and len(step) == 3:
            status, content, headers = step
            _send(handler, status, json.dumps(content).encode(), {"retry-after-ms": "1"} | headers)
        elif step == "timeout":
            self.over.wait(60)
        elif refusal is not None:
            _send(handler, 400, json.dumps({"error": {"message": refusal, "code": "bad"}}).encode())
        else:
            self._complete(handler, body, step)

    def _complete(self, handler: Handler, body: dict[str, Any], step: Any) -> None:
        text = self.answer(body["messages"])
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if step == "refusal":
            message = {"role": "assistant", "content": None, "refusal": "I will not judge that."}
        elif step == "half an answer":
            message["content"] = text[: len(text) // 2]
        end = "stop"
        if isinstance(step, tuple):
            end, message = step[0], {"role": "assistant", "content": None} | step[1]
        choice = {"index": 0, "message": message, "finish_reason": end}
        content: dict[str, Any] = {"id": "x", "object": "chat.completion", "created": 1, "model": "served"}
        content |= {"choices": [choice], **({"usage": self.usage} if self.usage else {})}
        whole = json.dumps(content).encode()
        if step == "broken off":
            _send(handler, 200, whole[: len(whole) // 2], {"Content-Length": str(len(whole))})
        else:
            _send(handler, 200, whole)


def _send(handler: Handler, status: int, content: bytes, headers: dict[str, str] | None = None) -> None:
    handler.send(status, content, {"Content-Type": "application/json"} | (headers or {}))


@contextmanager
def judge_server() -> Iterator[FakeJudge]:
    """A judge on a free port."""
    judge = FakeJudge()

    class Judge(Handler):
        def do_POST(self) -> None:
            body = self.body()
            judge.sizes.append(len(body))
            with suppress(BrokenPipeError, ConnectionResetError):  # the client gave up
                judge.handle(self, json.loads(body))

    with served(Judge) as address:
        judge.url = f"{address}/v1"
        try:
            yield judge
        finally:
            judge.over.set()
            judge.gate.set()


def until(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    """Waits for something that a process does."""
    end = time.monotonic() + WAIT
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.01)


def start(command: Sequence[str]) -> subprocess.Popen[str]:
    """A script as a process, without a key in its environment."""
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=environment(JUDGE_API_KEY=None), text=True, stdout=pipe, stderr=pipe)


def judged(server: FakeJudge, folder: Path, *words: Any, output: str = OUTPUT, models: Sequence[str] = "ab") -> str:
    """A run of the judge on two files of a folder, by default those of `two_files`; the line it prints."""
    from dschat.judge.command import run_judge
    from dschat.judge.options import JudgeOptions
    from dschat.settings.parse import parse

    a, b = (folder / f"{name}.jsonl" for name in models)
    if not a.exists():
        two_files(folder)
    files = ["--model_name_a", a, "--model_name_b", b, "--output", folder / output]
    return run_judge(parse(JudgeOptions, [*map(str, files), *server.words(), *map(str, words)]))


def judged_rows(folder: Path, output: str = OUTPUT) -> list[dict[str, Any]]:
    """What a run wrote."""
    return read_jsonl(folder / output)


def verdicts(folder: Path, output: str = OUTPUT) -> list[str]:
    """The same, the verdicts alone."""
    return [row["verdict"] for row in judged_rows(folder, output)]


def question(first: str = "good", second: str = "bad", prompt: str = "p") -> Any:
    """A question about two summaries."""
    from dschat.judge.published_rubrics import RUBRICS, question_of

    return question_of(RUBRICS["summarize"], prompt, first, second)


def client_of(server: FakeJudge, folder: Path, **endpoint: Any) -> Any:
    """A client of the server with the key KEY; its cache lies in the folder, and holds answers with a verdict."""
    from dschat.base.chat_servers import Endpoint
    from dschat.base.reply_cache import ReplyCache
    from dschat.judge.client import JudgeClient
    from dschat.judge.costs import Spending
    from dschat.judge.verdicts import has_verdict

    settings: dict[str, Any] = {
        "model": "gpt-test",
        "base_url": server.url,
        "max_tokens": 50,
        "timeout": 5.0,
        "tries": 8,
        "key": KEY,
    }
    whom = Endpoint(**(settings | endpoint))
    cache = ReplyCache(folder / "cache")
    client: Any = JudgeClient(whom, cache, Spending(None))
    client.ask = partial(client.ask, is_usable=has_verdict)
    return client


def always_first(messages: list[dict[str, str]]) -> str:
    """An answer in the form of either rubric: what is shown first is better."""
    one = {"comparison": "because", "verdict": "first"}
    criteria = RUBRICS["webgpt"].criteria if "factual_accuracy" in messages[0]["content"] else ()
    return json.dumps(dict.fromkeys(criteria, one) | {"verdict": "first"} if criteria else one)
