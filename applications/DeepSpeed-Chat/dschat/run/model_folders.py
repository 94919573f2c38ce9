# SPDX-License-Identifier: Apache-2.0
"""What a run saves: its models, each as a Hugging Face folder.

    output_dir/                 the final models
    output_dir/models/step-N/   the models after N updates (--save_models)

What else a run leaves behind stands in `checkpoint`. Steps 1 and 2 save their one model in that folder itself, step 3
in actor/, critic/ and, with --enable_ema, actor_ema/. A model's folder holds safetensors, config.json, tokenizer,
README.md (the model card) and run.json; with LoRA also adapter/. Folders and files are whole or not there: see
`dschat.base.atomic`.
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
from dschat.models.engines import Trained
from dschat.models.lora import lora_config
from dschat.models.save import save_model
from dschat.run.distributed import barrier, is_main
from dschat.run.model_card import CardModel, CardSettings, write_model_card
from dschat.run.output import RunOutput
from dschat.settings.common import CommonConfig
from dschat.settings.flags import FREE, flags_of, flags_on_resume

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SavedModel:
    """A model of a run as it is saved."""

    engine: Trained  # of the model
    role: str  # policy, reward model or critic, for the card
    base: str  # what it was trained from, for the card
    subfolder: str = ""  # of the run's folder; empty for that folder itself
    # Gives other whole weights than the engine's (a moving average), as `Trained.whole_weights` does.
    weights: Callable[[], Iterator[tuple[str, Tensor]]] | None = None


@contextmanager
def evaluation_after_saving(folder: str) -> Iterator[None]:
    """Around the evaluation that ends a run: if it fails, says that the models are there."""
    try:
        yield
    except Exception:
        logger.error("training is done and the models are saved in %s; the evaluation after it failed:", folder)
        raise


class ModelFolders:
    """Writes the models of a run. Every rank must call its methods: weights in parts are gathered one by one."""

    def __init__(
        self, models: Sequence[SavedModel], tokenizer: PreTrainedTokenizerBase, config: CommonConfig, run: RunOutput
    ) -> None:
        """Takes what is saved, the tokenizer with each model, and what the cards say: flags, and the run's record."""
        self._models, self._tokenizer, self._config, self._run = models, tokenizer, config, run
        self._place = Path(config.output.output_dir)

    def save_final(self) -> None:
        """Writes the models that the run ends with."""
        self._save(self._place)

    def save_after(self, updates: int) -> None:
        """Writes the models as they are after that many updates."""
        self._save(self._place / "models" / f"step-{updates}")

    def describe_final(self) -> None:
        """Writes the final models' cards and run.json again, with metrics measured since."""
        self._run.record.finished = True
        if is_main():
            for model in self._models:
                self._describe(model, self._place / model.subfolder)

    def _save(self, folder: Path) -> None:
        """Raises UserError where they cannot be written; what was there stays."""
        try:
            self._write(folder)
        except (OSError, SafetensorError) as error:
            raise UserError(
                f"the models could not be written into {folder}: {error}. {self._config.full_disk_remedy}"
            ) from error
        if is_main():
            self._run.forget_earlier_run()
        self._run.record.saved.append(str(folder))
        logger.info("models saved in %s", folder)
        barrier()

    def _write(self, folder: Path) -> None:
        failure: Exception | None = None
        with self._run.writing(folder) as beside:
            for model in self._models:
                weights = model.engine.whole_weights() if model.weights is None else model.weights()
                if beside is not None and failure is None:
                    try:
                        self._write_one(model, weights, beside / model.subfolder)
                    except (OSError, SafetensorError) as error:
                        failure = error
                for _ in weights:  # the others give their parts of these as well
                    pass
            if failure is not None:
                raise failure

    def _write_one(self, model: SavedModel, weights: Iterator[tuple[str, Tensor]], place: Path) -> None:
        named = ((name.removeprefix("inner."), tensor) for name, tensor in weights)
        save_model(model.engine.module.inner, named, self._tokenizer, place, self._config.finetuning.merge_lora)
        self._describe(model, place)

    def _describe(self, model: SavedModel, folder: Path) -> None:
        """Writes a model's card and run.json. A card that fails is warned of and costs no model."""
        try:
            write_model_card(folder, self._card_model(model), self._settings(), self._run.record)
        except Exception as error:
            logger.warning("the model card of %s could not be written; the model is not affected: %r", folder, error)
        self._run.record.save(folder)

    def _card_model(self, model: SavedModel) -> CardModel:
        is_pushed = self._config.tracking.push_to_hub is not None and model.subfolder in ("", "actor")
        return CardModel(
            name=model.subfolder or self._place.resolve().name,
            role=model.role,
            base=model.base,
            path=str(self._config.tracking.push_to_hub) if is_pushed else str(self._place / model.subfolder),
            has_template=bool(self._tokenizer.chat_template),
            is_adapter=not self._config.finetuning.merge_lora and lora_config(model.engine.module.inner) is not None,
        )

    def _settings(self) -> CardSettings:
        """The required flags and those that differ from their defaults; further ones that decide the numbers."""
        flags = flags_of(type(self._config))
        values = self._config.flat()
        required = {name: values[name] for name, flag in flags.items() if flag.default is dataclasses.MISSING}
        plain = type(self._config)(**required).flat()
        given = {name: value for name, value in values.items() if name in required or value != plain[name]}
        free = flags_on_resume(type(self._config), FREE) - {"num_train_epochs"}
        rest = values.keys() - given.keys() - free
        defaults = {name: value for name, value in values.items() if name in rest and value is not None}
        return CardSettings(given, defaults)
