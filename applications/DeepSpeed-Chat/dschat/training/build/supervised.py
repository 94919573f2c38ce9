# SPDX-License-Identifier: Apache-2.0
"""Steps 1 and 2, and DPO: each builds its data, its model and its task, and runs the loop."""

from functools import partial

from transformers import PreTrainedTokenizerBase

from dschat.base.fingerprints import model_hash
from dschat.data.examples import (
    PairExample,
    PreferenceExample,
    SFTExample,
    pair_examples,
    preference_examples,
    sft_examples,
)
from dschat.data.messages import WEIGHT
from dschat.data.template_notes import RESPONSES_OF_STEPS, warn_of_template
from dschat.models.load import warn_without_classifier
from dschat.models.tokenizer import end_token_id, load_tokenizer
from dschat.run.model_folders import SavedModel
from dschat.run.output import RunOutput, warn_unless_made_by
from dschat.settings.supervised import DPOConfig, RewardConfig, SFTConfig, SupervisedConfig
from dschat.training.build.engines import MODEL, build_policy, build_reward_model
from dschat.training.build.score_example import saved_reward_model
from dschat.training.build.steps import check_lengths, load_step_data, plan_run
from dschat.training.loop import loop_of
from dschat.training.supervised.algorithm import EngineT, Example, Supervised, Task
from dschat.training.supervised.dpo import DPOTask
from dschat.training.supervised.reward import RewardTask
from dschat.training.supervised.sft import SFTTask


def train_sft(config: SFTConfig, run: RunOutput) -> None:
    """Step 1: supervised fine-tuning."""
    base = config.model.model_name_or_path
    check_lengths(config)
    tokenizer = load_tokenizer(base, MODEL, end_token=config.data.end_of_conversation_token)
    end_id = end_token_id(tokenizer, config.data.end_of_conversation_token)
    make = partial(
        sft_examples,
        tokenizer=tokenizer,
        max_seq_len=config.model.max_seq_len,
        eos_id=end_id,
        all_turns=config.sft.train_on == "all",
    )
    # With --sft_on_prompt every token is trained on, whatever the weights of messages.
    fields_read = () if config.sft.sft_on_prompt else (WEIGHT,)
    validate = partial(
        warn_of_template,
        tokenizer,
        end_id=end_id,
        keys=config.columns,
        reads=fields_read,
        responses=RESPONSES_OF_STEPS[1],
    )
    data = load_step_data(config, SFTExample, make, validate, config.sft.sft_on_prompt)
    plan = plan_run(config, run, data)
    warn_without_classifier(base)
    engine = build_policy(config, plan, tokenizer, data.train)
    task = SFTTask(
        data.train,
        data.eval,
        tokenizer.pad_token_id,
        sft_on_prompt=config.sft.sft_on_prompt,
        label_smoothing=config.sft.label_smoothing,
        packed_width=config.model.max_seq_len if config.sft.packing else None,
        by_tokens=config.optimisation.max_tokens_per_micro_batch is not None,
    )
    saved = SavedModel(engine, "policy", base)
    fit_supervised("policy", saved, engine, task, tokenizer, config, run)


def train_reward(config: RewardConfig, run: RunOutput) -> None:
    """Step 2: the reward model."""
    base = config.model.model_name_or_path
    check_lengths(config)
    # If only an adapter is saved, the embeddings are not: they must not grow by a row for a pad token.
    saves_classifier = config.finetuning.merge_lora or config.finetuning.lora_dim == 0
    tokenizer = load_tokenizer(base, MODEL, saves_classifier, config.data.end_of_conversation_token)
    warn_unless_made_by("sft", base, MODEL)
    end_id = end_token_id(tokenizer, config.data.end_of_conversation_token)
    margin_key = config.preferences.margin_key
    make = partial(
        pair_examples,
        tokenizer=tokenizer,
        max_seq_len=config.model.max_seq_len,
        eos_id=end_id,
        margin_key=margin_key,
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


def train_dpo(config: DPOConfig, run: RunOutput) -> None:
    """Step 2 as direct preference optimisation, without a reward model."""
    base = config.model.model_name_or_path
    check_lengths(config)
    tokenizer = load_tokenizer(base, MODEL, end_token=config.data.end_of_conversation_token)
    warn_unless_made_by("sft", base, MODEL)
    end_id = end_token_id(tokenizer, config.data.end_of_conversation_token)
    make = partial(preference_examples, tokenizer=tokenizer, max_seq_len=config.model.max_seq_len, eos_id=end_id)
    validate = partial(warn_of_template, tokenizer, end_id=end_id, keys=config.columns)
    data = load_step_data(config, PreferenceExample, make, validate)
    plan = plan_run(config, run, data)
    engine = build_policy(config, plan, tokenizer, data.train)
    task = DPOTask(
        data.train,
        data.eval,
        tokenizer.pad_token_id,
        config,
        run,
        model_hash(base),
    )
    saved = SavedModel(engine, "policy", base)
    fit_supervised("policy", saved, engine, task, tokenizer, config, run)


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
