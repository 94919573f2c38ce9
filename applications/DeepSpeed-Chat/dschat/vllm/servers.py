# SPDX-License-Identifier: Apache-2.0
"""Sampling by vLLM servers (--vllm_url), which have GPUs of their own and get the actor's weights over the network.

A weight's way from the trainer to a server, before every rollout:

1. servers.py: `VllmServers.session` opens a new version of the weights, RUN.NUMBER, on every server. All ranks iterate
   over the actor's weights; the main process sends each of them.
2. weights.py: `plain_weights` merges adapters in and gives the weights their published names.
3. engine/zero3.py: `whole_weights` gathers one whole weight at a time from all ranks.
4. client.py: `send_over_http` sends the weight in pieces, `NcclTransport` by a broadcast.
5. gate.py, on the server: refuses requests without the token or with another version.
6. worker.py, on the server: puts pieces together, loads the weight into vLLM's model and, after the last one, compares
   what the layers compute with the weights that were sent (weights.py: `wrong_layers`).

Prompts and responses go over HTTP, each process's own. Every request names the version to sample with, and every
answer the version that it was sampled with. A server that is lost ends the run with a checkpoint (`ServerLost`).
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec

from torch import Tensor

from dschat.base.errors import ServerLost, UserError
from dschat.models.engines import TrainedPolicy
from dschat.models.vocabulary import missing_ids_of
from dschat.rollouts.engine import Generation, ResponseSampler
from dschat.rollouts.sampling import Sampling
from dschat.run.distributed import broadcast_object, device, is_main
from dschat.run.stop import stopping_together
from dschat.vllm.client import (
    FLAG,
    LOADING,
    WEIGHT_ROUTES,
    Json,
    NcclTransport,
    ServerClient,
    ServerInfo,
    dtype_name,
    other_weights,
    raise_on_all_ranks,
    send_over_http,
)
from dschat.vllm.pending import PendingResponses
from dschat.vllm.requests import make_requests, to_generation
from dschat.vllm.weights import plain_weights, transposed_matrices

logger = logging.getLogger("dschat")

BACKEND = "dschat"  # how servers take weights, see worker.py
SendWeight = Callable[[str, Tensor, str], None]  # name, weight and version


@dataclass(frozen=True)
class ServerNeeds:
    """What servers must be able to do for a run."""

    vocabulary: int  # tokens of the actor
    max_tokens: int  # longest prompt and response together
    temperature: float  # of sampling
    timeout: float = 1200.0  # seconds in which a server must finish one more response


class VllmServers:
    """A rollout engine on other machines. Seeds decide its samples, as with `dschat.vllm.engine`."""

    def __init__(self, urls: Sequence[str], needs: ServerNeeds) -> None:
        """Takes addresses without a path; the first session connects. Every rank must make one."""
        self._client = ServerClient(urls)
        self._needs = needs
        self._run = broadcast_object(secrets.token_hex(4))
        self._update_count = 0  # of the weights
        self._send: SendWeight | None = None  # of the main process, once the servers know the run
        self._pending: PendingResponses | None = None  # what servers may still be sampling

    @property
    def _version(self) -> str:
        """Version of the weights that were sent last."""
        return f"{self._run}.{self._update_count}"

    @contextmanager
    def session(self, actor: TrainedPolicy, same_weights: bool = False) -> Iterator[ResponseSampler]:
        """Sends the actor's weights, unless servers have them; see `dschat.rollouts.engine.RolloutEngine`."""
        self._wait_for_pending()
        if not (same_weights and self._update_count):
            self._send_weights(actor)
        yield self._sample

    def begin(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        seeds: Sequence[int],
        *,
        limits: Sequence[int] | None = None,
    ) -> PendingResponses:
        """Like a `ResponseSampler`, with the weights of the last session, but does not wait for the responses."""
        requests = make_requests(prompts, sampling, seeds, limits)
        finish = partial(to_generation, prompts, sampling=sampling, limits=limits)
        self._pending = PendingResponses(self._client, requests, self._version, self._needs.timeout, finish)
        return self._pending

    def _sample(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        seeds: Sequence[int],
        *,
        limits: Sequence[int] | None = None,
    ) -> Generation:
        return self.begin(prompts, sampling, seeds, limits=limits).finish()

    def _wait_for_pending(self) -> None:
        """Waits until the servers have sampled what they were asked for before. Every rank must call it."""
        if self._pending is not None:
            with stopping_together():
                self._pending.wait()
            self._pending = None

    def _send_weights(self, actor: TrainedPolicy) -> None:
        """Sends the actor's weights to all servers. Every rank must call it. Raises UserError on all of them."""
        self._update_count += 1

        # Only the main process talks to the servers about weights.
        problem = problem_in(lambda: self._open_update(actor)) if is_main() else None
        raise_on_all_ranks(problem)

        # Gathering a weight needs every rank, also after a problem.
        for name, weight in plain_weights(actor):
            send = self._send
            if send is not None and problem is None:
                problem = problem_in(lambda: send(name, weight, self._version))  # noqa: B023  # called at once
        if is_main() and problem is None:
            problem = problem_in(lambda: self._post("/finish_weight_update", {"weight_version": self._version}))
        raise_on_all_ranks(problem)

    def _open_update(self, actor: TrainedPolicy) -> None:
        """Checks the servers, introduces the run at its first update, and opens the update."""
        infos = [self._client.info(url) for url in self._client.urls]
        for url, info in zip(self._client.urls, infos, strict=True):
            self._check(url, info, actor)

        # From here on, servers refuse to sample until the update is complete.
        self._post("/update_weight_version", {"new_version": self._version + LOADING})
        if self._send is None:
            self._send = self._introduce(actor, infos)
        self._post("/start_weight_update", {})

    def _post(self, path: str, body: Json) -> None:
        self._client.post_to_all(path, body, self._version if path in WEIGHT_ROUTES else None)

    def _introduce(self, actor: TrainedPolicy, infos: Sequence[ServerInfo]) -> SendWeight:
        """Tells the servers what they must know of the run; returns how its weights are sent."""
        missing = missing_ids_of(actor.module.inner)
        run_info: Json = {
            "run": self._run,
            "temperature": self._needs.temperature,
            "transposed": sorted(transposed_matrices(actor)),
            "missing": [] if missing is None else missing.tolist(),
        }
        self._post("/collective_rpc", {"method": "discard_update"})  # of an earlier run that ended in the middle
        self._post("/init_weight_transfer_engine", {"init_info": run_info})

        gpus_on_both_sides = on_gpu() and all(info.device == "cuda" for info in infos)
        if not gpus_on_both_sides:
            return partial(send_over_http, self._client)
        if find_spec("vllm") is None:
            logger.warning("%s: weights go over HTTP, since vLLM is not installed here. NCCL is much faster.", FLAG)
            return partial(send_over_http, self._client)
        return NcclTransport(self._client, run_info, [info.workers for info in infos]).send

    def _check(self, url: str, info: ServerInfo, actor: TrainedPolicy) -> None:
        """Raises UserError if a server does not fit the run, ServerLost if it has lost the run's weights."""
        if self._send is not None and not info.version.startswith(f"{self._run}."):
            raise other_weights(url, info.version, f"{self._run}.{self._update_count - 1}")

        dtype = dtype_name(next(actor.module.parameters()).dtype)
        requirements = (
            ("backend", info.backend, BACKEND, "Start it with dschat serve-vllm."),
            ("vocabulary", info.vocabulary, self._needs.vocabulary, "Start it with --model of the actor."),
            ("dtype", info.dtype, dtype, "Start it with --dtype of the run."),
        )
        for name, value, required, remedy in requirements:
            if value != required:
                raise UserError(f"{FLAG} {url}: its {name} is {value}, not {required}. {remedy}")
        if info.max_tokens < self._needs.max_tokens:
            raise UserError(
                f"{FLAG} {url}: a prompt with its response may have {info.max_tokens} tokens there, but "
                f"{self._needs.max_tokens} here. Start it with --max_tokens {self._needs.max_tokens}."
            )


def on_gpu() -> bool:
    """Whether this process computes on a GPU."""
    return device().type == "cuda"


def problem_in(action: Callable[[], object]) -> UserError | None:
    """Runs an action; returns its error, so that this rank can continue to the next collective with the others."""
    try:
        action()
    except UserError as error:
        return error
    except (OSError, RuntimeError) as error:  # raised by sockets and by NCCL
        return ServerLost(
            f"{FLAG}: the weights cannot be sent by NCCL: {type(error).__name__}: {error}. Stop the servers, which may"
            " still wait for them, start them (dschat serve-vllm) and give the same command again; a run that has"
            " begun resumes with --resume_from_checkpoint. With NCCL_DEBUG=INFO, NCCL says more."
        )
    return None
