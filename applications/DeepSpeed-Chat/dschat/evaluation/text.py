# SPDX-License-Identifier: Apache-2.0
"""`dschat text`: losses of a data set's responses, ROUGE of greedy responses, and scores of pairs, text by text."""

import logging
import math
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import PreTrainedTokenizerBase

from dschat.base.errors import UserError
from dschat.base.fingerprints import folder_stamp
from dschat.base.jsonl import json_value, read_object
from dschat.data.collate import collate_pairs, collate_sft
from dschat.data.examples import PairExample, PromptExample, SFTExample, pair_examples, prompt_examples, sft_examples
from dschat.data.messages import message_text, trains_response
from dschat.data.notes import warn_of_plain_prompts
from dschat.data.rows import Row, in_words
from dschat.data.turn_end import response_texts
from dschat.evaluation.generate_options import TextFlags, TextOptions, TokenSamplerFlags, model_name
from dschat.evaluation.policy import STEP, Compute, SamplingPolicy, load_policy, locate_policy
from dschat.evaluation.prompts import Selection, digest_of, shuffled
from dschat.evaluation.runner import (
    BatchFunction,
    Concluded,
    Entry,
    RunPart,
    begin,
    enough_memory,
    entry_rows,
    run_batches,
    settings_of,
)
from dschat.evaluation.text_metrics import policy_result, reward_result, rouge, write_text_report
from dschat.evaluation.training_runs import NamedModel, measured_rows, warn_of_formats, with_flags_of_run
from dschat.models.adapters import adapter_alone
from dschat.models.classifiers import load_trained_scalar
from dschat.models.limits import check_length
from dschat.models.policy import PolicyModel
from dschat.models.pretrained import open_config
from dschat.models.reward_notes import noted_end_token
from dschat.models.scalar import ScalarModel, last_scores, warn_of_reward_loss
from dschat.models.template_date import SETTING, template_date
from dschat.models.tokenizer import end_token_id, load_tokenizer
from dschat.settings.common import COLUMN_FLAGS

logger = logging.getLogger(__name__)

ROWS = "rows.jsonl"
# Flags that the rows depend on.
RECORDED = (
    "data",
    "num_samples",
    "no_rouge",
    "sft_on_prompt",
    "train_on",
    "max_seq_len",
    "max_new_tokens",
    "max_prompt_len",
    "end_of_conversation_token",
    "batch_size",
    "rollout_engine",
    *COLUMN_FLAGS,
)
LONGEST = "the longest text (--max_seq_len cuts it)"
GREEDY = TokenSamplerFlags(top_k=0, top_p=1.0)

Kind = Literal["policy", "reward"]
Encode = Callable[..., tuple[list[Any], Counter[str]]]  # rows, tokenizer, … → SFT examples or pairs, and those dropped


@dataclass(frozen=True)
class Subject(NamedModel):
    """A model to be measured.

    Attributes:
        kind: policy or reward model.
        name: in table and rows.
        update: optimiser updates it had; None if that is unknown.
    """

    kind: Kind
    name: str
    update: int | None = None


def run_text(options: TextOptions) -> str:
    """Measure every model on every text; writes rows and report into --output, and returns the tables.

    Raises:
        UserError: bad models or data, a finished report, or an interrupted run with other settings.
    """
    subjects = subjects_of(options.text)
    where = Compute.chosen(options.compute, options.hardware.gpu)
    output = options.text.output
    path = output / ROWS
    overwrite = options.result.overwrite
    begin(path, overwrite, "--output")
    given_end = options.text.end_of_conversation_token
    if options.text.checkpoints is not None:
        options = with_flags_of_run(options, options.text.checkpoints)
    warn_of_formats(options, subjects, given_end)
    rows = _rows(options, subjects)

    def conclude(entries: list[Entry]) -> Concluded:
        policies = []
        rewards = []
        written_rows: list[dict[str, Any]] = []
        # Entries come model by model.
        for subject, (_, entries_of_model) in zip(subjects, groupby(entries, itemgetter("model")), strict=True):
            model_rows = []
            for row in entry_rows(entries_of_model):
                model_rows.append({"model": subject.name, "update": subject.update} | row)
            warn_not_finite(subject, model_rows)
            if subject.kind == "policy":
                policies.append(policy_result(model_rows))
            else:
                rewards.append(reward_result(model_rows))
            written_rows += map(json_value, model_rows)
        table = write_text_report(policies, rewards, output, _loss_over(options.text))
        return written_rows, f"{table}\n\n{path}; in the same folder report.md and .json"

    settings = settings_of(options, RECORDED) | where.settings
    settings["data"] = f"{options.text.data} (rows {digest_of(rows)})"
    settings[SETTING] = template_date()
    settings["models"] = [f"{subject.name}: {folder_stamp(subject.path)}" for subject in subjects]
    # A tokenizer is loaded only when the models before it are done.
    parts = (_part(subject, rows, options, where, given_end) for subject in subjects)
    return run_batches(path, settings, overwrite, parts, conclude)


def _loss_over(flags: TextFlags) -> str:
    """Which tokens the loss of policies is over, in words."""
    if flags.sft_on_prompt:
        return "prompt and response (--sft_on_prompt)"
    return "every message of the assistant (--train_on all)" if flags.train_on == "all" else "the response"


def _rows(options: TextOptions, models: Sequence[NamedModel]) -> list[Row]:
    """The rows to measure on, in a fixed random order where not all are taken."""
    flags = options.text
    if flags.checkpoints is not None:
        models = [NamedModel("--checkpoints", str(flags.checkpoints)), *models]
    data = flags.data
    rows, description = measured_rows("--data", data, options.columns, models, flags.split)
    num_samples = options.prompts.num_samples
    if num_samples is not None and num_samples < len(rows):
        rows = [rows[number] for number in shuffled(len(rows))[:num_samples]]
    logger.info("%s: %d of %s", data, len(rows), description)
    return rows


def _part(subject: Subject, rows: list[Row], options: TextOptions, where: Compute, given_end: str | None) -> RunPart:
    """The work of measuring a model, longest rows first; `given_end` is the end token of the command line, if any."""
    flags = options.text
    end_token = flags.end_of_conversation_token
    path = locate_policy(subject.path)
    if subject.kind == "reward":
        end_token = given_end or noted_end_token(open_config(path, subject.flag)) or end_token
    tokenizer = load_tokenizer(path, subject.flag, end_token=end_token)
    encode: Encode = pair_examples
    if subject.kind == "policy":
        encode = partial(sft_examples, all_turns=flags.train_on == "all")
    selection, texts = choose_texts(subject, rows, tokenizer, options, encode, end_token)
    check_length(path, subject.flag, max(map(len, texts.values())), LONGEST)

    def prepare() -> BatchFunction:
        if subject.kind == "reward":
            with enough_memory(f"{subject.flag}: the GPU's memory does not hold {path}"):
                classifier = load_trained_scalar(path, subject.flag, where.dtype, tokenizer).to(where.device)
            warn_of_reward_loss(classifier.config, f"{subject.flag} {path}")
            return selection.of_batch(partial(score_pairs, ScalarModel(classifier), texts, tokenizer.pad_token_id))
        ends = [end_token_id(tokenizer, end_token)]
        policy = load_policy(path, subject.flag, tokenizer, options.generation, GREEDY, 0.0, where, ends)
        if not flags.no_rouge:
            policy.check_lengths(selection.longest)
        return selection.of_batch(partial(read_and_answer, policy, texts, flags.sft_on_prompt, not flags.no_rouge))

    has_responses = subject.kind == "policy" and not flags.no_rouge
    response_length = options.generation.max_new_tokens if has_responses else 0
    lengths = []
    for prompt in selection.examples:
        lengths.append(max(len(texts[prompt.index]), len(prompt) + response_length))
    batches = selection.batches(options.generation.batch_size, lengths)
    return RunPart(batches=batches, prepare=prepare, columns={"model": subject.name}, title=subject.name)


def subjects_of(flags: TextFlags) -> list[Subject]:
    """The models, in the order of the flags, a run's by updates. Raises UserError if two share a name."""
    subjects: list[Subject] = []
    for path in flags.model:
        subjects.append(Subject("--model", path, "policy", model_name(path)))
    for path in flags.reward_model:
        subjects.append(Subject("--reward_model", path, "reward", model_name(path)))
    if flags.checkpoints:
        subjects += run_models(flags.checkpoints)
    ((name, count),) = Counter(subject.name for subject in subjects).most_common(1)
    if count > 1:
        raise UserError(f"Two of the models are called {name}: rename a folder, or measure them one by one.")
    return subjects


def run_models(folder: Path) -> list[Subject]:
    """The models that a run has saved, by updates; the final one last.

    Left out is what a resumed run has given up: models of updates after its checkpoint, and an earlier final one.

    Raises:
        UserError: the folder is no run's, or it has saved no models yet.
    """
    record = read_object(folder / "run.json")
    kind: Kind = "reward" if record.get("step") == "reward" else "policy"
    total_updates = record.get("batches", {}).get("total_updates")
    saved = record.get("saved")
    saved_names = None if saved is None else {Path(path).name for path in saved}

    folder_by_update: dict[int, Path] = {}
    for model_folder in (folder / "models").glob("*"):
        match = STEP.fullmatch(model_folder.name)
        if match and (saved_names is None or model_folder.name in saved_names):
            folder_by_update[int(match[1])] = model_folder
    subjects: list[Subject] = []
    for update, model_folder in sorted(folder_by_update.items()):
        path = locate_policy(str(model_folder))
        subjects.append(Subject("--checkpoints", path, kind, f"step-{update}", update))

    final = locate_policy(str(folder))
    has_final = (Path(final) / "config.json").is_file() or adapter_alone(final) is not None
    if has_final and record.get("finished") is not False:
        subjects = [subject for subject in subjects if subject.update != total_updates]
        subjects.append(Subject("--checkpoints", final, kind, "final", total_updates))
    if not subjects:
        raise UserError(
            f"--checkpoints {folder}: no output folder of a run that has kept models. With --save_models 50, training "
            "keeps them after every 50 updates."
        )
    return subjects


def choose_texts(
    subject: Subject,
    rows: list[Row],
    tokenizer: PreTrainedTokenizerBase,
    options: TextOptions,
    encode: Encode,
    end_token: str | None,
) -> tuple[Selection, dict[int, Any]]:
    """The prompts, and for their indices the examples that training makes from their rows with `encode`.

    Rows that are left out are counted and reported. Responses end with `end_token`, or EOS if it is None.

    Raises:
        UserError: nothing is left.
    """
    warn_of_plain_prompts(rows, tokenizer, options.columns.apply_chat_template)
    limit = options.prompts.max_prompt_len or sys.maxsize
    end_id = end_token_id(tokenizer, end_token)
    prompts, dropped = prompt_examples(rows, tokenizer, limit, held_out=True)
    texts: dict[int, Any] = {}
    for prompt in prompts:
        examples, reasons = encode([prompt.row], tokenizer, options.text.max_seq_len, end_id, held_out=True)
        dropped += reasons
        if examples:
            (texts[prompt.index],) = examples
    if not texts:
        raise UserError(
            f"--data: none of the {len(rows)} texts is left for {subject.name} ({in_words(dropped)}). Give a larger "
            "--max_seq_len or --max_prompt_len, or other data."
        )
    if dropped:
        left_out = f"{dropped.total()} of {len(rows)} texts left out ({in_words(dropped)})"
        logger.warning("%s: %s", subject.name, left_out)
    with_text = [prompt for prompt in prompts if prompt.index in texts]
    return Selection(with_text, dropped.total(), ""), texts


@torch.no_grad()
def read_and_answer(
    policy: SamplingPolicy,
    texts: Mapping[int, SFTExample],
    sft_on_prompt: bool,
    answers: bool,
    prompts: list[PromptExample],
) -> list[Entry]:
    """The loss of each text in nats, summed over its tokens; with `answers` also the greedy response and its ROUGE."""
    # Losses, computed as step 1's evaluation does.
    model = PolicyModel(policy.causal_lm, all_rows=True)
    examples = [texts[prompt.index] for prompt in prompts]
    batch = collate_sft(examples, policy.tokenizer.pad_token_id, sft_on_prompt)
    device = policy.causal_lm.device
    mask = batch["response_mask"].to(device)
    input_ids = batch["input_ids"].to(device)
    attention_mask = batch["attention_mask"].to(device)
    logprobs, _ = model(input_ids, attention_mask, mask.shape[1], with_entropy=False)
    response_logprobs = torch.where(mask, logprobs, 0.0)
    losses = -response_logprobs.double().sum(1)
    counts = mask.sum(1)

    # Greedy responses, compared with the data's.
    responses = policy.respond(prompts)[0] if answers else None
    rows = [prompt.row for prompt in prompts]
    references = response_texts(policy.tokenizer, rows, "chosen")
    entries: list[Entry] = []
    for number, prompt in enumerate(prompts):
        reference = references[number]
        row = prompt.columns | {"reference": reference}
        row["loss_sum"] = float(losses[number])
        row["loss_tokens"] = int(counts[number])
        if responses is not None:
            response = responses[number]
            row["response"] = response.text
            row["response_tokens"] = response.tokens
            row["finished"] = response.finished
            # With --train_on all a dialogue without a last reply, or with one of weight 0, has earlier turns.
            if reference and trains_response(prompt.row):
                row |= rouge(response.text, reference)
        entries.append({"number": prompt.index, "row": row})
    return entries


@torch.no_grad()
def score_pairs(
    model: ScalarModel, texts: Mapping[int, PairExample], pad_id: int, prompts: list[PromptExample]
) -> list[Entry]:
    """The reward model's score of both responses of each pair, at its last token."""
    examples = [texts[prompt.index] for prompt in prompts]
    batch = collate_pairs(examples, pad_id)
    device = model.inner.device
    input_ids = batch["input_ids"].to(device)
    attention_mask = batch["attention_mask"].to(device)
    scores = last_scores(model(input_ids, attention_mask), attention_mask)
    chosen, rejected = scores.chunk(2)  # the chosen responses of all pairs, then the rejected ones
    entries: list[Entry] = []
    for prompt, chosen_score, rejected_score in zip(prompts, chosen.tolist(), rejected.tolist(), strict=True):
        row = prompt.columns
        row["chosen"] = message_text(prompt.row.reply("chosen") or {})
        row["rejected"] = message_text(prompt.row.reply("rejected") or {})
        row["chosen_score"] = chosen_score
        row["rejected_score"] = rejected_score
        entries.append({"number": prompt.index, "row": row})
    return entries


def warn_not_finite(subject: Subject, rows: Sequence[Mapping[str, Any]]) -> None:
    """Warn of texts whose loss or scores are not finite; then neither is the mean, and such pairs are ranked wrong."""
    names = ("chosen_score", "rejected_score") if subject.kind == "reward" else ("loss_sum",)
    count = 0
    for row in rows:
        if not all(math.isfinite(row[name]) for name in names):
            count += 1
    if count:
        logger.warning(
            "%s: %s of %d of %d texts is not finite, so there is no mean loss. Compute in --dtype bf16 or fp32;"
            " if it stays so, the model is damaged.",
            subject.name,
            " or ".join(names),
            count,
            len(rows),
        )
