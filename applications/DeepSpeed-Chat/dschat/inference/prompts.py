# SPDX-License-Identifier: Apache-2.0
"""Which rows of a data set are used, and in which order."""

import hashlib
import json
import logging
import sys
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from dschat.data.examples import PromptExample, prompt_examples
from dschat.data.hub import find_known
from dschat.data.rows import Row
from dschat.data.sources import load_source
from dschat.errors import UserError
from dschat.inference.options import UNSHUFFLED, ProgramOptions, ScoredOptions

logger = logging.getLogger(__name__)

PROTOCOL_SEED = 1234  # of the shuffle and of a split that has to be made; --seed changes the draws only


@dataclass(frozen=True)
class Selection:
    """The prompts of a run, in the order of the file."""

    examples: list[PromptExample]  # prompts as token ids; `index` is the number in the data set's order
    rows: list[Row]  # of the examples
    dropped: int  # rows left out, whose prompt was too long or empty
    digest: str  # 12 hexadecimal digits that follow from the texts of all rows, also of those left out


def select_prompts(options: ScoredOptions | ProgramOptions, tokenizer: PreTrainedTokenizerBase) -> Selection:
    """Reads the data set and takes the prompts of the protocol.

    The held-out rows, shuffled as `datasets` shuffles them with seed 1234, first `options.samples` (webgpt: not
    shuffled). Prompts that are too long are left out afterwards, so that a limit never brings other prompts in. Raises
    UserError where the data set cannot be read or no prompt is left.
    """
    known = find_known(options.dataset)  # read by hub id: results lie in folders that are called like `dataset`
    path = options.data_path or (known.hub_id if known else options.dataset)
    held_out = load_source(path, options.keys, PROTOCOL_SEED).eval
    order = range(len(held_out)) if options.dataset == UNSHUFFLED else shuffled(len(held_out))
    rows = [held_out[number] for number in order][: options.samples]
    limit = options.max_prompt_len or sys.maxsize
    examples, dropped = prompt_examples(rows, tokenizer, limit, held_out=True)
    reasons = ", ".join(f"{reason}: {count}" for reason, count in dropped.items())
    if not examples:
        raise UserError(
            f"{path}: none of the {len(rows)} prompts is left ({reasons}). Give a larger --max-prompt-len, or other "
            "data with --data-path."
        )
    if dropped:
        logger.warning("%s: %d of %d prompts left out (%s)", path, dropped.total(), len(rows), reasons)
    texts = [[row.prompt, row.messages, row.chosen, row.rejected] for row in rows]
    digest = hashlib.sha256(json.dumps(texts, default=str).encode("utf-8")).hexdigest()[:12]
    return Selection(examples, [rows[example.index] for example in examples], dropped.total(), digest)


def shuffled(count: int) -> list[int]:
    """The numbers 0 to count - 1 in the order in which `datasets.Dataset.shuffle(seed=1234)` puts count rows."""
    from datasets import Dataset

    return Dataset.from_dict({"number": range(count)}).shuffle(seed=PROTOCOL_SEED)[:]["number"]
