# SPDX-License-Identifier: Apache-2.0
"""Responses that vLLM servers sample while this process goes on.

A thread sends the requests and collects the answers. All ranks wait for them together.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import httpx2

from dschat.base.errors import ServerLost, UserError
from dschat.base.servers import open_async_client
from dschat.rollouts.engine import Generation
from dschat.run.distributed import gather_objects, rank, world_size
from dschat.run.stop import is_stopping_here, raise_if_stopped_here, stopping_together
from dschat.vllm.client import FLAG, ServerClient, is_healthy, lost, raise_on_all_ranks
from dschat.vllm.requests import ResponseRequest, VllmResponse

logger = logging.getLogger(__name__)

MAX_CONNECTIONS = 256  # of one process to all servers; each takes a file descriptor
ROWS_PER_SERVER = 256  # responses that a server samples at a time, of all processes; a GPU is busy with that many
HEALTH_INTERVAL = 5.0  # seconds between two health checks of a server that owes responses
STOP_PATIENCE = 20.0  # seconds that a run which must stop waits for a rollout sampled ahead
POLL_INTERVAL = 0.1  # seconds between two checks for a signal


class PendingResponses:
    """One response to each of this rank's prompts, which servers sample while this process goes on."""

    def __init__(
        self,
        client: ServerClient,
        requests: Sequence[ResponseRequest],
        version: str,
        timeout: float,
        to_generation: Callable[[Sequence[VllmResponse]], Generation],
    ) -> None:
        """Sends the requests in a thread, which collects the responses.

        Args:
            client: the servers.
            requests: one per response.
            version: of the weights to sample with.
            timeout: longest time in seconds that a server may go without finishing a response.
            to_generation: puts the responses, in the order of the requests, together.
        """
        self._client = client
        self._requests = requests
        self._version = version
        self._timeout = timeout
        self._to_generation = to_generation
        self._at_once = requests_at_once(len(requests), len(client.urls), world_size())
        self._responses: dict[int, VllmResponse] = {}
        self._problem: UserError | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def finish(self) -> Generation:
        """Waits for the responses. Every rank must call it.

        Raises UserError on every rank if a server refuses, ServerLost if one is lost, Stopped soon after a signal.
        """
        with stopping_together():
            problem = self.wait()
        raise_on_all_ranks(problem)
        return self._generation()

    def settle(self) -> Generation | None:
        """Waits for the responses, after a signal for at most STOP_PATIENCE seconds; None if some do not come.

        Every rank must call it.
        """
        problem = self._wait_despite_signals()
        if problem is not None:
            logger.warning("the rollout that was sampled ahead is left out: %s", problem)
        if any(gather_objects(problem is not None)):
            return None
        return self._generation()

    def _generation(self) -> Generation:
        in_order = [self._responses[number] for number in range(len(self._requests))]
        return self._to_generation(in_order)

    def wait(self) -> UserError | None:
        """Waits until all responses are finished; returns what went wrong, if anything did.

        Raises Stopped soon after a signal, on this rank alone.
        """
        while self._thread.is_alive():
            raise_if_stopped_here()
            self._thread.join(POLL_INTERVAL)
        return self._problem

    def _wait_despite_signals(self) -> UserError | None:
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
        """Deals the requests to the servers, one more whenever a server has finished a response.

        Raises the first problem of any server.
        """
        urls = self._client.urls
        waiting = deque(range(len(self._requests)))
        servers = []
        for number in range(len(urls)):
            url = urls[(rank() + number) % len(urls)]  # ranks with few requests begin with different servers
            servers.append(self._generate_on(url, waiting))
        results = await asyncio.gather(*servers, return_exceptions=True)
        problems = [result for result in results if isinstance(result, BaseException)]
        # A lost server comes last: resuming would not help against the other problems.
        problems.sort(key=lambda problem: isinstance(problem, ServerLost))
        if problems:
            raise problems[0]

    async def _generate_on(self, url: str, waiting: deque[int]) -> None:
        """Has a server sample what waits, and empties `waiting` after a problem, so that the other servers end, too.

        Args:
            url: address of the server.
            waiting: numbers of the requests that no server has yet.
        """
        running: dict[asyncio.Task[VllmResponse], int] = {}
        async with open_async_client(url, FLAG, None, self._client.headers, self._at_once) as http:
            try:
                await self._keep_busy(http, url, waiting, running)
            finally:
                waiting.clear()
                for task in running:
                    task.cancel()
                await asyncio.gather(*running, return_exceptions=True)

    async def _keep_busy(
        self, http: httpx2.AsyncClient, url: str, waiting: deque[int], running: dict[asyncio.Task[VllmResponse], int]
    ) -> None:
        """Sends requests as responses arrive, until there are none left. Raises ServerLost if the server hangs."""
        last_finished = time.monotonic()
        failed_checks = 0
        while waiting or running:
            while waiting and len(running) < self._at_once:
                number = waiting.popleft()
                response = self._client.generate(http, url, self._requests[number], self._version)
                running[asyncio.create_task(response)] = number
            done, _ = await asyncio.wait(
                running, timeout=min(HEALTH_INTERVAL, self._timeout), return_when=asyncio.FIRST_COMPLETED
            )
            for task in done:
                self._responses[running.pop(task)] = task.result()
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


def requests_at_once(requests: int, servers: int, processes: int) -> int:
    """Most requests that one process has at one server at a time; its others wait for whichever server is free first.

    At the beginning, the servers get equal shares.

    Args:
        requests: of this process.
        servers: that all processes ask.
        processes: of the run.
    """
    share = math.ceil(requests / servers)
    return max(1, min(share, ROWS_PER_SERVER // processes, MAX_CONNECTIONS // servers))


def _hangs(url: str, timeout: float) -> ServerLost:
    return ServerLost(
        f"{FLAG} {url} has finished no response for {timeout:g} s (--vllm_timeout): its engine hangs, or its"
        " responses take longer. Start it again and go on with --resume_from_checkpoint, or raise --vllm_timeout."
    )
