# SPDX-License-Identifier: Apache-2.0
"""Opening Hugging Face models. Weights that a folder lacks are an error, not new numbers; its code is never run.

A `path` is a folder or hub id; the command-line `flag` that named it stands in messages.
"""

import logging
from collections.abc import Collection
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
)
from transformers.modeling_layers import GenericForSequenceClassification
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
)

from dschat.errors import UserError
from dschat.models.heads import draw_head, zero_head
from dschat.models.opening import (
    PLAIN,
    Opening,
    Placement,
    check_attention,
    implementation,
    say_what_is_used,
    without_flash,
)
from dschat.models.scalar import warn_of_reward_loss

logger = logging.getLogger(__name__)

HEAD = "score.weight"  # of a sequence classifier
LM_HEADS = ("lm_head.weight", "lm_head.bias", "embed_out.weight")  # what a causal LM's weights bring to a classifier
# Families that see tokens to come, unless their configs say that they are decoders.
BOTH_DIRECTIONS = {*MODEL_FOR_MASKED_LM_MAPPING_NAMES, "bert-generation", "xlnet"}
MOST_NAMED = 8  # weights named in a message


def load_causal_lm(
    path: str,
    flag: str,
    dtype: torch.dtype,
    tokenizer: PreTrainedTokenizerBase,
    end_id: int | None = None,
    opening: Opening = PLAIN,
    own_ends: Collection[int] = (),
) -> Any:
    """Opens a causal LM without dropout, its embeddings large enough for the run's tokenizer.

    The generation config keeps what ends a response beside EOS: `end_id` (--end_of_conversation_token) and the model's
    own, see `dschat.models.tokenizer.own_end_ids`.

    Raises UserError: there is no such model, it lacks weights, is a reward model, or sees tokens to come.
    """
    config = open_config(path, flag)
    if reads_both_ways(config):
        raise UserError(
            f"{flag} {path}: a {config.model_type} model is no causal LM, it reads in both directions. Use "
            "a decoder-only model (Gemma, Llama, Mistral, Qwen, GPT-2, OPT, …)."
        )
    scoring = [name for name in config.architectures or () if name.endswith("ForSequenceClassification")]
    if scoring:
        raise UserError(
            f"{flag} {path}: a {scoring[0]} is a reward model or critic, which gives scores and writes no"
            " text. Give a causal LM, such as the output of step 1."
        )
    model, loading = _from_pretrained(AutoModelForCausalLM, path, flag, dtype, config, opening)
    _check_weights(path, flag, loading)
    _fit(model, tokenizer, opening.placement, f"{flag} {path}")
    generation = model.generation_config
    _set_special_ids(generation, tokenizer)
    known = (tokenizer.eos_token_id, tokenizer.pad_token_id, None)  # an end by padding could not be seen
    if others := [one for one in dict.fromkeys([end_id, *own_ends]) if one not in known]:
        generation.eos_token_id = [tokenizer.eos_token_id, *others]
    try:
        generation.validate(strict=True)
    except ValueError:  # sampling values without do_sample, which transformers refuses to save
        generation.do_sample = True
    return model


def reads_both_ways(config: PreTrainedConfig) -> bool:
    """Whether a model sees tokens to come, as BERT and T5 do."""
    masked = config.model_type in BOTH_DIRECTIONS and not getattr(config, "is_decoder", False)
    return bool(config.is_encoder_decoder) or masked


def warn_without_classifier(path: str) -> None:
    """Says in step 1 what will not work in step 2: a reward model of a family without sequence classifiers."""
    config = open_config(path, "--model_name_or_path")
    if not _has_classifier(config):
        logger.warning(
            "transformers knows no sequence classifier of the family %s: step 2 will not make a reward model of it. "
            "Step 3 works with --reward_function.",
            config.model_type,
        )


def _has_classifier(config: PreTrainedConfig) -> bool:
    return type(config) in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING


def load_scalar(
    path: str,
    flag: str,
    dtype: torch.dtype,
    tokenizer: PreTrainedTokenizerBase,
    may_be_new: bool = True,
    for_this_run: bool = False,
    opening: Opening = PLAIN,
    head_seed: int | None = None,
) -> Any:
    """Opens a sequence classifier with one label; from a causal LM the head is new, if it `may_be_new`.

    A new head is drawn with `head_seed` (a reward model's, see `heads.draw_head`), or zero without one (a critic's).

    `for_this_run` accepts a family of which transformers knows no sequence classifier, and makes one: a critic, which
    nobody opens elsewhere.

    Raises UserError: there is no such model, it lacks weights, or it has no ``score`` head with one output, or none
    that was trained.
    """
    config = open_config(path, flag, num_labels=1)
    auto_class: Any = AutoModelForSequenceClassification
    if not _has_classifier(config):
        if not for_this_run or type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
            raise UserError(
                f"{flag} {path}: transformers knows no sequence classifier of the family {config.model_type}, so "
                "there can be no reward model of it. Use another family, or in step 3 --reward_function."
            )
        auto_class = classifier_class(config)
    model, loading = _from_pretrained(auto_class, path, flag, dtype, config, opening)
    head = getattr(model, "score", None)
    if not isinstance(head, nn.Linear) or head.out_features != 1:
        raise UserError(
            f"{flag} {path}: a {type(model).__name__} has no `score` layer with one output, which the reward model "
            "and the critic need. Use a decoder-only model (Gemma, Llama, Mistral, Qwen, GPT-2, …)."
        )
    new = HEAD in loading["missing_keys"]
    _check_weights(path, flag, loading, may_lack=(HEAD, "score.bias"), may_hold=LM_HEADS if new else ())
    if new and not may_be_new:
        raise UserError(f"{flag} {path}: not a reward model, it has no score head. Train one from it with step 2.")
    if new:
        start_head(head, head_seed, f"{flag} {path}")
    _fit(model, tokenizer, opening.placement, f"{flag} {path}")
    return model


def start_head(head: nn.Linear, seed: int | None, where: str) -> None:
    """Starts a new head, drawn with `seed` or at zero without one, and logs which."""
    if seed is None:
        logger.info("%s: a new score head, starting at zero", where)
        zero_head(head)
    else:
        logger.info("%s: a new score head, drawn from N(0, 1 / %d)", where, head.in_features + 1)
        draw_head(head, seed)


def load_classifier(path: str, flag: str, dtype: torch.dtype) -> Any:
    """Opens any sequence classifier with one trained label as it is, for scoring; its tokenizer is its own.

    Raises UserError: there is no such model, it has several labels, it lacks weights, or no head that was trained.
    """
    config = open_config(path, flag)
    model, loading = _from_pretrained(AutoModelForSequenceClassification, path, flag, dtype, config)
    if any(not name.startswith(f"{model.base_model_prefix}.") for name in loading["missing_keys"]):
        raise UserError(f"{flag} {path}: not a reward model, it has no score head. Train one from it with step 2.")
    _check_weights(path, flag, loading)
    if model.config.num_labels != 1:
        raise UserError(
            f"{flag} {path}: a classifier with {model.config.num_labels} labels; a reward model must have one label."
        )
    warn_of_reward_loss(model.config, f"{flag} {path}")
    return model


def explain_missing(what: str, path: str, flag: str, error: Exception) -> str:
    """One message for a model or tokenizer that cannot be opened, local or on the hub."""
    first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    if "trust_remote_code" in str(error):
        return f"{flag} {path}: its {what} needs Python code of its own (auto_map), which is never run. Give another."
    looks_local = path.startswith(("/", ".", "~")) or path.count("/") > 1
    if Path(path).is_dir():
        below = [str(config.parent) for config in sorted(Path(path).glob("*/config.json"))]
        hint = f" Did you mean {' or '.join(below)}?" if below else ""
        return f"{flag} {path}: this folder holds no {what} that transformers can open: {first_line}{hint}"
    if looks_local:
        return f"{flag} {path}: no such folder. Give the folder that holds the model's config.json."
    return (
        f"{flag} {path}: there is no such folder here, and the {what} could not be fetched from the Hugging Face hub: "
        f"{first_line} Check the name, the connection and, for gated models, HF_TOKEN; or download it first with "
        f"`hf download {path}`."
    )


def open_config(path: str, flag: str, **options: Any) -> PreTrainedConfig:
    """The model's config, dropout off."""
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(path, trust_remote_code=False, **options)
    except (OSError, ValueError, KeyError) as error:
        raise UserError(explain_missing("model", path, flag, error)) from error
    _disable_dropout(config)
    return config


def _from_pretrained(
    auto_class: Any,
    path: str,
    flag: str,
    dtype: torch.dtype,
    config: PreTrainedConfig,
    opening: Opening = PLAIN,
) -> tuple[Any, dict[str, Collection[str]]]:
    """The model and what transformers says of its weights (missing_keys, …)."""
    attention = opening.attention
    check_attention(attention, dtype)
    options = {"config": config, "dtype": dtype, "use_safetensors": True, "output_loading_info": True}
    options["attn_implementation"] = implementation(attention, config)
    try:
        with opening.placement.load_sharded() as where:
            model, loading = auto_class.from_pretrained(path, trust_remote_code=False, **options, **where)
    except (OSError, ValueError, KeyError, ImportError, SafetensorError) as error:
        problem = without_flash(attention, path, error) or explain_missing("model", path, flag, error)
        raise UserError(problem) from error
    except RuntimeError as error:
        if "mismatch" not in str(error):
            raise
        raise UserError(
            f"{flag} {path}: the weights do not fit the model that is wanted here. A reward model must have one label."
        ) from error
    say_what_is_used(attention, model.config.get_text_config()._attn_implementation, path)
    for module in model.modules():
        if any("jitter" in name for name in vars(module)):  # a router of experts, random in training mode
            module.register_forward_pre_hook(_evaluate)
    return model, loading


def _check_weights(
    path: str,
    flag: str,
    loading: dict[str, Collection[str]],
    may_lack: Collection[str] = (),
    may_hold: Collection[str] = (),
) -> None:
    """Weights that a folder lacks are an error, those that the model has no place for a warning.

    transformers would fill what is missing with random numbers and pass over the rest.
    """
    missing = sorted(set(loading["missing_keys"]) - set(may_lack))
    if missing:
        raise UserError(
            f"{flag} {path}: {len(missing)} of the model's weights are not in the folder: {_named(missing)}. It was "
            "saved or copied in part, or is a model of another kind (a reward model has no language-model head)."
        )
    unexpected = sorted(set(loading["unexpected_keys"]) - set(may_hold))
    if unexpected:
        logger.warning(
            "%s %s: %d weights of the folder are not used: %s", flag, path, len(unexpected), _named(unexpected)
        )


def _fit(model: Any, tokenizer: PreTrainedTokenizerBase, placement: Placement, where: str) -> None:
    """Room for tokens that were added, of which more than one to pad with is a warning; special ids in the config."""
    embeddings = model.get_input_embeddings()
    if len(tokenizer) > embeddings.num_embeddings:
        if len(tokenizer) > embeddings.num_embeddings + 1:
            _warn_of_growth(where, embeddings.num_embeddings, len(tokenizer))
        heads = [head for head in (model.get_output_embeddings(),) if head is not None]
        with placement.whole(model, embeddings, *heads):
            model.resize_token_embeddings(len(tokenizer))
    placement.finalise(model)
    _set_special_ids(model.config, tokenizer)
    model.config.use_cache = True


@lru_cache  # actor and reference, critic and reward model are one folder
def _warn_of_growth(where: str, rows: int, tokens: int) -> None:
    logger.warning(
        "%s: the model has embeddings of %d tokens, its tokenizer knows %d: %d untrained rows are added. If you did"
        " not add these tokens yourself, the folder's tokenizer is another model's: give it its own.",
        *(where, rows, tokens, tokens - rows),
    )


def _named(names: list[str]) -> str:
    return ", ".join([*names[:MOST_NAMED], *["…"] * (len(names) > MOST_NAMED)])


def classifier_class(config: PreTrainedConfig) -> Any:
    """The sequence classifier of a family; one made as transformers makes its own where transformers has none."""
    if _has_classifier(config):
        return MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING[type(config)]
    causal_lm: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    family = next(cls for cls in causal_lm.__mro__ if cls.__name__.endswith("PreTrainedModel"))
    name = causal_lm.__name__.replace("ForCausalLM", "ForSequenceClassification")
    members = {"base_model_prefix": causal_lm.base_model_prefix}
    return type(name, (GenericForSequenceClassification, family), members)


def _disable_dropout(config: PreTrainedConfig) -> None:
    """Sets every dropout probability of a config to 0: rollout and update must see the same function."""
    for name, value in vars(config).items():
        if isinstance(value, PreTrainedConfig):
            _disable_dropout(value)
        elif "drop" in name and isinstance(value, float) and value > 0:
            setattr(config, name, 0.0)


def _evaluate(router: nn.Module, inputs: object) -> None:
    """As in evaluation mode. A noise of 0 would be another model: PhiMoE's has a part in that mode, too."""
    router.training = False  # not that of the layers inside


def _set_special_ids(config: Any, tokenizer: Any) -> None:
    for name in ("pad_token_id", "eos_token_id", "bos_token_id"):
        setattr(config, name, getattr(tokenizer, name))
