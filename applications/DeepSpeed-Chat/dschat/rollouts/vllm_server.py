# SPDX-License-Identifier: Apache-2.0
"""Sampling by vLLM servers (--vllm_url), which have GPUs of their own and get the actor's weights over the network.

Prompts and responses go over HTTP, each process's own. Weights go from the main process to all servers, by vLLM's
weight transfer: an NCCL broadcast where both sides have GPUs, else one by one over HTTP. They carry a version, which
every answer must name.
"""

from __future__ import annotations

import itertools
import logging
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec

from dschat.base.errors import UserError
from dschat.models.engines import TrainedPolicy
from dschat.models.vocabulary import missing_ids_of
from dschat.rollouts.engine import Draw, Generation
from dschat.rollouts.sampling import Sampling
from dschat.rollouts.vllm import generation_of, sampling_parameters
from dschat.rollouts.vllm_client import (
    FLAG,
    FRESH,
    LOADING,
    WEIGHT_ROUTES,
    About,
    Answer,
    BackgroundGeneration,
    Json,
    Lost,
    ResponseRequest,
    Servers,
    other_weights,
)
from dschat.rollouts.vllm_send import NcclSender, WeightShape, dtype_name, pieces
from dschat.rollouts.vllm_weights import inputs_first, plain_weights
from dschat.run.distributed import broadcast_object, device, gather_objects, is_main, rank
from dschat.run.stop import raise_if_stopped_here, stopping_together

logger = logging.getLogger("dschat")

TRIES = 5  # to send weights or to draw a rollout, each time with servers that have come back
PAUSE = 0.5  # seconds between two looks whether they have
BACKEND = "dschat"  # how servers take weights, see rollouts/vllm_worker.py


@dataclass(frozen=True)
class ServerNeeds:
    """What servers must be able to do for a run."""

    vocabulary: int  # tokens of the actor
    max_tokens: int  # of the longest prompt and response together
    temperature: float  # of the draws
    patience: float  # seconds to wait for a server that has gone
    timeout: float = 1200.0  # seconds in which a server must finish one more response


class VllmServers:
    """A rollout engine elsewhere. Seeds decide its draws, as those of `dschat.rollouts.vllm.VllmEngine`."""

    def __init__(self, urls: Sequence[str], needs: ServerNeeds) -> None:
        """Takes addresses without a path; asks nothing yet, the first session does. Every rank must make one."""
        self._servers, self._needs = Servers(urls), needs
        self._run, self._count = broadcast_object(secrets.token_hex(4)), 0
        self._problem: Exception | None = None  # what has gone wrong in sending, on the main process
        self._introduction: Json = {}
        self._is_known = False  # whether the servers have been told of the run, and the last weights have reached them
        self._nccl: NcclSender | None = None
        self._shapes: list[WeightShape] = []  # of the weights, for NCCL
        self._asked: Asked | None = None  # what servers may still be drawing

    @property
    def _version(self) -> str:
        return f"{self._run}.{self._count}"

    @contextmanager
    def session(self, actor: TrainedPolicy) -> Iterator[Draw]:
        """The servers with the actor's weights; see `dschat.rollouts.engine.RolloutEngine`."""
        self._wait_for_responses()
        self._send(actor)
        yield self._draw_of(actor)

    @contextmanager
    def session_again(self, actor: TrainedPolicy) -> Iterator[Draw]:
        """The servers with the weights of the last session; see `dschat.rollouts.engine.AheadEngine`."""
        self._wait_for_responses()
        if not self._is_known:
            self._send(actor)
        yield self._draw_of(actor)

    def _wait_for_responses(self) -> None:
        """Until the servers have drawn what was asked of them before. Every rank must call it."""
        if self._asked is not None:
            with stopping_together():
                self._asked.drawing.wait()
            self._asked = None

    def _draw_of(self, actor: TrainedPolicy) -> Draw:
        def draw(
            prompts: Sequence[Sequence[int]],
            sampling: Sampling,
            seeds: Sequence[int],
            *,
            limits: Sequence[int] | None = None,
        ) -> Generation:
            return self.begin(prompts, sampling, seeds, limits=limits).finish(actor)

        return draw

    def begin(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        seeds: Sequence[int],
        *,
        limits: Sequence[int] | None = None,
    ) -> Asked:
        """Lets servers draw, as `dschat.rollouts.engine.Draw`, with the weights of the last session. Does not wait."""
        most = sampling.limits(len(prompts), limits)
        parameters = [sampling_parameters(sampling, *row) for row in zip(seeds, most, strict=True)]
        rows = {n: ResponseRequest(list(prompts[n]), of_row) for n, of_row in enumerate(parameters)}
        self._asked = Asked(self, rows, sampling, limits)
        return self._asked

    def drawing(self, rows: dict[int, ResponseRequest]) -> BackgroundGeneration:
        """Begins to draw rows of this rank with the weights that were sent last."""
        return BackgroundGeneration(self._servers, rows, rank(), self._version, self._needs.timeout)

    def send_again(self, lost: Lost, actor: TrainedPolicy) -> None:
        """Once a server that has gone is back. Every rank must call it. Raises UserError on all."""
        self._wait_until_back(lost)
        self._send(actor)

    def _wait_until_back(self, lost: Lost) -> None:
        """Every rank must call it. Raises UserError on all where a server stays away."""
        patience, problem = self._needs.patience, None
        with stopping_together():
            if is_main():
                logger.warning("%s %s. Waiting for it, for up to %g s (--vllm_patience).", FLAG, lost, patience)
                problem = self._return(patience)
        if _of_all_ranks(problem) is not None:
            raise UserError(
                f"{FLAG} {lost}, and did not come back within {patience:g} s (--vllm_patience). Start it again "
                "(dschat serve-vllm), and go on with --resume_from_checkpoint."
            )

    def _return(self, patience: float) -> Lost | UserError | None:
        """Waits until all servers are there. Raises Stopped on this rank alone."""
        end = time.monotonic() + patience
        while True:
            raise_if_stopped_here()
            time.sleep(PAUSE)
            try:
                self._servers.about()
            except UserError as error:
                return error
            except Lost as error:
                if time.monotonic() > end:
                    return error
            else:
                return None

    def _send(self, actor: TrainedPolicy) -> None:
        """Gives all servers the actor's weights. Every rank must call it. Raises UserError on all."""
        for tries in itertools.count(1):
            self._problem = None
            workers = broadcast_object(self._meet(actor) if is_main() else [])
            lost = _of_all_ranks(self._problem)
            if lost is None:
                self._count += 1
                if workers:
                    self._broadcast(actor, workers)
                else:
                    self._post_weights(actor)
                lost = _of_all_ranks(self._problem)
            self._is_known = lost is None
            if lost is None:
                return
            _require_hope(tries, lost)
            self._wait_until_back(lost)

    def _meet(self, actor: TrainedPolicy) -> list[int]:
        """Looks at the servers, and introduces the run to those that do not know it. Returns how many GPUs each has,
        where all sides can use NCCL; else nothing.
        """
        try:
            abouts = self._servers.about()
            for url, about in zip(self._servers.urls, abouts, strict=True):
                self._check(url, about, actor)
        except (Lost, UserError) as error:
            self._problem = error
            return []
        # From here on, they draw with nobody's weights.
        self._post("/update_weight_version", {"new_version": f"{self._run}.{self._count + 1}{LOADING}"})
        if not (self._is_known and all(about.version.startswith(self._run) for about in abouts)):
            self._nccl = None
            names = sorted(inputs_first(actor))
            self._post("/collective_rpc", {"method": "forget_update"})
            missing = missing_ids_of(actor.module.inner)
            self._introduction = {
                "run": self._run,
                "temperature": self._needs.temperature,
                "inputs_first": names,
                "missing": [] if missing is None else missing.tolist(),
            }
            self._post("/init_weight_transfer_engine", {"init_info": self._introduction})
        on_gpus = on_gpu() and all(about.device == "cuda" for about in abouts)
        if on_gpus and find_spec("vllm") is None and self._count == 0:
            logger.warning("%s: weights go over HTTP, since vLLM is not installed here. NCCL is much faster.", FLAG)
        return [about.workers for about in abouts] if on_gpus and find_spec("vllm") is not None else []

    def _check(self, url: str, about: About, actor: TrainedPolicy) -> None:
        needs = self._needs
        if self._count and not about.version.startswith((self._run, FRESH)):
            raise other_weights(url, about.version, self._version)
        own = {
            "backend": BACKEND,
            "vocabulary": needs.vocabulary,
            "dtype": dtype_name(next(actor.module.parameters()).dtype),
        }
        remedies = {
            "backend": "Start it with dschat serve-vllm.",
            "vocabulary": "Start it with --model of the actor.",
            "dtype": "Start it with --dtype of the run.",
        }
        for name, wanted in own.items():
            if getattr(about, name) != wanted:
                raise UserError(f"{FLAG} {url}: its {name} is {getattr(about, name)}, not {wanted}. {remedies[name]}")
        if about.max_tokens < needs.max_tokens:
            raise UserError(
                f"{FLAG} {url}: a prompt with its response may have {about.max_tokens} tokens there, but "
                f"{needs.max_tokens} here. Start it with --max_tokens {needs.max_tokens}."
            )

    def _post_weights(self, actor: TrainedPolicy) -> None:
        """Over HTTP, from the main process; the others go through the weights with it."""
        self._post("/start_weight_update", {})
        for name, weight in plain_weights(actor):
            for piece in pieces(name, weight) if self._sends else ():
                self._post("/update_weights", {"update_info": {**piece, "version": self._version}})
        self._post("/finish_weight_update", {"weight_version": self._version})

    def _broadcast(self, actor: TrainedPolicy, workers: Sequence[int]) -> None:
        """The same by NCCL. The first time, it goes through the weights to know their shapes."""
        if not self._shapes:
            self._shapes = [WeightShape.of(name, weight) for name, weight in plain_weights(actor)]
        with self._noting_problems():
            if self._sends:
                self._nccl = self._nccl or NcclSender(self._servers, self._introduction, workers)
        self._post("/start_weight_update", {})
        if self._sends and self._nccl is not None:
            self._nccl.begin(self._shapes, self._version)
        for _, weight in plain_weights(actor):
            with self._noting_problems():
                if self._sends and self._nccl is not None:
                    self._nccl.send(weight)
        with self._noting_problems():
            if self._sends and self._nccl is not None:
                self._nccl.finish()
        self._post("/finish_weight_update", {"weight_version": self._version})

    @property
    def _sends(self) -> bool:
        """Whether this is the main process, and nothing has gone wrong so far."""
        return is_main() and self._problem is None

    def _post(self, path: str, bodies: Json) -> None:
        """To all servers, if it is this process that sends."""
        with self._noting_problems():
            if self._sends:
                self._servers.post(path, bodies, self._version if path in WEIGHT_ROUTES else None)

    @contextmanager
    def _noting_problems(self) -> Iterator[None]:
        """What goes wrong inside is noted, so that this process goes through the weights with the others."""
        try:
            yield
        except (Lost, UserError) as error:
            self._problem, self._nccl = error, None
        except (OSError, RuntimeError) as error:  # of sockets and of NCCL
            self._problem, self._nccl = UserError(f"{FLAG}: the weights cannot be sent by NCCL: {error}"), None


class Asked:
    """A response to each of this rank's prompts, which servers are drawing."""

    def __init__(
        self, engine: VllmServers, rows: dict[int, ResponseRequest], sampling: Sampling, limits: Sequence[int] | None
    ) -> None:
        self._engine, self._rows, self._sampling, self._limits = engine, rows, sampling, limits
        self.drawing = engine.drawing(rows)  # of all rows, or of those that are left
        self._answers: dict[int, Answer] = {}

    def finish(self, actor: TrainedPolicy) -> Generation:
        """Waits for it. Every rank must call it.

        Where a server has gone meanwhile, waits until it is back; it then gets the weights of now, and draws with
        these what is left. Raises UserError, on every rank, where a server refuses or stays away; Stopped soon after a
        signal.
        """
        for tries in itertools.count(1):
            with stopping_together():
                problem = self.drawing.wait()
            self._answers |= self.drawing.answers
            lost = _of_all_ranks(problem)
            if lost is None:
                break
            _require_hope(tries, lost)
            self._engine.send_again(lost, actor)
            self.drawing = self._engine.drawing({n: row for n, row in self._rows.items() if n not in self._answers})
        return self._generation()

    def settle(self) -> Generation | None:
        """Waits for it whatever signals come, after one for a while; None where it could not be finished. Every rank
        must call it.
        """
        problem = self.drawing.settle()
        self._answers |= self.drawing.answers
        return None if any(gather_objects(problem is not None)) else self._generation()

    def _generation(self) -> Generation:
        answers = [self._answers[n] for n in self._rows]
        return generation_of([row.prompt for row in self._rows.values()], answers, self._sampling, self._limits)


def on_gpu() -> bool:
    """Whether this process computes on one."""
    return device().type == "cuda"


def _require_hope(tries: int, lost: Lost) -> None:
    """Raises UserError where it has been tried often enough, with servers that came back each time."""
    if tries == TRIES:
        raise UserError(f"{FLAG} {lost}. Tried {TRIES} times. The server's own log may say more.")


def _of_all_ranks(problem: Exception | None) -> Lost | None:
    """What is lost on some rank. Every rank must call it. Raises UserError on all where a server refuses one."""
    told = None if problem is None else (isinstance(problem, Lost), str(problem))
    found = sorted(one for one in gather_objects(told) if one is not None)
    if found and not found[0][0]:
        raise UserError(found[0][1])
    return Lost(found[0][1]) if found else None
