# SPDX-License-Identifier: Apache-2.0
"""ASGI middleware in front of all routes of a vLLM server: who may send requests, and for which weights.

vLLM imports this module by name, see serve.py. It does not need vLLM itself.
"""

from __future__ import annotations

import hmac
import json
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from dschat.base.secrets import secret_of
from dschat.base.trusted_hosts import PROBLEM, is_trusted
from dschat.vllm.client import GENERATE, LOADING, TOKEN, UPDATE_WEIGHTS, VERSION_HEADER, WEIGHT_HEADER, WEIGHT_ROUTES

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.engine.protocol import EngineClient

INFO_ROUTE = "/run"
WEIGHT_FIELDS = {"name", "dtype", "shape"}  # of WEIGHT_HEADER, see `dschat.vllm.client.describe_weight`
UNGUARDED_ROUTE = "/health"  # needs no token
MAX_BODY_BYTES = 64 << 20  # maximum request body (64 MiB); the largest piece of a weight has 16 MiB


class Gate:
    """ASGI middleware of a server that belongs to one run at a time.

    Every request but health checks needs the token of VLLM_API_KEY, if there is one: vLLM itself guards only some of
    its routes. The route `/run` reports what the server is. Web sockets, which no run uses, are closed. Without a
    token, the server answers to names of this machine alone, see `dschat.base.trusted_hosts`.

    The weights of a server have a version, which requests name in the header `X-Weight-Version`. When a run begins to
    send version `a.2`, it sets the server's version to `a.2.loading`, and to `a.2` when all weights are there.
    Therefore a run's request to sample (route GENERATE) is answered only if it names exactly the server's version, and
    a request with weights only if the server's version is the one that it names, followed by `.loading`. All others on
    these routes get status 409.

    Raw bytes of a weight go from here to the workers, since vLLM's own route reads JSON alone.
    """

    def __init__(self, app: ASGIApp) -> None:
        """Takes the application behind the gate."""
        self._app = app
        self._token = secret_of(TOKEN)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request itself, or passes it on."""
        if scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.close", "code": 1008})
            return
        answer = await self._answer(Request(scope, receive)) if scope["type"] == "http" else None
        responder = answer or self._app
        await responder(scope, receive, send)

    async def _answer(self, request: Request) -> JSONResponse | None:
        """The gate's own answer to a request; None if vLLM is to answer."""
        # The path as the server routes it, since `dschat serve-vllm` sets no root path. `request.url` would not do: it
        # contains the Host header, which the sender writes.
        path: str = request.scope["path"]
        if not (self._token or is_trusted(request.scope)):
            return JSONResponse({"error": PROBLEM}, 400)
        if path == UNGUARDED_ROUTE:
            return None
        if not self._has_token(request):
            return JSONResponse({"error": "the token is missing or wrong"}, 401)
        refusal = refuse_body(request)
        if refusal is not None:
            return refusal
        if path not in (INFO_ROUTE, GENERATE, *WEIGHT_ROUTES):
            return None

        engine = request.app.state.engine_client
        if engine.errored:  # for good; the run ends with a checkpoint and can resume with a new server
            return JSONResponse({"error": "the engine has died"}, 503)
        version: str = await engine.get_weight_version()
        if path == INFO_ROUTE:
            return JSONResponse(server_info(engine.vllm_config, version))
        expected_version = request.headers.get(VERSION_HEADER, "")
        if path in WEIGHT_ROUTES:
            expected_version += LOADING
        if expected_version != version:
            return JSONResponse({"version": version}, 409)
        if path == UPDATE_WEIGHTS and WEIGHT_HEADER in request.headers:
            return await pass_bytes_on(request, engine)
        return None

    def _has_token(self, request: Request) -> bool:
        """Whether a request may enter: it has the server's token, or the server has none."""
        if not self._token:
            return True
        header = request.headers.get("authorization", "")
        return hmac.compare_digest(header.encode(), f"Bearer {self._token}".encode())


def refuse_body(request: Request) -> JSONResponse | None:
    """The refusal of a request whose body is too long or of unknown length; None for any other request."""
    length = request.headers.get("content-length", "0")
    if "transfer-encoding" in request.headers or not length.isdecimal() or int(length) > MAX_BODY_BYTES:
        return JSONResponse({"error": f"a request must name its length, at most {MAX_BODY_BYTES >> 20} MiB"}, 413)
    return None


async def pass_bytes_on(request: Request, engine: EngineClient) -> JSONResponse:
    """Gives all workers a piece of a weight, as a `dschat.vllm.worker.WeightUpdate`."""
    try:
        update = json.loads(request.headers[WEIGHT_HEADER])
    except ValueError:
        update = None
    if not isinstance(update, dict) or update.keys() != WEIGHT_FIELDS:
        fields = ", ".join(sorted(WEIGHT_FIELDS))
        return JSONResponse({"error": f"{WEIGHT_HEADER} must be a JSON object with {fields}"}, 400)
    update["version"] = request.headers[VERSION_HEADER]
    update["data"] = await request.body()
    await engine.collective_rpc("update_weights", kwargs={"update_info": update})
    return JSONResponse({})


def server_info(config: VllmConfig, version: str) -> dict[str, object]:
    """What a server reports about itself, see `dschat.vllm.client.ServerInfo`."""
    return {
        "backend": config.weight_transfer_config.backend,
        "device": config.device_config.device_type,
        "dtype": str(config.model_config.dtype).removeprefix("torch."),
        "vocabulary": config.model_config.get_vocab_size(),
        "max_tokens": config.model_config.max_model_len,
        "workers": config.parallel_config.world_size,
        "version": version,
    }
