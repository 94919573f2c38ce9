# SPDX-License-Identifier: Apache-2.0
"""The tokenizer of a reward model."""

from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from dschat.base.errors import UserError
from dschat.models.tokenizer import open_tokenizer


@dataclass(frozen=True)
class ReaderFlags:
    """Names of a command's flags, for messages: of the reward model, its chat template, and shorter texts."""

    model: str = "--reward_model"
    template: str = "--rm_template"
    shorter: str = "Lower --max_new_tokens, or leave long prompts out with --max_prompt_len"


FLAGS = ReaderFlags()


def load_reward_tokenizer(path: str, rm_template: bool, flags: ReaderFlags = FLAGS) -> PreTrainedTokenizerBase:
    """Opens the tokenizer of a reward model, which need not be able to pad.

    Raises:
        UserError: there is none, or `rm_template` asks for a chat template that it lacks.
    """
    tokenizer: PreTrainedTokenizerBase = open_tokenizer(path, flags.model)
    if rm_template and tokenizer.chat_template is None:
        raise UserError(
            f"{flags.template}: the tokenizer of {flags.model} {path} has no chat template. Leave {flags.template} "
            "out: the reward model then reads prompt + response + EOS."
        )
    return tokenizer
