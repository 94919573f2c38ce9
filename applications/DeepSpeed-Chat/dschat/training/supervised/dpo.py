# SPDX-License-Identifier: Apache-2.0
"""Step 2 as direct preference optimisation: raises the log-ratio of the chosen response above the rejected one's."""

from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor

from dschat.data.collate import collate_preferences, collate_sft
from dschat.data.examples import PreferenceExample, SFTExample
from dschat.models.engines import TrainedPolicy
from dschat.run.distributed import device
from dschat.run.output import Run
from dschat.run.stop import raise_if_stopped, stop_signals
from dschat.settings.supervised import DPOConfig
from dschat.training.iteration import eval_size, on_device
from dschat.training.reference import REFERENCE_FOLDER, pair_lengths, pair_logprobs, with_logprobs, with_reference
from dschat.training.selfcheck import check_policy
from dschat.training.supervised.algorithm import RowStatistics, Task, statistics_of_rows
from macro_actions.supervised_losses import dpo_loss

Pair = TypeVar("Pair", bound=PreferenceExample)


class PairTask(Task[Pair, TrainedPolicy]):
    """Learns from pairs of responses to one prompt; the reference is the policy before training.

    Attributes:
        pad_id: id that pads shorter sequences.
        temperature: divides the logits.
    """

    pad_id: int
    temperature = 1.0

    def lengths(self, examples: Sequence[Pair]) -> list[int]:
        return pair_lengths(examples)

    def with_placeholders(self, examples: Sequence[Pair]) -> Sequence[Pair]:
        return with_logprobs(examples, torch.zeros(len(examples), 2))

    def self_check(self, engine: TrainedPolicy, examples: Sequence[Pair]) -> None:
        chosen = [SFTExample(example.prompt_ids, example.chosen_ids) for example in examples]
        batch = on_device(collate_sft(chosen, self.pad_id))
        tokens = (batch["input_ids"], batch["attention_mask"])
        response_width = batch["response_mask"].shape[1]
        check_policy(engine, tokens, response_width, self.temperature, self.pad_id)


class DPOTask(PairTask[PreferenceExample]):
    """Learns to prefer the chosen response of a pair. The reference is the policy before training."""

    name = "dpo"

    def __init__(
        self,
        train: Sequence[PreferenceExample],
        eval: Sequence[PreferenceExample],
        pad_id: int,
        config: DPOConfig,
        run: Run,
        model_hash: str,
    ) -> None:
        """Prepares training on pairs of responses.

        Args:
            train: training pairs; `prepare` adds the reference's log-probs.
            eval: held-out pairs; `prepare` adds the reference's log-probs.
            pad_id: id that pads shorter sequences.
            config: flags of the run.
            run: the run, whose output folder keeps the reference's log-probs.
            model_hash: hash of the policy's weights before training, see `dschat.base.fingerprints.model_hash`.
        """
        self.train = train
        self.eval = eval
        self.pad_id = pad_id
        self._config = config
        self._run = run
        self._model_hash = model_hash

    def prepare(self, engine: TrainedPolicy) -> None:
        if self._config.dpo.reference_free:
            return
        held_out = self.eval[: self._config.num_eval_examples or None]
        with stop_signals():
            self.train = self._with_reference(engine, self.train, "train")
            if held_out:  # the file's name has their number, which may change when the run is resumed
                self.eval = self._with_reference(engine, held_out, f"eval-{len(held_out)}")
            raise_if_stopped()

    def loss(
        self, engine: TrainedPolicy, examples: Sequence[PreferenceExample], count: Tensor | float
    ) -> tuple[Tensor, dict[str, Tensor]]:
        chosen, rejected = self._log_ratios(engine, examples)
        return dpo_loss(chosen, rejected, self._config.dpo.beta, self._config.dpo.label_smoothing, count)

    def row_statistics(self, engine: TrainedPolicy, examples: Sequence[PreferenceExample]) -> RowStatistics:
        flags = self._config.dpo
        chosen, rejected = self._log_ratios(engine, examples)
        losses = []
        for row in range(len(examples)):
            losses.append(
                dpo_loss(chosen[row : row + 1], rejected[row : row + 1], flags.beta, flags.label_smoothing, 1.0)
            )
        return statistics_of_rows(losses, [1] * len(examples))

    def _log_ratios(self, engine: TrainedPolicy, examples: Sequence[PreferenceExample]) -> tuple[Tensor, Tensor]:
        """Log-ratios of the chosen and of the rejected responses, (B,) each; log-probs with --reference_free."""
        chosen, rejected = pair_logprobs(engine, examples, self.pad_id, self.temperature)
        if self._config.dpo.reference_free:
            return chosen, rejected
        chosen_ref, rejected_ref = self._reference(examples).unbind(1)
        return chosen - chosen_ref, rejected - rejected_ref

    def collate(self, examples: Sequence[PreferenceExample]) -> dict[str, Tensor]:
        batch = on_device(collate_preferences(examples, self.pad_id))
        if not self._config.dpo.reference_free:
            batch["ref_logprobs"] = self._reference(examples)
        return batch

    def _with_reference(
        self, engine: TrainedPolicy, examples: Sequence[PreferenceExample], name: str
    ) -> list[PreferenceExample]:
        file = self._run.folder / REFERENCE_FOLDER / f"{name}.safetensors"
        size = eval_size(self._config)
        return with_reference(engine, examples, self.pad_id, size, self.temperature, file, self._model_hash)

    def _reference(self, examples: Sequence[PreferenceExample]) -> Tensor:
        """(B, 2) float32; raises TypeError for pairs without log-probs of the reference."""
        return torch.tensor([example.ref_logprobs for example in examples], dtype=torch.float32, device=device())
