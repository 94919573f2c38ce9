# SPDX-License-Identifier: Apache-2.0
"""A stand-in for a vLLM server that accepts weights; its tokens are a function of the seed and the first weight."""

import json
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from fake_score_server import Handler, Server

WEIGHT_ROUTES = ("/start_weight_update", "/update_weights", "/finish_weight_update")
ABOUT = {"backend": "dschat", "device": "cpu", "dtype": "float32", "vocabulary": 100, "max_tokens": 64, "workers": 1}


class WeightServer:
    """On loopback; it can be stopped, and started again on its port without what it knew."""

    def __init__(self, **about: Any) -> None:
        self.about, self.port = ABOUT | about, 0
        self.fails_after: int | None = None  # responses, after which it stops, and begins anew soon after
        self.sleeps = 0.0  # seconds before it answers anything at all
        self.draws_for = 0.0  # seconds, a response
        self.salts = set[str]()  # versions whose keys and values requests may share
        self.waits_for: Callable[[], bool] = lambda: True  # until when it takes weights by NCCL
        self.says: str | None = None  # that these weights drew, whichever did
        self.start()

    def start(self) -> None:
        """With no weights."""
        self.version, self.weights, self.info = "default", dict[str, torch.Tensor](), dict[str, Any]()
        self.is_loading = False
        self.sent = list[dict[str, Any]]()  # what was said of weights that come by NCCL
        self.drawn, self.paths, self._pieces = list[list[int]](), list[str](), b""
        self._server = Server(self._handler(), self.port)
        self.port, self.url = self._server.port, self._server.url

    def stop(self) -> None:
        """Closes the port."""
        self._server.stop()

    def _restart(self) -> None:
        self.stop()
        time.sleep(0.5)
        self.start()

    def take(self, weight: dict[str, Any], piece: bytes) -> None:
        """A piece of a weight."""
        name, dtype, shape = weight["name"], weight["dtype"], weight["shape"]
        self._pieces += piece
        kind = getattr(torch, dtype)
        if len(self._pieces) == torch.Size(shape).numel() * kind.itemsize:
            self.weights[name] = torch.frombuffer(bytearray(self._pieces), dtype=kind).view(shape)
            self._pieces = b""

    def draw(self, prompt: list[int], parameters: dict[str, Any]) -> dict[str, Any]:
        """Two tokens of the seed, and the log-probs -1 and -2."""
        self.drawn.append(prompt)
        time.sleep(self.draws_for)
        tokens = [3 + parameters["seed"] % 90, 4 + len(prompt)]
        content = [{"token_id": token, "logprob": -1.0 - n} for n, token in enumerate(tokens)]
        versions = [{"version": self.says or self.version, "start": 0, "end": 2}]
        return {"choices": [{"token_ids": tokens, "logprobs": {"content": content}, "weight_versions": versions}]}

    def answer(self, path: str, content: bytes, headers: Any) -> tuple[int, dict[str, Any]]:
        """To a request."""
        time.sleep(self.sleeps)
        self.paths.append(path)
        if self.is_loading and path in ("/init_weight_transfer_engine", "/shutdown_weight_transfer_engine"):
            return 500, {"error": "not in the middle of an update"}  # as vLLM
        if path in WEIGHT_ROUTES and headers["X-Weight-Version"] + ".loading" != self.version:
            return 409, {"version": self.version}
        if "X-Weight" in headers:
            self.take(json.loads(headers["X-Weight"]), content)
            return 200, {}
        body = json.loads(content or b"{}")
        if path == "/collective_rpc":
            self.is_loading = False
        if path == "/run":
            return 200, self.about | {"version": self.version}
        if path == "/start_weight_update":
            self.is_loading = True
        elif path == "/init_weight_transfer_engine":
            self.info = body["init_info"]
        elif path == "/update_weights":
            self.sent.append(body["update_info"])
            while not self.waits_for():
                time.sleep(0.01)
        elif path == "/finish_weight_update":
            self.version, self.is_loading = body["weight_version"], False
        elif path == "/update_weight_version":
            self.version = body["new_version"]
        elif path == "/inference/v1/generate":
            if headers["X-Weight-Version"] != self.version:
                return 409, {"version": self.version}
            if self.fails_after is not None and len(self.drawn) >= self.fails_after:
                self.fails_after = None
                threading.Thread(target=self._restart, daemon=True).start()
                return 503, {}
            self.salts.add(body["cache_salt"])
            return 200, self.draw(body["token_ids"], body["sampling_params"])
        return 200, {}

    def _handler(self) -> type[Handler]:
        server = self

        class Weights(Handler):
            def do_GET(self) -> None:
                status, answer = server.answer(self.path, self.body(), self.headers)
                self.send(status, json.dumps(answer).encode())

            do_POST = do_GET

            def handle(self) -> None:
                with suppress(ConnectionError):  # who asked has gone
                    super().handle()

        return Weights
