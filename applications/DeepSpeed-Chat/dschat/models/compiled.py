# SPDX-License-Identifier: Apache-2.0
"""torch.compile for a model's decoder layers, each by itself (``--compile``).

The layers of a model share their code, so one compiled graph serves all of them, and compiling takes seconds, not
minutes. Sizes are dynamic: micro-batches of any number of rows (from two on) and any width share a graph; a single row
has one of its own. A model's training passes, its passes without gradients and its decoding steps have a graph each.

Where the compiler refuses a model, that is said once, and its layers run as they are.
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
from dschat.models.layers import layers_of
from dschat.models.side_by_side import Backend, common_layout, lay_side_by_side, merging

logger = logging.getLogger(__name__)

# Graphs of one function. All layers of all models count together: training, scoring and decoding, with a mask and
# without, one row and several.
RECOMPILE_LIMIT = 64
CODE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
BACKEND = "inductor"
EAGER_LOWERING = "force_non_lazy_backward_lowering"
P = ParamSpec("P")
R = TypeVar("R")


class Compiler:
    """The compiler of one model's layers."""

    def __init__(self, model_type: str, backend: str = BACKEND, warns: bool = True) -> None:
        """`warns`: a refusal is said; one process of several is enough for that."""
        self._model_type = model_type
        self._warns = warns
        self.backend = backend
        self.refusal: str | None = None  # why the model's layers are not compiled
        self._is_paused = False
        self._merged_layout: tuple[int, ...] | None = None  # of the weights that merged layers were compiled for

    @property
    def words(self) -> str:
        """Whether the layers are compiled, for the run's record."""
        return "compiled" if self.refusal is None else f"not compiled: {self.refusal}"

    def refuse(self, why: str) -> None:
        """Leaves the model's layers as they are from now on, and says so once."""
        if self.refusal is None and self._warns:
            message = "--compile: the layers of %s are not compiled from now on: %s"
            logger.warning(message, self._model_type, why)
        self.refusal = self.refusal or why

    @property
    def is_active(self) -> bool:
        """Whether functions run compiled now."""
        return self.refusal is None and not self._is_paused

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, everything runs as it is.

        For dispatch modes: torch.compile leaves a function alone for good once it was called under one.
        """
        before = self._is_paused
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = before

    def compile(self, function: Callable[P, R], backend: Backend | str | None = None) -> Compiled[P, R]:
        """A function that is compiled, with sizes that may change, when it is first called."""
        return Compiled(self, function, backend or self.backend)

    def may_merge(self, layers: Sequence[nn.Module]) -> bool:
        """Whether merged linear layers would read the right memory.

        The weights of all layers must lie as they did when the first step was compiled.
        """
        layout = common_layout(layers)
        if self._merged_layout is None:
            self._merged_layout = layout
        return layout is not None and layout == self._merged_layout

    @cached_property
    def merging_backend(self) -> Backend:
        """A backend that computes linear layers of one input as one matrix product; see `side_by_side`."""
        return merging(torch._dynamo.lookup_backend(self.backend))


class Compiled(Generic[P, R]):
    """A function that runs compiled until its compiler refuses the model.

    Gradient checkpointing calls a function again in the backward pass and expects the same tensors to be saved. The
    second call therefore runs as the first did, though the compiler may have refused another layer in between.
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
    """What a layer's call does: it stands in the place that `nn.Module.compile` uses."""

    def __init__(self, compiler: Compiler, layer: nn.Module, index: int) -> None:
        self.compiler = compiler
        self._layer = layer
        self._index = index
        self._call = compiler.compile(layer._call_impl)
        self._merged_step = compiler.compile(layer._call_impl, compiler.merging_backend)

    def __call__(self, *args: object, **kwargs: object) -> object:
        cache = next((value for value in (*args, *kwargs.values()) if isinstance(value, Cache)), None)
        if cache is None:
            return self._call(*args, **kwargs)
        # A graph of the whole cache would hold for one layer only: the layer's number would be in it. In a decoding
        # step of fixed shapes our own cache hands every layer its part.
        step_layers: Sequence[object] | None = getattr(cache, "step_layers", None)
        if step_layers is None:
            return self._layer._call_impl(*args, **kwargs)
        layer_cache = step_layers[self._index]
        args = tuple(layer_cache if value is cache else value for value in args)
        kwargs = {name: layer_cache if value is cache else value for name, value in kwargs.items()}
        step = self._merged_step if getattr(cache, "merges_linears", False) else self._call
        return step(*args, **kwargs)


def compile_layers(model: PreTrainedModel, backend: str = BACKEND, warns: bool = True) -> Compiler:
    """Has a model's decoder layers compiled, each when it is first called.

    Passes without a cache of keys and values are compiled, and decoding steps of fixed shapes; with any other cache,
    layers run as they are.

    Args:
        model: a Hugging Face model with a head.
        backend: of torch.compile.
        warns: whether this process says that a model cannot be compiled.
    """
    prepare_compiler()
    compiler = Compiler(model.config.model_type, backend, warns)
    count = int(model.config.get_text_config().num_hidden_layers)
    parent, layers = layers_of(getattr(model, model.base_model_prefix), count)
    if parent is None or layers is None:
        compiler.refuse(f"it is not known where a {type(model).__name__} keeps its layers")
        return compiler
    lay_side_by_side(layers)
    for index, layer in enumerate(layers):
        layer._compiled_call_impl = CompiledLayer(compiler, layer, index)
    for module in parent.children():
        # Beside the layers stand the last norm and what turns positions into angles: many small kernels.
        if module is not layers and not isinstance(module, (nn.Embedding, nn.Linear, nn.Dropout)):
            module._compiled_call_impl = compiler.compile(module._call_impl)
    return compiler


def compiler_of(model: PreTrainedModel) -> Compiler | None:
    """The compiler of a model's layers; None where they run as they are."""
    for module in model.modules():
        call = module._compiled_call_impl
        if isinstance(call, CompiledLayer):
            return None if call.compiler.refusal is not None else call.compiler
    return None


def compiled_layers(model: PreTrainedModel) -> list[nn.Module]:
    """A model's compiled layers."""
    return [module for module in model.modules() if isinstance(module._compiled_call_impl, CompiledLayer)]


@contextmanager
def uncompiled(model: PreTrainedModel) -> Iterator[None]:
    """Inside, a model's layers run as they are."""
    compiler = compiler_of(model)
    if compiler is None:
        yield
        return
    with compiler.paused():
        yield


def prepare_compiler() -> None:
    """Settings of torch.compile for this process."""
    dynamo = torch._dynamo.config
    dynamo.recompile_limit = max(dynamo.recompile_limit, RECOMPILE_LIMIT)
    dynamo.fail_on_recompile_limit_hit = True  # in place of running as it is in silence
    # Two sizes that are equal when a graph is made need not be so later.
    torch.fx.experimental._config.use_duck_shape = False
    # The backward pass is compiled with the forward pass, so that what fails fails before anything is computed.
    # torch 2.8 compiles it at the first backward pass; what fails there ends the run.
    if hasattr(torch._functorch.config, EAGER_LOWERING):
        setattr(torch._functorch.config, EAGER_LOWERING, True)
    if CODE_VARIABLE not in os.environ:
        folder = cache_home() / "compiled"
        with suppress(OSError):  # torch then takes a temporary folder
            folder.mkdir(parents=True, exist_ok=True)
            if os.access(folder, os.W_OK | os.X_OK):
                os.environ[CODE_VARIABLE] = str(folder)


def reason_of(error: Exception) -> str:
    """The lines of a compiler's message that say which part of it failed, and why."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:2]) or type(error).__name__
