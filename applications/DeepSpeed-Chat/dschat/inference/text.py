# SPDX-License-Identifier: Apache-2.0
"""Text metrics: losses of a data set's responses, greedy responses beside them, scores of its pairs; text by text."""

import hashlib
import json
from contextlib import closing
from functools import partial
from typing import Any

import torch

from dschat.common.fingerprints import folder_stamp
from dschat.common.journal import Journal
from dschat.data.prepared.folder import open_prepared
from dschat.data.prepared.read import prepared_rows
from dschat.data.rows import Row
from dschat.data.sources import load_source
from dschat.errors import UserError
from dschat.evaluation.report.build import write_text_report
from dschat.evaluation.text import policy_result, reward_result, without_nan
from dschat.inference.batches import LARGER, Work, batches_of, do_batches, enough_memory
from dschat.inference.devices import choose_device
from dschat.inference.policy import load_policy, locate_policy
from dschat.inference.prompts import shuffled
from dschat.inference.text_options import Subject, TextOptions
from dschat.inference.text_work import choose_texts, read_and_answer, say_not_finite, score_pairs, shown
from dschat.models.limits import check_length
from dschat.models.load import load_scalar
from dschat.models.lora import base_of, load_adapter
from dschat.models.opening import choose_dtype
from dschat.models.scalar import ScalarModel, warn_of_reward_loss
from dschat.models.tokenizer import load_tokenizer

ROWS = "rows.jsonl"
# Flags that the rows depend on.
RECORDED = (
    *("data", "split", "seed", "num_samples", "no_rouge", "all_tokens", "max_seq_len", "max_new_tokens"),
    *("max_prompt_len", "end_of_conversation_token", "batch_size", "rollout_engine", "prompt_key", "chosen_key"),
    *("rejected_key", "response_key", "messages_key"),
)


def run_text(options: TextOptions) -> str:
    """Measures every model on every text; writes rows and report into `options.output`, and returns the tables.

    Raises UserError for bad models or data, a finished report, or an interrupted run with other settings.
    """
    subjects, device = options.subjects(), choose_device(options.gpu, options.device)
    dtype = choose_dtype(options.dtype, device)
    path = options.output / ROWS
    if path.exists() and not options.overwrite:
        raise UserError(f"{path} exists, finished. Give another --output, or --overwrite to make it again.")
    rows = _rows(options)
    texts = json.dumps([[row.prompt, row.messages, row.chosen, row.rejected] for row in rows], default=str)
    settings = {name.replace("_", "-"): getattr(options, name) for name in RECORDED}
    settings |= {"device": device.type, "dtype": str(dtype).removeprefix("torch.")}
    settings |= {"data": f"{options.data} (rows {hashlib.sha256(texts.encode()).hexdigest()[:12]})"}
    settings |= {"models": [f"{each.name}: {folder_stamp(each.path)}" for each in subjects]}
    with closing(Journal(path, settings, options.overwrite)) as journal:
        written = {each.name: _measure(each, rows, options, journal, device, dtype) for each in subjects}
        policies = [policy_result(written[each.name]) for each in subjects if each.kind == "policy"]
        rewards = [reward_result(written[each.name]) for each in subjects if each.kind == "reward"]
        table = write_text_report(policies, rewards, options.output)  # before the file that says: finished
        journal.finish(without_nan(row) for each in subjects for row in written[each.name])
    return f"{table}\n\n{path}, and beside it report.md, .json and .png"


def _rows(options: TextOptions) -> list[Row]:
    """The rows of the split, in a fixed random order where not all are taken."""
    held_out, folder = options.split == "eval", open_prepared(options.data)
    if folder is None:
        source = load_source(options.data, options.keys, options.seed)
        rows = source.eval if held_out else source.train
    else:
        rows = prepared_rows(folder, held_out)
    if not rows:
        raise UserError(f"--data {options.data}: the split {options.split} has no rows.")
    if options.num_samples is None or options.num_samples >= len(rows):
        return rows
    return [rows[number] for number in shuffled(len(rows))[: options.num_samples]]


def _measure(
    subject: Subject,
    rows: list[Row],
    options: TextOptions,
    journal: Journal,
    device: torch.device,
    dtype: torch.dtype,
) -> list[dict[str, Any]]:
    """The rows of one model, those that the journal holds and the others."""
    path = locate_policy(subject.path) if subject.kind == "policy" else subject.path
    tokenizer = load_tokenizer(path, subject.flag, may_add_pad=True)
    texts = choose_texts(subject, rows, tokenizer, options)
    weights, adapter = base_of(path, subject.flag) if subject.kind == "reward" else (path, None)
    check_length(weights, subject.flag, texts.longest, "the longest text (--max-seq-len cuts it)")
    answers = subject.kind == "policy" and not options.no_rouge

    def prepare() -> Work:
        with enough_memory(f"{subject.flag}: the GPU's memory does not hold {subject.path}", LARGER):
            if subject.kind == "reward":
                classifier = load_scalar(weights, subject.flag, dtype, tokenizer, may_be_new=adapter is not None)
                if adapter is not None:
                    load_adapter(classifier, adapter, subject.flag, weights)
                warn_of_reward_loss(classifier.config, f"{subject.flag} {path}")
                model = ScalarModel(classifier.to(device).eval())
                return partial(score_pairs, model, texts, tokenizer.pad_token_id)
            policy = load_policy(path, tokenizer, options, 0.0, device, dtype)
        if answers:
            policy.check_lengths(max(map(len, texts.selection.examples)))
        return partial(read_and_answer, policy, texts, tokenizer.pad_token_id, options.all_tokens, answers)

    batches = batches_of(texts.lengths(options.max_new_tokens if answers else 0), options.batch_size)
    part = ("model", subject.name)
    entries = do_batches(journal, texts.selection, batches, prepare, shown, part, subject.name)
    rows_of_model = [{"model": subject.name, "update": subject.update} | entry["row"] for entry in entries]
    say_not_finite(subject, rows_of_model)
    return rows_of_model
