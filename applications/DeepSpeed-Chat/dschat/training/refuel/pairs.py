# SPDX-License-Identifier: Apache-2.0
"""REFUEL: the log-ratios of two replies to a state shall differ as their rewards-to-go do, times η."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from dschat.base.errors import UserError
from dschat.data.collate import collate_preferences
from dschat.data.dialogue_pairs import RegressionExample
from dschat.models.engines import TrainedPolicy
from dschat.run.distributed import device
from dschat.run.stop import raise_if_stopped, stop_signals
from dschat.settings.refuel import RefuelConfig
from dschat.training.iteration import eval_size
from dschat.training.reference import FOLDER, pair_logprobs, pair_texts, with_logprobs, with_reference
from dschat.training.selfcheck import TOLERANCE, check_modes, check_weights
from dschat.training.supervised.algorithm import RowStatistics, Task, statistics_of_rows
from macro_actions.losses import regression_loss

Reference = Callable[[TrainedPolicy, Sequence[RegressionExample]], list[RegressionExample]]


class RefuelTask(Task[RegressionExample, TrainedPolicy]):
    """Regresses the relative rewards of pairs of replies."""

    name = "refuel"

    def __init__(
        self,
        train: Sequence[RegressionExample],
        eval: Sequence[RegressionExample],
        pad_id: int,
        eta: float,
        temperature: float,
        reference: Reference | None = None,
        self_checks: bool = True,
    ) -> None:
        """Takes pairs, η of `regression_loss`, and what divides the logits, then and now.

        `reference` adds the log-probs of the policy before training; None where the pairs have them.
        `self_checks` compare them with the policy's before the first update.
        """
        self.train, self.eval = train, eval
        self._pad_id, self._eta, self._temperature, self._reference = pad_id, eta, temperature, reference
        self._self_checks = self_checks

    def prepare(self, engine: TrainedPolicy) -> None:
        """Raises UserError where log-probs that were kept are not those of this policy."""
        if self._reference is None:
            return
        with stop_signals():
            pairs = [*self.train, *self.eval]
            known, count = self._reference(engine, pairs), len(self.train)
            self.train, self.eval = known[:count], known[count:]
            if self._self_checks:
                self.check_start(engine, self.train[:2])
            raise_if_stopped()

    def texts(self, examples: Sequence[RegressionExample]) -> list[tuple[int, int]]:
        return pair_texts(examples)

    def with_placeholders(self, examples: Sequence[RegressionExample]) -> Sequence[RegressionExample]:
        return with_logprobs(examples, torch.zeros(len(examples), 2))

    def loss(
        self, engine: TrainedPolicy, examples: Sequence[RegressionExample], count: Tensor | float
    ) -> tuple[Tensor, dict[str, Tensor]]:
        return self._loss_of(*self._ratios(engine, examples), count)

    def row_statistics(self, engine: TrainedPolicy, examples: Sequence[RegressionExample]) -> RowStatistics:
        chosen, rejected, differences = self._ratios(engine, examples)
        losses = []
        for row in torch.arange(len(examples), device=chosen.device)[:, None]:
            losses.append(self._loss_of(chosen[row], rejected[row], differences[row], 1.0))
        return statistics_of_rows(losses, [1] * len(examples))

    def _ratios(self, engine: TrainedPolicy, examples: Sequence[RegressionExample]) -> tuple[Tensor, Tensor, Tensor]:
        """Log-ratios of the chosen and of the rejected replies, and the differences of their rewards, (B,) each."""
        chosen, rejected = pair_logprobs(engine, examples, self._pad_id, self._temperature)
        old_chosen, old_rejected = torch.tensor([e.ref_logprobs for e in examples], device=chosen.device).T
        # Rewards are subtracted in double precision: they are often large and close together.
        differences = torch.tensor([e.chosen_reward - e.rejected_reward for e in examples], device=chosen.device)
        return chosen - old_chosen, rejected - old_rejected, differences

    def _loss_of(
        self, chosen: Tensor, rejected: Tensor, differences: Tensor, count: Tensor | float
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss and what is reported of it; see `_ratios` for the three tensors."""
        loss, stats = regression_loss(chosen, rejected, differences, self._eta, count)
        named = {name: stats[name] for name in ("kl", "agreement", "ratio", "ratio_squared")}
        named["kl_chosen"] = chosen.detach().sum() / count
        named["kl_rejected"] = rejected.detach().sum() / count
        return loss, named

    @torch.no_grad()
    def self_check(self, engine: TrainedPolicy, examples: Sequence[RegressionExample]) -> None:
        """Padding and training mode change nothing: a pair alone has the log-probs that it has beside a longer one."""
        together = pair_logprobs(engine, examples, self._pad_id, self._temperature)
        for n, example in enumerate(examples):
            alone = pair_logprobs(engine, [example], self._pad_id, self._temperature)
            for x, y in zip(together, alone, strict=True):
                self._require_close(engine, float(x[n]), float(y[0]), example, "alone and in a batch")
        options, every = (examples, self._pad_id, self._temperature), torch.ones(1, dtype=torch.bool, device=device())
        check_modes(engine, "log-probs", every, lambda: torch.cat(pair_logprobs(engine, *options)))

    @torch.no_grad()
    def check_start(self, engine: TrainedPolicy, examples: Sequence[RegressionExample]) -> None:
        """Before the first update the policy is the one before training: D = 0, and the loss is the mean of (η ΔR)²;
        else UserError.
        """
        engine.eval()
        chosen, rejected = pair_logprobs(engine, examples, self._pad_id, self._temperature)
        for example, *now in zip(examples, chosen.tolist(), rejected.tolist(), strict=True):
            for x, y in zip(now, example.ref_logprobs or (), strict=True):
                self._require_close(engine, x, y, example, "now and when the reference was computed")

    def _require_close(self, engine: TrainedPolicy, x: float, y: float, example: RegressionExample, when: str) -> None:
        """Raises UserError where two sums of log-probs differ by more than rounding of each token explains."""
        tokens = max(len(example.chosen_ids), len(example.rejected_ids))
        # Rounding errors of single tokens add up like a random walk.
        tolerance = 2 * TOLERANCE[next(engine.module.parameters()).dtype] * max(1.0, math.sqrt(tokens))
        check_weights(engine, x - y)
        if not abs(x - y) <= tolerance:
            raise UserError(
                f"self-check: the log-probs of a reply of {tokens} tokens differ {when}: {x:.6g} and {y:.6g} "
                f"(rounding explains {tolerance:g}). Remove the file of reference log-probs, or report the model. "
                "--no_self_checks skips this check."
            )

    def collate(self, examples: Sequence[RegressionExample]) -> dict[str, Tensor]:
        return {name: x.to(device()) for name, x in collate_preferences(examples, self._pad_id).items()}


def kept_reference(config: RefuelConfig, pad_id: int, model: str, folder: Path) -> Reference:
    """The reference of a run, by the `dschat.base.fingerprints.model_hash` of its policy.

    A file keeps its log-probs: with --task.cluster beside the pairs, else in the run's folder.
    """
    file = folder / FOLDER / "logprobs.safetensors"
    if config.pairs.cluster is not None:
        data = Path(config.data.data_path[0])
        place = (
            data
            if data.is_dir()
            else data.parent
            if data.is_file()
            else Path(config.output.output_dir).resolve().parent
        )
        file = place / f"{data.stem if data.is_file() else data.resolve().name}_{config.pairs.cluster}.safetensors"
    temperature, size = config.pairs.temperature, eval_size(config)
    return partial(with_reference, pad_id=pad_id, size=size, temperature=temperature, file=file, model=model)
