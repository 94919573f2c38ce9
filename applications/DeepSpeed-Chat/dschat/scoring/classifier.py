# SPDX-License-Identifier: Apache-2.0
"""Numbers of a sequence classifier with one label for token ids of its own tokenizer, whatever they were made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from dschat.models.engines import ScalarForward
from dschat.models.limits import position_limit
from dschat.models.scalar import ScalarModel, last_scores


class ClassifierReader:
    """Reads sequences of ids in batches of similar length: a decoder at its last token, others as they are made to."""

    def __init__(
        self,
        classifier: nn.Module,
        pad_id: int | None,
        device: torch.device,
        batch_size: int | None = None,
        offload: bool = False,
        engine: ScalarForward | None = None,
    ) -> None:
        """Takes a model.

        Args:
            classifier: of transformers, with one label, on the device unless it is offloaded or an engine computes.
            pad_id: of its tokenizer, if that can pad; padding is masked, whatever it is.
            device: where to compute.
            batch_size: sequences read together at most; all if not given.
            offload: keep the model in CPU memory between calls.
            engine: computes in its place, with every rank calling equally often; of a decoder.
        """
        self.is_decoder = isinstance(getattr(classifier, "score", None), nn.Linear)
        self.limit = position_limit(classifier)  # tokens; None where there is no end
        self._classifier, self._pad_id, self._device = classifier, pad_id or 0, device
        self._batch_size, self._offload = batch_size, offload
        self._scalar = engine or (ScalarModel(classifier) if self.is_decoder else None)

    def numbers(self, sequences: Sequence[Sequence[int]]) -> Tensor:
        """One number for each of B sequences of at least one id: (B,) float32, on the CPU."""
        lengths = [len(ids) for ids in sequences]
        return self.numbers_of(lengths, lambda rows: self._padded([sequences[n] for n in rows]))

    @torch.no_grad()
    def numbers_of(self, lengths: Sequence[int], inputs_of: Callable[[list[int]], Mapping[str, Tensor]]) -> Tensor:
        """One number for each of B rows, the longest first: what does not fit into memory fails at once.

        Args:
            lengths: of the rows, in tokens.
            inputs_of: some of the row numbers → what a tokenizer makes of these rows, tensors (b, T).

        Returns:
            (B,) float32, on the CPU.
        """
        order = sorted(range(len(lengths)), key=lambda n: -lengths[n])
        size = self._batch_size or max(1, len(order))
        scores = torch.zeros(len(order))
        if self._offload:
            self._classifier.to(self._device)
        for first in range(0, len(order), size):
            rows = order[first : first + size]
            inputs = {name: tensor.to(self._device) for name, tensor in inputs_of(rows).items()}
            scores[rows] = self._of_inputs(inputs).float().cpu()
        if self._offload:
            self._classifier.to("cpu")
        return scores

    def _of_inputs(self, inputs: Mapping[str, Tensor]) -> Tensor:
        if self._scalar is not None:
            mask = inputs["attention_mask"].bool()
            return last_scores(self._scalar(inputs["input_ids"], mask), mask)
        logits: Tensor = self._classifier(**inputs).logits
        return logits[:, 0]

    def _padded(self, sequences: Sequence[Sequence[int]]) -> dict[str, Tensor]:
        """input_ids and attention_mask (B, T), padded on the right."""
        width = max(map(len, sequences))
        ids = [[*sequence, *[self._pad_id] * (width - len(sequence))] for sequence in sequences]
        mask = [[1] * len(sequence) + [0] * (width - len(sequence)) for sequence in sequences]
        return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}
