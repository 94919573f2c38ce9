# SPDX-License-Identifier: Apache-2.0
"""The output folder of a run."""

from __future__ import annotations

import dataclasses
import logging
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dschat.errors import UserError

logger = logging.getLogger("dschat")


class Stage:
    """The output folder of a run: flags, metrics, models, and run.json, which says at the end that it finished."""

    def __init__(self, step: str, config: Any) -> None:
        import torch

        from dschat.config.parse import save
        from dschat.run.distributed import is_main, world_size
        from dschat.run.metrics import MetricsLog
        from dschat.run.records import new_record

        torch.manual_seed(config.seed)  # adapters and new embedding rows; sampling has seeds of its own
        self.config, self.folder = config, Path(config.output_dir)
        self.plan = config.check_batches(world_size())
        self.record = new_record(step, sys.argv, config.seed, world_size())
        self.record.batches = dataclasses.asdict(self.plan)
        if not is_main():
            logging.getLogger().setLevel(logging.WARNING)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if is_main():
                if config.overwrite_output_dir and (self.folder / "run.json").exists():
                    self._remove_earlier_run()
                self.record.save(self.folder)
                # In steps 1 and 2 config.json is the model's own.
                save(config, self.folder / ("config.json" if step == "ppo" else "train_config.json"), self.plan)
        except OSError as error:
            raise UserError(f"--output_dir {self.folder}: cannot be written: {error}") from error
        board = Path(config.tensorboard_path) if config.enable_tensorboard else None
        self.metrics = MetricsLog(self.folder, board)

    def describe_data(self, share: Any, **dropped: Mapping[str, int]) -> None:
        """Records sources, row counts, what was dropped and why, and the files' hashes.

        Args:
            share: the step's rows.
            dropped: what tokenisation dropped, by split.
        """
        from dschat.run.records import file_hashes

        self.record.data = {
            "sources": share.sources,
            "dropped": {split: dict(counts) for split, counts in dropped.items()},
            "sha256": file_hashes(share.files),
        }
        if not share.eval:
            logger.warning(
                "no held-out rows: nothing will be evaluated. Give more rows, or valid* files in the folder."
            )
        self._save_record()
        for split, counts in dropped.items():
            for reason, count in counts.items():
                logger.warning("%s: %d rows dropped (%s)", split, count, reason)

    def _remove_earlier_run(self) -> None:
        """Deletes what an earlier run of this program left, and nothing else."""
        for name in ("actor", "actor_ema", "critic", "adapter", "checkpoints", "samples", "tensorboard"):
            shutil.rmtree(self.folder / name, ignore_errors=True)
        for pattern in ("*.safetensors", "*.safetensors.index.json", "metrics.jsonl", "run.json"):
            for file in self.folder.glob(pattern):
                file.unlink()

    def announce(self, total_updates: int, num_examples: int) -> None:
        """Says once how large an update is, how many there will be, and what is left over."""
        plan = self.plan
        rollout = None if plan.rollout_per_rank is None else plan.rollout_per_rank * plan.world_size
        left_over = num_examples % (rollout or plan.global_batch)
        self.record.batches.update(total_updates=total_updates, left_over_per_epoch=left_over)
        self._save_record()
        logger.info(
            "global batch %d = %d per process x %d processes (micro-batch %d, accumulation %d); %d updates; "
            "%d of %d examples left over in each epoch",
            plan.global_batch,
            plan.update_per_rank,
            plan.world_size,
            plan.micro_batch,
            plan.accumulation,
            total_updates,
            left_over,
            num_examples,
        )

    def save_model(self, engine: Any, tokenizer: Any, role: str, base: str, folder: Path, state: Any = None) -> None:
        """Writes the Hugging Face folder of an engine's model, with its card. Every rank must call it.

        Args:
            engine: of the model.
            tokenizer: of the run.
            role: policy, reward model or critic, for the card.
            base: what it was trained from, for the card.
            folder: to write into.
            state: other whole weights than the engine's (a moving average), on the main process.
        """
        from dschat.models.save import save_model
        from dschat.run.distributed import barrier, is_main
        from dschat.run.records import write_model_card

        state = engine.full_state_dict() if state is None else state
        if is_main():
            prefix = "causal_lm." if hasattr(engine.module, "causal_lm") else "classifier."
            weights = {name.removeprefix(prefix): tensor for name, tensor in state.items()}
            save_model(getattr(engine.module, prefix[:-1]), weights, tokenizer, folder, self.config.merge_lora)
            write_model_card(folder, role, base, self._settings(), self.record)
            self.record.save(folder)
        barrier()

    def checkpoint_folder(self, update: int) -> Path:
        """Where models saved after ``update`` updates go."""
        return self.folder / "checkpoints" / f"step-{update}"

    @staticmethod
    def due(interval: int, before: int, after: int) -> bool:
        """Whether a multiple of ``interval`` updates was passed between ``before`` and ``after``; never for 0."""
        return interval > 0 and after // interval > before // interval

    def finish(self) -> None:
        """Marks the run as finished."""
        self.metrics.close()
        self.record.finished = True
        self._save_record()

    def _save_record(self) -> None:
        from dschat.run.distributed import is_main

        if is_main():
            self.record.save(self.folder)

    def _settings(self) -> dict[str, Any]:
        """The flags that differ from what they would be if only the required ones were given."""
        fields = dataclasses.fields(self.config)
        required = [f.name for f in fields if f.default is f.default_factory is dataclasses.MISSING]
        plain = type(self.config)(**{name: getattr(self.config, name) for name in required})
        values = {f.name: getattr(self.config, f.name) for f in fields}
        return {n: v for n, v in values.items() if n in required or v != getattr(plain, n)}
