# SPDX-License-Identifier: Apache-2.0
"""Scores of a reward model with its own tokenizer, which reads texts."""

import logging

from transformers import PreTrainedTokenizerBase

from dschat.engine.engine import frozen_engine
from dschat.models.classifiers import load_trained_scalar
from dschat.models.load import is_bidirectional
from dschat.models.pretrained import open_config
from dschat.models.scalar import ScalarModel
from dschat.run.distributed import device
from dschat.scoring.reward_reader import ClassifierReader, RewardReader, load_reward_model
from dschat.scoring.reward_texts import TextRewardScores
from dschat.training.iteration import pass_size
from dschat.training.steps.engines import load_options_of
from dschat.training.steps.scores import SourceParts
from dschat.training.steps.step3 import REWARD, STEP_3_READER_FLAGS, frozen_settings

logger = logging.getLogger(__name__)


def build_text_scores(parts: SourceParts, path: str, reward_tokenizer: PreTrainedTokenizerBase) -> TextRewardScores:
    """Scores of the reward model at a path, which reads texts.

    A model that reads texts in both directions, such as BERT, computes on this device; any other one is sharded like
    the run's frozen models.
    """
    config = parts.config
    settings = frozen_settings(config, parts.plan)
    size = pass_size(parts.plan.batches).without_gradient
    rm_template = config.rewards.rm_template
    if is_bidirectional(open_config(path, REWARD)):
        reader = load_reward_model(
            path,
            reward_tokenizer,
            rm_template,
            device(),
            settings.dtype,
            batch_size=size.rows,
            flags=STEP_3_READER_FLAGS,
            max_tokens=size.tokens,
        )
    else:
        model = load_trained_scalar(path, REWARD, settings.dtype, reward_tokenizer, load_options_of(config, settings))
        classifier = ClassifierReader(
            model,
            reward_tokenizer.pad_token_id,
            device(),
            batch_size=size.rows,
            engine=frozen_engine(ScalarModel(model), settings),
            max_tokens=size.tokens,
        )
        reader = RewardReader(classifier, reward_tokenizer, path, rm_template, STEP_3_READER_FLAGS)
    logger.info("%s %s scores text, read as %s by its own tokenizer", REWARD, path, reader.form)
    return TextRewardScores(reader, parts.skips)
