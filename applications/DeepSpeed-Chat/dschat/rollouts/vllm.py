# SPDX-License-Identifier: Apache-2.0
"""Sampling by vLLM inside the training processes, asleep while the models train.

Each rank has an engine of its own or, with --vllm_tensor_parallel k, each k neighbours share one: vLLM's external
launcher divides the process group in the same way. All of them hand it the same rows in the same order, those of all
k, and take their own out of what it draws.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers.pytorch_utils import Conv1D

from dschat.errors import UserError
from dschat.models.engines import TrainedPolicy
from dschat.models.lora import lora_config, merged
from dschat.models.save import as_published
from dschat.rollouts.engine import Draw, Generation, assemble, pad_prompts
from dschat.rollouts.sampling import Sampling
from dschat.run.distributed import device, gather_objects, neighbours, rank
from dschat.run.state import random_states, set_random_states

if TYPE_CHECKING:
    from vllm import LLM
    from vllm.outputs import CompletionOutput

logger = logging.getLogger("dschat")

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

        Args:
            model: folder or hub name of the actor's config; the weights come from the actor.
            max_tokens: of the longest prompt and response together.
            gpu_memory: share of a GPU's memory for weights and cache.
            tensor_parallel: neighbouring ranks that share an engine; it divides their number.
        """
        self._share, self._group = tensor_parallel, neighbours(tensor_parallel)
        self._model, self._max_tokens, self._gpu_memory = model, max_tokens, gpu_memory
        self._llm: LLM | None = None
        self._packed: list[nn.Module] = []  # layers to be packed anew on a CPU: the head and experts
        self._on_gpu = device().type == "cuda"
        self._temperature = 1.0

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
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

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
        (model,) = llm.apply_model(lambda model: model)
        self._packed = [m for m in model.modules() if isinstance(m, ParallelLMHead) or hasattr(m, "w13_weight")]
        self._divide_logits(model)
        return llm

    def _divide_logits(self, model: nn.Module) -> None:
        """Puts the temperature of the draws into the model."""
        compute_logits: Callable[[Tensor], Tensor] = model.compute_logits  # type: ignore[assignment]

        def divided(hidden: Tensor) -> Tensor:
            return compute_logits(hidden).float().div_(self._temperature)

        model.compute_logits = divided  # type: ignore[assignment]

    def _push(self, llm: LLM, actor: TrainedPolicy) -> None:
        """Gives the engine the actor's weights. Every rank must call it. Raises UserError where they do not arrive."""
        columns: dict[str, Tensor] = {}
        weights = plain_weights(actor, columns, self._share)
        llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
        if not self._on_gpu:
            # On a CPU, layers compute with a packed copy of their weight. That of a head tied to the embedding is not
            # made anew, since no weight of the head's own name comes; and new weights of experts are not packed.
            for layer in self._packed:
                kernel = getattr(layer.quant_method, "moe_kernel", None)
                method = layer.quant_method if kernel is None else kernel.fused_experts
                method.process_weights_after_loading(layer)  # type: ignore[union-attr,operator]
        place = rank() % self._share
        (wrong,) = llm.apply_model(lambda model: wrong_layers(model, columns, place, _gathered))
        for name in sorted(set().union(*self._of_neighbours(wrong))):
            raise UserError(
                f"--rollout_engine vllm: {name} computes with other weights than the actor's, which vLLM was given. "
                "Use --rollout_engine continuous, and please report the model."
            )

    def _of_neighbours(self, item: T) -> list[T]:
        """What each rank that shares the engine passes, in their order."""
        return [item] if self._share == 1 else gather_objects(item, self._group)

    def _draw(self, prompts: Sequence[Sequence[int]], sampling: Sampling, seeds: Sequence[int]) -> Generation:
        """See `dschat.rollouts.engine.Draw`."""
        from vllm import SamplingParams

        assert self._llm is not None  # a session is open
        self._temperature = sampling.temperature or 1.0
        shared = self._of_neighbours([(list(ids), seed) for ids, seed in zip(prompts, seeds, strict=True)])
        first = sum(len(rows) for rows in shared[: rank() % self._share])
        rows = [row for of_rank in shared for row in of_rank]
        parameters = [
            SamplingParams(
                temperature=1.0 if sampling.temperature else 0.0,
                top_k=sampling.top_k,
                top_p=sampling.top_p,
                seed=seed,
                max_tokens=sampling.max_new_tokens,
                stop_token_ids=list(sampling.end_ids),
                ignore_eos=True,  # only those ids end a response
                logit_bias=dict.fromkeys(sampling.forbidden, -torch.inf),
                logprobs=0,  # of the drawn token alone
                flat_logprobs=True,
                detokenize=False,
            )
            for _, seed in rows
        ]
        inputs = [{"prompt_token_ids": ids} for ids, _ in rows]
        outputs = self._llm.generate(inputs, parameters, use_tqdm=False)
        own = outputs[first : first + len(prompts)]
        return _drawn(prompts, [output.outputs[0] for output in own], sampling)


def _drawn(prompts: Sequence[Sequence[int]], responses: Sequence[CompletionOutput], sampling: Sampling) -> Generation:
    """The responses of the prompts, in their order, as tensors on the device."""
    tokens = pad_sequence([torch.tensor(list(r.token_ids)) for r in responses], True, sampling.end_ids[0])
    rollout = assemble(pad_prompts(prompts, sampling.pad_id, device()), tokens.to(device()), sampling)
    logprobs = pad_sequence([torch.tensor(r.logprobs.logprobs) for r in responses], True).to(device())
    bad_rows = ~logprobs.isfinite().all(1)
    return Generation(replace(rollout, drawn_logprobs=logprobs), None, bad_rows)


def plain_weights(
    actor: TrainedPolicy, columns: dict[str, Tensor] | None = None, shares: int = 1
) -> Iterator[tuple[str, Tensor]]:
    """Whole weights of the model that the actor computes with, adapters merged in. Every rank must go through it.

    Each tensor is a copy: vLLM keeps those of a fused layer (q, k and v, for instance) until it has them all, while
    those of `whole_weights` are gone when the next is asked for.

    `columns` gets, by name, weights (shares, outputs) of every matrix outside experts: those of the first input of
    each share, where inputs are divided; see `wrong_layers`.
    """
    inner = actor.module.inner
    own = ((name.removeprefix("inner."), tensor.clone()) for name, tensor in actor.whole_weights())
    whole = own if lora_config(inner) is None else merged(inner, own)
    conv1d = {name.removesuffix(".base_layer") for name, m in inner.named_modules() if isinstance(m, Conv1D)}
    for name, tensor in as_published(inner, whole):
        if columns is not None and tensor.dim() == 2 and ".experts." not in name:
            inputs = tensor if name.removesuffix(".weight") in conv1d else tensor.T
            columns[name] = inputs[:: max(1, len(inputs) // shares)][:shares].clone()
        yield name, tensor


def _gathered(part: Tensor) -> Tensor:
    """The parts of all ranks that share the engine, beside each other."""
    from vllm.distributed import tensor_model_parallel_all_gather

    whole: Tensor = tensor_model_parallel_all_gather(part)
    return whole


@torch.no_grad()
def wrong_layers(
    model: nn.Module, columns: Mapping[str, Tensor], place: int = 0, gathered: Callable[[Tensor], Tensor] = _gathered
) -> list[str]:
    """Layers of vLLM's model, by name, that compute with other weights than they were given. All ranks that share it
    must call it.

    A layer whose first input is 1 and all others 0 returns the weights of that input: without rounding, and however it
    keeps them. They are compared in the order of their size, since some families' rows are moved. Of a layer whose
    inputs are divided among ranks, each compares its own first one; where outputs are, all parts are put together.
    Layers with numbers that are not finite, and those whose weights have other names, are left out.

    Args:
        model: vLLM's, this rank's part of it.
        columns: see `plain_weights`.
        place: of this rank among those.
        gathered: puts the outputs (N,) of all of them together.
    """
    names: dict[int, str] = {}
    wrong, compared = [], 0
    for name, layer in model.named_modules():
        method, weight = getattr(layer, "quant_method", None), getattr(layer, "weight", None)
        parent, dot, last = names.setdefault(id(weight), name).rpartition(".")  # a tied head's is the embedding's
        fused = getattr(model, "packed_modules_mapping", {}).get(last, [last])
        parts = [f"{parent}{dot}{part}.weight" for part in fused]
        if method is None or weight is None or not columns.keys() >= set(parts):
            continue
        size = getattr(layer, "input_size", None) or layer.embedding_dim
        own_inputs = getattr(layer, "input_size_per_partition", size)
        found = method.apply(layer, torch.eye(1, own_inputs).to(weight))[0]
        given = torch.cat([columns[part][place * (own_inputs < size)] for part in parts])
        if getattr(layer, "tp_size", 1) > 1 and own_inputs == size:
            found = gathered(found)
        if getattr(layer, "num_kv_head_replicas", 1) > 1:  # several ranks hold the same keys and values
            found, given = found.unique(), given.unique()
        compared += 1
        given = given.to(found)
        if found.isfinite().all() and not torch.equal(found[: len(given)].sort()[0], given.sort()[0]):
            wrong.append(name)
    if not compared:
        logger.warning("--rollout_engine vllm: its layers have other names than the actor's and are not compared.")
    return wrong
