# SPDX-License-Identifier: Apache-2.0
"""Step 2, the reward model: builds its data, its model and its task, and runs the loop."""

from collections.abc import Sequence
from functools import partial

from transformers import PreTrainedTokenizerBase

from dschat.data.examples import PairExample, pair_examples, texts_of
from dschat.data.notes import warn_of_template
from dschat.engine.engine import Engine, train_engine
from dschat.models.classifiers import load_scalar
from dschat.models.finetuning import choose_trained, require_trainable_tokens
from dschat.models.reward_head import add_gain
from dschat.models.reward_notes import note_end_token
from dschat.models.scalar import ScalarModel, note_reward_loss
from dschat.models.tokenizer import end_token_id
from dschat.run.output import RunOutput, warn_unless_made_by
from dschat.run.state import SeedKind, derive_seed
from dschat.settings.supervised import RewardConfig
from dschat.training.steps.common import load_step_data, open_tokenizer, plan_run
from dschat.training.steps.engines import MODEL, RunPlan, engine_settings, load_options_of, trained_part
from dschat.training.steps.score_example import saved_reward_model
from dschat.training.steps.supervised import fit_supervised, one_optimizer
from dschat.training.supervised.reward import RewardTask


def train_reward(config: RewardConfig, run: RunOutput) -> None:
    """Step 2: the reward model."""
    base = config.model.model_name_or_path
    # If only an adapter is saved, the embeddings are not: they must not grow by a row for a pad token.
    saves_classifier = config.finetuning.merge_lora or config.finetuning.lora_dim == 0
    tokenizer = open_tokenizer(config, saves_classifier)
    warn_unless_made_by("sft", base, MODEL)
    end_id = end_token_id(tokenizer, config.data.end_of_conversation_token)
    margin_key = config.preferences.margin_key
    make = partial(
        pair_examples, tokenizer=tokenizer, max_seq_len=config.model.max_seq_len, eos_id=end_id, margin_key=margin_key
    )
    fields_read = () if margin_key is None else (margin_key,)
    validate = partial(warn_of_template, tokenizer, end_id=end_id, keys=config.columns, reads=fields_read)
    data = load_step_data(config, PairExample, make, validate)
    plan = plan_run(config, run, data)
    engine = build_reward_model(config, plan, tokenizer, data.train)
    task = RewardTask(
        data.train,
        data.eval,
        tokenizer.pad_token_id,
        loss=config.preferences.reward_loss,
        centering=config.preferences.center_rewards_coefficient,
    )
    saved = saved_reward_model(engine, base, tokenizer, end_id)
    fit_supervised("reward", saved, engine, task, tokenizer, config, run)


def build_reward_model(
    config: RewardConfig, plan: RunPlan, tokenizer: PreTrainedTokenizerBase, examples: Sequence[PairExample] = ()
) -> Engine[ScalarModel]:
    """The engine of step 2's reward model, which trains on `examples`."""
    settings = engine_settings(config, plan, config.engine.gradient_checkpointing, config.engine.zero_stage)
    path = config.model.model_name_or_path
    load_options = load_options_of(config, settings)
    finetuning = trained_part(config, config.finetuning.lora_dim, tokenizer, path, MODEL)
    seed = derive_seed(config.optimisation.seed, SeedKind.HEAD)
    model = load_scalar(path, MODEL, settings.dtype, tokenizer, load_options=load_options, head_seed=seed)
    note_reward_loss(model, config.preferences.reward_loss)
    note_end_token(model, tokenizer, end_token_id(tokenizer, config.data.end_of_conversation_token))
    if config.preferences.reward_gain:
        add_gain(model.score)
    choose_trained(model, finetuning, path)
    require_trainable_tokens(model, tokenizer, texts_of(examples), load_options.placement, f"{MODEL} {path}")
    return train_engine(ScalarModel(model), one_optimizer(config, plan.updates), settings)
