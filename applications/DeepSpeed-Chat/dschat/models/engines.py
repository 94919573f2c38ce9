# SPDX-License-Identifier: Apache-2.0
"""What trainers, scores and checkpoints need of a model under an engine; `dschat.engine` fulfils it."""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from torch import Tensor

from dschat.models.policy import PolicyModel
from dschat.models.scalar import ScalarModel


class PolicyForward(Protocol):
    """Log-probs and entropies of tokens; see `PolicyModel.forward`."""

    def __call__(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        targets: Tensor | int,
        temperature: float = 1.0,
        with_entropy: bool = True,
    ) -> tuple[Tensor, Tensor]: ...


class ScalarForward(Protocol):
    """A number at every position (B, T); see `ScalarModel.forward`."""

    def __call__(self, input_ids: Tensor, attention_mask: Tensor | None) -> Tensor: ...


class PolicyEngine(PolicyForward, Protocol):
    """A policy that is not trained: the reference."""

    @property
    def module(self) -> PolicyModel: ...


class ModelEngine(Protocol):
    """A model under an engine, trained or not: its modes and its weights. DeepSpeed's own method names."""

    @property
    def module(self) -> PolicyModel | ScalarModel: ...

    def train(self) -> None:
        """Training mode."""

    def eval(self) -> None:
        """Inference mode."""

    def rehearsing(self) -> AbstractContextManager[None]:
        """Inside, passes, `backward` and `step` take the memory that training takes, and leave nothing behind.

        That is the memory of activations and gradients and of what the first update adds: Adam's moments and the sums
        of gradients. Every rank must enter it, before the first update since the start of the process.
        """

    def whole_weights(self, instead: Mapping[str, Tensor] | None = None) -> Iterator[tuple[str, Tensor]]:
        """Name and whole tensor of every weight, one at a time, on this rank's device, valid until the next is asked
        for.

        `instead` holds `Trained.parts` of other values, to be put together in the place of these weights. Every rank
        must call it, and go through all of it.
        """


class Scalar(ScalarForward, ModelEngine, Protocol):
    """A scalar model that is not trained: the reward model."""

    @property
    def module(self) -> ScalarModel: ...


class Trained(ModelEngine, Protocol):
    """A model with its optimiser and schedule."""

    grad_norm: float  # of the last update, before clipping
    # DeepSpeed left the last update out though nothing is wrong: fp16's loss scale was too large.
    skipped: bool
    # What was not finite in the last update, which was left out: "losses" or "gradients" of this process, or "gradient
    # norms" over all; None where it was applied.
    nonfinite: str | None

    @property
    def layers(self) -> str:
        """How decoder layers are computed: eager, compiled, or why they are not compiled although they were to be."""

    @property
    def learning_rate(self) -> float:
        """That of the next update."""

    def check_reduction(self) -> None:
        """Has the next update compare the gradients that the engine holds with those that processes computed, before
        it is applied; later ones, too, for parameters whose gradient was zero. Every rank must call it; `step` raises
        UserError where they differ.
        """

    def begin_update(self, micro_batches: int) -> None:
        """Says how many micro-batches the next update has on every rank, where the flags do not say it."""

    def backward(self, loss: Tensor) -> None:
        """Adds the gradient of one micro-batch's share of the update's loss (0-d)."""

    def step(self) -> None:
        """Ends a micro-batch; the last of an update applies the optimiser and the schedule."""

    def save_checkpoint(self, folder: Path) -> None:
        """Writes weights, optimiser and schedule into a folder. Every rank must call it."""

    def load_checkpoint(self, folder: Path, scratch: Path | None = None) -> None:
        """Restores what `save_checkpoint` wrote; by way of `scratch` if on other ranks. Every rank must call it."""

    def parts(self) -> dict[str, Tensor]:
        """By name, this rank's part of every weight that trains: flat, in the same memory. Nothing is gathered.

        Together the parts of all ranks are the weight, in their order; see `dschat.run.distributed.own_part`.
        """


class TrainedPolicy(PolicyEngine, Trained, Protocol):
    """The actor, or the model of step 1."""

    def __call__(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        targets: Tensor | int,
        temperature: float = 1.0,
        with_entropy: bool = True,
        smoothing: float = 0.0,
        position_ids: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]: ...

    @property
    def module(self) -> PolicyModel: ...

    def gathered(self) -> AbstractContextManager[PolicyModel]:
        """The module with whole weights on this process, for generation."""


class TrainedScalar(Scalar, Trained, Protocol):
    """The critic, or the reward model of step 2."""

    @property
    def module(self) -> ScalarModel: ...
