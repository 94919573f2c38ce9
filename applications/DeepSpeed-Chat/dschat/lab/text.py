# SPDX-License-Identifier: Apache-2.0
"""Text metrics: losses of a data set's responses, greedy responses beside them, scores of its pairs; text by text."""

import json
import logging
import math
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, TypeVar

import torch
from transformers import PreTrainedTokenizerBase

from dschat.base.errors import UserError
from dschat.base.fingerprints import folder_stamp
from dschat.base.jsonl import read_object
from dschat.data.collate import collate_pairs, collate_sft
from dschat.data.encoding import response_texts
from dschat.data.examples import PairExample, PromptExample, SFTExample, pair_examples, prompt_examples, sft_examples
from dschat.data.messages import message_text
from dschat.data.plain_prompts import warn_of_plain_prompts
from dschat.data.prepared.folder import open_prepared
from dschat.data.prepared.read import prepared_rows
from dschat.data.rows import Row, in_words
from dschat.data.sources import load_source
from dschat.lab.generate_options import TRAINING_SEED, TextOptions, model_name
from dschat.lab.policy import ACTOR, FLAGS_FILE, STEP, Compute, SamplingPolicy, load_policy, locate_policy
from dschat.lab.prompts import Selection, digest_of, shuffled
from dschat.lab.runner import (
    BatchFunction,
    Concluded,
    Entry,
    RunPart,
    enough_memory,
    go_on_with_date,
    run_batches,
    settings_of,
)
from dschat.lab.text_metrics import policy_result, reward_result, rouge, without_nan, write_text_report
from dschat.models.limits import check_length
from dschat.models.load import load_scalar
from dschat.models.lora import adapter_alone
from dschat.models.policy import PolicyModel
from dschat.models.scalar import ScalarModel, last_scores, warn_of_reward_loss
from dschat.models.template_date import SETTING, template_date
from dschat.models.tokenizer import end_token_id, load_tokenizer

logger = logging.getLogger(__name__)

ROWS = "rows.jsonl"
# Flags that the rows depend on.
RECORDED = (
    *("data", "split", "seed", "num_samples", "no_rouge", "all_tokens", "max_seq_len", "max_new_tokens"),
    *("max_prompt_len", "end_of_conversation_token", "batch_size", "rollout_engine", "prompt_key", "chosen_key"),
    *("rejected_key", "response_key", "messages_key", "apply_chat_template"),
)
LONGEST = "the longest text (--max_seq_len cuts it)"

E = TypeVar("E", SFTExample, PairExample)
Kind = Literal["policy", "reward"]


@dataclass(frozen=True)
class Subject:
    """A model to be measured."""

    kind: Kind  # what it is
    name: str  # in table and rows
    path: str  # folder or hub id
    flag: str  # that named it
    update: int | None = None  # optimiser updates it had; None if that is not known


def run_text(options: TextOptions) -> str:
    """Measures every model on every text; writes rows and report into `options.output`, and returns the tables.

    Raises UserError for bad models or data, a finished report, or an interrupted run with other settings.
    """
    subjects, where = subjects_of(options), Compute.chosen(options)
    options = replace(options, seed=split_seed(options))
    path = options.output / ROWS
    if path.exists() and not options.overwrite:
        raise UserError(f"{path} exists, finished. Give another --output, or --overwrite to make it again.")
    go_on_with_date(path, options.overwrite)
    rows = _rows(options)
    settings = settings_of(options, RECORDED) | where.settings
    settings |= {"data": f"{options.data} (rows {digest_of(rows)})", SETTING: template_date()}
    settings |= {"models": [f"{each.name}: {folder_stamp(each.path)}" for each in subjects]}

    def conclude(entries: list[Entry]) -> Concluded:
        written: dict[str, list[dict[str, Any]]] = {each.name: [] for each in subjects}
        updates = {each.name: each.update for each in subjects}
        for entry in entries:
            name = entry["model"]
            written[name].append({"model": name, "update": updates[name]} | entry["row"])
        for each in subjects:
            say_not_finite(each, written[each.name])
        policies = [policy_result(written[each.name]) for each in subjects if each.kind == "policy"]
        rewards = [reward_result(written[each.name]) for each in subjects if each.kind == "reward"]
        table = write_text_report(policies, rewards, options.output)
        rows = [without_nan(row) for of_model in written.values() for row in of_model]
        return rows, f"{table}\n\n{path}, and beside it report.md, .json and .png"

    part_of = {"policy": _policy_part, "reward": _reward_part}
    parts = (part_of[each.kind](each, rows, options, where) for each in subjects)
    return run_batches(path, settings, options.overwrite, parts, conclude)


def _rows(options: TextOptions) -> list[Row]:
    """The rows of the split, in a fixed random order where not all are taken."""
    held_out, folder = options.split == "eval", open_prepared(options.data)
    if folder is None:
        source = load_source(options.data, options.keys, options.seed)
        rows = source.eval if held_out else source.train
        num_rows = source.num_rows[0] if source.num_rows[1] is None or not held_out else source.num_rows[1]
        taken = len(rows) if options.num_samples is None else min(len(rows), options.num_samples)
        logger.info("%s: %d of %d rows", options.data, taken, num_rows)
    else:
        rows = prepared_rows(folder, held_out)
    if not rows:
        raise UserError(f"--data {options.data}: the split {options.split} has no rows.")
    if options.num_samples is None or options.num_samples >= len(rows):
        return rows
    return [rows[number] for number in shuffled(len(rows))[: options.num_samples]]


def _policy_part(subject: Subject, rows: list[Row], options: TextOptions, where: Compute) -> RunPart:
    path = locate_policy(subject.path)
    tokenizer = load_tokenizer(path, subject.flag, end_token=options.end_of_conversation_token)
    selection, texts = choose_texts(subject, rows, tokenizer, options, sft_examples)
    check_length(path, subject.flag, max(map(len, texts.values())), LONGEST)
    answers = not options.no_rouge

    def prepare() -> BatchFunction:
        with enough_memory(f"{subject.flag}: the GPU's memory does not hold {subject.path}"):
            policy = load_policy(path, tokenizer, options, 0.0, where)
        if answers:
            policy.check_lengths(selection.longest)
        return selection.of_batch(partial(read_and_answer, policy, texts, options.all_tokens, answers))

    drawn = options.max_new_tokens if answers else 0
    lengths = [max(len(texts[prompt.index]), len(prompt) + drawn) for prompt in selection.examples]
    return _part(subject, selection.batches(options.batch_size, lengths), prepare)


def _reward_part(subject: Subject, rows: list[Row], options: TextOptions, where: Compute) -> RunPart:
    tokenizer = load_tokenizer(subject.path, subject.flag, end_token=options.end_of_conversation_token)
    selection, texts = choose_texts(subject, rows, tokenizer, options, pair_examples)
    check_length(subject.path, subject.flag, max(map(len, texts.values())), LONGEST)

    def prepare() -> BatchFunction:
        with enough_memory(f"{subject.flag}: the GPU's memory does not hold {subject.path}"):
            classifier = load_scalar(subject.path, subject.flag, where.dtype, tokenizer, may_be_new=False)
            warn_of_reward_loss(classifier.config, f"{subject.flag} {subject.path}")
            model = ScalarModel(classifier.to(where.device).eval())
        return selection.of_batch(partial(score_pairs, model, texts, tokenizer.pad_token_id))

    lengths = [max(len(texts[prompt.index]), len(prompt)) for prompt in selection.examples]
    return _part(subject, selection.batches(options.batch_size, lengths), prepare)


def _part(subject: Subject, batches: list[list[int]], prepare: Callable[[], BatchFunction]) -> RunPart:
    return RunPart(batches=batches, prepare=prepare, shown=shown, columns={"model": subject.name}, title=subject.name)


def subjects_of(options: TextOptions) -> list[Subject]:
    """The models, in the order of the flags, a run's by updates. Raises UserError where two share a name."""
    found = [Subject("policy", model_name(path), path, "--model") for path in options.model]
    found += [Subject("reward", model_name(path), path, "--reward_model") for path in options.reward_model]
    found += run_models(options.checkpoints) if options.checkpoints else []
    ((name, count),) = Counter(each.name for each in found).most_common(1)
    if count > 1:
        raise UserError(f"Two of the models are called {name}: rename a folder, or measure them one by one.")
    return found


def split_seed(options: TextOptions) -> int:
    """The seed that splits the data: --seed, else the seed of the run in --checkpoints, else training's default.

    Raises:
        UserError: the run's flags hold no seed.
    """
    folder = options.checkpoints
    if options.seed is not None:
        return options.seed
    if folder is None:
        return TRAINING_SEED
    seed = read_object(folder / FLAGS_FILE).get("seed")
    if not isinstance(seed, int):
        raise UserError(
            f"--checkpoints {folder}: its {FLAGS_FILE} holds no seed. Give the run's --seed: with another one,"
            " held-out rows of data without evaluation rows may be rows that the run was trained on."
        )
    return seed


def run_models(folder: Path) -> list[Subject]:
    """The models that a run has kept, by updates; the final one last.

    Raises:
        UserError: there is no run, or it has kept no models yet.
    """
    try:
        record = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"--checkpoints {folder}: no run of ours, its run.json cannot be read: {error}.") from error
    kind: Kind = "reward" if record.get("step") == "reward" else "policy"
    last = record.get("batches", {}).get("total_updates")
    places = {int(m[1]): place for place in (folder / "models").glob("*") if (m := STEP.fullmatch(place.name))}
    found = [
        Subject(kind, f"step-{update}", str(_model_in(place)), "--checkpoints", update)
        for update, place in sorted(places.items())
    ]
    final = _model_in(folder)
    if (final / "config.json").is_file() or adapter_alone(str(final)) is not None:
        found = [each for each in found if each.update != last]
        found.append(Subject(kind, "final", str(final), "--checkpoints", last))
    if not found:
        raise UserError(
            f"--checkpoints {folder}: the run has kept no models yet. With --save_models 50, training keeps them "
            "after every 50 updates."
        )
    return found


def _model_in(folder: Path) -> Path:
    return folder / ACTOR if (folder / ACTOR).is_dir() else folder


def choose_texts(
    subject: Subject,
    rows: list[Row],
    tokenizer: PreTrainedTokenizerBase,
    options: TextOptions,
    encode: Callable[..., tuple[list[E], Counter[str]]],
) -> tuple[Selection, dict[int, E]]:
    """The prompts, and by their `index` the token ids that training makes of their rows with `encode`.

    What is left out is counted and said. Raises UserError if nothing is left.
    """
    warn_of_plain_prompts(rows, tokenizer, options.apply_chat_template)
    limit, end_id = options.max_prompt_len or sys.maxsize, end_token_id(tokenizer, options.end_of_conversation_token)
    prompts, dropped = prompt_examples(rows, tokenizer, limit, held_out=True)
    texts: dict[int, E] = {}
    for prompt in prompts:
        made, reasons = encode([prompt.row], tokenizer, options.max_seq_len, end_id, held_out=True)
        texts.update((prompt.index, text) for text in made)
        dropped += reasons
    if not texts:
        raise UserError(
            f"--data: none of the {len(rows)} texts is left for {subject.name} ({in_words(dropped)}). Give a larger "
            "--max_seq_len or --max_prompt_len, or other data."
        )
    if dropped:
        left_out = f"{dropped.total()} of {len(rows)} texts left out ({in_words(dropped)})"
        logger.warning("%s: %s", subject.name, left_out)
    return Selection([prompt for prompt in prompts if prompt.index in texts], dropped.total(), ""), texts


@torch.no_grad()
def read_and_answer(
    policy: SamplingPolicy,
    texts: Mapping[int, SFTExample],
    all_tokens: bool,
    answers: bool,
    prompts: list[PromptExample],
) -> list[Entry]:
    """The loss of each text in nats, summed over its tokens; and, if wanted, the greedy response and its ROUGE."""
    model = PolicyModel(policy.causal_lm, all_rows=True)  # as step 1's evaluation
    examples = [texts[prompt.index] for prompt in prompts]
    batch = collate_sft(examples, policy.tokenizer.pad_token_id, all_tokens)
    batch = {name: x.to(policy.causal_lm.device) for name, x in batch.items()}
    mask = batch["response_mask"]
    logprobs, _ = model(batch["input_ids"], batch["attention_mask"], mask.shape[1], with_entropy=False)
    losses, counts = -torch.where(mask, logprobs, 0.0).double().sum(1), mask.sum(1)
    drawn = policy.respond(prompts)[0] if answers else None
    references = response_texts(policy.tokenizer, [prompt.row for prompt in prompts], "chosen")
    entries = []
    for place, (prompt, reference) in enumerate(zip(prompts, references, strict=True)):
        written = prompt.columns | {"reference": reference}
        written |= {"loss_sum": float(losses[place]), "loss_tokens": int(counts[place])}
        if drawn is not None:
            answer = drawn[place]
            written |= {"response": answer.text, "response_tokens": answer.tokens, "finished": answer.finished}
            written |= rouge(answer.text, reference)
        entries.append({"number": prompt.index, "row": written})
    return entries


@torch.no_grad()
def score_pairs(
    model: ScalarModel, texts: Mapping[int, PairExample], pad_id: int, prompts: list[PromptExample]
) -> list[Entry]:
    """The reward model's score of both responses of each pair, at its last token."""
    tokens = collate_pairs([texts[prompt.index] for prompt in prompts], pad_id)
    tokens = {name: x.to(model.inner.device) for name, x in tokens.items()}
    chosen, rejected = last_scores(model(**tokens), tokens["attention_mask"]).chunk(2)
    entries = []
    for prompt, better, worse in zip(prompts, chosen.tolist(), rejected.tolist(), strict=True):
        written = prompt.columns
        written["chosen"] = message_text(prompt.row.reply("chosen") or {})
        written["rejected"] = message_text(prompt.row.reply("rejected") or {})
        written |= {"chosen_score": better, "rejected_score": worse}
        entries.append({"number": prompt.index, "row": written})
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
    names, what, more = ["loss_sum"], "the loss", ""
    if subject.kind == "reward":
        names, what, more = ["chosen_score", "rejected_score"], "a score", ", and such pairs count as ranked wrong"
    count = sum(not all(math.isfinite(row[name]) for name in names) for row in rows)
    if count:
        logger.warning(
            "%s: %s of %d of %d texts is not finite, so the mean loss is no number%s. Compute in --dtype bf16 or fp32;"
            " if it stays so, the model is damaged.",
            *(subject.name, what, count, len(rows), more),
        )
