# SPDX-License-Identifier: Apache-2.0
"""The steps of REFUEL: each builds its data, models and algorithm, and runs the loop."""

from dataclasses import replace

import torch
from transformers import PreTrainedTokenizerBase

from dschat.base.fingerprints import model_hash
from dschat.data.dialogues import DialogueLimits, dialogue_examples
from dschat.data.loading import StepData
from dschat.data.notes import warn_of_dialogues
from dschat.data.sources import load_share
from dschat.data.turn_end import turn_end
from dschat.engine.engine import Engine, frozen_engine, train_engine
from dschat.engine.process_group import training_dtype
from dschat.models.engines import PolicyEngine
from dschat.models.finetuning import choose_trained, train_top_layers
from dschat.models.limits import check_length
from dschat.models.load import load_causal_lm, require_savable
from dschat.models.policy import PolicyModel
from dschat.models.tokenizer import own_end_ids
from dschat.models.vocabulary import id_count
from dschat.refuel.models import RefuelModels
from dschat.refuel.offline import RefuelTask, saved_reference
from dschat.refuel.offline_settings import RefuelConfig
from dschat.refuel.online import Refuel
from dschat.refuel.online_settings import RefuelOnlineConfig
from dschat.refuel.scores import DialogueScores, RewardModelDialogueScores, function_scores, reward_model_scores
from dschat.refuel.token_pairs import load_regression_data
from dschat.rollouts.continuous import Report, choose_engine
from dschat.run.distributed import device, is_main
from dschat.run.model_folders import SavedModel
from dschat.run.output import RunOutput
from dschat.scoring.reward_tokenizer import load_reward_tokenizer
from dschat.training.iteration import eval_size
from dschat.training.loop import loop_of
from dschat.training.steps.common import open_tokenizer, plan_run, record_decoding
from dschat.training.steps.engines import MODEL, RunPlan, engine_settings, load_options_of, trained_part
from dschat.training.steps.supervised import build_policy, fit_supervised, one_optimizer


def train_refuel(config: RefuelConfig, run: RunOutput) -> None:
    """REFUEL on pairs of dialogues that `dschat refuel-data` has sampled and scored."""
    base = config.model.model_name_or_path
    tokenizer = open_tokenizer(config)
    data = load_regression_data(config.data.data_path, config.model.max_seq_len, id_count(tokenizer))
    plan = plan_run(config, run, data)
    engine = build_policy(config, plan, tokenizer, data.train)
    task = RefuelTask(
        data.train,
        data.eval,
        tokenizer.pad_token_id,
        config.regression.eta,
        config.pairs.temperature,
        saved_reference(config, tokenizer.pad_token_id, model_hash(base), run.folder),
        config.engine.self_checks,
    )
    saved = SavedModel(engine, "policy", base)
    fit_supervised("refuel", saved, engine, task, tokenizer, config, run)


def train_refuel_online(config: RefuelOnlineConfig, run: RunOutput) -> None:
    """REFUEL on dialogues that are sampled during training, with the user messages of the data."""
    tokenizer = open_tokenizer(config)
    scores: DialogueScores | None = None
    if config.dialogues.reward_function is not None:  # before data and models, so that its mistakes are said at once
        scores = function_scores(config.dialogues.reward_function)
    base = config.model.model_name_or_path
    end_id = turn_end(tokenizer).token_id
    share = load_share(config)
    if is_main():
        warn_of_dialogues(tokenizer, share.train, config.columns)
    limits = DialogueLimits(
        config.dialogues.max_turns,
        config.sampling.max_prompt_seq_len,
        config.sampling.max_answer_seq_len,
        config.model.max_seq_len,
    )
    dialogues, dropped = dialogue_examples(share.train, tokenizer, limits)
    held_out, dropped_eval = dialogue_examples(share.eval, tokenizer, limits, held_out=True)
    data = StepData(dialogues, held_out, share.sources, share.files, {"train": dropped, "eval": dropped_eval})
    plan = plan_run(config, run, data)
    if scores is None:
        scores = build_dialogue_scores(config, config.dialogues.reward_model_name_or_path or "")
    models = build_refuel_models(config, plan, tokenizer, end_id, scores, record_decoding(run))
    saved = [SavedModel(models.policy, "policy", base)]
    algorithm = Refuel(models, dialogues, held_out, tokenizer, config, run)
    loop_of(algorithm, {"policy": models.policy}, saved, tokenizer, config, run).fit()


def build_refuel_models(
    config: RefuelOnlineConfig,
    plan: RunPlan,
    tokenizer: PreTrainedTokenizerBase,
    end_id: int,
    reward: DialogueScores,
    report: Report | None = None,
) -> RefuelModels:
    """The models of REFUEL online: the policy, and its frozen start as the reference if the KL has a coefficient.

    `end_id` ends a reply; `report` is called with how decoding steps are launched.
    """
    settings = engine_settings(config, plan, config.engine.gradient_checkpointing, config.engine.zero_stage)
    settings = replace(settings, offload=config.engine.offload and config.engine.zero_stage > 0)
    path = config.model.model_name_or_path
    torch.manual_seed(config.optimisation.seed)  # new rows of the embeddings must equal the reference's
    model = load_causal_lm(
        path, MODEL, settings.dtype, tokenizer, end_id, load_options_of(config, settings), own_end_ids(path)
    )
    require_savable(model, f"{MODEL} {path}")
    finetuning = trained_part(config, config.finetuning.lora_dim, tokenizer, path, MODEL)
    choose_trained(model, finetuning, path)
    if config.dialogues.trained_layers:
        train_top_layers(model, config.dialogues.trained_layers, "--trained_layers")
    optimizer = replace(one_optimizer(config, plan.updates), epsilon=config.rounds.adam_epsilon)
    policy = train_engine(PolicyModel(model), optimizer, settings)
    engine = choose_engine(
        config.dialogues.rollout_engine,
        config.sampling.per_device_generation_batch_size,
        policy.module.inner,
        "--rollout_engine",
        config.sampling.decode_graphs,
        report,
    )
    return RefuelModels(policy, _refuel_reference(config, plan, tokenizer, policy), reward, engine)


def _refuel_reference(
    config: RefuelOnlineConfig, plan: RunPlan, tokenizer: PreTrainedTokenizerBase, policy: Engine[PolicyModel]
) -> PolicyEngine | None:
    if config.kl.kl_coef == 0:
        return None
    if config.finetuning.lora_dim:
        from dschat.engine.adapters_off import AdaptersOff

        return AdaptersOff(policy)
    sharded = config.engine.zero_stage == 3 or config.engine.offload
    settings = engine_settings(config, plan, False, 3 if sharded else 0)
    load_options = load_options_of(config, settings)
    torch.manual_seed(config.optimisation.seed)  # as for the policy
    model = load_causal_lm(
        config.model.model_name_or_path, MODEL, settings.dtype, tokenizer, load_options=load_options
    )
    return frozen_engine(PolicyModel(model), settings)


def build_dialogue_scores(config: RefuelOnlineConfig, path: str) -> RewardModelDialogueScores:
    """Scores of the reward model of an online REFUEL run. Raises UserError if the model cannot be used."""
    check_length(path, "--reward_model", config.model.max_seq_len, "--max_seq_len")
    tokenizer = load_reward_tokenizer(path, rm_template=False)
    size = eval_size(config)
    return reward_model_scores(
        path,
        tokenizer,
        training_dtype(config.engine.dtype),
        device(),
        size.rows,
        size.tokens,
        offload=config.engine.offload,
    )
