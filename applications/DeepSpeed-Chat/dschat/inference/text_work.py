# SPDX-License-Identifier: Apache-2.0
"""Rows → losses of their responses, greedy responses beside them, scores of their pairs; a batch at a time."""

import logging
import math
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from dschat.data.collate import collate_pairs, collate_sft
from dschat.data.examples import PairExample, PromptExample, SFTExample, pair_examples, prompt_examples, sft_examples
from dschat.data.rows import Row
from dschat.errors import UserError
from dschat.evaluation.text import rouge
from dschat.inference.batches import Entry
from dschat.inference.policy import Policy
from dschat.inference.prompts import Selection
from dschat.inference.text_options import Subject, TextOptions
from dschat.models.policy import PolicyModel
from dschat.models.scalar import ScalarModel, last_scores
from dschat.models.tokenizer import end_token_id

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Texts:
    """What a model is measured on: the prompts, and by their `index` the texts or the pairs."""

    model: str  # its name
    selection: Selection
    demonstrations: dict[int, SFTExample]
    pairs: dict[int, PairExample]

    def lengths(self, new_tokens: int) -> list[int]:
        """Tokens that are computed at a time for each prompt, of which so many are drawn."""
        known: dict[int, SFTExample] | dict[int, PairExample] = self.demonstrations or self.pairs
        return [max(len(known[prompt.index]), len(prompt) + new_tokens) for prompt in self.selection.examples]

    @property
    def longest(self) -> int:
        """Tokens of the longest text."""
        return max([*map(len, self.demonstrations.values()), *map(len, self.pairs.values())])


def choose_texts(subject: Subject, rows: list[Row], tokenizer: PreTrainedTokenizerBase, options: TextOptions) -> Texts:
    """Token ids as training has them; what is left out is counted and said. Raises UserError if nothing is left."""
    limit, end_id = options.max_prompt_len or sys.maxsize, end_token_id(tokenizer, options.end_of_conversation_token)
    prompts, dropped = prompt_examples(rows, tokenizer, limit, held_out=True)
    demonstrations: dict[int, SFTExample] = {}
    pairs: dict[int, PairExample] = {}
    for prompt in prompts:
        own = [rows[prompt.index]]
        if subject.kind == "policy":
            texts, reasons = sft_examples(own, tokenizer, options.max_seq_len, end_id, held_out=True)
            demonstrations.update((prompt.index, text) for text in texts)
        else:
            compared, reasons = pair_examples(own, tokenizer, options.max_seq_len, end_id, held_out=True)
            pairs.update((prompt.index, pair) for pair in compared)
        dropped += reasons
    known: set[int] = {*demonstrations, *pairs}
    kept = [prompt for prompt in prompts if prompt.index in known]
    _say_dropped(subject, dropped, len(rows), len(kept))
    selection = Selection(kept, [rows[each.index] for each in kept], dropped.total(), "")
    return Texts(subject.name, selection, demonstrations, pairs)


@torch.no_grad()
def read_and_answer(
    policy: Policy,
    texts: Texts,
    pad_id: int,
    all_tokens: bool,
    answers: bool,
    prompts: list[PromptExample],
    rows: list[Row],
) -> list[Entry]:
    """The loss of each text in nats, summed over its tokens; and, if wanted, the greedy response and its ROUGE."""
    model, examples = PolicyModel(policy.causal_lm), [texts.demonstrations[prompt.index] for prompt in prompts]
    batch = {name: x.to(policy.causal_lm.device) for name, x in collate_sft(examples, pad_id, all_tokens).items()}
    mask = batch["response_mask"]
    logprobs, _ = model(batch["input_ids"], batch["attention_mask"], mask.shape[1], with_entropy=False)
    losses, counts = -torch.where(mask, logprobs, 0.0).double().sum(1), mask.sum(1)
    drawn = policy.respond(prompts)[0] if answers else None
    entries = []
    for place, (prompt, row) in enumerate(zip(prompts, rows, strict=True)):
        reference = row.chosen or ""
        written = prompt.columns | {"reference": reference}
        written |= {"loss_sum": float(losses[place]), "loss_tokens": int(counts[place])}
        if drawn is not None:
            answer = drawn[place]
            written |= {"response": answer.text, "response_tokens": answer.tokens, "finished": answer.finished}
            written |= rouge(answer.text, reference)
        entries.append({"model": texts.model, "number": prompt.index, "row": written})
    return entries


@torch.no_grad()
def score_pairs(
    model: ScalarModel, texts: Texts, pad_id: int, prompts: list[PromptExample], rows: list[Row]
) -> list[Entry]:
    """The reward model's score of both responses of each pair, at its last token."""
    tokens = collate_pairs([texts.pairs[prompt.index] for prompt in prompts], pad_id)
    tokens = {name: x.to(model.inner.device) for name, x in tokens.items()}
    chosen, rejected = last_scores(model(**tokens), tokens["attention_mask"]).chunk(2)
    entries = []
    for prompt, row, better, worse in zip(prompts, rows, chosen.tolist(), rejected.tolist(), strict=True):
        written = prompt.columns | {"chosen": row.chosen, "rejected": row.rejected}
        written |= {"chosen_score": better, "rejected_score": worse}
        entries.append({"model": texts.model, "number": prompt.index, "row": written})
    return entries


def shown(entries: list[Entry]) -> Mapping[str, str]:
    """The means so far, beside the progress."""
    rows = [entry["row"] for entry in entries]
    if "chosen_score" in rows[0]:
        return {"accuracy": f"{fmean(row['chosen_score'] > row['rejected_score'] for row in rows):.1%}"}
    loss = sum(row["loss_sum"] for row in rows) / sum(row["loss_tokens"] for row in rows)
    means = {"loss": f"{loss:.3f}"}
    return means | ({"rougeL": f"{fmean(row['rougeL'] for row in rows):.3f}"} if "rougeL" in rows[0] else {})


def say_not_finite(subject: Subject, rows: Sequence[Mapping[str, Any]]) -> None:
    """Warns of texts whose loss or scores are no finite numbers: the means are none, then."""
    names = ("loss_sum",) if subject.kind == "policy" else ("chosen_score", "rejected_score")
    count = sum(not all(math.isfinite(row[name]) for name in names) for row in rows)
    if count:
        logger.warning(
            "%s: %s of %d of %d texts is not finite, so the mean loss is no number%s. Compute in --dtype bf16 or fp32;"
            " if it stays so, the model is damaged.",
            subject.name,
            "the loss" if subject.kind == "policy" else "a score",
            count,
            len(rows),
            "" if subject.kind == "policy" else ", and such pairs count as ranked wrong",
        )


def _say_dropped(subject: Subject, dropped: Counter[str], total: int, kept: int) -> None:
    reasons = ", ".join(f"{reason}: {count}" for reason, count in dropped.items())
    if not kept:
        raise UserError(
            f"--data: none of the {total} texts is left for {subject.name} ({reasons}). Give a larger --max-seq-len "
            "or --max-prompt-len, or other data."
        )
    if dropped:
        logger.warning("%s: %d of %d texts left out (%s)", subject.name, dropped.total(), total, reasons)
