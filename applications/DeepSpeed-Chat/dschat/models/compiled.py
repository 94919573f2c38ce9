# SPDX-License-Identifier: Apache-2.0
"""torch.compile for a model's decoder layers, one layer at a time (``--compile``).

The layers of a model share their code, so one compiled graph serves all of them, and compiling takes seconds, not
minutes. Sizes are dynamic: micro-batches of two or more rows and any width share a graph; a single row has its own.
Training passes, passes without gradients and decoding steps each have a graph.

If the compiler fails on a model, a warning is logged once and the layers run eagerly from then on.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from typing import Generic, ParamSpec, TypeVar

import torch
from torch import nn
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from dschat.base.cache_home import cache_home
from dschat.models.layers import find_layers
from dschat.models.side_by_side import Backend, common_layout, lay_side_by_side, merging_backend, plain_linear_problem

logger = logging.getLogger(__name__)

# Maximum number of graphs per function. The layers of all models share one: its graphs are those of training, scoring
# and decoding, with and without a mask, of one row and several.
RECOMPILE_LIMIT = 64
CODE_CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
BACKEND = "inductor"
EAGER_LOWERING = "force_non_lazy_backward_lowering"
P = ParamSpec("P")
R = TypeVar("R")


class Compiler:
    """The compiler of one model's layers."""

    def __init__(self, model_type: str, backend: str = BACKEND, warns: bool = True) -> None:
        """`warns`: log a warning if compilation fails; one process of several is enough."""
        self._model_type = model_type
        self._warns = warns
        self.backend = backend
        self.layers: list[nn.Module] = []  # the model's decoder layers, set by `compile_layers`
        self.refusal: str | None = None  # why the model's layers are not compiled
        self.merge_refusal: str | None = None  # why decoding steps do not merge linear layers, set by `may_merge`
        self._is_paused = False
        self._merged_layout: tuple[int, ...] | None = None  # weight layout that merged layers were compiled for

    @property
    def words(self) -> str:
        """Whether the layers are compiled, and their linear layers merged while sampling, for the run's record."""
        if self.refusal is not None:
            return f"not compiled: {self.refusal}"
        if self.merge_refusal is not None:
            return f"compiled; linear layers are not merged in decoding steps: {self.merge_refusal}"
        return "compiled"

    def refuse(self, reason: str) -> None:
        """Runs the model's layers eagerly from now on, and logs the reason once."""
        if self.refusal is not None:
            return
        self.refusal = reason
        if self._warns:
            logger.warning(
                "--compile: the layers of %s are not compiled from now on: %s", self._model_type, self.refusal
            )

    @property
    def is_active(self) -> bool:
        """Whether functions currently run compiled."""
        return self.refusal is None and not self._is_paused

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Runs everything inside eagerly.

        Needed under dispatch modes: torch.compile never compiles a function that was once called under one.
        """
        was_paused = self._is_paused
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = was_paused

    def compile(self, function: Callable[P, R], backend: Backend | str | None = None) -> Compiled[P, R]:
        """Wraps a function so that it is compiled on its first call, with dynamic sizes."""
        return Compiled(self, function, backend or self.backend)

    def may_merge(self) -> bool:
        """Whether decoding steps may compute linear layers that share an input as one product, see `side_by_side`.

        The compiled graph reads all layers' weights at the offsets that the first step was compiled for. `words` gives
        the reason if it may not.
        """
        layout = common_layout(self.layers)
        if self._merged_layout is None:
            self._merged_layout = layout
        self.merge_refusal = plain_linear_problem()
        if layout is None:
            self.merge_refusal = "the weights of a layer do not lie side by side in memory"
        elif layout != self._merged_layout:
            self.merge_refusal = "the weights have moved in memory since the first step was compiled"
        return self.merge_refusal is None

    @cached_property
    def merging_backend(self) -> Backend:
        """A backend that computes linear layers that share an input (query, key, value) as one matrix product."""
        return merging_backend(torch._dynamo.lookup_backend(self.backend))


class Compiled(Generic[P, R]):
    """A function that runs compiled until compilation fails anywhere in its model.

    Gradient checkpointing calls a function again in the backward pass and expects the same tensors to be saved. The
    second call therefore runs compiled exactly if the first did, even if compilation of another layer failed in
    between.
    """

    def __init__(self, compiler: Compiler, function: Callable[P, R], backend: Backend | str) -> None:
        self._compiler = compiler
        self._function = function
        self._compiled = torch.compile(function, dynamic=True, backend=backend)
        self._trained_compiled = False  # whether the last forward pass with gradients ran compiled

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        if is_recomputing():
            runs_compiled = self._trained_compiled
        else:
            runs_compiled = self._compiler.is_active
            if torch.is_grad_enabled():
                self._trained_compiled = runs_compiled
        if not runs_compiled:
            return self._function(*args, **kwargs)
        try:
            return self._compiled(*args, **kwargs)
        except (TorchDynamoException, FailOnRecompileLimitHit) as error:
            self._compiler.refuse(reason_of(error))
        self._trained_compiled = False
        return self._function(*args, **kwargs)


def is_recomputing() -> bool:
    """Whether gradient checkpointing repeats a forward pass: one with gradients, inside a backward pass."""
    return torch.is_grad_enabled() and torch._C._current_graph_task_id() != -1


class CompiledLayer:
    """Replaces a layer's call, through the attribute that `nn.Module.compile` sets."""

    def __init__(self, compiler: Compiler, layer: nn.Module, index: int) -> None:
        self.compiler = compiler
        self._layer = layer
        self._index = index
        self._call = compiler.compile(layer._call_impl)
        self._merged_step = compiler.compile(layer._call_impl, compiler.merging_backend)

    def __call__(self, *args: object, **kwargs: object) -> object:
        caches = []
        for value in (*args, *kwargs.values()):
            if isinstance(value, Cache):
                caches.append(value)
        if not caches:
            return self._call(*args, **kwargs)
        # A graph over the whole cache would be specialised on the layer's index. In a decoding step of fixed shapes,
        # our own cache gives every layer its part instead.
        cache = caches[0]
        step_layers: Sequence[object] | None = getattr(cache, "step_layers", None)
        if step_layers is None:
            return self._layer._call_impl(*args, **kwargs)
        layer_cache = step_layers[self._index]
        args = tuple(layer_cache if value is cache else value for value in args)
        kwargs = {name: layer_cache if value is cache else value for name, value in kwargs.items()}
        step = self._merged_step if getattr(cache, "merges_linears", False) else self._call
        return step(*args, **kwargs)


def compile_layers(model: PreTrainedModel, backend: str = BACKEND, warns: bool = True) -> Compiler:
    """Has a model's decoder layers compiled, each on its first call.

    Passes without a key-value cache and decoding steps of fixed shapes run compiled; with any other cache, layers run
    eagerly.

    Args:
        model: a Hugging Face model with a head.
        backend: backend of torch.compile.
        warns: whether this process logs that a model cannot be compiled.
    """
    prepare_compiler()
    compiler = Compiler(model.config.model_type, backend, warns)
    decoder = find_layers(model)
    if decoder is None:
        compiler.refuse(f"it is not known where a {type(model).__name__} keeps its layers")
        return compiler
    compiler.layers = list(decoder.layers)
    lay_side_by_side(compiler.layers)
    for index, layer in enumerate(compiler.layers):
        layer._compiled_call_impl = CompiledLayer(compiler, layer, index)
    for module in decoder.parent.children():
        # The last norm and the rotary embedding launch many small kernels.
        if module is not decoder.layers and not isinstance(module, (nn.Embedding, nn.Linear, nn.Dropout)):
            module._compiled_call_impl = compiler.compile(module._call_impl)
    return compiler


def prepare_compiler() -> None:
    """Configures torch.compile for this process."""
    dynamo = torch._dynamo.config
    dynamo.recompile_limit = max(dynamo.recompile_limit, RECOMPILE_LIMIT)
    dynamo.fail_on_recompile_limit_hit = True  # by default torch would run the function eagerly without a word
    # Sizes that are equal when a graph is traced may differ later.
    torch.fx.experimental._config.use_duck_shape = False
    # Compile the backward pass together with the forward pass, so that a failure comes before anything is computed.
    # torch 2.8 compiles it at the first backward pass, where a failure ends the run.
    if hasattr(torch._functorch.config, EAGER_LOWERING):
        setattr(torch._functorch.config, EAGER_LOWERING, True)
    if CODE_CACHE_VARIABLE not in os.environ:
        folder = cache_home() / "compiled"
        with suppress(OSError):  # torch then uses a temporary folder
            folder.mkdir(parents=True, exist_ok=True)
            if os.access(folder, os.W_OK | os.X_OK):
                os.environ[CODE_CACHE_VARIABLE] = str(folder)


def reason_of(error: Exception) -> str:
    """The first lines of a compiler's message: which part of it failed, and why."""
    lines = []
    for line in str(error).splitlines():
        if line.strip():
            lines.append(line.strip())
    return " ".join(lines[:2]) or type(error).__name__
