# SPDX-License-Identifier: Apache-2.0
"""ASGI middleware in front of all routes of a vLLM server: who may send requests, and for which weights.

vLLM imports this module by name, see serve.py. It does not need vLLM itself.
"""

from __future__ import annotations

import hmac
import os
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from dschat.rollouts.vllm.client import GENERATE, LOADING, TOKEN, VERSION_HEADER, WEIGHT_ROUTES

if TYPE_CHECKING:
    from vllm.config import VllmConfig

INFO_ROUTE = "/run"
OPEN_ROUTE = "/health"
MAX_BODY_BYTES = 64 << 20  # of a request; a piece of a weight takes 23 million


class Gate:
    """ASGI middleware of a server that belongs to one run at a time.

    Every request needs the token of VLLM_API_KEY, if there is one: vLLM itself guards only some of its routes. A
    request to sample is refused unless it names the version of the server's weights, and a piece of a weight unless it
    belongs to the update under way. `GET /run` reports what the server is. Web sockets, which no run uses, are closed.
    """

    def __init__(self, app: ASGIApp) -> None:
        """Takes the application behind the gate."""
        self._app = app
        self._token = os.environ.get(TOKEN, "")

    async def __call__(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        """Answers a request itself, or passes it on."""
        if scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.close", "code": 1008})
            return
        answer = await self._answer(Request(scope)) if scope["type"] == "http" else None
        await (answer or self._app)(scope, receive, send)

    async def _answer(self, request: Request) -> JSONResponse | None:
        """The gate's own answer to a request; None if vLLM is to answer."""
        # The path as the server routes it. `request.url` contains the Host header, which the sender writes.
        path: str = request.scope["path"]
        if path == OPEN_ROUTE:
            return None
        header = request.headers.get("authorization", "")
        if self._token and not hmac.compare_digest(header.encode(), f"Bearer {self._token}".encode()):
            return JSONResponse({"error": "the token is missing or wrong"}, 401)
        refusal = refuse_body(request)
        if refusal is not None:
            return refusal
        if path not in (INFO_ROUTE, GENERATE, *WEIGHT_ROUTES):
            return None

        engine = request.app.state.engine_client
        if engine.errored:
            return JSONResponse({"error": "the engine has died"}, 503)
        version: str = await engine.get_weight_version()
        if path == INFO_ROUTE:
            return JSONResponse(server_info(engine.vllm_config, version))
        expected_version = request.headers.get(VERSION_HEADER, "")
        if path in WEIGHT_ROUTES:
            expected_version += LOADING
        return None if expected_version == version else JSONResponse({"version": version}, 409)


def refuse_body(request: Request) -> JSONResponse | None:
    """An answer to a request whose body is too long or of unknown length; None to any other."""
    if "transfer-encoding" in request.headers:
        return JSONResponse({"error": "the length of the request is missing"}, 411)
    length = request.headers.get("content-length", "0")
    if not length.isdecimal() or int(length) > MAX_BODY_BYTES:
        return JSONResponse({"error": f"the request is more than {MAX_BODY_BYTES >> 20} MB"}, 413)
    return None


def is_of_run(version: str, run: str) -> bool:
    """Whether a version of weights, RUN.NUMBER, belongs to a run."""
    return version.rpartition(".")[0] == run


def server_info(
    config: VllmConfig,
    version: str,
) -> dict[str, object]:
    """What a server reports about itself, see `dschat.rollouts.vllm.client.ServerInfo`."""
    return {
        "backend": config.weight_transfer_config.backend,
        "device": config.device_config.device_type,
        "dtype": str(config.model_config.dtype).removeprefix("torch."),
        "vocabulary": config.model_config.get_vocab_size(),
        "max_tokens": config.model_config.max_model_len,
        "workers": config.parallel_config.world_size,
        "version": version,
    }
