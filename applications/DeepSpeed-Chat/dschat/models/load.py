# SPDX-License-Identifier: Apache-2.0
"""Opening Hugging Face models. Weights that a folder lacks are an error, not new numbers; its code is never run.

A `path` is a folder or hub id; the command-line `flag` that named it stands in messages. A folder with a LoRA adapter
and no whole model (--no_merge_lora) opens as its base with the adapter merged in.
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

from dschat.base.errors import UserError
from dschat.models.heads import draw_head, zero_head
from dschat.models.lora import adapter_alone, base_of, has_score_head, merge_adapter, named_base
from dschat.models.opening import (
    PLAIN,
    Opening,
    Placement,
    check_attention,
    explain_refusal,
    implementation,
    say_what_is_used,
)
from dschat.models.scalar import warn_of_reward_loss
from dschat.models.vocabulary import id_count, mask_missing_ids, require_rows

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
    all_rows: bool = False,
) -> Any:
    """Opens a causal LM without dropout, its embeddings large enough for the run's tokenizer.

    Ids that the tokenizer lacks have no probability, see `dschat.models.vocabulary`; with `all_rows` they stay in the
    softmax.

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
    weights, adapters = base_of(path, flag)
    if any(map(has_score_head, adapters)):
        raise UserError(
            f"{flag} {path}: the adapter of a reward model or critic, which gives scores and writes no text. Give a"
            " causal LM, such as the output of step 1."
        )
    model, loading = _from_pretrained(AutoModelForCausalLM, path, flag, dtype, config, opening)
    _check_weights(weights, flag, loading)
    _fit(model, tokenizer, opening.placement, f"{flag} {path}")
    for adapter in adapters:
        merge_adapter(model, adapter, f"{flag} {path}", weights, opening.placement)
    if not all_rows:
        mask_missing_ids(model, tokenizer)
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
    may_grow: bool = True,
    head_seed: int | None = None,
) -> Any:
    """Opens a sequence classifier with one label; from a causal LM the head is new, if it `may_be_new`.

    A new head is drawn with `head_seed` (a reward model's, see `heads.draw_head`), or zero without one (a critic's).

    `for_this_run` accepts a family of which transformers knows no sequence classifier, and makes one: a critic, which
    nobody opens elsewhere. `may_grow`: the embeddings get rows for ids of the tokenizer that they lack; a model that
    `may_be_new` only.

    Raises UserError: there is no such model, it lacks weights, or it has no ``score`` head with one output, or none
    that was trained; its embeddings have too few rows.
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
    model, loading = _from_pretrained(auto_class, path, flag, dtype, config, opening)
    head = getattr(model, "score", None)
    if not isinstance(head, nn.Linear) or head.out_features != 1:
        raise UserError(
            f"{flag} {path}: a {type(model).__name__} has no `score` layer with one output, which the reward model "
            "and the critic need. Use a decoder-only model (Gemma, Llama, Mistral, Qwen, GPT-2, …)."
        )
    is_trained_beside = any(map(has_score_head, adapters))
    lacks_head = HEAD in loading["missing_keys"]
    _check_weights(weights, flag, loading, (HEAD, "score.bias"), LM_HEADS if lacks_head else ())
    new = lacks_head and not is_trained_beside
    if new and not may_be_new:
        raise UserError(f"{flag} {path}: not a reward model, it has no score head. Train one from it with step 2.")
    if new:
        start_head(head, head_seed, f"{flag} {path}")
    elif lacks_head:  # the adapter brings a trained one
        zero_head(head)
    _fit(model, tokenizer, opening.placement, f"{flag} {path}")
    drop_eos_as_pad(model.config)
    for adapter in adapters:
        merge_adapter(model, adapter, f"{flag} {path}", weights, opening.placement)
    return model


def start_head(head: nn.Linear, seed: int | None, where: str) -> None:
    """Starts a new head, drawn with `seed` or at zero without one, and logs which."""
    if seed is None:
        logger.info("%s: a new score head, starting at zero", where)
        zero_head(head)
    else:
        logger.info("%s: a new score head, drawn from N(0, 1 / %d)", where, head.in_features + 1)
        draw_head(head, seed)


def drop_eos_as_pad(config: PreTrainedConfig) -> None:
    """Lets a classifier have no pad token rather than EOS: the forward of transformers looks for the last token that
    is not padding, which is to be EOS. Without one it reads texts one at a time, and refuses a padded batch.
    """
    ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    if config.pad_token_id in ends:
        config.pad_token_id = None


def load_classifier(path: str, flag: str, dtype: torch.dtype, tokenizer: PreTrainedTokenizerBase) -> Any:
    """Opens any sequence classifier with one trained label as it is, for scoring; the tokenizer is its own.

    Raises UserError: there is no such model, it has several labels, it lacks weights, or no head that was trained; its
    embeddings have fewer rows than the tokenizer has ids.
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


def explain_missing(what: str, path: str, flag: str, error: Exception) -> str:
    """One message for a model or tokenizer that cannot be opened, local or on the hub."""
    first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    if "trust_remote_code" in str(error):
        return f"{flag} {path}: its {what} needs Python code of its own (auto_map), which is never run. Give another."
    if remedy := gguf_remedy(path):
        return f"{flag} {path}: {remedy}"
    looks_local = path.startswith(("/", ".", "~")) or path.count("/") > 1
    if Path(path).is_dir():
        below = [str(config.parent) for config in sorted(Path(path).glob("*/config.json"))]
        hint = f" Did you mean {' or '.join(below)}?" if below else ""
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
    """What to do with a GGUF file, a folder of such files or a repository of them; None of any other path."""
    place = Path(path)
    files = sorted(place.glob("*.gguf")) if place.is_dir() else [place] if place.suffix.lower() == ".gguf" else []
    if not files and not (not place.exists() and "gguf" in place.name.lower()):
        return None
    folder, name = (place, "FILE.gguf") if not files else (files[0].parent, files[0].name)
    return (
        "GGUF weights, which are quantised for inference and cannot be trained or scored with as they are. Prefer the "
        "original model (safetensors). Or convert them, with the package gguf installed: model = "
        f"AutoModelForCausalLM.from_pretrained({str(folder)!r}, gguf_file={name!r}, dtype=torch.float32); build a "
        "second model by AutoModelForCausalLM.from_config(model.config), give it model.state_dict() by "
        "load_state_dict, and save_pretrained(FOLDER) both that model and the tokenizer, which AutoTokenizer opens "
        "with the same gguf_file. Then give FOLDER."
    )


def open_config(path: str, flag: str, **options: Any) -> PreTrainedConfig:
    """The model's config, dropout off; of an adapter alone, its base's."""
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
    opening: Opening = PLAIN,
) -> tuple[Any, dict[str, Collection[str]]]:
    """The model and what transformers says of its weights (missing_keys, …); of an adapter alone, the base."""
    attention = opening.attention
    weights, adapters = base_of(path, flag)
    if adapters:
        logger.info("%s %s: a LoRA adapter, which is merged into %s", flag, path, weights)
    check_attention(attention, dtype)
    options = {"config": config, "dtype": dtype, "use_safetensors": True, "output_loading_info": True}
    options["attn_implementation"] = implementation(attention, config)
    try:
        with opening.placement.load_sharded() as where:
            model, loading = auto_class.from_pretrained(weights, trust_remote_code=False, **options, **where)
    except (OSError, ValueError, KeyError, ImportError, SafetensorError) as error:
        missing = explain_missing("model", weights, named_base(path, flag), error)
        raise UserError(explain_refusal(attention, path, error) or missing) from error
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
    model.name_or_path = path
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
    embeddings, needed = model.get_input_embeddings(), id_count(tokenizer)
    if needed > embeddings.num_embeddings:
        if needed > embeddings.num_embeddings + 1:
            _warn_of_growth(where, embeddings.num_embeddings, needed)
        heads = [head for head in (model.get_output_embeddings(),) if head is not None]
        with placement.whole(model, embeddings, *heads):
            model.resize_token_embeddings(needed)
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
