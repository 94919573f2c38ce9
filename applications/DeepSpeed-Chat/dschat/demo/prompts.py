# SPDX-License-Identifier: Apache-2.0
"""From what was typed to prompts: dialogues in a model's own form, posts as in TL;DR."""

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from dschat.data.formats import tldr_prompt
from dschat.data.rows import Row
from dschat.errors import UserError

HUMAN, ASSISTANT = "\n\nHuman:", "\n\nAssistant:"
ORIGIN = "the conversation"
CHAT_EXAMPLE = "What should I look at when I buy a second-hand bicycle?"
SUMMARY_EXAMPLE = (
    "AskReddit",
    "How do I tell my neighbour about the noise?",
    "I moved into my flat last spring. My neighbour is friendly, but plays the drums every evening until eleven. The"
    " walls are thin, I get up at five, and I have not slept well in weeks. I do not want to start a quarrel. I have"
    " thought of a letter, or of baking something and bringing it over.",
)


@dataclass(frozen=True)
class Prompt:
    """What a model is asked.

    Attributes:
        row: the prompt as training has it; messages where the tokenizer has a chat template.
        markers: texts that begin somebody else's turn: an answer ends before them.
    """

    row: Row
    markers: tuple[str, ...] = ()


def chat_prompt(tokenizer: PreTrainedTokenizerBase, turns: Sequence[tuple[str, str]], message: str) -> Prompt:
    r"""The next turn of a dialogue.

    Without a chat template it has the form of HH-RLHF: "\n\nHuman: …\n\nAssistant: …\n\nHuman: …\n\nAssistant:".

    Args:
        tokenizer: of the model that is asked.
        turns: earlier messages, each with the model's answer.
        message: the next one.

    Raises:
        UserError: the message is empty.
    """
    if not message.strip():
        raise UserError("type a message first.")
    if tokenizer.chat_template is not None:
        pairs = (({"role": "user", "content": u}, {"role": "assistant", "content": a}) for u, a in turns)
        messages = [one for pair in pairs for one in pair] + [{"role": "user", "content": message}]
        return Prompt(Row(None, messages, None, None, {}, ORIGIN))
    before = "".join(f"{HUMAN} {user.strip()}{ASSISTANT} {answer.strip()}" for user, answer in turns)
    return Prompt(Row(f"{before}{HUMAN} {message.strip()}{ASSISTANT}", None, None, None, {}, ORIGIN), (HUMAN,))


def summary_prompt(subreddit: str, title: str, post: str) -> Prompt:
    r"""A post as in the published TL;DR data: "POST\nSubreddit: r/S\n<post>\nTL;DR: ".

    These data have no titles; one that is given stands on a line of its own before the post.

    Raises:
        UserError: there is no post.
    """
    if not post.strip():
        raise UserError("the post is empty: type or paste one first.")
    text = "\n".join(part.strip() for part in (title, post) if part.strip())
    name = subreddit.strip().removeprefix("/").removeprefix("r/")
    return Prompt(Row(tldr_prompt({"post": text, "subreddit": name or None}), None, None, None, {}, "the post"))
