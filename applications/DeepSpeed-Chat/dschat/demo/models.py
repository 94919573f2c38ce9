# SPDX-License-Identifier: Apache-2.0
"""Opening a model to talk to: an ordinary folder, a hub id, or a LoRA adapter on its base."""

import logging
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from dschat.data.dialogues import turn_end
from dschat.demo.checkpoints import has_head, is_classifier, read_json
from dschat.errors import UserError
from dschat.inference.policy import locate_policy
from dschat.models.limits import position_limit
from dschat.models.load import load_causal_lm
from dschat.models.shared_base import base_of
from dschat.models.tokenizer import end_token_id, load_tokenizer, own_end_ids

logger = logging.getLogger(__name__)

DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


@dataclass(frozen=True)
class Opened:
    """A model that answers."""

    path: str
    causal_lm: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    end_ids: tuple[int, ...]  # any of them ends an answer
    limit: int  # tokens that it reads at most
    seconds: float  # that opening took

    @property
    def status(self) -> str:
        """What is loaded, and where."""
        weights = self.causal_lm.num_parameters()
        size = f"{weights / 1e9:.2f} billion" if weights >= 1e9 else f"{weights / 1e6:.2f} million"
        where = f"on {self.causal_lm.device}, {DTYPES[self.causal_lm.dtype]}"
        return f"Loaded {self.path}: {size} parameters, {where}, in {self.seconds:.1f} s"


@dataclass(frozen=True)
class Found:
    """What is known of a model before its weights are read."""

    path: str  # of the tokenizer and of what ends answers
    weights: str  # of the model, or of the adapter's base
    adapter: str | None
    tokenizer: PreTrainedTokenizerBase
    end_ids: tuple[int, ...]


def find_model(path: str, flag: str, end_token: str | None) -> Found:
    """Looks whether there is such a model and reads its tokenizer, so that what can fail early does.

    Args:
        path: a model's folder, a run's output folder with actor/, or a hub id.
        flag: what named it, for messages.
        end_token: --end_of_conversation_token.

    Raises:
        UserError: there is none, it is a reward model or critic, or its adapter's base is missing.
    """
    path = locate_policy(path)
    folder = Path(path)
    weights, adapter = base_of(path, flag)
    if is_classifier(read_json(folder / "config.json")) or (adapter is not None and has_head(adapter)):
        raise UserError(f"{flag} {path}: a reward model or critic, which writes no text. Give a policy's folder.")
    texts = path
    if adapter is not None:
        places = [place for place in (folder, adapter.parent) if (place / "tokenizer_config.json").is_file()]
        texts = str(places[0]) if places else weights
    tokenizer = load_tokenizer(texts, flag, may_add_pad=True)
    ends = {tokenizer.eos_token_id, end_token_id(tokenizer, end_token), *own_end_ids(weights)}
    if tokenizer.chat_template is not None:
        try:
            ends.add(turn_end(tokenizer).token_id)
        except UserError as error:
            logger.warning("%s %s: %s Answers end with EOS alone.", flag, path, error)
    return Found(texts, weights, None if adapter is None else str(adapter), tokenizer, tuple(sorted(ends)))


def open_model(path: str, found: Found, flag: str, device: torch.device, dtype: torch.dtype) -> Opened:
    """Reads the weights.

    Args:
        path: as it was given, for the status line.
        found: by `find_model`.
        flag: what named it, for messages.
        device: where to compute.
        dtype: of the parameters.

    Raises:
        UserError: the weights are not those of a causal LM, the adapter does not fit, or memory does not suffice.
    """
    start = time.perf_counter()
    try:
        causal_lm = load_causal_lm(found.weights, flag, dtype, found.tokenizer)
        if found.adapter is not None:
            causal_lm = _with_adapter(causal_lm, found.adapter, flag)
        causal_lm = causal_lm.to(device).eval().requires_grad_(False)
    except torch.OutOfMemoryError as error:
        raise UserError(
            f"{flag} {path}: does not fit into the memory of {device}. Give --dtype bf16, or --device cpu."
        ) from error
    causal_lm.generation_config = GenerationConfig()  # its fields would fill whatever the panel leaves open
    limit = position_limit(causal_lm)
    seconds = time.perf_counter() - start
    return Opened(path, causal_lm, found.tokenizer, found.end_ids, limit or _declared(causal_lm), seconds)


def _declared(causal_lm: PreTrainedModel) -> int:
    """The longest text that a model without a table of positions was made for."""
    declared = getattr(causal_lm.config.get_text_config(), "max_position_embeddings", None)
    return declared if isinstance(declared, int) else 2**31


def _with_adapter(causal_lm: PreTrainedModel, adapter: str, flag: str) -> PreTrainedModel:
    """The base model with the adapter's update added to its weights."""
    from peft import PeftModel

    try:
        whole: PreTrainedModel = PeftModel.from_pretrained(causal_lm, adapter).merge_and_unload()
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(f"{flag} {adapter}: the adapter does not fit its base model: {first_line}") from error
    return whole
