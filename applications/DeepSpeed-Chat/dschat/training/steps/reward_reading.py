# SPDX-License-Identifier: Apache-2.0
"""Scores of a reward model (--reward_model_name_or_path), which reads the actor's token ids or texts."""

from transformers import PreTrainedTokenizerBase

from dschat.base.errors import UserError
from dschat.engine.engine import frozen_engine
from dschat.models.classifiers import load_trained_scalar
from dschat.models.scalar import ScalarModel, warn_of_reward_loss
from dschat.models.vocabulary import same_ids
from dschat.scoring.reward_model import RewardModelScores
from dschat.scoring.reward_tokenizer import load_reward_tokenizer
from dschat.scoring.source import ScoreSource
from dschat.settings.ppo import PPOConfig
from dschat.training.iteration import pass_size
from dschat.training.steps.engines import load_options_of
from dschat.training.steps.scores import SourceParts
from dschat.training.steps.step3 import REWARD, STEP_3_READER_FLAGS, frozen_settings


def own_reward_tokenizer(
    config: PPOConfig, path: str, tokenizer: PreTrainedTokenizerBase
) -> PreTrainedTokenizerBase | None:
    """The tokenizer of a reward model that cannot read the actor's token ids.

    A reward model must read texts if its tokenizer differs from the actor's, or with --rm_template.

    Returns:
        The reward model's tokenizer if it must read texts, None if it can read the actor's token ids.

    Raises:
        UserError: it must read texts, but the responses are episodes, whose text lacks the tokens that separate turns.
    """
    reward_tokenizer = load_reward_tokenizer(path, config.rewards.rm_template, STEP_3_READER_FLAGS)
    if not config.rewards.rm_template and same_ids(tokenizer, reward_tokenizer):
        return None
    if config.has_episodes:
        raise UserError(
            f"--environment with {REWARD} {path}, whose tokenizer is not the actor's: it would read all turns of an"
            " episode as one response, without the tokens that separate them. Use a reward model with the actor's"
            " tokenizer, or a --reward_function, whose rows hold the messages."
        )
    return reward_tokenizer


def build_model(parts: SourceParts, path: str) -> ScoreSource:
    """Scores of the reward model at a path.

    It reads the actor's token ids, or texts if `own_reward_tokenizer` says so.
    """
    if parts.shared_scores is not None:
        return parts.shared_scores
    config = parts.config
    reward_tokenizer = own_reward_tokenizer(config, path, parts.tokenizer)
    if reward_tokenizer is not None:
        from dschat.training.steps.reward_texts import build_text_scores

        return build_text_scores(parts, path, reward_tokenizer)
    settings = frozen_settings(config, parts.plan)
    model = load_trained_scalar(path, REWARD, settings.dtype, parts.tokenizer, load_options_of(config, settings))
    warn_of_reward_loss(model.config, f"{REWARD} {path}")
    size = pass_size(parts.plan.batches).without_gradient
    return RewardModelScores(frozen_engine(ScalarModel(model), settings), size.rows, size.tokens)
