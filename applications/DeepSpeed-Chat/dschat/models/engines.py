# SPDX-License-Identifier: Apache-2.0
"""Protocols of models under an engine, for trainers, scores and checkpoints; `dschat.engine` implements them."""

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

    def __call__(self, input_ids: Tensor, attention_mask: Tensor | None, raw: bool = False) -> Tensor: ...


class PolicyEngine(PolicyForward, Protocol):
    """A policy under an engine; used alone for the reference, which is not trained."""

    @property
    def module(self) -> PolicyModel: ...


class ModelEngine(Protocol):
    """A model under an engine, trained or frozen; method names are DeepSpeed's."""

    @property
    def module(self) -> PolicyModel | ScalarModel: ...

    def train(self) -> None:
        """Training mode."""

    def eval(self) -> None:
        """Inference mode."""

    def rehearsing(self) -> AbstractContextManager[None]:
        """Inside, passes (if trained, also `backward` and `step`) use the memory of training and change nothing.

        Activations, gradients, Adam's moments and the sums of gradients are allocated as by a first update. Every rank
        must enter it, before the first update since the start of the process.
        """

    def whole_weights(self, instead: Mapping[str, Tensor] | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yields name and whole tensor of every weight, on this rank's device; valid until the next is asked for.

        Every rank must exhaust the iterator.

        Args:
            instead: values to yield in the place of the weights of these names, a moving average say: this rank's
                parts of them, cut as by `Trained.parts`.
        """


class Scalar(ScalarForward, ModelEngine, Protocol):
    """A scalar model under an engine; used alone for the reward model, which is not trained."""

    @property
    def module(self) -> ScalarModel: ...


class Trained(ModelEngine, Protocol):
    """A model with its optimiser and schedule."""

    grad_norm: float  # of the last update, before clipping
    skipped: bool  # the last update was skipped because fp16's loss scale was too large, which is ordinary
    # What was not finite in the last update, which was skipped: "losses" or "gradients" of this process, or "gradient
    # norms" over all; None if the update was applied, or `skipped`.
    nonfinite: str | None

    @property
    def layers(self) -> str:
        """How decoder layers are computed: "eager", "compiled", or why they are not compiled despite --compile."""

    @property
    def learning_rate(self) -> float:
        """The learning rate of the next update."""

    def check_reduction(self) -> None:
        """Makes the next updates compare the engine's gradients with those that the processes computed.

        The comparison is made in `step`, which raises UserError if they differ; parameters with zero gradients are
        compared again in later updates. Every rank must call it.
        """

    def begin_update(self, micro_batches: int) -> None:
        """Sets the number of micro-batches of the next update, if it does not follow from the flags."""

    def backward(self, loss: Tensor) -> None:
        """Adds the gradient of one micro-batch's share of the update's loss (0-d)."""

    def step(self) -> None:
        """Ends a micro-batch; the last of an update applies the optimiser and the schedule."""

    def save_checkpoint(self, folder: Path) -> None:
        """Writes weights, optimiser and schedule into a folder. Every rank must call it."""

    def load_checkpoint(self, folder: Path, is_resized: bool = False) -> None:
        """Restores a checkpoint; `is_resized`: another number of ranks wrote it. Every rank must call it."""

    def parts(self) -> dict[str, Tensor]:
        """This rank's part of every trained weight by name: a flat view, nothing is gathered.

        Concatenated over ranks, the parts are the weight; see `dschat.run.distributed.own_part`.
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
