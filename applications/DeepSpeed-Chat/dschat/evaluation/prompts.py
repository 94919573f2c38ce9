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
from dschat.data.known_sets import find_known
from dschat.data.notes import warn_of_plain_prompts
from dschat.data.rows import Row, in_words
from dschat.evaluation.generate_options import UNSHUFFLED, AnsweringOptions, ScoredOptions
from dschat.evaluation.policy import Compute, SamplingPolicy, load_policy, locate_policy
from dschat.evaluation.runner import BatchFunction, Entry, begin, enough_memory, in_batches, settings_of
from dschat.evaluation.training_runs import NamedModel, measured_rows
from dschat.models.template_date import SETTING, template_date
from dschat.models.tokenizer import load_tokenizer
from dschat.settings.common import COLUMN_FLAGS

logger = logging.getLogger(__name__)

# Flags that the responses to a selection depend on.
RECORDED = (
    "rollout_engine",
    "batch_size",
    "top_k",
    "top_p",
    "max_new_tokens",
    "max_prompt_len",
    "seed",
    *COLUMN_FLAGS,
)
PROTOCOL_SEED = 1234  # seed of the shuffle; --seed changes the sampling only

PromptFunction = Callable[[list[PromptExample]], list[Entry]]  # prompts of a batch → their entries


@dataclass(frozen=True)
class Selection:
    """The prompts of a run, in the order of the file.

    Attributes:
        examples: prompts as token ids; `index` is the number in the data set's order.
        dropped: number of rows left out because their prompt was too long or empty.
        digest: hash of all rows, also of those left out.
    """

    examples: list[PromptExample]
    dropped: int
    digest: str

    @property
    def longest(self) -> int:
        """Length of the longest prompt in tokens."""
        return max(map(len, self.examples))

    def batches(self, size: int, lengths: Sequence[int] | None = None) -> list[list[int]]:
        """Batches of prompt numbers, the longest first.

        Args:
            size: prompts per batch.
            lengths: tokens computed for each prompt; those of the prompt itself if None.
        """
        numbers = [example.index for example in self.examples]
        return in_batches(numbers, size, lengths or [len(example) for example in self.examples])

    def of_batch(self, function: PromptFunction) -> BatchFunction:
        """A function of prompt numbers that calls a function of prompts.

        It raises UserError if the GPU's memory does not suffice.
        """
        example_of = {example.index: example for example in self.examples}

        def of_numbers(numbers: list[int]) -> list[Entry]:
            examples = [example_of[number] for number in numbers]
            problem = (
                f"--batch_size: the GPU's memory does not suffice for {len(examples)} prompts of up to "
                f"{max(map(len, examples))} tokens"
            )
            with enough_memory(problem, "a smaller --batch_size, or --max_new_tokens"):
                return function(examples)

        return of_numbers


def select_prompts(options: AnsweringOptions, tokenizer: PreTrainedTokenizerBase) -> Selection:
    """Read the data set and take the prompts of the protocol.

    These are the rows of `measured_rows`, shuffled as `datasets` shuffles them with seed 1234, first
    `options.prompt_count` (webgpt: not shuffled). Prompts that are too long are left out afterwards, so that a limit
    never brings other prompts in.

    Raises:
        UserError: the data set cannot be read, or no prompt is left.
    """
    # Take the rows in the protocol's order.
    path = _data_path(options)
    data = options.data
    whole, description = measured_rows("--data_path", path, options.columns, _models_of(options), data.split)
    order = range(len(whole)) if options.dataset_name == UNSHUFFLED else shuffled(len(whole))
    rows = [whole[number] for number in order][: options.prompt_count]
    logger.info("%s: %d of %s", path, len(rows), description)
    num_samples = options.prompts.num_samples
    if num_samples is not None and len(rows) < num_samples:
        logger.warning("%s: it holds %d prompts, not the %d of --num_samples", path, len(rows), num_samples)
    warn_of_plain_prompts(rows, tokenizer, options.columns.apply_chat_template)

    # Leave out prompts that are too long.
    limit = options.prompts.max_prompt_len or sys.maxsize
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


def _data_path(options: AnsweringOptions) -> str:
    """The data set to read. A published one is read by its title, since `dataset` also names a folder of results."""
    dataset = options.dataset_name
    published = find_known(dataset)
    return options.data.data_path or (published.title if published else dataset)


def _models_of(options: AnsweringOptions) -> list[NamedModel]:
    """The models of a command: the policy, and the reward model."""
    models = []
    if options.policy.model is not None:
        models.append(NamedModel("--model", options.policy.model))
    if isinstance(options, ScoredOptions) and options.scores.reward_model is not None:
        models.append(NamedModel("--reward_model", options.scores.reward_model))
    return models


def shuffled(count: int) -> list[int]:
    """The numbers 0 to count - 1 in the order in which `datasets.Dataset.shuffle(seed=1234)` puts count rows."""
    from datasets import Dataset

    return Dataset.from_dict({"number": range(count)}).shuffle(seed=PROTOCOL_SEED)[:]["number"]


def digest_of(rows: Sequence[Row]) -> str:
    """12 hexadecimal digits that follow from the texts of rows, and from all columns, which functions may read."""
    contents: list[Any] = []
    for row in rows:
        texts = [row.prompt, row.messages, row.reply("chosen"), row.reply("rejected"), row.template_arguments]
        contents.append([*texts, row.extra])
    return content_hash(json.dumps(contents, default=str))[:12]


@dataclass(frozen=True)
class Answering:
    """A run that answers prompts, before its models are opened.

    Attributes:
        options: flags of the command.
        where: device and dtype of the models.
        path: path of the policy; None if nothing is sampled.
        tokenizer: encodes the prompts: the policy's, or without one the reward model's.
        selection: the prompts.
    """

    options: AnsweringOptions
    where: Compute
    path: str | None
    tokenizer: PreTrainedTokenizerBase
    selection: Selection

    @classmethod
    def find(cls, options: AnsweringOptions, reward_tokenizer: PreTrainedTokenizerBase | None = None) -> Self:
        """Locate the policy, load the tokenizer and read the prompts.

        Raises:
            UserError: one of them is missing, or the result is finished.
        """
        begin(options.result_path, options.result.overwrite, "--name")
        where = Compute.chosen(options.compute, options.hardware.gpu)
        model = options.policy.model
        path = None if model is None else locate_policy(model)
        tokenizer = reward_tokenizer if path is None else load_tokenizer(path, "--model")
        assert tokenizer is not None  # options without a policy have a reward model
        return cls(options, where, path, tokenizer, select_prompts(options, tokenizer))

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that the rows depend on."""
        dataset = self.options.dataset_name
        settings = {"dataset": dataset} | settings_of(self.options, RECORDED)
        settings["num-samples"] = self.options.prompt_count
        settings |= self.where.settings
        settings["model"] = None if self.path is None else folder_stamp(self.path)
        settings["chat-template"] = template_fingerprint(self.tokenizer)[:12]
        settings[SETTING] = template_date()
        settings["data-path"] = f"{self.options.data.data_path or dataset} (rows {self.selection.digest})"
        return settings

    def open_policy(self, temperature: float) -> SamplingPolicy:
        """Load the policy, which samples at a temperature; raises UserError if it has no room for the prompts."""
        options = self.options
        path = str(self.path)
        policy = load_policy(
            path, "--model", self.tokenizer, options.generation, options.sampler, temperature, self.where
        )
        policy.check_lengths(self.selection.longest)
        return policy
