# SPDX-License-Identifier: Apache-2.0
"""Step 3's evaluation: responses to held-out prompts, their scores, and a file of samples."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dschat.data.collate import eval_batches
from dschat.data.examples import PromptExample
from dschat.rl.masked import masked_sum
from dschat.rl.types import PPOBatch
from dschat.run.distributed import gather_objects, is_main, rank, world_size
from dschat.run.metrics import Means
from dschat.trainers.ppo.metrics import token_table
from dschat.trainers.ppo.trainer import PPOTrainer

logger = logging.getLogger(__name__)

DETAILED_SAMPLES = 8  # responses of a sample file that are written token by token
PRINTED_SAMPLES = 2


class Evaluation:
    """Callable on a trainer: evaluates its actor with the run's own sampling settings, the same draws every time."""

    def __init__(self, prompts: Sequence[PromptExample], batch_size: int, max_batches: int, show: bool) -> None:
        """Chooses the prompts.

        Args:
            prompts: held out.
            batch_size: prompts per generation batch.
            max_batches: the first so many batches' worth of prompts are used; 0 = all.
            show: log a few responses (--print_answers).
        """
        self.prompts = prompts[: max_batches * batch_size * world_size() or None]
        self._batch_size, self._show = batch_size, show

    @torch.no_grad()
    def __call__(self, trainer: PPOTrainer) -> dict[str, float]:
        """Means over the prompts of all ranks: eval/scores, kl, length, eos_rate and the metric function's name."""
        if not self.prompts:
            return {}
        prompt_lengths = [len(prompt) for prompt in self.prompts]
        batches = eval_batches(prompt_lengths, self._batch_size, rank=rank(), world_size=world_size())
        means = Means()
        samples: dict[int, dict[str, Any]] = {}
        detailed = {prompt.index for prompt in self.prompts[:DETAILED_SAMPLES]}
        for number, rows in enumerate(batches):
            # A rank that has run out of prompts takes part in every forward pass all the same, without weight.
            examples = [self.prompts[i] for i in rows or [0]]
            rollout, text = trainer.sample([examples], number, kind=1)
            trajectory, metric = trainer.score(rollout, text)
            batch = trainer.assign_credit(trajectory, trainer.segmenter(trajectory, 0).ends)
            name = trainer.models.metric_name
            kl, lengths = batch.kl.sum(1), batch.response_mask.sum(1)
            _add(means, batch, metric, name, weight=len(rows))
            for row, example in enumerate(examples if rows else []):
                sample = {
                    "prompt": text.prompts[row],
                    "response": text.responses[row],
                    "score": float(trajectory.scores[row]),
                    "finished": bool(rollout.finished[row]),
                    "kl": float(kl[row]),
                    "length": int(lengths[row]),
                }
                if metric is not None:
                    sample[name] = float(metric[row])
                if example.index in detailed:
                    sample["tokens"] = token_table(batch, row, trainer.tokenizer)
                samples[example.index] = sample
        metrics = {f"eval/{key}": value for key, value in means.reduce().items()}
        size = trainer.stage.plan.rollout_per_rank * world_size()
        trainer.stage.metrics.log(trainer.update, trainer.iteration * size, metrics)
        everywhere = {index: sample for part in gather_objects(samples) for index, sample in part.items()}
        if is_main():
            self._write(trainer, [everywhere[index] for index in sorted(everywhere)])
        return metrics

    def _write(self, trainer: PPOTrainer, samples: list[dict[str, Any]]) -> None:
        folder = trainer.stage.folder / "samples"
        folder.mkdir(exist_ok=True)
        lines = [json.dumps(sample, ensure_ascii=False) + "\n" for sample in samples]
        (folder / f"update-{trainer.update:06d}.jsonl").write_text("".join(lines), encoding="utf-8")
        for sample in samples[: PRINTED_SAMPLES if self._show else 0]:
            logger.info("prompt: %r\nresponse: %r\nscore: %.3f", *(sample[k] for k in ("prompt", "response", "score")))


def _add(means: Means, batch: PPOBatch, metric: Tensor | None, name: str, weight: int) -> None:
    """Adds a batch's sums; with weight 0 only the names, which must be the same on every rank."""
    trajectory, mask = batch.trajectory, batch.response_mask
    totals = {
        "scores": trajectory.scores.sum(),
        "kl": masked_sum(batch.kl, mask),
        "length": mask.sum(),
        "eos_rate": trajectory.rollout.finished.sum(),
    }
    if metric is not None:
        totals[name] = metric.sum()
    means.add_all(totals if weight else dict.fromkeys(totals, 0), weight)
