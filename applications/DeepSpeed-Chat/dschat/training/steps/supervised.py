# SPDX-License-Identifier: Apache-2.0
"""Runs the loop on a supervised task."""

from transformers import PreTrainedTokenizerBase

from dschat.run.model_folders import SavedModel
from dschat.run.output import RunOutput
from dschat.settings.supervised import SupervisedConfig
from dschat.training.loop import loop_of
from dschat.training.supervised.algorithm import EngineT, Example, Supervised, Task


def fit_supervised(
    name: str,
    saved: SavedModel,
    engine: EngineT,
    task: Task[Example, EngineT],
    tokenizer: PreTrainedTokenizerBase,
    config: SupervisedConfig,
    run: RunOutput,
) -> None:
    """Trains one engine on a task. `name` is the name of the engine in checkpoints."""
    algorithm = Supervised(engine, task, config, run)
    loop_of(algorithm, {name: engine}, [saved], tokenizer, config, run).fit()
