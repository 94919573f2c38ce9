# SPDX-License-Identifier: Apache-2.0
"""The prompts of a run: which ones the protocol takes, who answers them, and what their rows depend on."""

import json
import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

from transformers import PreTrainedTokenizerBase

from dschat.base.errors import UserError
from dschat.base.fingerprints import content_hash, folder_stamp, template_fingerprint
from dschat.data.examples import PromptExample, prompt_examples
from dschat.data.hub import find_known
from dschat.data.plain_prompts import warn_of_plain_prompts
from dschat.data.rows import Row, in_words
from dschat.data.sources import load_source
from dschat.lab.generate_options import UNSHUFFLED, BestOfOptions, InferenceOptions, ProgramOptions, ScoredOptions
from dschat.lab.policy import Compute, SamplingPolicy, load_policy, locate_policy
from dschat.lab.runner import BatchFunction, Entry, enough_memory, go_on_with_date, in_batches, settings_of
from dschat.models.template_date import SETTING, template_date
from dschat.models.tokenizer import load_tokenizer

logger = logging.getLogger(__name__)

# Flags that the responses to a selection depend on.
RECORDED = (
    *("dataset", "rollout_engine", "batch_size", "top_k", "top_p", "max_new_tokens", "max_prompt_len"),
    *("seed", "prompt_key", "chosen_key", "rejected_key", "response_key", "messages_key", "apply_chat_template"),
)
PROTOCOL_SEED = 1234  # of the shuffle and of a split that has to be made; --seed changes the draws only

PromptFunction = Callable[[list[PromptExample]], list[Entry]]  # prompts of a batch → their entries


@dataclass(frozen=True)
class Selection:
    """The prompts of a run, in the order of the file."""

    examples: list[PromptExample]  # prompts as token ids; `index` is the number in the data set's order
    dropped: int  # rows left out, whose prompt was too long or empty
    digest: str  # of all rows, also of those left out

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt."""
        return max(map(len, self.examples))

    def batches(self, size: int, lengths: Sequence[int] | None = None) -> list[list[int]]:
        """Batches by the tokens that are computed for each prompt: its own, unless others are given."""
        numbers = [example.index for example in self.examples]
        return in_batches(numbers, size, lengths or [len(example) for example in self.examples])

    def of_batch(self, function: PromptFunction) -> BatchFunction:
        """A function of prompts as one of their numbers; raises UserError where memory does not suffice."""
        numbered = {example.index: example for example in self.examples}

        def of_numbers(numbers: list[int]) -> list[Entry]:
            examples = [numbered[number] for number in numbers]
            problem = (
                f"--batch_size: the GPU's memory does not suffice for {len(examples)} prompts of up to "
                f"{max(map(len, examples))} tokens"
            )
            with enough_memory(problem, "a smaller --batch_size, or --max_new_tokens"):
                return function(examples)

        return of_numbers


def select_prompts(options: ScoredOptions | ProgramOptions, tokenizer: PreTrainedTokenizerBase) -> Selection:
    """Reads the data set and takes the prompts of the protocol.

    The held-out rows, shuffled as `datasets` shuffles them with seed 1234, first `options.samples` (webgpt: not
    shuffled). Prompts that are too long are left out afterwards, so that a limit never brings other prompts in. Raises
    UserError where the data set cannot be read or no prompt is left.
    """
    known = find_known(options.dataset)  # read by hub id: results lie in folders that are called like `dataset`
    path = options.data_path or (known.hub_id if known else options.dataset)
    source = load_source(path, options.keys, PROTOCOL_SEED)
    held_out = source.eval
    order = range(len(held_out)) if options.dataset == UNSHUFFLED else shuffled(len(held_out))
    rows = [held_out[number] for number in order][: options.samples]
    if source.num_rows[1] is None:
        logger.info("%s: %d of %d rows, from the 5 %% held out for evaluation", path, len(rows), source.num_rows[0])
    else:
        logger.info("%s: %d of %d evaluation rows", path, len(rows), source.num_rows[1])
    if options.num_samples is not None and len(rows) < options.num_samples:
        logger.warning("%s: it holds %d prompts, not the %d of --num_samples", path, len(rows), options.num_samples)
    warn_of_plain_prompts(rows, tokenizer, options.apply_chat_template)
    limit = options.max_prompt_len or sys.maxsize
    examples, dropped = prompt_examples(rows, tokenizer, limit, held_out=True)
    reasons = in_words(dropped)
    if not examples:
        raise UserError(
            f"{path}: none of the {len(rows)} prompts is left ({reasons}). Give a larger --max_prompt_len, or other "
            "data with --data_path."
        )
    if dropped:
        logger.warning("%s: %d of %d prompts left out (%s)", path, dropped.total(), len(rows), reasons)
    return Selection(examples, dropped.total(), digest_of(rows))


def shuffled(count: int) -> list[int]:
    """The numbers 0 to count - 1 in the order in which `datasets.Dataset.shuffle(seed=1234)` puts count rows."""
    from datasets import Dataset

    return Dataset.from_dict({"number": range(count)}).shuffle(seed=PROTOCOL_SEED)[:]["number"]


def digest_of(rows: Sequence[Row]) -> str:
    """12 hexadecimal digits that follow from the texts of rows."""
    texts = [
        [row.prompt, row.messages, row.reply("chosen"), row.reply("rejected"), row.template_arguments] for row in rows
    ]
    return content_hash(json.dumps(texts, default=str))[:12]


AnsweringOptions = InferenceOptions | BestOfOptions | ProgramOptions


@dataclass(frozen=True)
class Answering:
    """What a run that answers prompts knows before it opens models."""

    options: AnsweringOptions
    where: Compute
    path: str | None  # of the policy; None: nothing is drawn
    tokenizer: PreTrainedTokenizerBase  # of the prompts: the policy's
    selection: Selection

    @classmethod
    def find(cls, options: AnsweringOptions, reward_tokenizer: PreTrainedTokenizerBase | None = None) -> Self:
        """Finds the policy and reads its tokenizer, or else has the reward model's; reads the prompts.

        Raises UserError where one of them is missing.
        """
        go_on_with_date(options.result_path, options.overwrite)
        where = Compute.chosen(options)
        path = None if options.model is None else locate_policy(options.model)
        tokenizer = reward_tokenizer if path is None else load_tokenizer(path, "--model")
        assert tokenizer is not None  # options without a policy have a reward model
        return cls(options, where, path, tokenizer, select_prompts(options, tokenizer))

    @property
    def settings(self) -> dict[str, Any]:
        """What the rows depend on."""
        options = self.options
        settings = settings_of(options, RECORDED) | {"num-samples": options.samples} | self.where.settings
        return settings | {
            "model": None if self.path is None else folder_stamp(self.path),
            "chat-template": template_fingerprint(self.tokenizer)[:12],
            SETTING: template_date(),
            "data-path": f"{options.data_path or options.dataset} (rows {self.selection.digest})",
        }

    def open_policy(self, temperature: float) -> SamplingPolicy:
        """Opens the policy, to draw at a temperature."""
        return load_policy(str(self.path), self.tokenizer, self.options, temperature, self.where)


def refuse_finished(options: AnsweringOptions) -> None:
    """Raises UserError where the file of results is there and is to stay; asked before the data set is read."""
    if options.result_path.exists() and not options.overwrite:
        raise UserError(
            f"{options.result_path} exists, finished. Remove it or give --overwrite to make it again, or --name for a "
            "file beside it."
        )
