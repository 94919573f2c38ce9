# SPDX-License-Identifier: Apache-2.0
"""Steps that train one model: its engine, and the loop on a supervised task."""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from dschat.data.examples import PreferenceExample, SFTExample, texts_of
from dschat.engine.engine import Engine, OptimizerSettings, train_engine
from dschat.models.finetuning import choose_trained, require_trainable_tokens
from dschat.models.load import load_causal_lm, require_savable
from dschat.models.policy import PolicyModel
from dschat.models.tokenizer import end_token_id, own_end_ids
from dschat.run.model_folders import SavedModel
from dschat.run.output import RunOutput
from dschat.settings.supervised import OneModelConfig, SFTConfig, SupervisedConfig
from dschat.training.loop import loop_of
from dschat.training.steps.engines import (
    MODEL,
    RunPlan,
    engine_settings,
    load_options_of,
    optimizer_settings,
    trained_part,
)
from dschat.training.supervised.algorithm import EngineT, Example, Supervised, Task


def one_optimizer(config: OneModelConfig, total_updates: int) -> OptimizerSettings:
    """Optimiser settings of a run that trains one model."""
    return optimizer_settings(config, total_updates, config.model.learning_rate, config.model.weight_decay)


def build_policy(
    config: SupervisedConfig,
    plan: RunPlan,
    tokenizer: PreTrainedTokenizerBase,
    examples: Sequence[SFTExample | PreferenceExample] = (),
) -> Engine[PolicyModel]:
    """The engine of step 1, of DPO and of REFUEL on pairs, which trains on `examples`.

    Step 1's softmax goes over all rows of the embeddings, as in transformers' own loss: its texts teach the model that
    ids without a token do not occur, which programs that do not mask these ids rely on. The other losses compare
    distributions that are sampled from, and leave such ids out.
    """
    settings = engine_settings(config, plan, config.engine.gradient_checkpointing, config.engine.zero_stage)
    end_id = end_token_id(tokenizer, config.data.end_of_conversation_token)
    path = config.model.model_name_or_path
    load_options = load_options_of(config, settings)
    finetuning = trained_part(config, config.finetuning.lora_dim, tokenizer, path, MODEL)
    all_rows = isinstance(config, SFTConfig)
    model = load_causal_lm(
        path, MODEL, settings.dtype, tokenizer, end_id, load_options, own_end_ids(path), all_rows=all_rows
    )
    require_savable(model, f"{MODEL} {path}")
    choose_trained(model, finetuning, path)
    require_trainable_tokens(model, tokenizer, texts_of(examples), load_options.placement, f"{MODEL} {path}")
    return train_engine(PolicyModel(model), one_optimizer(config, plan.updates), settings)


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
