# SPDX-License-Identifier: Apache-2.0
"""REFUEL on prepared pairs: regresses the difference of two replies' log-ratios on η times that of their rewards."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from dschat.data.collate import collate_preferences
from dschat.models.engines import TrainedPolicy
from dschat.refuel.offline_settings import RefuelConfig
from dschat.refuel.start_check import check_start
from dschat.refuel.token_pairs import RegressionExample
from dschat.run.stop import raise_if_stopped, stop_signals
from dschat.training.iteration import eval_size, on_device
from dschat.training.reference import REFERENCE_FOLDER, pair_logprobs, with_reference
from dschat.training.supervised.algorithm import RowStatistics, statistics_of_rows
from dschat.training.supervised.dpo import PairTask
from macro_actions.supervised_losses import regression_loss

Reference = Callable[[TrainedPolicy, Sequence[RegressionExample]], list[RegressionExample]]


class RefuelTask(PairTask[RegressionExample]):
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
        """Prepares training on pairs of replies.

        Args:
            train: training pairs.
            eval: held-out pairs.
            pad_id: fills ids.
            eta: η of `macro_actions.supervised_losses.regression_loss`.
            temperature: divides the logits, of the policy and of the reference.
            reference: adds the log-probs of the policy before training; None if the pairs have them.
            self_checks: compare them with the policy's before the first update.
        """
        self.train = train
        self.eval = eval
        self.pad_id = pad_id
        self._eta = eta
        self.temperature = temperature
        self._reference = reference
        self._self_checks = self_checks

    def prepare(self, engine: TrainedPolicy) -> None:
        """Adds the reference's log-probs. Raises UserError if a file has those of another policy."""
        if self._reference is None:
            return
        with stop_signals():
            count = len(self.train)
            pairs = self._reference(engine, [*self.train, *self.eval])
            self.train = pairs[:count]
            self.eval = pairs[count:]
            if self._self_checks:
                self.check_start(engine, self.train[:2])
            raise_if_stopped()

    def loss(
        self, engine: TrainedPolicy, examples: Sequence[RegressionExample], count: Tensor | float
    ) -> tuple[Tensor, dict[str, Tensor]]:
        return self._loss_of(*self._regression_inputs(engine, examples), count)

    def row_statistics(self, engine: TrainedPolicy, examples: Sequence[RegressionExample]) -> RowStatistics:
        chosen, rejected, differences = self._regression_inputs(engine, examples)
        losses = []
        for row in torch.arange(len(examples), device=chosen.device)[:, None]:
            losses.append(self._loss_of(chosen[row], rejected[row], differences[row], 1.0))
        return statistics_of_rows(losses, [1] * len(examples))

    def _regression_inputs(
        self, engine: TrainedPolicy, examples: Sequence[RegressionExample]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Log-ratios of the chosen and of the rejected replies, and the differences of their rewards, (B,) each."""
        chosen, rejected = pair_logprobs(engine, examples, self.pad_id, self.temperature)
        ref_logprobs = torch.tensor([example.ref_logprobs for example in examples], device=chosen.device)
        ref_chosen, ref_rejected = ref_logprobs.T
        # Rewards are subtracted in double precision: they are often large and close together.
        differences = [example.chosen_reward - example.rejected_reward for example in examples]
        return chosen - ref_chosen, rejected - ref_rejected, torch.tensor(differences, device=chosen.device)

    def _loss_of(
        self, chosen: Tensor, rejected: Tensor, differences: Tensor, count: Tensor | float
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss and its statistics; see `_regression_inputs` for the three tensors."""
        loss, stats = regression_loss(chosen, rejected, differences, self._eta, count)
        named = {}
        for name in ("log_ratio", "agreement", "ratio", "ratio_squared"):
            named[name] = stats[name]
        named["log_ratio_chosen"] = chosen.detach().sum() / count
        named["log_ratio_rejected"] = rejected.detach().sum() / count
        return loss, named

    @torch.no_grad()
    def check_start(self, engine: TrainedPolicy, examples: Sequence[RegressionExample]) -> None:
        """Checks log-probs of a few pairs. Leaves the engine in evaluation mode. Raises UserError."""
        engine.eval()
        logprobs = torch.stack(pair_logprobs(engine, examples, self.pad_id, self.temperature), dim=1)
        earlier = torch.tensor([example.ref_logprobs for example in examples], device=logprobs.device)
        tokens = max(max(len(example.chosen_ids), len(example.rejected_ids)) for example in examples)
        check_start(engine, logprobs.flatten(), earlier.flatten(), tokens)

    def collate(self, examples: Sequence[RegressionExample]) -> dict[str, Tensor]:
        return on_device(collate_preferences(examples, self.pad_id))


def saved_reference(config: RefuelConfig, pad_id: int, model: str, folder: Path) -> Reference:
    """The reference of a run, whose log-probs a file keeps.

    With --task.cluster the file is in the folder of the pairs, otherwise in the run's folder.

    Args:
        config: the flags.
        pad_id: fills ids.
        model: `dschat.base.fingerprints.model_hash` of the policy.
        folder: the run's.
    """
    file = folder / REFERENCE_FOLDER / "logprobs.safetensors"
    if config.pairs.cluster is not None:
        data = Path(config.data.data_path[0])
        name = data.resolve().name
        parent = data
        if data.is_file():
            name = data.stem
            parent = data.parent
        elif not data.is_dir():  # a data set of the hub
            parent = Path(config.output.output_dir).resolve().parent
        file = parent / f"{name}_{config.pairs.cluster}.safetensors"
    return partial(
        with_reference,
        pad_id=pad_id,
        size=eval_size(config),
        temperature=config.pairs.temperature,
        file=file,
        model=model,
    )
