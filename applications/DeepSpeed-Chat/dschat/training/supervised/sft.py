# SPDX-License-Identifier: Apache-2.0
"""Step 1, supervised fine-tuning: cross-entropy on the response tokens, or on those of every turn of the assistant."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from dschat.data.collate import collate_packed, collate_sft, collate_targets
from dschat.data.examples import SFTExample
from dschat.models.engines import TrainedPolicy
from dschat.run.distributed import device
from dschat.run.metrics import STANDARD_ERROR
from dschat.training.iteration import on_device
from dschat.training.selfcheck import check_policy
from dschat.training.supervised.algorithm import RowStatistics, Task
from macro_actions.supervised_losses import sft_loss


class SFTTask(Task[SFTExample, TrainedPolicy]):
    """Learns to write the demonstrated responses."""

    name = "sft"

    def __init__(
        self,
        train: Sequence[SFTExample],
        eval: Sequence[SFTExample],
        pad_id: int,
        sft_on_prompt: bool = False,
        label_smoothing: float = 0.0,
        packed_width: int | None = None,
        by_tokens: bool = False,
    ) -> None:
        """Prepares training on demonstrations.

        Args:
            train: training examples.
            eval: held-out examples.
            pad_id: fills ids.
            sft_on_prompt: prompts are learnt from, too.
            label_smoothing: ε of the targets in training; evaluation is without, so that exp(loss) is the perplexity.
            packed_width: tokens of a row that holds several examples; None puts one into each row.
            by_tokens: pad rows to the longest example, not to the longest prompt and the longest response.
        """
        self.train = train
        self.eval = eval
        self._pad_id = pad_id
        self._on_prompt = sft_on_prompt
        self._smoothing = label_smoothing
        self._width = packed_width
        self._by_tokens = by_tokens

    def prepare(self, engine: TrainedPolicy) -> None:
        """Raises UserError if packed examples of this model would see each other."""
        if self._width is not None:
            from dschat.training.packing_check import check_packing

            engine.eval()
            check_packing(engine, self.train[:2], self._pad_id)

    def count(self, examples: Sequence[SFTExample]) -> int:
        if self._on_prompt:
            return sum(len(example) - 1 for example in examples)
        return sum(example.num_targets for example in examples)

    @property
    def _pads_both_parts(self) -> bool:
        """Whether prompts are padded to the longest prompt, and responses to the longest response."""
        return self._width is None and not self._by_tokens and not self._on_prompt

    def with_placeholders(self, examples: Sequence[SFTExample]) -> Sequence[SFTExample]:
        """Placeholder examples, equally many, one of which has the longest prompt and one the longest response."""
        if not self._pads_both_parts or len(examples) == 1:  # one example is padded to nothing
            return examples
        longest_prompt = max(self.train, key=lambda example: len(example.prompt_ids))
        longest_response = max(self.train, key=lambda example: len(example.response_ids))
        return [longest_prompt, longest_response, *examples][: len(examples)]

    def padded_tokens(self, examples: Sequence[SFTExample]) -> int:
        if not self._pads_both_parts:
            return super().padded_tokens(examples)
        prompt = max(len(example.prompt_ids) for example in examples)
        return prompt + max(len(example.response_ids) for example in examples)

    def loss(
        self, engine: TrainedPolicy, examples: Sequence[SFTExample], count: Tensor | float
    ) -> tuple[Tensor, dict[str, Tensor]]:
        batch = self.collate(examples)
        return sft_loss(*self._logprobs(engine, batch), count)

    def row_statistics(self, engine: TrainedPolicy, examples: Sequence[SFTExample]) -> RowStatistics:
        batch = self.collate(examples)
        logprobs, mask = self._logprobs(engine, batch)
        if "targets" not in batch:
            loss = -torch.where(mask, logprobs, 0.0).sum(1)
            return RowStatistics(mask.sum(1), {"loss": loss})
        # The number of the text that each token belongs to.
        if "position_ids" in batch:  # a packed row holds several texts, each from position 0 on
            positions = batch["position_ids"].flatten()
            text = (positions == 0).cumsum(0) - 1
        else:
            input_ids = batch["input_ids"]
            text = torch.arange(input_ids.numel(), device=device()) // input_ids.shape[1]

        # Sums over the targets of each text.
        text_of_target = text[batch["targets"]]
        num_texts = int(text[-1]) + 1
        zeros = logprobs.new_zeros(num_texts)
        counts = zeros.index_add(0, text_of_target, torch.ones_like(logprobs))
        loss = -zeros.index_add(0, text_of_target, logprobs)
        return RowStatistics(counts, {"loss": loss})

    def _logprobs(self, engine: TrainedPolicy, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Log-probs of the tokens that are learnt, (N,) or (B, R), and a mask of those that count."""
        smoothing = self._smoothing if torch.is_grad_enabled() else 0.0
        if "targets" in batch:
            targets = batch["targets"]
            logprobs, _ = engine(
                batch["input_ids"],
                None,
                targets,
                with_entropy=False,
                smoothing=smoothing,
                position_ids=batch.get("position_ids"),
            )
            return logprobs, torch.ones_like(targets, dtype=torch.bool)
        mask = batch["response_mask"]
        logprobs, _ = engine(
            batch["input_ids"], batch["attention_mask"], mask.shape[1], with_entropy=False, smoothing=smoothing
        )
        return logprobs, mask

    def self_check(self, engine: TrainedPolicy, examples: Sequence[SFTExample]) -> None:
        batch = self._unpacked(examples)
        tokens = (batch["input_ids"], batch["attention_mask"])
        check_policy(engine, tokens, batch["response_mask"].shape[1], 1.0, self._pad_id)

    def summary(self, means: dict[str, float]) -> dict[str, float]:
        perplexity = math.exp(min(means["loss"], 700.0))
        summary = {**means, "perplexity": perplexity}
        loss_error = means.get(f"loss{STANDARD_ERROR}")
        if loss_error is not None:
            summary[f"perplexity{STANDARD_ERROR}"] = perplexity * loss_error  # to first order
        return summary

    def collate(self, examples: Sequence[SFTExample]) -> dict[str, Tensor]:
        if self._width is not None:
            batch = collate_packed(examples, self._pad_id, self._width, self._on_prompt)
        elif self._by_tokens:
            batch = collate_targets(examples, self._pad_id, self._on_prompt)
        else:
            return self._unpacked(examples)
        return on_device(batch)

    def _unpacked(self, examples: Sequence[SFTExample]) -> dict[str, Tensor]:
        batch = collate_sft(examples, self._pad_id, self._on_prompt)
        return on_device(batch)
