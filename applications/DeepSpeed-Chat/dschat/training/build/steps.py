# SPDX-License-Identifier: Apache-2.0
"""The training steps: each builds its data, models and algorithm, and runs the loop.

The way from a line of a JSON Lines file to a training batch is the same in steps 1, 2 and 3:

1. Here: the function of the step says how its examples are made, and `load_step_data` which process makes them.
2. data/loading.py: `ExampleLoader` opens the examples in the cache, or reads and encodes the rows.
3. data/sources.py: `load_share` reads every --data_path and takes the step's part of its rows (--data_split).
4. data/files.py: `read_file` yields the lines of a file as objects.
5. data/formats.py: `parse_row` makes a `Row` of the columns of an object: a prompt, and its responses.
6. data/examples.py: `sft_examples`, `pair_examples`, `preference_examples` and `prompt_examples` encode rows to token
   ids, and cut or drop what is too long.
7. data/collate.py: `update_batches` chooses the examples of each update, for the loop (training/loop.py), and
   `collate_sft` or `collate_pairs` pads them, for the step's task. The prompts of step 3 are sampled from (`PPO`).
"""

import logging
import os
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from transformers import PreTrainedTokenizerBase

from dschat.base.fingerprints import model_hash
from dschat.data.examples import (
    PairExample,
    PreferenceExample,
    PromptExample,
    SFTExample,
    pair_examples,
    preference_examples,
    prompt_examples,
    sft_examples,
)
from dschat.data.loading import ExampleLoader, Make, StepData, Validate
from dschat.data.messages import WEIGHT
from dschat.data.sources import source_line
from dschat.data.template_notes import RESPONSES_OF_STEPS, warn_of_template
from dschat.engine.process_group import training_dtype
from dschat.models.limits import check_length
from dschat.models.load import warn_without_classifier
from dschat.models.operations import Peaks
from dschat.models.tokenizer import end_token_id, load_tokenizer
from dschat.rollouts.termination import TerminationCondition
from dschat.run.distributed import barrier, broadcast_object, is_main
from dschat.run.model_folders import SavedModel
from dschat.run.output import RunOutput, warn_unless_made_by
from dschat.run.peaks import measure_own_gpu
from dschat.scoring.programs.run import ProgramPool
from dschat.settings.common import CommonConfig
from dschat.settings.ppo import PPOConfig
from dschat.settings.supervised import DPOConfig, OneModelConfig, RewardConfig, SFTConfig, SupervisedConfig
from dschat.training.build.engines import (
    ACTOR,
    CRITIC,
    MODEL,
    RunPlan,
    build_policy,
    build_reward_model,
)
from dschat.training.build.ppo import (
    build_episode_sampler,
    build_ppo_models,
    check_heads,
    load_ppo_tokenizer,
    open_environments,
    warn_of_wait,
)
from dschat.training.build.problems import load_problems
from dschat.training.build.score_example import saved_reward_model
from dschat.training.build.scores import (
    build_program_pool,
    check_functions,
)
from dschat.training.build.shared_base import check_shared_base, is_on_base
from dschat.training.loop import loop_of, total_updates
from dschat.training.ppo.algorithm import PPO
from dschat.training.ppo.models import MovingAverage
from dschat.training.supervised.algorithm import EngineT, Example, Supervised, Task
from dschat.training.supervised.dpo import DPOTask
from dschat.training.supervised.reward import RewardTask
from dschat.training.supervised.sft import SFTTask

logger = logging.getLogger(__name__)

E = TypeVar("E")


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
    peaks = measure_peaks(config, run)
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
    fit_supervised("policy", saved, engine, task, tokenizer, config, run, peaks)


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
    peaks = measure_peaks(config, run)
    engine = build_reward_model(config, plan, tokenizer, data.train)
    task = RewardTask(
        data.train,
        data.eval,
        tokenizer.pad_token_id,
        loss=config.preferences.reward_loss,
        centering=config.preferences.center_rewards_coefficient,
    )
    saved = saved_reward_model(engine, base, tokenizer, end_id)
    fit_supervised("reward", saved, engine, task, tokenizer, config, run, peaks)


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
    peaks = measure_peaks(config, run)
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
    fit_supervised("policy", saved, engine, task, tokenizer, config, run, peaks)


def train_ppo(config: PPOConfig, run: RunOutput) -> None:
    """Step 3: PPO with macro actions."""
    check_lengths(config)
    check_functions(config)
    tokenizer = load_ppo_tokenizer(config)
    end_id = end_token_id(tokenizer, config.data.end_of_conversation_token)
    condition = TerminationCondition(config.termination, tokenizer, end_id, config.optimisation.seed)
    run.record.parser = condition.parser
    programs: ProgramPool | None = None
    if config.rewards.reward_source == "programs":
        programs = build_program_pool(config)
    make = partial(prompt_examples, tokenizer=tokenizer, max_prompt_seq_len=config.sampling.max_prompt_seq_len)
    validate = partial(
        warn_of_template, tokenizer, end_id=end_id, keys=config.columns, responses=RESPONSES_OF_STEPS[3]
    )
    if programs is not None:
        run.record.sandbox = programs.level
        data = load_problems(config, make, programs, validate)
    else:
        data = load_step_data(config, PromptExample, make, validate, reads_prompts=not config.has_episodes)
    plan = plan_run(config, run, data)
    if config.rewards.source_names:
        logger.info("%s", config.rewards.formula)
    warmup = config.optimizers.critic_warmup_updates
    if warmup:
        logger.info("the first %d updates train the critic alone (--critic_warmup_updates)", warmup)
    if config.has_episodes:
        warn_of_wait(config, len(data.eval))
    environments = open_environments(config, tokenizer)
    peaks = measure_peaks(config, run)
    models = build_ppo_models(config, plan, tokenizer, programs, record_decoding(run))
    average = MovingAverage(models.actor) if config.memory.enable_ema else None

    actor_base = config.models.actor_model_name_or_path
    critic_base = config.models.critic_model_name_or_path or actor_base
    saved = [SavedModel(models.actor, "policy", actor_base, "actor")]
    if average is not None:
        role = "policy (moving average)"
        saved.append(SavedModel(models.actor, role, actor_base, "actor_ema", average.whole_weights))
    if models.critic is not None:
        saved.append(SavedModel(models.critic, "critic", critic_base, "critic"))
    average_parts = None if average is None else average.parts
    algorithm = PPO(
        models,
        data.train,
        data.eval,
        tokenizer,
        condition,
        config,
        run,
        average,
        sampler=build_episode_sampler(config, models, tokenizer, environments),
        peaks=peaks,
    )
    loop_of(algorithm, models.trained, saved, tokenizer, config, run, average_parts).fit()


def load_step_data(
    config: CommonConfig,
    kind: type[E],
    make: Make[E],
    validate: Validate | None = None,
    on_prompt: bool | None = None,
    reads_prompts: bool = True,
) -> StepData[E]:
    """The examples of a step. Every rank must call it.

    One process of a machine makes the examples, the others read what it made.

    Args:
        config: the flags.
        kind: the type of the examples.
        make: makes examples from rows, see `dschat.data.loading.ExampleLoader`.
        validate: warns about rows, see there.
        on_prompt: in step 1, prompts are learnt from, too.
        reads_prompts: whether the model reads the rows' prompts, see there.

    Raises:
        UserError: there are no data, a row is bad, or no example is left.
    """
    loader = ExampleLoader(config, kind, make, validate, on_prompt, reads_prompts)
    made_from = broadcast_object(loader.made_from if is_main() else {})
    data = None
    if is_main():
        data = loader.open(made_from, show=True)
        data = loader.make(show=True) if data is None else data
    barrier()
    # The first process of another machine, which may have a disk of its own.
    if data is None:
        data = loader.open(made_from)
        if data is None and os.environ.get("LOCAL_RANK") == "0":
            data = loader.make()
    barrier()
    if data is None:
        data = loader.open(made_from)
    return loader.read() if data is None else data


def check_lengths(config: CommonConfig) -> None:
    """Checks, before anything is loaded, that models can read texts of the lengths that flags allow.

    Raises:
        UserError: a model reads fewer tokens.
    """
    if isinstance(config, OneModelConfig):
        check_length(config.model.model_name_or_path, MODEL, config.model.max_seq_len, "--max_seq_len")
    elif isinstance(config, PPOConfig):
        tokens = config.sampling.max_prompt_seq_len + config.sampling.max_answer_seq_len
        check_shared_base(config)
        check_heads(config)
        # What the reward model reads depends on its tokenizer, see `load_ppo_tokenizer`.
        paths = {ACTOR: config.models.actor_model_name_or_path, CRITIC: config.models.critic_model_name_or_path}
        for flag, path in paths.items():
            if path and not is_on_base(config, path):
                check_length(path, flag, tokens, "--max_prompt_seq_len + --max_answer_seq_len")


def fit_supervised(
    name: str,
    saved: SavedModel,
    engine: EngineT,
    task: Task[Example, EngineT],
    tokenizer: PreTrainedTokenizerBase,
    config: SupervisedConfig,
    run: RunOutput,
    peaks: Peaks | None,
) -> None:
    """Trains one engine on a task. `name` is the name of the engine in checkpoints."""
    algorithm = Supervised(engine, task, config, run, peaks=peaks)
    loop_of(algorithm, {name: engine}, [saved], tokenizer, config, run).fit()


def plan_run(
    config: CommonConfig,
    run: RunOutput,
    data: StepData[E],
) -> RunPlan:
    """Logs how many rows of each source are used and how long the run is; returns the run's plan."""
    for source in data.sources:
        logger.info("%s", source_line(source))
    run.describe_data(data, **data.dropped)
    updates = total_updates(len(data.train), config, run.plan)
    run.announce(updates, len(data.train))
    return RunPlan.of(config, run.plan, updates)


def measure_peaks(config: CommonConfig, run: RunOutput) -> Peaks | None:
    """Measures this process's GPU while nothing else is on it; None on a CPU."""
    return measure_own_gpu(training_dtype(config.engine.dtype), run.record)


def record_decoding(run: RunOutput) -> Callable[[str], None]:
    """A function that writes into the run's record how continuous batching launches its steps."""
    return partial(setattr, run.record, "decoding")
