# SPDX-License-Identifier: Apache-2.0
"""Opens Hugging Face models. Missing weights are an error, never random numbers; a folder's code is never run.

A `path` is a folder or hub id; messages name the command-line `flag` that gave it. A folder with a LoRA adapter and no
whole model (--no_merge_lora) opens as its base with the adapter merged.
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
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
)
from transformers.modeling_layers import GenericForSequenceClassification
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
)

from dschat.base.errors import UserError
from dschat.models.heads import draw_head, zero_head
from dschat.models.lora import adapter_alone, base_of, has_score_head, merge_adapter, named_base
from dschat.models.opening import (
    DEFAULT_OPTIONS,
    LoadOptions,
    Placement,
    check_attention,
    explain_refusal,
    resolve_attention,
    warn_once_if_other_attention,
)
from dschat.models.scalar import warn_of_reward_loss
from dschat.models.vocabulary import id_count, mask_missing_ids, require_rows

logger = logging.getLogger(__name__)

SCORE_HEAD = "score.weight"  # of a sequence classifier
LM_HEADS = ("lm_head.weight", "lm_head.bias", "embed_out.weight")  # weights of a causal LM that a classifier lacks
# Families that attend in both directions unless their configs say that they are decoders.
BOTH_DIRECTIONS = {*MODEL_FOR_MASKED_LM_MAPPING_NAMES, "bert-generation", "xlnet"}
MAX_NAMED = 8  # weights named in a message


def load_causal_lm(
    path: str,
    flag: str,
    dtype: torch.dtype,
    tokenizer: PreTrainedTokenizerBase,
    end_id: int | None = None,
    load_options: LoadOptions = DEFAULT_OPTIONS,
    own_ends: Collection[int] = (),
    all_rows: bool = False,
) -> Any:
    """Opens a causal LM without dropout, with embeddings large enough for the run's tokenizer.

    Args:
        path: folder or hub id.
        flag: that gave the path.
        dtype: dtype of the weights.
        tokenizer: tokenizer of the run.
        end_id: id of --end_of_conversation_token, added to the generation config's end tokens.
        load_options: attention implementation and placement of the weights.
        own_ends: the model's own end tokens, see `dschat.models.tokenizer.own_end_ids`; also added.
        all_rows: keep ids that the tokenizer lacks in the softmax; otherwise they have no probability, see
            `dschat.models.vocabulary`.

    Raises:
        UserError: there is no such model, it lacks weights, is a reward model, or attends in both directions.
    """
    config = open_config(path, flag)
    if reads_both_ways(config):
        raise UserError(
            f"{flag} {path}: a {config.model_type} model is not a causal LM, it reads in both directions. Use "
            "a decoder-only model (Gemma, Llama, Mistral, Qwen, GPT-2, OPT, …)."
        )
    for architecture in config.architectures or ():
        if architecture.endswith("ForSequenceClassification"):
            raise UserError(
                f"{flag} {path}: a {architecture} is a reward model or critic, which gives scores and writes no"
                " text. Give a causal LM, such as the output of step 1."
            )
    weights, adapters = base_of(path, flag)
    if any(map(has_score_head, adapters)):
        raise UserError(
            f"{flag} {path}: the adapter of a reward model or critic, which gives scores and writes no text. Give a"
            " causal LM, such as the output of step 1."
        )
    model, loading = _from_pretrained(AutoModelForCausalLM, path, flag, dtype, config, load_options)
    _check_weights(weights, flag, loading)
    _fit(model, tokenizer, load_options.placement, f"{flag} {path}")
    for adapter in adapters:
        merge_adapter(model, adapter, f"{flag} {path}", weights, load_options.placement)
    if not all_rows:
        mask_missing_ids(model, tokenizer)
    _set_generation_ids(model.generation_config, tokenizer, [end_id, *own_ends])
    return model


def _set_generation_ids(
    generation: GenerationConfig,
    tokenizer: PreTrainedTokenizerBase,
    end_ids: Collection[int | None],
) -> None:
    """Sets the special ids of a generation config; `end_ids` end a response in addition to EOS, unless they pad."""
    _set_special_ids(generation, tokenizer)
    further_ids: list[int] = []
    for end_id in dict.fromkeys(end_ids):
        if end_id is not None and end_id not in (tokenizer.eos_token_id, tokenizer.pad_token_id):
            further_ids.append(end_id)
    if further_ids:
        generation.eos_token_id = [tokenizer.eos_token_id, *further_ids]
    try:
        generation.validate(strict=True)
    except ValueError:  # sampling values without do_sample, which transformers refuses to save
        generation.do_sample = True


def reads_both_ways(config: PreTrainedConfig) -> bool:
    """Whether a model attends to later tokens, as BERT and T5 do."""
    masked = config.model_type in BOTH_DIRECTIONS and not getattr(config, "is_decoder", False)
    return bool(config.is_encoder_decoder) or masked


def warn_without_classifier(path: str) -> None:
    """Warns in step 1 if step 2 cannot train a reward model, because the family has no sequence classifier."""
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
    load_options: LoadOptions = DEFAULT_OPTIONS,
    may_grow: bool = True,
    head_seed: int | None = None,
) -> Any:
    """Opens a sequence classifier with one label, also from a causal LM.

    Args:
        path: folder or hub id.
        flag: that gave the path.
        dtype: dtype of the weights.
        tokenizer: tokenizer of the run.
        may_be_new: accept a causal LM, whose score head is then new.
        for_this_run: accept a family without sequence classifier in transformers, and make one: a critic, which is
            never opened elsewhere.
        load_options: attention implementation and placement of the weights.
        may_grow: add rows to the embeddings for ids of the tokenizer that they lack; only if it `may_be_new`.
        head_seed: initialises a new head randomly, see `heads.draw_head` (reward model); zeros without it (critic).

    Raises:
        UserError: there is no such model; it lacks weights; it has no ``score`` head with one output, or no trained
            one; its embeddings have too few rows.
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
    if not (may_be_new and may_grow):
        require_rows(config, tokenizer, f"{flag} {path}")
    weights, adapters = base_of(path, flag)
    model, loading = _from_pretrained(auto_class, path, flag, dtype, config, load_options)
    head = getattr(model, "score", None)
    if not isinstance(head, nn.Linear) or head.out_features != 1:
        raise UserError(
            f"{flag} {path}: a {type(model).__name__} has no `score` layer with one output, which the reward model "
            "and the critic need. Use a decoder-only model (Gemma, Llama, Mistral, Qwen, GPT-2, …)."
        )
    adapter_has_head = any(map(has_score_head, adapters))
    lacks_head = SCORE_HEAD in loading["missing_keys"]
    _check_weights(weights, flag, loading, (SCORE_HEAD, "score.bias"), LM_HEADS if lacks_head else ())
    if lacks_head and adapter_has_head:
        zero_head(head)  # `merge_adapter` replaces it
    elif lacks_head:
        if not may_be_new:
            raise UserError(f"{flag} {path}: not a reward model, it has no score head. Train one from it with step 2.")
        start_head(head, head_seed, f"{flag} {path}")
    _fit(model, tokenizer, load_options.placement, f"{flag} {path}")
    drop_eos_as_pad(model.config)
    for adapter in adapters:
        merge_adapter(model, adapter, f"{flag} {path}", weights, load_options.placement)
    return model


def start_head(
    head: nn.Linear,
    seed: int | None,
    where: str,
) -> None:
    """Initialises a new head, randomly with `seed` or with zeros without one, and logs which."""
    if seed is None:
        logger.info("%s: a new score head, starting at zero", where)
        zero_head(head)
    else:
        logger.info("%s: a new score head, initialised from N(0, 1 / %d)", where, head.in_features + 1)
        draw_head(head, seed)


def drop_eos_as_pad(config: PreTrainedConfig) -> None:
    """Removes a classifier's pad token if it is EOS.

    The forward of transformers scores the last token that is not padding, which is to be EOS. Without a pad token it
    scores sequences one at a time, and refuses a padded batch.
    """
    end_ids = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    if config.pad_token_id in end_ids:
        config.pad_token_id = None


def load_classifier(
    path: str,
    flag: str,
    dtype: torch.dtype,
    tokenizer: PreTrainedTokenizerBase,
) -> Any:
    """Opens any sequence classifier with one trained label for scoring, with its own tokenizer.

    Raises:
        UserError: there is no such model; it has several labels, lacks weights or has no trained head; its embeddings
            have fewer rows than the tokenizer has ids.
    """
    if adapter_alone(path) is not None:
        model = load_scalar(path, flag, dtype, tokenizer, may_be_new=False)
        warn_of_reward_loss(model.config, f"{flag} {path}")
        return model
    config = open_config(path, flag)
    require_rows(config, tokenizer, f"{flag} {path}")
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


def explain_missing(
    what: str,
    path: str,
    flag: str,
    error: Exception,
) -> str:
    """The message for a model or tokenizer that cannot be opened, local or on the hub."""
    error_lines = str(error).strip().splitlines()
    first_line = error_lines[0] if error_lines else type(error).__name__
    if "trust_remote_code" in str(error):
        return f"{flag} {path}: its {what} needs Python code of its own (auto_map), which is never run. Give another."
    if remedy := gguf_remedy(path):
        return f"{flag} {path}: {remedy}"
    looks_local = path.startswith(("/", ".", "~")) or path.count("/") > 1
    if Path(path).is_dir():
        subfolders = [str(config.parent) for config in sorted(Path(path).glob("*/config.json"))]
        hint = f" Did you mean {' or '.join(subfolders)}?" if subfolders else ""
        return f"{flag} {path}: this folder holds no {what} that transformers can open: {first_line}{hint}"
    if Path(path).is_file():
        return f"{flag} {path}: a file, and no folder. Give the folder that holds the model's config.json."
    if looks_local:
        return f"{flag} {path}: no such folder. Give the folder that holds the model's config.json."
    return (
        f"{flag} {path}: there is no such folder here, and the {what} could not be fetched from the Hugging Face hub: "
        f"{first_line} Check the name, the connection and, for gated models, HF_TOKEN; or download it first with "
        f"`hf download {path}`."
    )


def gguf_remedy(path: str) -> str | None:
    """What to do with a GGUF file, or a folder or repository of such files; None for any other path."""
    location = Path(path)
    if location.is_dir() and any(location.glob("*.gguf")):
        folder = str(location)
        file_name = sorted(location.glob("*.gguf"))[0].name
    elif not location.is_dir() and location.suffix.lower() == ".gguf":
        folder = str(location.parent)
        file_name = location.name
    elif not location.exists() and "gguf" in location.name.lower():
        folder = str(location)
        file_name = "FILE.gguf"
    else:
        return None
    return (
        "GGUF weights, which are quantised for inference and can neither be trained nor score as they are. Prefer the "
        "original model (safetensors). Or convert them, with the package gguf installed: model = "
        f"AutoModelForCausalLM.from_pretrained({folder!r}, gguf_file={file_name!r}, dtype=torch.float32); build a "
        "second model by AutoModelForCausalLM.from_config(model.config), give it model.state_dict() by "
        "load_state_dict, and save_pretrained(FOLDER) both that model and the tokenizer, which AutoTokenizer opens "
        "with the same gguf_file. Then give FOLDER."
    )


def open_config(path: str, flag: str, **options: Any) -> PreTrainedConfig:
    """The config of a model, or of an adapter's base, with dropout off."""
    base, _ = base_of(path, flag)
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(base, trust_remote_code=False, **options)
    except (OSError, ValueError, KeyError) as error:
        raise UserError(explain_missing("model", base, named_base(path, flag), error)) from error
    _disable_dropout(config)
    return config


def _from_pretrained(
    auto_class: Any,
    path: str,
    flag: str,
    dtype: torch.dtype,
    config: PreTrainedConfig,
    load_options: LoadOptions = DEFAULT_OPTIONS,
) -> tuple[Any, dict[str, Collection[str]]]:
    """Opens a model, or an adapter's base; also returns transformers' loading info (missing_keys, …)."""
    attention = load_options.attention
    weights, adapters = base_of(path, flag)
    if adapters:
        logger.info("%s %s: a LoRA adapter, which is merged into %s", flag, path, weights)
    check_attention(attention, dtype)
    try:
        with load_options.placement.while_loading() as placement_options:
            model, loading = auto_class.from_pretrained(
                weights,
                trust_remote_code=False,
                config=config,
                dtype=dtype,
                use_safetensors=True,
                output_loading_info=True,
                attn_implementation=resolve_attention(attention, config),
                **placement_options,
            )
    except (OSError, ValueError, KeyError, ImportError, SafetensorError) as error:
        missing = explain_missing("model", weights, named_base(path, flag), error)
        raise UserError(explain_refusal(attention, path, error) or missing) from error
    except RuntimeError as error:
        if "mismatch" not in str(error):
            raise
        raise UserError(
            f"{flag} {path}: the weights do not fit the model that is wanted here. A reward model must have one label."
        ) from error
    warn_once_if_other_attention(attention, model.config.get_text_config()._attn_implementation, path)
    for module in model.modules():
        is_random_router = any("jitter" in name for name in vars(module))  # of experts, in training mode
        if is_random_router:
            module.register_forward_pre_hook(_use_evaluation_mode)
    model.name_or_path = path
    return model, loading


def _check_weights(
    path: str,
    flag: str,
    loading: dict[str, Collection[str]],
    may_lack: Collection[str] = (),
    may_hold: Collection[str] = (),
) -> None:
    """Raises UserError if a folder lacks weights, and warns if it has weights that the model does not use.

    transformers would initialise missing weights randomly and ignore the others.
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


def _fit(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    placement: Placement,
    where: str,
) -> None:
    """Enlarges embeddings for the tokenizer's ids, places the remaining weights, and sets the config's special ids.

    More than one added row is a warning: one may be a pad token.
    """
    embeddings = model.get_input_embeddings()
    row_count = embeddings.num_embeddings
    needed_rows = id_count(tokenizer)
    if needed_rows > row_count:
        if needed_rows > row_count + 1:
            _warn_of_growth(where, row_count, needed_rows)
        head = model.get_output_embeddings()
        resized = [embeddings] if head is None else [embeddings, head]
        with placement.gathered(model, *resized):
            model.resize_token_embeddings(needed_rows)
    placement.finalise(model)
    _set_special_ids(model.config, tokenizer)
    model.config.use_cache = True


@lru_cache  # once for actor and reference, which share a folder
def _warn_of_growth(
    where: str,
    rows: int,
    tokens: int,
) -> None:
    logger.warning(
        "%s: the model has embeddings of %d tokens, its tokenizer knows %d: %d untrained rows are added. If you did"
        " not add these tokens yourself, the folder's tokenizer is another model's: give it its own.",
        *(where, rows, tokens, tokens - rows),
    )


def _named(names: list[str]) -> str:
    shown = ", ".join(names[:MAX_NAMED])
    return f"{shown}, …" if len(names) > MAX_NAMED else shown


def classifier_class(config: PreTrainedConfig) -> Any:
    """The sequence classifier class of a family; if transformers has none, one that is built like its others."""
    if _has_classifier(config):
        return MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING[type(config)]
    causal_lm: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    base_class = next(cls for cls in causal_lm.__mro__ if cls.__name__.endswith("PreTrainedModel"))
    name = causal_lm.__name__.replace("ForCausalLM", "ForSequenceClassification")
    members = {"base_model_prefix": causal_lm.base_model_prefix}
    return type(name, (GenericForSequenceClassification, base_class), members)


def _disable_dropout(config: PreTrainedConfig) -> None:
    """Sets every dropout probability of a config to 0: rollout and update must compute the same function."""
    for name, value in vars(config).items():
        if isinstance(value, PreTrainedConfig):
            _disable_dropout(value)
        elif "drop" in name and isinstance(value, float) and value > 0:
            setattr(config, name, 0.0)


def _use_evaluation_mode(router: nn.Module, inputs: object) -> None:
    """Switches a router, but not its layers, to evaluation mode; a noise of 0 would change PhiMoE's routing."""
    router.training = False


def _set_special_ids(config: Any, tokenizer: Any) -> None:
    for name in ("pad_token_id", "eos_token_id", "bos_token_id"):
        setattr(config, name, getattr(tokenizer, name))
