# SPDX-License-Identifier: Apache-2.0
"""Saves the models of a run, each as a Hugging Face folder.

    output_dir/                 the final models
    output_dir/models/step-N/   the models after N updates (--save_models)

Steps 1 and 2 save their model in that folder itself, step 3 in actor/, critic/ and, with --enable_ema, actor_ema/. A
model's folder has safetensors, config.json, the tokenizer, README.md (the model card) and run.json; with LoRA also
adapter/. Folders and files are complete or absent, see `dschat.base.atomic`. `dschat.run.checkpoint` lists what else a
run writes.
"""

import dataclasses
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from dschat.base.errors import UserError
from dschat.models.adapters import lora_config
from dschat.models.engines import Trained
from dschat.models.save import save_model
from dschat.run.distributed import barrier, is_main
from dschat.run.model_card import CardModel, write_model_card
from dschat.run.output import RunOutput
from dschat.settings.common import CommonConfig
from dschat.settings.flags import FREE, flags_of, flags_on_resume

LENGTH_FLAGS = ("num_train_epochs", "max_steps", "total_episodes")  # which say how long a run trains

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SavedModel:
    """A model of a run, and how it is saved."""

    engine: Trained
    role: str  # policy, reward model or critic, for the card
    base: str  # the model it was trained from, for the card
    subfolder: str = ""  # subfolder of the run's folder; empty for that folder itself
    # Yields the weights to save if they are not the engine's, such as a moving average; like `Trained.whole_weights`.
    weights: Callable[[], Iterator[tuple[str, Tensor]]] | None = None
    tokenizer: PreTrainedTokenizerBase | None = None  # saved with the model; None for the run's own
    example: Callable[[], str] | None = None  # makes `CardModel.example`; every rank must call it


@contextmanager
def evaluation_after_saving(folder: str) -> Iterator[None]:
    """Around the last evaluation of a run: if it fails, logs that the models are saved."""
    try:
        yield
    except Exception:
        logger.error("training is done and the models are saved in %s; the evaluation after it failed:", folder)
        raise


class ModelFolders:
    """Writes the models of a run. Every rank must call its methods, since partitioned weights are gathered."""

    def __init__(
        self, models: Sequence[SavedModel], tokenizer: PreTrainedTokenizerBase, config: CommonConfig, run: RunOutput
    ) -> None:
        """Prepares to save models, each with the tokenizer and a model card."""
        self._models = models
        self._tokenizer = tokenizer
        self._config = config
        self._run = run
        self._output_dir = Path(config.output.output_dir)
        self._examples: dict[str, str] = {}  # examples of the models as they were last saved, by subfolder

    def save_final(self) -> None:
        """Writes the final models."""
        self._save(self._output_dir)

    def save_after(self, updates: int) -> None:
        """Writes the current models, after `updates` updates."""
        self._save(self._output_dir / "models" / f"step-{updates}")

    def describe_final(self) -> None:
        """Writes the final models' cards and run.json again, with later metrics."""
        self._run.record.finished = True
        if is_main():
            for model in self._models:
                self._describe(model, self._output_dir / model.subfolder)

    def _save(self, folder: Path) -> None:
        """Writes the models. Raises UserError if that fails; earlier files remain."""
        try:
            self._write(folder)
        except (OSError, SafetensorError) as error:
            raise UserError(
                f"the models could not be written into {folder}: {error}. {self._config.full_disk_remedy}"
            ) from error
        self._run.record.saved.append(str(folder))
        logger.info("models saved in %s", folder)
        barrier()

    def _write(self, folder: Path) -> None:
        """Writes the models on the main rank. The others take part in gathering the weights, even after a failure."""
        for model in self._models:
            if model.example is not None:
                self._examples[model.subfolder] = model.example()
        failure: Exception | None = None
        with self._run.writing(folder) as temporary_folder:
            for model in self._models:
                weights = model.engine.whole_weights() if model.weights is None else model.weights()
                try:
                    if temporary_folder is not None and failure is None:
                        self._write_model(model, weights, temporary_folder / model.subfolder)
                except (OSError, SafetensorError) as error:
                    failure = error
                for _ in weights:  # every rank must exhaust the iterator
                    pass
            if failure is not None:
                raise failure

    def _write_model(self, model: SavedModel, weights: Iterator[tuple[str, Tensor]], folder: Path) -> None:
        inner_weights = ((name.removeprefix("inner."), tensor) for name, tensor in weights)
        merge = self._config.finetuning.merge_lora
        save_model(model.engine.module.inner, inner_weights, model.tokenizer or self._tokenizer, folder, merge)
        self._describe(model, folder)

    def _describe(self, model: SavedModel, folder: Path) -> None:
        """Writes a model's card and run.json. If the card fails, a warning is logged and the model is saved anyway."""
        try:
            write_model_card(folder, self._card_model(model), self._flags_for_card(), self._run.record)
        except Exception as error:
            logger.warning("the model card of %s could not be written; the model is not affected: %r", folder, error)
        self._run.record.save(folder)

    def _card_model(self, model: SavedModel) -> CardModel:
        is_pushed = self._config.tracking.push_to_hub is not None and model.subfolder in ("", "actor")
        return CardModel(
            name=self._output_dir.resolve().name,
            role=model.role,
            base=model.base,
            path=str(self._config.tracking.push_to_hub) if is_pushed else str(self._output_dir / model.subfolder),
            has_template=bool(self._tokenizer.chat_template),
            example=self._examples.get(model.subfolder, ""),
            is_adapter=not self._config.finetuning.merge_lora and lora_config(model.engine.module.inner) is not None,
        )

    def _flags_for_card(self) -> dict[str, object]:
        """The flags that say how the models were made: required ones and those that differ from their defaults.

        Those that a resume may change freely are left out, except for the length of the run and the other models.
        """
        flags = flags_of(type(self._config))
        values = self._config.flat()
        required = {name: values[name] for name, flag in flags.items() if flag.default is dataclasses.MISSING}
        defaults = type(self._config)(**required).flat()
        left_out = flags_on_resume(type(self._config), FREE) - set(LENGTH_FLAGS)
        card_flags: dict[str, object] = {}
        for name, value in values.items():
            is_changed = name in required or value != defaults[name]
            if is_changed and (name not in left_out or name.endswith("model_name_or_path")):
                card_flags[name] = value
        return card_flags
