# SPDX-License-Identifier: Apache-2.0
"""Opens sequence classifiers with one label: reward models and critics. Paths and flags are as in load.py."""

import logging
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForSequenceClassification, PreTrainedConfig, PreTrainedTokenizerBase
from transformers.modeling_layers import GenericForSequenceClassification
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
)

from dschat.base.errors import UserError
from dschat.models.adapters import adapter_alone
from dschat.models.heads import zero_head
from dschat.models.load import has_classifier
from dschat.models.opening import DEFAULT_OPTIONS, LoadOptions
from dschat.models.pretrained import (
    ModelSource,
    check_loaded,
    grow_embeddings,
    merge_adapters,
    open_config,
    open_pretrained,
    set_special_ids,
)
from dschat.models.scalar import warn_of_reward_loss
from dschat.models.vocabulary import require_rows

logger = logging.getLogger(__name__)

SCORE_HEAD = "score.weight"  # of a sequence classifier
LM_HEADS = ("lm_head.weight", "lm_head.bias", "embed_out.weight")  # weights of a causal LM that a classifier lacks


@dataclass(frozen=True)
class _ScalarRules:
    """What a model may lack that opens as a sequence classifier.

    Attributes:
        new_head: without a score head it gets a new one.
        new_rows: embeddings with fewer rows than the tokenizer has ids get new rows.
        new_class: a family without a sequence classifier in transformers gets one, see `classifier_class`.
        head_seed: initialises a new head randomly, see `reward_head.draw_head`; without a seed it starts at zero.
        outputs: outputs of the head.
    """

    new_head: bool = True
    new_rows: bool = True
    new_class: bool = False
    head_seed: int | None = None
    outputs: int = 1


def load_scalar(
    path: str,
    flag: str,
    dtype: torch.dtype,
    tokenizer: PreTrainedTokenizerBase,
    load_options: LoadOptions = DEFAULT_OPTIONS,
    head_seed: int | None = None,
) -> Any:
    """Opens the start of a reward model: a sequence classifier with one label, or a causal LM that becomes one.

    Args:
        path: folder or hub id.
        flag: flag that the path came from.
        dtype: dtype of the weights.
        tokenizer: tokenizer of the run, for whose ids the embeddings grow.
        load_options: attention implementation and placement of the weights.
        head_seed: initialises a new score head randomly, see `reward_head.draw_head`; otherwise it starts at zero.

    Raises:
        UserError: there is no such model; it lacks weights; its family has no sequence classifier with a ``score``
            head of one output.
    """
    rules = _ScalarRules(head_seed=head_seed)
    return _open_scalar(ModelSource.of(path, flag), rules, dtype, tokenizer, load_options)


def load_critic(
    path: str,
    flag: str,
    dtype: torch.dtype,
    tokenizer: PreTrainedTokenizerBase,
    load_options: LoadOptions = DEFAULT_OPTIONS,
    may_grow: bool = True,
    outputs: int = 1,
) -> Any:
    """Opens the start of a critic: as `load_scalar`, with a new head of zeros, and from more families.

    A family without a sequence classifier in transformers gets one that only this run can open; a reward model would
    have to open elsewhere, too.

    Args:
        path: folder or hub id.
        flag: flag that the path came from.
        dtype: dtype of the weights.
        tokenizer: tokenizer of the run.
        load_options: attention implementation and placement of the weights.
        may_grow: add rows to the embeddings for ids of the tokenizer that they lack.
        outputs: outputs of the head: more than one of a critic with bins, see `dschat.models.value_head`.

    Raises:
        UserError: as `load_scalar`; or the embeddings have too few rows and may not grow.
    """
    rules = _ScalarRules(new_rows=may_grow, new_class=True, outputs=outputs)
    return _open_scalar(ModelSource.of(path, flag), rules, dtype, tokenizer, load_options)


def load_trained_scalar(
    path: str,
    flag: str,
    dtype: torch.dtype,
    tokenizer: PreTrainedTokenizerBase,
    load_options: LoadOptions = DEFAULT_OPTIONS,
) -> Any:
    """Opens a trained reward model, whose score head and embeddings are complete.

    Args:
        path: folder or hub id.
        flag: flag that the path came from.
        dtype: dtype of the weights.
        tokenizer: tokenizer of the texts to score.
        load_options: attention implementation and placement of the weights.

    Raises:
        UserError: as `load_scalar`; or it has no trained head, or its embeddings have too few rows.
    """
    rules = _ScalarRules(new_head=False, new_rows=False)
    return _open_scalar(ModelSource.of(path, flag), rules, dtype, tokenizer, load_options)


def _open_scalar(
    source: ModelSource,
    rules: _ScalarRules,
    dtype: torch.dtype,
    tokenizer: PreTrainedTokenizerBase,
    load_options: LoadOptions,
) -> Any:
    config = open_config(source.path, source.flag, num_labels=rules.outputs)
    auto_class = _classifier_loader(config, rules, source.where)
    if not rules.new_rows:
        require_rows(config, tokenizer, source.where)

    model, loading = open_pretrained(auto_class, source, dtype, config, load_options)
    _require_score_layer(model, rules.outputs, source.where)
    lacks_head = SCORE_HEAD in loading["missing_keys"]
    check_loaded(source, loading, (SCORE_HEAD, "score.bias"), LM_HEADS if lacks_head else ())

    # The head gets its values before `finalise`, which places weights that did not come from a file.
    if lacks_head:
        _start_head(model.score, rules, source)
    grow_embeddings(model, tokenizer, load_options.placement, source.where)
    load_options.placement.finalise(model)
    set_special_ids(model.config, tokenizer)
    drop_eos_as_pad(model.config)
    merge_adapters(model, source, load_options.placement)
    return model


def _classifier_loader(config: PreTrainedConfig, rules: _ScalarRules, where: str) -> Any:
    """The class whose ``from_pretrained`` opens a family's sequence classifiers."""
    if has_classifier(config):
        return AutoModelForSequenceClassification
    if rules.new_class and type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        return classifier_class(config)
    raise UserError(
        f"{where}: transformers knows no sequence classifier of the family {config.model_type}, so "
        "there can be no reward model of it. Use another family, or in step 3 --reward_function."
    )


def _require_score_layer(model: Any, outputs: int, where: str) -> None:
    head = getattr(model, "score", None)
    if not isinstance(head, nn.Linear) or head.out_features != outputs:
        raise UserError(
            f"{where}: a {type(model).__name__} has no `score` layer with one output, which the reward model "
            "and the critic need. Use a decoder-only model (Gemma, Llama, Mistral, Qwen, GPT-2, …)."
        )


def _start_head(head: nn.Linear, rules: _ScalarRules, source: ModelSource) -> None:
    """Initialises a score head that the weights lack, and logs how."""
    if source.has_score_adapter:
        zero_head(head)  # merging the adapter replaces it
    elif not rules.new_head:
        raise UserError(f"{source.where}: not a reward model, it has no score head. Train one from it with step 2.")
    elif rules.head_seed is None:
        logger.info("%s: a new score head, starting at zero", source.where)
        zero_head(head)
    else:
        from dschat.models.reward_head import draw_head

        logger.info("%s: a new score head, initialised from N(0, 1 / %d)", source.where, head.in_features + 1)
        draw_head(head, rules.head_seed)


def drop_eos_as_pad(config: PreTrainedConfig) -> None:
    """Removes a classifier's pad token if it is EOS.

    The forward of transformers scores the last token that is not padding, which should be EOS. Without a pad token it
    scores sequences one at a time, and refuses a padded batch.
    """
    end_ids = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    if config.pad_token_id in end_ids:
        config.pad_token_id = None


def classifier_class(config: PreTrainedConfig) -> Any:
    """The sequence classifier class of a family; if transformers has none, one that is built like its others."""
    if has_classifier(config):
        return MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING[type(config)]
    causal_lm: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    base_class = next(cls for cls in causal_lm.__mro__ if cls.__name__.endswith("PreTrainedModel"))
    name = causal_lm.__name__.replace("ForCausalLM", "ForSequenceClassification")
    members = {"base_model_prefix": causal_lm.base_model_prefix}
    return type(name, (GenericForSequenceClassification, base_class), members)


def load_classifier(path: str, flag: str, dtype: torch.dtype, tokenizer: PreTrainedTokenizerBase) -> Any:
    """Opens any sequence classifier with one trained label for scoring, with its own tokenizer.

    Raises:
        UserError: there is no such model; it has several labels, lacks weights or has no trained head; its embeddings
            have fewer rows than the tokenizer has ids.
    """
    if adapter_alone(path) is not None:
        model = load_trained_scalar(path, flag, dtype, tokenizer)
        warn_of_reward_loss(model.config, f"{flag} {path}")
        return model
    source = ModelSource.of(path, flag)
    config = open_config(path, flag)
    require_rows(config, tokenizer, source.where)
    model, loading = open_pretrained(AutoModelForSequenceClassification, source, dtype, config, DEFAULT_OPTIONS)
    if any(not name.startswith(f"{model.base_model_prefix}.") for name in loading["missing_keys"]):
        raise UserError(f"{source.where}: not a reward model, it has no score head. Train one from it with step 2.")
    check_loaded(source, loading)
    if model.config.num_labels != 1:
        raise UserError(
            f"{source.where}: a classifier with {model.config.num_labels} labels; a reward model must have one label."
        )
    warn_of_reward_loss(model.config, source.where)
    return model
