# SPDX-License-Identifier: Apache-2.0
"""The steps of opening any Hugging Face model: its path, its config, its weights, and its tokenizer's ids."""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, GenerationConfig, PreTrainedConfig, PreTrainedTokenizerBase

from dschat.base.errors import UserError
from dschat.models.adapters import base_of, has_score_head, named_base
from dschat.models.attention import check_attention, explain_refusal, resolve_attention, warn_once_if_other_attention
from dschat.models.open_errors import explain_missing, explaining, is_machine_error, refuse_pickles, refuse_pointers
from dschat.models.opening import LoadOptions, Placement
from dschat.models.reward_notes import add_adapter_notes
from dschat.models.vocabulary import id_count

logger = logging.getLogger(__name__)

MAX_NAMED = 8  # weights named in a message
ONE_LABEL = (
    "A reward model must have one label. A critic with bins cannot score: give it to step 3 as the critic, with its"
    " own --value_head and --value_range."
)

LoadingInfo = dict[str, Collection[Any]]  # transformers' missing_keys, unexpected_keys, mismatched_keys, …


@dataclass(frozen=True)
class ModelSource:
    """A path that the user gave, and what is opened for it.

    Attributes:
        path: folder or hub id, as the user gave it.
        flag: flag that the path came from.
        base: folder or hub id of the whole weights.
        adapters: folders of the LoRA adapters to merge into them, in order.
    """

    path: str
    flag: str
    base: str
    adapters: list[Path]

    @classmethod
    def of(cls, path: str, flag: str) -> ModelSource:
        """Finds the base and the adapters of a path.

        Raises:
            UserError: see `base_of`.
        """
        base, adapters = base_of(path, flag)
        return cls(path, flag, base, adapters)

    @property
    def where(self) -> str:
        """The beginning of messages about the path."""
        return f"{self.flag} {self.path}"

    @property
    def named_base(self) -> str:
        """What precedes `base` in messages about it."""
        return named_base(self.path, self.flag)

    @property
    def has_score_adapter(self) -> bool:
        """Whether an adapter brings a score head, as a reward model's or critic's does."""
        return any(map(has_score_head, self.adapters))


def open_config(path: str, flag: str, **options: Any) -> PreTrainedConfig:
    """The config of a model, or of an adapter's base with the adapter's notes; with dropout off.

    Args:
        path: folder or hub id.
        flag: flag that the path came from.
        **options: attributes of the config to set, such as num_labels.

    Raises:
        UserError: transformers cannot read a config; the folder's files are pointers or pickles; or see `base_of`.
    """
    source = ModelSource.of(path, flag)
    for folder in (source.base, *map(str, source.adapters)):
        refuse_pointers(folder, source.where)
        refuse_pickles(folder, source.where)
    with explaining("model", source.base, source.named_base):
        config: PreTrainedConfig = AutoConfig.from_pretrained(source.base, trust_remote_code=False, **options)
    for adapter in source.adapters:
        add_adapter_notes(config, adapter)
    _disable_dropout(config)
    return config


def open_pretrained(
    auto_class: Any, source: ModelSource, dtype: torch.dtype, config: PreTrainedConfig, load_options: LoadOptions
) -> tuple[Any, LoadingInfo]:
    """Opens a model, or an adapter's base: `merge_adapters` merges the adapters.

    Args:
        auto_class: class whose ``from_pretrained`` opens the model.
        source: the model.
        dtype: dtype of the weights.
        config: the model's config, of `open_config`.
        load_options: attention implementation and placement of the weights.

    Returns:
        The model and transformers' loading info. Weights that the folder lacks are random until `check_loaded` refuses
        the model.

    Raises:
        UserError: transformers cannot open the model with this config and this attention.
    """
    attention = load_options.attention
    if source.adapters:
        logger.info("%s: a LoRA adapter, which is merged into %s", source.where, source.base)
    check_attention(attention, dtype)
    try:
        with load_options.placement.while_loading() as placement_options:
            model, loading = auto_class.from_pretrained(
                source.base,
                trust_remote_code=False,
                config=config,
                dtype=dtype,
                use_safetensors=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # `check_loaded` raises, and names them
                attn_implementation=resolve_attention(attention, config),
                **placement_options,
            )
    except Exception as error:  # a wrong value in a config surfaces as any of them
        if is_machine_error(error):
            raise
        refusal = explain_refusal(attention, source.path, source.base, error)
        raise UserError(refusal or explain_missing("model", source.base, source.named_base, error)) from error
    warn_once_if_other_attention(attention, model.config.get_text_config()._attn_implementation, source.path)
    _disable_router_noise(model)
    model.name_or_path = source.path
    return model, loading


def check_loaded(
    source: ModelSource, loading: LoadingInfo, may_lack: Collection[str] = (), may_hold: Collection[str] = ()
) -> None:
    """Raises UserError if weights are missing or of other shapes, and warns if the model does not use some.

    transformers would initialise missing weights randomly and ignore the others.

    Args:
        source: the model, for messages.
        loading: transformers' loading info.
        may_lack: names of weights that may be missing.
        may_hold: names of weights that the model need not use.
    """
    where = f"{source.named_base} {source.base}"
    missing = sorted(set(loading["missing_keys"]) - set(may_lack))
    if missing:
        raise UserError(
            f"{where}: {len(missing)} of the model's weights are not in the folder: {_shortened_list(missing)}. It "
            "was saved or copied in part, or is a model of another kind (a reward model has no language-model head)."
        )
    mismatched = sorted(loading["mismatched_keys"])
    if mismatched:
        problems = [f"{name} has {list(found)} instead of {list(expected)}" for name, found, expected in mismatched]
        only_score_head = all(name.startswith("score.") for name, _, _ in mismatched)
        remedy = ONE_LABEL if only_score_head else "Is the config.json that of another model?"
        raise UserError(
            f"{where}: {len(mismatched)} of the folder's weights have shapes that do not fit its config: "
            f"{_shortened_list(problems)}. {remedy}"
        )
    unexpected = sorted(set(loading["unexpected_keys"]) - set(may_hold))
    if unexpected:
        logger.warning(
            "%s: %d weights of the folder are not used: %s", where, len(unexpected), _shortened_list(unexpected)
        )


def _shortened_list(items: list[str]) -> str:
    shown = ", ".join(items[:MAX_NAMED])
    return f"{shown}, …" if len(items) > MAX_NAMED else shown


def merge_adapters(model: Any, source: ModelSource, placement: Placement) -> None:
    """Adds the source's LoRA adapters to the weights of its base, in order. Every rank must call it."""
    if not source.adapters:
        return
    from dschat.models.lora import merge_adapter

    for adapter in source.adapters:
        merge_adapter(model, adapter, source.where, source.base, placement)


def grow_embeddings(model: Any, tokenizer: PreTrainedTokenizerBase, placement: Placement, where: str) -> None:
    """Enlarges embeddings that have fewer rows than the tokenizer has ids. Every rank must call it.

    More than one added row is a warning that begins with `where`: one may be a pad token.
    """
    embeddings = model.get_input_embeddings()
    row_count = embeddings.num_embeddings
    needed_rows = id_count(tokenizer)
    if needed_rows <= row_count:
        return
    if needed_rows > row_count + 1:
        _warn_once_of_growth(where, row_count, needed_rows)
    head = model.get_output_embeddings()
    resized = [embeddings] if head is None else [embeddings, head]
    with placement.gathered(model, *resized):
        model.resize_token_embeddings(needed_rows)


@cache  # one warning for actor and reference, which share a folder
def _warn_once_of_growth(where: str, rows: int, tokens: int) -> None:
    logger.warning(
        "%s: the model has embeddings of %d tokens, its tokenizer knows %d: %d untrained rows are added. If you did"
        " not add these tokens yourself, the folder's tokenizer is another model's: give it its own.",
        where,
        rows,
        tokens,
        tokens - rows,
    )


def _disable_dropout(config: PreTrainedConfig) -> None:
    """Sets every dropout probability of a config to 0: rollout and update must compute the same function."""
    for name, value in vars(config).items():
        if isinstance(value, PreTrainedConfig):
            _disable_dropout(value)
        elif "drop" in name and isinstance(value, float) and value > 0:
            setattr(config, name, 0.0)


def _disable_router_noise(model: nn.Module) -> None:
    """Keeps mixture-of-experts routers in evaluation mode, because they add noise (jitter) in training mode.

    Setting the noise to 0 instead would change PhiMoE's routing.
    """
    for module in model.modules():
        is_random_router = any("jitter" in name for name in vars(module))
        if is_random_router:
            module.register_forward_pre_hook(_use_evaluation_mode)


def _use_evaluation_mode(router: nn.Module, inputs: object) -> None:
    """Switches a router, but not its layers, to evaluation mode."""
    router.training = False


def set_special_ids(config: PreTrainedConfig | GenerationConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Gives a config, or a generation config, the tokenizer's ids of pad, EOS and BOS."""
    for name in ("pad_token_id", "eos_token_id", "bos_token_id"):
        setattr(config, name, getattr(tokenizer, name))
