# SPDX-License-Identifier: Apache-2.0
"""What a run saves: its models, each as a Hugging Face folder.

    output_dir/                      the final models, written here; run.json, train_config.json and metrics.jsonl by
                                     run/output.py
    output_dir/checkpoints/step-N/   the models after N updates (--save_steps), written here
    output_dir/samples/              responses of step 3's evaluations, by trainers/ppo/evaluation.py
    tensorboard/                     with --enable_tensorboard, by run/metrics.py

Steps 1 and 2 save their one model in that folder itself, step 3 in actor/, critic/ and, with --enable_ema, actor_ema/.
A model's folder holds safetensors, config.json, tokenizer, README.md (the model card) and run.json; with LoRA also
adapter/. The states of optimisers and schedules are not saved.
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from dschat.config.common import CommonConfig
from dschat.models.engines import Trained
from dschat.models.save import save_model
from dschat.run.distributed import barrier, is_main
from dschat.run.records import RunRecord, write_model_card


@dataclass(frozen=True)
class SavedModel:
    """A model of a run as it is saved.

    Attributes:
        engine: of the model.
        role: policy, reward model or critic, for the card.
        base: what it was trained from, for the card.
        subfolder: of the run's folder; empty for that folder itself.
        weights: gives other whole weights than the engine's (a moving average), on the main process.
    """

    engine: Trained
    role: str
    base: str
    subfolder: str = ""
    weights: Callable[[], dict[str, Tensor]] | None = None


class ModelFolders:
    """Writes the models of a run. Every rank must call its methods: weights that are sharded are gathered."""

    def __init__(
        self, models: Sequence[SavedModel], tokenizer: PreTrainedTokenizerBase, config: CommonConfig, record: RunRecord
    ) -> None:
        """Takes what is saved and what the model cards say of it.

        Args:
            models: of the run.
            tokenizer: of the run, saved with each.
            config: the flags.
            record: of the run, with its last metrics.
        """
        self._models, self._tokenizer, self._config, self._record = models, tokenizer, config, record

    def save_final(self) -> None:
        """Writes the models that the run ends with."""
        self._save(Path(self._config.output_dir))

    def save_after(self, updates: int) -> None:
        """Writes the models as they are after that many updates."""
        self._save(Path(self._config.output_dir) / "checkpoints" / f"step-{updates}")

    def _save(self, folder: Path) -> None:
        for model in self._models:
            state = model.engine.full_state_dict() if model.weights is None else model.weights()
            if is_main():
                place = folder / model.subfolder
                module = model.engine.module
                weights = {name.removeprefix("inner."): tensor for name, tensor in state.items()}
                save_model(module.inner, weights, self._tokenizer, place, self._config.merge_lora)
                write_model_card(place, model.role, model.base, self._settings(), self._record)
                self._record.save(place)
            barrier()

    def _settings(self) -> dict[str, object]:
        """The required flags, and those that differ from their defaults."""
        fields = dataclasses.fields(self._config)
        required = [f.name for f in fields if f.default is f.default_factory is dataclasses.MISSING]
        plain = type(self._config)(**{name: getattr(self._config, name) for name in required})
        values = {f.name: getattr(self._config, f.name) for f in fields}
        return {n: v for n, v in values.items() if n in required or v != getattr(plain, n)}
