# SPDX-License-Identifier: Apache-2.0
"""Opens causal LMs. Missing weights are an error, never random numbers; a folder's code is never run.

A `path` is a folder or hub id; `flag` is the command-line flag that it came from, for messages. A folder with a LoRA
adapter and no whole model (--no_merge_lora) opens as its base with the adapter merged. Reward models and critics are
opened by classifiers.py.
"""

import logging
from collections.abc import Collection, Mapping
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
)

from dschat.base.errors import UserError
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
from dschat.models.vocabulary import mask_missing_ids

logger = logging.getLogger(__name__)

# Families that attend in both directions unless their configs say that they are decoders.
BIDIRECTIONAL_FAMILIES = {*MODEL_FOR_MASKED_LM_MAPPING_NAMES, "bert-generation", "xlnet"}


def load_causal_lm(
    path: str,
    flag: str,
    dtype: torch.dtype,
    tokenizer: PreTrainedTokenizerBase,
    end_id: int | None = None,
    load_options: LoadOptions = DEFAULT_OPTIONS,
    own_end_ids: Collection[int] = (),
    all_rows: bool = False,
) -> Any:
    """Opens a causal LM without dropout, with embeddings large enough for the run's tokenizer.

    Args:
        path: folder or hub id.
        flag: flag that the path came from.
        dtype: dtype of the weights.
        tokenizer: tokenizer of the run.
        end_id: id of --end_of_conversation_token, added to the generation config's end tokens.
        load_options: attention implementation and placement of the weights.
        own_end_ids: the model's own end tokens, see `dschat.models.tokenizer.own_end_ids`; also added.
        all_rows: the softmax includes ids that the tokenizer lacks. Otherwise they have no probability, see
            `dschat.models.vocabulary`.

    Raises:
        UserError: there is no such model, it lacks weights, is a reward model, or attends in both directions.
    """
    source = ModelSource.of(path, flag)
    config = open_config(path, flag)
    _require_causal_lm(config, source)
    model, loading = open_pretrained(AutoModelForCausalLM, source, dtype, config, load_options)
    check_loaded(source, loading)
    grow_embeddings(model, tokenizer, load_options.placement, source.where)
    load_options.placement.finalise(model)
    set_special_ids(model.config, tokenizer)
    merge_adapters(model, source, load_options.placement)
    if not all_rows:
        mask_missing_ids(model, tokenizer)
    _set_generation_ids(model.generation_config, tokenizer, [end_id, *own_end_ids])
    if _fault_of(model.generation_config) is not None:
        model.generation_config.do_sample = True  # many published models have sampling parameters without it
    return model


def _require_causal_lm(config: PreTrainedConfig, source: ModelSource) -> None:
    if is_bidirectional(config):
        raise UserError(
            f"{source.where}: a {config.model_type} model is not a causal LM, it reads in both directions. Use "
            "a decoder-only model (Gemma, Llama, Mistral, Qwen, GPT-2, OPT, …)."
        )
    for architecture in config.architectures or ():
        if architecture.endswith("ForSequenceClassification"):
            raise UserError(
                f"{source.where}: a {architecture} is a reward model or critic, which gives scores and writes no"
                " text. Give a causal LM, such as the output of step 1."
            )
    if source.has_score_adapter:
        raise UserError(
            f"{source.where}: the adapter of a reward model or critic, which gives scores and writes no text. Give a"
            " causal LM, such as the output of step 1."
        )


def _set_generation_ids(
    generation: GenerationConfig, tokenizer: PreTrainedTokenizerBase, end_ids: Collection[int | None]
) -> None:
    """Sets the special ids of a generation config.

    `end_ids` end a response in addition to EOS; None and the id of the pad token are left out.
    """
    set_special_ids(generation, tokenizer)
    eos_id = tokenizer.eos_token_id
    further_ids: list[int] = []
    for end_id in dict.fromkeys(end_ids):
        if end_id is not None and end_id not in (eos_id, tokenizer.pad_token_id):
            further_ids.append(end_id)
    if further_ids:
        generation.eos_token_id = further_ids if eos_id is None else [eos_id, *further_ids]


def require_savable(model: PreTrainedModel, where: str) -> None:
    """Refuses a model that is to be trained and that transformers would not save at the end of the run.

    Args:
        model: the model, of `load_causal_lm`.
        where: its flag and path.

    Raises:
        UserError: its generation config is not valid.
    """
    fault = _fault_of(model.generation_config)
    if fault is not None:
        raise UserError(
            f"{where}: transformers would not save its generation_config.json with the trained model. Correct the file"
            f" in a local copy of the folder. {fault}"
        )


def _fault_of(generation: GenerationConfig) -> str | None:
    """Why transformers would not save a generation config; None if it would."""
    try:
        generation.validate(strict=True)
    except ValueError as error:
        return str(error)
    return None


def is_bidirectional(config: PreTrainedConfig) -> bool:
    """Whether a model attends to later tokens, as BERT and T5 do."""
    return attends_to_later_tokens(config.to_dict())


def attends_to_later_tokens(config: Mapping[str, object]) -> bool:
    """`is_bidirectional` for the content of a config.json with a model_type."""
    if config.get("is_encoder_decoder"):
        return True
    return config["model_type"] in BIDIRECTIONAL_FAMILIES and not config.get("is_decoder")


def warn_without_classifier(path: str) -> None:
    """Warns in step 1 if step 2 cannot train a reward model, because the family has no sequence classifier."""
    config = open_config(path, "--model_name_or_path")
    if not has_classifier(config):
        logger.warning(
            "transformers knows no sequence classifier of the family %s: step 2 will not make a reward model of it. "
            "Step 3 works with --reward_function.",
            config.model_type,
        )


def has_classifier(config: PreTrainedConfig) -> bool:
    """Whether transformers knows a sequence classifier of a model's family."""
    return type(config) in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING
