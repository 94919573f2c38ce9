# SPDX-License-Identifier: Apache-2.0
"""Who may ask a vLLM server, and with which weights: a middleware in front of all of vLLM's routes.

vLLM imports this module by name, see rollouts/serve.py. It needs no vLLM itself.
"""

from __future__ import annotations

import hmac
import os
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from dschat.rollouts.vllm_client import GENERATE, LOADING, VERSION_HEADER, WEIGHT_ROUTES

if TYPE_CHECKING:
    from vllm.config import VllmConfig

ABOUT, OPEN = "/run", "/health"
LARGEST_BODY = 64 << 20  # bytes of a request; a piece of a weight has 23 million


class Gate:
    """ASGI middleware.

    It lets nobody in without the token of VLLM_API_KEY, if there is one: vLLM itself guards some of its routes only.
    It refuses to draw with other weights than a request names, and pieces of weights of another version than the
    server is being given; and it tells a run what the server is. Web sockets, which no run uses, are closed.
    """

    def __init__(self, app: ASGIApp) -> None:
        """Takes what is behind it."""
        self._app = app
        self._token = os.environ.get("VLLM_API_KEY", "")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request itself, or hands it on."""
        if scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.close", "code": 1008})
            return
        answer = await self._answer(Request(scope)) if scope["type"] == "http" else None
        await (answer or self._app)(scope, receive, send)

    async def _answer(self, request: Request) -> JSONResponse | None:
        """None where vLLM is to answer."""
        # As the server routes it. `request.url` is put together from the Host header, which whoever asks writes.
        path: str = request.scope["path"]
        if path == OPEN:
            return None
        header = request.headers.get("authorization", "")
        if self._token and not hmac.compare_digest(header.encode(), f"Bearer {self._token}".encode()):
            return JSONResponse({"error": "the token is missing or wrong"}, 401)
        if (refusal := refuse_body(request)) is not None:
            return refusal
        if path not in (ABOUT, GENERATE, *WEIGHT_ROUTES):
            return None
        engine = request.app.state.engine_client
        if engine.errored:
            return JSONResponse({"error": "the engine has died"}, 503)
        version: str = await engine.get_weight_version()
        if path == ABOUT:
            return JSONResponse(about(engine.vllm_config) | {"version": version})
        wanted = request.headers.get(VERSION_HEADER, "") + (LOADING if path in WEIGHT_ROUTES else "")
        return None if wanted == version else JSONResponse({"version": version}, 409)


def refuse_body(request: Request) -> JSONResponse | None:
    """An answer to a request whose content is too long, or of unknown length; None to any other."""
    if "transfer-encoding" in request.headers:
        return JSONResponse({"error": "the length of the request is missing"}, 411)
    length = request.headers.get("content-length", "0")
    if not length.isdecimal() or int(length) > LARGEST_BODY:
        return JSONResponse({"error": f"the request is more than {LARGEST_BODY >> 20} MB"}, 413)
    return None


def is_of_run(version: str, run: str) -> bool:
    """Whether a version of weights, a run's name, a dot and a number, is one of this run."""
    return version.rpartition(".")[0] == run


def about(config: VllmConfig) -> dict[str, object]:
    """What a server says of itself, see `dschat.rollouts.vllm_client.About`."""
    return {
        "backend": config.weight_transfer_config.backend,
        "device": config.device_config.device_type,
        "dtype": str(config.model_config.dtype).removeprefix("torch."),
        "vocabulary": config.model_config.get_vocab_size(),
        "max_tokens": config.model_config.max_model_len,
        "workers": config.parallel_config.world_size,
    }
