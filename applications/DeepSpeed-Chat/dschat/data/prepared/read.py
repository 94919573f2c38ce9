# SPDX-License-Identifier: Apache-2.0
"""Reads prepared folders for training. They hold encoded rows and their own splits, for one tokenizer only."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dschat.base.errors import UserError
from dschat.base.fingerprints import template_fingerprint, tokenizer_fingerprint
from dschat.data.examples import EncodedRow, PairExample, PreferenceExample, fitted_examples
from dschat.data.prepared.folder import PreparedFolder
from dschat.data.rows import Row, Split
from dschat.data.sources import Share, described, in_proportion
from dschat.data.tokenised import Examples, open_table
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
        tokenizer: tokenizer of the run.
        end_id: id of the token that ends a response; None if no response is read.
        on_prompt: whether step 1 trains on prompts, too (`--sft_on_prompt`); None in other steps.
        kind: kind of the examples that the step needs, if any.

    Raises:
        UserError: it was made with another tokenizer or another such token, or for the other kind of training.
    """
    flag = f"--data_path {folder.path}"
    if kind in (PairExample, PreferenceExample) and folder.stage == "finetune":
        raise UserError(
            f"{flag}: it was prepared with --stage finetune, and this step compares two responses; prepare the data "
            "with --stage preference."
        )
    if folder.is_described:
        _check_tokenizer(folder, tokenizer)
        if end_id is not None and folder.info["end_id"] != end_id:
            folder_end = repr(tokenizer.convert_ids_to_tokens(folder.info["end_id"]))
            run_end = repr(tokenizer.convert_ids_to_tokens(end_id))
            raise UserError(
                f"{flag}: its responses end with {folder_end}, those of this run with {run_end}; give the same "
                "--end_of_conversation_token to both commands."
            )
    else:
        from dschat.data.prepared.sheeprl import check_example_prompt

        check_example_prompt(folder, tokenizer)
    if on_prompt is not None and on_prompt == folder.info["flags"]["mask_prompt"]:
        problem = "it was prepared with --no_mask_prompt; add --sft_on_prompt, or prepare it with --mask_prompt"
        if on_prompt:
            problem = "it was prepared with --mask_prompt; drop --sft_on_prompt, or prepare it with --no_mask_prompt"
        raise UserError(f"{flag}: {problem}.")


def _check_tokenizer(folder: PreparedFolder, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises UserError if the run's tokenizer gives other ids, or its chat template other texts, than the folder's."""
    flag = f"--data_path {folder.path}"
    remedy = f"give that model, or prepare the data again with --tokenizer {tokenizer.name_or_path}"
    template = folder.info["template"]
    if folder.info["tokenizer"]["fingerprint"] != tokenizer_fingerprint(tokenizer):
        raise UserError(
            f"{flag}: it was prepared with the tokenizer of {folder.tokenizer_name}, and the model's, "
            f"{tokenizer.name_or_path}, gives other ids; {remedy}."
        )
    if not template["rows"]:
        return
    if template["fingerprint"] != template_fingerprint(tokenizer):
        raise UserError(
            f"{flag}: its {template['rows']:,} rows of messages were written by the chat template of "
            f"{folder.tokenizer_name}, and the model's, {tokenizer.name_or_path}, has another template or other "
            f"special tokens in it; {remedy}."
        )
    if template["date"] not in (None, template_date()):
        logger.warning(
            "%s: the chat template wrote the date %s into its rows, and this run's is %s; give the run that of the "
            "folder with %s=%s, or prepare the data again.",
            flag,
            template["date"],
            template_date(),
            DATE_VARIABLE,
            template["date"],
        )


def prepared_share(folders: Sequence[PreparedFolder], tokenizer: PreTrainedTokenizerBase | None = None) -> Share[Any]:
    """The rows of prepared folders: training rows, one folder after another, and validation (else test) rows.

    The tokenizer decodes the texts of `.pt` files, which hold only ids.
    """
    train: list[Sequence[EncodedRow]] = []
    held_out: list[Sequence[EncodedRow]] = []
    sources: list[dict[str, Any]] = []
    files: list[Path] = []
    for folder in folders:
        logger.info("%s is prepared and holds its own splits: --data_split does not cut it", folder.path)
        eval_split = held_out_split(folder)
        folder_train = read_split(folder, "train", tokenizer)
        folder_eval = read_split(folder, eval_split, tokenizer) if eval_split else []
        train.append(folder_train)
        held_out.append(folder_eval)
        counts = (len(folder_train), len(folder_eval))
        sources.append(described(str(folder.path), *counts, {}, counts))
        files += chain.from_iterable(folder.files.values())
    all_train = train[0] if len(train) == 1 else list(chain.from_iterable(train))
    return Share(all_train, in_proportion(held_out), sources, tuple(files))


def held_out_split(folder: PreparedFolder) -> str | None:
    """The split that evaluations read: validation, else test; None if there is neither."""
    for split in ("validation", "test"):
        if split in folder.files:
            return split
    return None


def prepared_rows(folder: PreparedFolder, split: Split, flag: str) -> tuple[list[Row], str]:
    """The source's rows, with uncut texts, that a folder's splits were made from; and the names of these splits.

    Args:
        folder: the prepared folder.
        split: which rows; "eval" are those of `held_out_split`.
        flag: the command-line flag that named the folder, for messages.

    Raises:
        UserError: the folder holds no texts, or no such split.
    """
    if folder.info["format"] == "pt":
        raise UserError(
            f"{flag} {folder.path}: a prepared folder of .pt files, which hold ids and no texts; give the data that "
            "it was made from, or prepare them with --format arrow."
        )
    names = list(folder.files) if split == "all" else ["train"]
    if split == "eval":
        held_out = held_out_split(folder)
        if held_out is None:
            raise UserError(
                f"{flag} {folder.path}: the prepared folder has neither validation nor test rows; prepare the data "
                "with --validation_percentage, or give --split all."
            )
        names = [held_out]
    rows = []
    for name in names:
        rows += [example.row for example in read_split(folder, name)]
    return rows, " and ".join(names)


def read_split(
    folder: PreparedFolder, split: str, tokenizer: PreTrainedTokenizerBase | None = None
) -> Sequence[EncodedRow]:
    """The rows of one split. Raises UserError if it cannot be read."""
    files = folder.files[split]
    if folder.info["format"] == "pt":
        from dschat.data.prepared.sheeprl import read_pt

        return read_pt(files[0], folder.stage == "preference", tokenizer)
    try:
        return Examples(EncodedRow, open_table(EncodedRow, files))
    except (OSError, ValueError, KeyError) as error:  # Arrow's errors are of these kinds
        raise UserError(f"--data_path {files[0]}: not readable ({error}); prepare the data again.") from error


def from_prepared(make: partial[Any], kind: type[Any]) -> partial[Any]:
    """The function that makes a step's examples of prepared rows, with the same limit as `make`, which reads texts.

    Raises:
        UserError: the step needs something that prepared rows do not hold.
    """
    if make.keywords.get("margin_key") is not None:
        raise UserError("--margin_key: a prepared folder holds no margins; give the source itself as --data_path.")
    if make.keywords.get("all_turns"):
        raise UserError(
            "--train_on all: a prepared folder holds one response per row; give the source itself as --data_path."
        )
    limit = make.keywords.get("max_seq_len") or make.keywords["max_prompt_seq_len"]
    return partial(fitted_examples, kind=kind, limit=limit)
