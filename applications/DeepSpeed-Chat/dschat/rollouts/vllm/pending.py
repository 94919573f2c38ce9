# SPDX-License-Identifier: Apache-2.0
"""Responses that vLLM servers sample while this process goes on.

A thread sends the requests and collects the answers (`BackgroundGeneration`); `PendingResponses` waits for them on all
ranks together, and makes them a `Generation`.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections.abc import Mapping, Sequence

from dschat.base.errors import ServerLost, UserError
from dschat.base.servers import open_async_client
from dschat.rollouts.engine import Generation
from dschat.rollouts.sampling import Sampling
from dschat.rollouts.vllm.client import FLAG, MAX_CONNECTIONS, ServerClient, is_healthy, lost, raise_on_all_ranks
from dschat.rollouts.vllm.requests import ResponseRequest, VllmResponse, to_generation
from dschat.run.distributed import gather_objects
from dschat.run.stop import is_stopping_here, raise_if_stopped_here, stopping_together

logger = logging.getLogger(__name__)

HEALTH_INTERVAL = 5.0  # seconds between two health checks of a server that owes responses
STOP_PATIENCE = 20.0  # seconds that a run which must stop waits for a rollout sampled ahead
POLL_INTERVAL = 0.1  # seconds between two checks for a signal


class PendingResponses:
    """One response to each of this rank's prompts, which servers are sampling."""

    def __init__(
        self,
        generation: BackgroundGeneration,
        requests: Sequence[ResponseRequest],
        sampling: Sampling,
        limits: Sequence[int] | None,
    ) -> None:
        self.generation = generation
        self._requests = requests
        self._sampling = sampling
        self._limits = limits

    def finish(self) -> Generation:
        """Waits for the responses. Every rank must call it.

        Raises UserError on every rank if a server refuses, ServerLost if one is lost, Stopped soon after a signal.
        """
        with stopping_together():
            problem = self.generation.wait()
        raise_on_all_ranks(problem)
        return self._to_generation()

    def settle(self) -> Generation | None:
        """Waits for the responses, after a signal for at most STOP_PATIENCE seconds; None if some do not come.

        Every rank must call it.
        """
        problem = self.generation.wait_despite_signals()
        if problem is not None:
            logger.warning("the rollout that was sampled ahead is left out: %s", problem)
        if any(gather_objects(problem is not None)):
            return None
        return self._to_generation()

    def _to_generation(self) -> Generation:
        prompts = [request.prompt for request in self._requests]
        return to_generation(prompts, self.generation.responses, self._sampling, self._limits)


class BackgroundGeneration:
    """Responses that the servers sample while this process goes on; a thread collects them."""

    def __init__(
        self,
        client: ServerClient,
        requests: Sequence[ResponseRequest],
        first_server: int,
        version: str,
        timeout: float,
    ) -> None:
        """Sends the requests.

        Args:
            client: the servers, which get the requests in turn.
            requests: one per response.
            first_server: number of the server that gets the first request.
            version: of the weights to sample with.
            timeout: longest time in seconds that a server may go without finishing a response.
        """
        self._client = client
        self._requests = requests
        self._first_server = first_server
        self._version = version
        self._timeout = timeout
        self._responses: dict[int, VllmResponse] = {}
        self._problem: UserError | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def responses(self) -> list[VllmResponse]:
        """All responses in the order of the requests, once they are finished."""
        return [self._responses[number] for number in range(len(self._requests))]

    def wait(self) -> UserError | None:
        """Waits until all responses are finished; returns what went wrong, if anything did.

        Raises Stopped soon after a signal, on this rank alone.
        """
        while self._thread.is_alive():
            raise_if_stopped_here()
            self._thread.join(POLL_INTERVAL)
        return self._problem

    def wait_despite_signals(self) -> UserError | None:
        """Like `wait`, but a signal only limits the wait to STOP_PATIENCE seconds."""
        deadline = math.inf
        while self._thread.is_alive():
            if is_stopping_here():
                deadline = min(deadline, time.monotonic() + STOP_PATIENCE)
            if time.monotonic() > deadline:
                return ServerLost("responses are still being sampled")
            self._thread.join(POLL_INTERVAL)
        return self._problem

    def _run(self) -> None:
        try:
            asyncio.run(self._generate_on_all())
        except UserError as error:
            self._problem = error
        except BaseException as error:  # otherwise `wait` would take a thread that failed for one that has finished
            logger.exception("sampling on vLLM servers failed")
            self._problem = UserError(f"{FLAG}: sampling failed: {error!r}.")

    async def _generate_on_all(self) -> None:
        """Deals the requests to the servers; raises the first problem of any of them."""
        urls = self._client.urls
        requests_by_url: dict[str, dict[int, ResponseRequest]] = {url: {} for url in urls}
        for number, request in enumerate(self._requests):
            url = urls[(self._first_server + number) % len(urls)]
            requests_by_url[url][number] = request
        servers = []
        for url, requests in requests_by_url.items():
            servers.append(self._generate_on(url, requests))
        results = await asyncio.gather(*servers, return_exceptions=True)
        problems = [result for result in results if isinstance(result, BaseException)]
        # A lost server comes last: resuming would not help against the other problems.
        problems.sort(key=lambda problem: isinstance(problem, ServerLost))
        if problems:
            raise problems[0]

    async def _generate_on(
        self,
        url: str,
        requests: Mapping[int, ResponseRequest],
    ) -> None:
        """Sends the requests of one server and collects its responses; after a problem, the others are cancelled."""
        connections = max(1, MAX_CONNECTIONS // len(self._client.urls))
        number_of_task: dict[asyncio.Task[VllmResponse], int] = {}
        async with open_async_client(url, FLAG, None, self._client.headers, connections) as http:
            for number, request in requests.items():
                task = asyncio.create_task(self._client.generate(http, url, request, self._version))
                number_of_task[task] = number
            try:
                await self._collect(url, number_of_task)
            finally:
                for task in number_of_task:
                    task.cancel()
                await asyncio.gather(*number_of_task, return_exceptions=True)

    async def _collect(
        self,
        url: str,
        number_of_task: Mapping[asyncio.Task[VllmResponse], int],
    ) -> None:
        """Waits for the responses of one server. Raises ServerLost if it hangs or does not answer."""
        pending = set(number_of_task)
        last_finished = time.monotonic()
        failed_checks = 0
        while pending:
            done, pending = await asyncio.wait(
                pending, timeout=min(HEALTH_INTERVAL, self._timeout), return_when=asyncio.FIRST_COMPLETED
            )
            for task in done:
                self._responses[number_of_task[task]] = task.result()
            if done:
                last_finished = time.monotonic()
                failed_checks = 0
                continue
            if time.monotonic() - last_finished > self._timeout:
                raise _hangs(url, self._timeout)
            # A machine that was switched off does not close its connections.
            failed_checks = 0 if await is_healthy(url) else failed_checks + 1
            if failed_checks > 1:
                raise lost(url, "does not answer")


def _hangs(url: str, timeout: float) -> ServerLost:
    return ServerLost(
        f"{FLAG} {url} has finished no response for {timeout:g} s (--vllm_timeout): its engine hangs, or its"
        " responses take longer. Start it again and go on with --resume_from_checkpoint, or raise --vllm_timeout."
    )
