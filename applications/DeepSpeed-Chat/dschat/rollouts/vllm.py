# SPDX-License-Identifier: Apache-2.0
"""Sampling by vLLM inside the training processes, asleep while the models train.

Each rank has an engine of its own or, with --vllm_tensor_parallel k, each k neighbours share one: vLLM's external
launcher divides the process group in the same way. All of them hand it the same rows in the same order, those of all
k, and take their own out of what it draws.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from dschat.base.errors import UserError
from dschat.models.engines import TrainedPolicy
from dschat.models.lora import base_of
from dschat.models.vocabulary import missing_ids_of
from dschat.rollouts.engine import Draw, Generation, assemble, pad_prompts
from dschat.rollouts.sampling import Sampling
from dschat.rollouts.vllm_weights import Temperature, inputs_first, noting, pack_again, plain_weights, wrong_layers
from dschat.run.distributed import device, gather_objects, neighbours, rank
from dschat.run.state import random_states, set_random_states

if TYPE_CHECKING:
    from vllm import LLM

T = TypeVar("T")

CPU_CACHE = 1 << 28  # bytes of keys and values on a CPU
BATCHED_TOKENS = 8192  # the most prompt tokens of a step
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine lives in this process, so that weights need no way to it
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the threads are the trainer's, too
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}


class VllmEngine:
    """A rollout engine that lives beside the trainer.

    vLLM gives log-probs of what its sampler draws from ("processed": masked, truncated), or of the logits without the
    temperature ("raw"). The trainer's are those of the whole softmax(logits / temperature). So the temperature is put
    into the model, as a last division of its logits, and vLLM's sampler keeps a temperature of 1: then the raw ones
    are the trainer's.
    """

    def __init__(self, model: str, max_tokens: int, gpu_memory: float, tensor_parallel: int = 1) -> None:
        """Starts nothing yet; the first session does.

        `model` is the folder or hub name of the actor's config; the weights come from the actor. `max_tokens` is of
        the longest prompt and response together, `gpu_memory` the share of a GPU's memory for weights and cache.
        `tensor_parallel` neighbouring ranks share an engine; it divides their number.
        """
        self._share, self._group = tensor_parallel, neighbours(tensor_parallel)
        self._model, _ = base_of(model, "--actor_model_name_or_path")  # an adapter's folder has no config
        self._max_tokens, self._gpu_memory = max_tokens, gpu_memory
        self._llm: LLM | None = None
        self._on_gpu = device().type == "cuda"
        self._temperature: Temperature | None = None

    @contextmanager
    def session(self, actor: TrainedPolicy) -> Iterator[Draw]:
        """The engine awake with the actor's weights; see `dschat.rollouts.engine.RolloutEngine`."""
        states = random_states()
        try:
            llm = self._awake(actor)
            try:
                yield self._draw
            finally:
                if self._on_gpu:
                    llm.sleep(level=2)  # frees the weights as well
        finally:
            set_random_states(states)  # vLLM seeds and uses the global ones

    def _awake(self, actor: TrainedPolicy) -> LLM:
        is_new = self._llm is None
        if self._llm is None:
            self._llm = self._start(actor)
        llm = self._llm
        assert self._temperature is not None  # the engine has been started
        self._temperature.missing = missing_ids_of(actor.module.inner)
        sleeps = self._on_gpu and not is_new
        if sleeps:
            llm.wake_up(tags=["weights"])
        self._push(llm, actor)
        if sleeps:
            llm.wake_up(tags=["kv_cache"])
        return llm

    def _start(self, actor: TrainedPolicy) -> LLM:
        """An engine with random weights. Every rank must call it. Raises UserError."""
        os.environ.update({name: value for name, value in ENVIRONMENT.items() if name not in os.environ})
        from vllm import LLM

        try:
            llm = LLM(
                self._model,
                skip_tokenizer_init=True,
                trust_remote_code=False,
                generation_config="vllm",  # not the checkpoint's, whose defaults would leak in
                dtype=next(actor.module.parameters()).dtype,
                load_format="dummy",
                max_model_len=self._max_tokens,
                # A prompt that is split over steps would use up numbers of its row's seed, and rows depend on others.
                enable_chunked_prefill=False,
                max_num_batched_tokens=max(BATCHED_TOKENS, self._max_tokens),
                enable_prefix_caching=False,  # old keys and values would outlive the weights
                distributed_executor_backend="external_launcher",
                tensor_parallel_size=self._share,
                enforce_eager=not self._on_gpu,
                enable_sleep_mode=self._on_gpu,
                gpu_memory_utilization=self._gpu_memory,
                kv_cache_memory_bytes=None if self._on_gpu else CPU_CACHE,
                logprobs_mode="raw_logprobs",
                disable_log_stats=True,
            )
        except ValueError as error:  # too little memory, or a model that vLLM does not know
            raise UserError(
                f"--rollout_engine vllm: vLLM does not start with {self._model}: {error}. Change "
                "--vllm_gpu_memory or --vllm_tensor_parallel, or use --rollout_engine continuous."
            ) from error
        # When the engine is collected, it would end the whole process group, which is the trainer's.
        llm.llm_engine.engine_core._finalizer.detach()
        (self._temperature,) = llm.apply_model(Temperature)
        return llm

    def _push(self, llm: LLM, actor: TrainedPolicy) -> None:
        """Gives the engine the actor's weights. Every rank must call it. Raises UserError where they do not arrive."""
        columns: dict[str, Tensor] = {}
        weights = noting(plain_weights(actor), columns, inputs_first(actor), self._share)
        llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
        if not self._on_gpu:
            llm.apply_model(pack_again)
        place = rank() % self._share
        (wrong,) = llm.apply_model(lambda model: wrong_layers(model, columns, place))
        for name in sorted(set().union(*self._of_neighbours(wrong))):
            raise UserError(
                f"--rollout_engine vllm: {name} computes with other weights than the actor's, which vLLM was given. "
                "Use --rollout_engine continuous, and please report the model."
            )

    def _of_neighbours(self, item: T) -> list[T]:
        """What each rank that shares the engine passes, in their order."""
        return [item] if self._share == 1 else gather_objects(item, self._group)

    def _draw(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        seeds: Sequence[int],
        *,
        limits: Sequence[int] | None = None,
    ) -> Generation:
        from vllm import SamplingParams

        assert self._llm is not None and self._temperature is not None  # a session is open
        self._temperature.value = sampling.temperature or 1.0
        most = sampling.limits(len(prompts), limits)
        shared = self._of_neighbours(
            [(list(ids), seed, limit) for ids, seed, limit in zip(prompts, seeds, most, strict=True)]
        )
        first = sum(len(rows) for rows in shared[: rank() % self._share])
        rows = [row for of_rank in shared for row in of_rank]
        parameters = [SamplingParams(**sampling_parameters(sampling, seed, limit)) for _, seed, limit in rows]
        inputs = [{"prompt_token_ids": ids} for ids, _, _ in rows]
        outputs = self._llm.generate(inputs, parameters, use_tqdm=False)
        own = outputs[first : first + len(prompts)]
        responses = [(list(r.token_ids), r.logprobs.logprobs) for r in (output.outputs[0] for output in own)]
        return generation_of(prompts, responses, sampling, limits)


def sampling_parameters(sampling: Sampling, seed: int, limit: int) -> dict[str, object]:
    """Of a row of so many tokens at most, as vLLM's SamplingParams takes them. The temperature is in the model."""
    return {
        "temperature": 1.0 if sampling.temperature else 0.0,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "seed": seed,
        "max_tokens": limit,
        "stop_token_ids": list(sampling.end_ids),
        "ignore_eos": True,  # only those ids end a response
        "logit_bias": dict.fromkeys(sampling.forbidden, -math.inf),
        "logprobs": 0,  # of the drawn token alone
        "flat_logprobs": True,
        "detokenize": False,
    }


def generation_of(
    prompts: Sequence[Sequence[int]],
    responses: Sequence[tuple[list[int], list[float]]],
    sampling: Sampling,
    limits: Sequence[int] | None = None,
) -> Generation:
    """Tokens and log-probs of a response to each prompt, as tensors on the device."""
    tokens = pad_sequence([torch.tensor(ids) for ids, _ in responses], True, sampling.end_ids[0])
    rollout = assemble(pad_prompts(prompts, sampling.pad_id, device()), tokens.to(device()), sampling, limits)
    logprobs = pad_sequence([torch.tensor(numbers) for _, numbers in responses], True).to(device())
    bad_rows = ~logprobs.isfinite().all(1)
    return Generation(replace(rollout, drawn_logprobs=logprobs), None, bad_rows)
