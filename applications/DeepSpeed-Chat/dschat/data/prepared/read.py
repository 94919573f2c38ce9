# SPDX-License-Identifier: Apache-2.0
"""Prepared folders as training reads them: their own splits, encoded already; another tokenizer's are refused."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from dschat.base.errors import UserError
from dschat.base.fingerprints import template_fingerprint, tokenizer_fingerprint
from dschat.data.examples import (
    PROMPT_TOO_LONG,
    PairExample,
    PreferenceExample,
    PromptExample,
    SFTExample,
    fit_demonstration,
    fit_pair,
    kept,
    whole_pair,
)
from dschat.data.prepared.folder import PreparedExample, PreparedFolder, check_example_prompt, read_pt
from dschat.data.rows import Row
from dschat.data.sources import Share, described
from dschat.data.tokenised import Examples, open_table
from dschat.data.turns import MarkedPrompt
from dschat.models.template_date import DATE_VARIABLE, template_date

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


def check_folder(
    folder: PreparedFolder,
    tokenizer: PreTrainedTokenizerBase,
    end_id: int | None,
    on_prompt: bool | None,
    kind: type[Any] | None = None,
) -> None:
    """Refuses a folder whose ids mean something else to a run.

    Args:
        folder: to train on.
        tokenizer: of the run.
        end_id: id of the token that ends a response; None where none is read.
        on_prompt: whether step 1 is to learn from prompts (`--sft_on_prompt`); None in other steps.
        kind: of the examples that the step needs, if any.

    Raises:
        UserError: it was made with another tokenizer or another such token, or for the other way to train.
    """
    where, remedy = f"--data_path {folder.path}", "give that model, or prepare the data again with --tokenizer"
    if kind in (PairExample, PreferenceExample) and folder.stage == "finetune":
        raise UserError(
            f"{where}: it was prepared with --stage finetune, and this step compares two responses; prepare the data "
            "with --stage preference."
        )
    if not folder.info:
        check_example_prompt(folder, tokenizer)
    elif folder.info["tokenizer"]["fingerprint"] != tokenizer_fingerprint(tokenizer):
        raise UserError(
            f"{where}: it was prepared with the tokenizer of {folder.tokenizer_name}, and the model's, "
            f"{tokenizer.name_or_path}, gives other ids; {remedy} {tokenizer.name_or_path}."
        )
    elif folder.info["template"]["rows"] and folder.info["template"]["fingerprint"] != template_fingerprint(tokenizer):
        raise UserError(
            f"{where}: its {folder.info['template']['rows']:,} rows of messages were written by the chat template of "
            f"{folder.tokenizer_name}, and the model's, {tokenizer.name_or_path}, has another template or other "
            f"special tokens in it; {remedy} {tokenizer.name_or_path}."
        )
    elif end_id is not None and folder.info["end_id"] != end_id:
        ends = [repr(tokenizer.convert_ids_to_tokens(number)) for number in (folder.info["end_id"], end_id)]
        raise UserError(
            f"{where}: its responses end with {ends[0]}, those of this run with {ends[1]}; give the same "
            "--end_of_conversation_token to both commands."
        )
    date = folder.info["template"]["date"] if folder.info and folder.info["template"]["rows"] else None
    if date not in (None, template_date()):
        logger.warning(
            "%s: the chat template wrote the date %s into its rows, and this run's is %s; give the run that of the "
            "folder with %s=%s, or prepare the data again.",
            *(where, date, template_date(), DATE_VARIABLE, date),
        )
    if on_prompt is not None and on_prompt == folder.mask_prompt:
        made, other = ("--mask_prompt", "--no_mask_prompt") if on_prompt else ("--no_mask_prompt", "--mask_prompt")
        flag = "drop --sft_on_prompt" if on_prompt else "add --sft_on_prompt"
        raise UserError(f"{where}: it was prepared with {made}; {flag}, or prepare it with {other}.")


def prepared_share(folders: Sequence[PreparedFolder], tokenizer: PreTrainedTokenizerBase | None = None) -> Share[Any]:
    """The rows of prepared folders, one after another: their training rows, and validation (else test) rows.

    The tokenizer writes the texts of `.pt` files, which hold ids alone.
    """
    train: list[Sequence[PreparedExample]] = []
    held_out: list[Sequence[PreparedExample]] = []
    sources: list[dict[str, Any]] = []
    for folder in folders:
        logger.info("%s is prepared and holds its own splits: --data_split does not cut it", folder.path)
        split = held_out_split(folder)
        own, own_eval = read_split(folder, "train", tokenizer), read_split(folder, split, tokenizer) if split else []
        train.append(own)
        held_out.append(own_eval)
        sources.append(described(str(folder.path), own, own_eval, {}, (len(own), len(own_eval))))
    files = tuple(file for folder in folders for listed in folder.files.values() for file in listed)
    return Share(_joined(train), _joined(held_out), sources, files)


def held_out_split(folder: PreparedFolder) -> str | None:
    """The split that an evaluation reads: validation, else test; None where there is neither."""
    return next((name for name in ("validation", "test") if name in folder.files), None)


def prepared_rows(folder: PreparedFolder, held_out: bool) -> list[Row]:
    """The rows of the source that a folder's training or held-out split was made of, with whole texts.

    Raises:
        UserError: the folder holds no texts, or no such split.
    """
    if folder.format == "pt":
        raise UserError(
            f"--data {folder.path}: a prepared folder of .pt files, which hold ids and no texts; give the data that "
            "it was made from, or prepare them with --format arrow."
        )
    split = held_out_split(folder) if held_out else "train"
    if split is None:
        raise UserError(
            f"--data {folder.path}: the prepared folder has neither validation nor test rows; prepare the data with "
            "--validation_percentage, or measure its training rows with --split train."
        )
    return [example.row for example in read_split(folder, split)]


def read_split(
    folder: PreparedFolder, split: str, tokenizer: PreTrainedTokenizerBase | None = None
) -> Sequence[PreparedExample]:
    """The rows of one split. Raises UserError where it cannot be read."""
    files = folder.files[split]
    if folder.format == "pt":
        return read_pt(files[0], tokenizer)
    try:
        return Examples(PreparedExample, open_table(files))
    except (OSError, ValueError, KeyError) as error:  # Arrow's errors are of these kinds
        raise UserError(f"--data_path {files[0]}: not readable ({error}); prepare the data again.") from error


def from_prepared(make: partial[Any], kind: type[Any]) -> partial[Any]:
    """What makes a step's examples of prepared rows, with the limit of what makes them of others.

    Raises:
        UserError: the step wants something that prepared rows do not hold.
    """
    if make.keywords.get("margin_key") is not None:
        raise UserError("--margin_key: a prepared folder holds no margins; give the source itself as --data_path.")
    if make.keywords.get("all_turns"):
        raise UserError(
            "--train_on all: a prepared folder holds one response per row; give the source itself as --data_path."
        )
    limit = next(name for name in ("max_seq_len", "max_prompt_seq_len") if name in make.keywords)
    return partial(cut_examples, kind=kind, flag=limit, limit=make.keywords[limit])


def cut_examples(
    rows: Sequence[PreparedExample], *, kind: type[Any], flag: str, limit: int, held_out: bool = False
) -> tuple[list[Any], Counter[str]]:
    """Prepared rows as examples of a step, cut or dropped at its own limit as rows of texts are.

    Args:
        rows: of a folder.
        kind: SFTExample, PairExample, PreferenceExample or PromptExample.
        flag: that gave the limit.
        limit: longest example in tokens; of PromptExample the longest prompt.
        held_out: an evaluation may have none.

    Raises:
        UserError: a row has no second response, or none is left.
    """

    def make(index: int, row: PreparedExample) -> Any:
        if kind is PromptExample:
            is_long = len(row.prompt_ids) > limit
            return PROMPT_TOO_LONG if is_long else PromptExample(row.prompt_ids, row.prompt, row.row, index)
        if kind is SFTExample:
            return fit_demonstration(MarkedPrompt(row.prompt_ids, []), row.chosen_ids, limit)
        if row.rejected_ids is None:
            raise UserError(
                f"{row.row.origin}: there is no second response; prepare the data with --stage preference."
            )
        pair = fit_pair(row.prompt_ids, row.chosen_ids, row.rejected_ids, limit)
        return whole_pair(pair) if kind is PairExample and not isinstance(pair, str) else pair

    places = [row.row for row in rows[:1]] * len(rows)  # of which a message names the first
    return kept(places, map(make, range(len(rows)), rows), f"--{flag} {limit}", held_out)


def _joined(parts: Sequence[Sequence[PreparedExample]]) -> Sequence[PreparedExample]:
    return parts[0] if len(parts) == 1 else [example for part in parts for example in part]
