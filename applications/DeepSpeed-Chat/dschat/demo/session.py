# SPDX-License-Identifier: Apache-2.0
"""What page and terminal share: the models, the prompts from what is typed, and every model's answer."""

from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace

from transformers import PreTrainedTokenizerBase

from dschat.base.errors import UserError
from dschat.data.encoding import prompt_text
from dschat.data.formats import tldr_prompt
from dschat.data.rows import Row
from dschat.data.turn_end import reply_contents
from dschat.demo.models import LENGTH, GrowingAnswer, LoadedModel, answer, load_model
from dschat.demo.options import ChatOptions, DemoOptions
from dschat.demo.sampling import SamplingChoice, choose_sampling
from dschat.evaluation.policy import Compute
from dschat.rollouts.sampling import row_seed
from dschat.scoring.reward_reader import load_reward_model
from dschat.scoring.reward_tokenizer import load_reward_tokenizer
from dschat.scoring.source import ResponseTexts

HUMAN = "\n\nHuman:"
ASSISTANT = "\n\nAssistant:"
ORIGIN = "the conversation"


@dataclass(frozen=True)
class Turn:
    """A message and every model's answer to it; no answers where the models could not answer."""

    message: str
    answers: tuple[GrowingAnswer, ...]


Turns = tuple[Turn, ...]


class Session:
    """The models of a demo, which answer one request at a time."""

    def __init__(self, options: DemoOptions) -> None:
        """Loads the models. Raises UserError if that is not possible, or one takes no system prompt."""
        demo = options.demo
        where = Compute.chosen(options.compute)
        self.system = (options.chat.system_prompt or "") if isinstance(options, ChatOptions) else ""
        self.reader = None
        if demo.reward_model is not None:
            tokenizer = load_reward_tokenizer(demo.reward_model, demo.rm_template)
            self.reader = load_reward_model(demo.reward_model, tokenizer, demo.rm_template, where.device, where.dtype)
        self.models = [load_model(demo.model, "--model", options, where)]
        if demo.other is not None:
            self.models.append(load_model(demo.other, "--other", options, where))
        for model in self.models:
            check_system_prompt(model.tokenizer, self.system, model.name)
        self.sampling = choose_sampling(demo, self.models[0].path)
        self._seed = demo.seed
        self._questions = 0

    def chat(self, turns: Turns, message: str, choice: SamplingChoice) -> Generator[list[GrowingAnswer]]:
        """Yields every model's answer to the next message of a conversation; see `_answers`."""
        if not message.strip():
            raise UserError("type a message first.")
        rows = []
        for side, model in enumerate(self.models):
            earlier = [(turn.message, turn.answers[side].text) for turn in turns if turn.answers]
            rows.append(chat_prompt(model.tokenizer, earlier, message, self.system))
        yield from self._answers(rows, choice, (HUMAN,))

    def summary(self, subreddit: str, title: str, post: str, choice: SamplingChoice) -> Generator[list[GrowingAnswer]]:
        """Yields every model's summary of a post; see `_answers`."""
        yield from self._answers([summary_prompt(subreddit, title, post)] * len(self.models), choice, ())

    def _answers(
        self, rows: Sequence[Row], choice: SamplingChoice, markers: Sequence[str]
    ) -> Generator[list[GrowingAnswer]]:
        """Yields the answers of all models, one model after the other, as they grow.

        Args:
            rows: the prompt of each model.
            choice: sampling settings.
            markers: texts before which an answer to a plain text ends.

        Raises:
            UserError: a model or the reward model cannot read this.
        """
        seed = row_seed(self._seed, self._questions)
        self._questions += 1
        answers = [GrowingAnswer() for _ in self.models]
        for side, (model, row) in enumerate(zip(self.models, rows, strict=True)):
            ends = markers if row.messages is None else ()  # a chat template has end tokens of its own
            with closing(answer(model, row, ends, choice, seed)) as drafts:
                for draft in drafts:
                    answers[side] = self._scored(model, row, draft)
                    yield list(answers)

    def _scored(self, model: LoadedModel, row: Row, draft: GrowingAnswer) -> GrowingAnswer:
        """A finished answer with its score, if there is a reward model."""
        if self.reader is None or draft.done is None:
            return draft
        finished = draft.done != LENGTH
        texts = ResponseTexts([prompt_text(model.tokenizer, row)], [draft.text], [row], [finished])
        return replace(draft, score=float(self.reader(texts)))


def chat_prompt(
    tokenizer: PreTrainedTokenizerBase, turns: Sequence[tuple[str, str]], message: str, system: str = ""
) -> Row:
    r"""The prompt for the next turn of a dialogue.

    Without a chat template it has the form of HH-RLHF: "\n\nHuman: …\n\nAssistant: …\n\nHuman: …\n\nAssistant:".

    Args:
        tokenizer: tokenizer of the model that answers.
        turns: earlier messages, each with the model's answer.
        message: the next message.
        system: system prompt, for a tokenizer with a chat template.
    """
    if tokenizer.chat_template is None:
        text = "".join(f"{HUMAN} {question.strip()}{ASSISTANT} {reply.strip()}" for question, reply in turns)
        return Row(f"{text}{HUMAN} {message.strip()}{ASSISTANT}", None, None, None, {}, ORIGIN)
    replies = reply_contents(tokenizer, [reply for _, reply in turns])
    messages = [{"role": "system", "content": system}] if system else []
    for (question, _), reply in zip(turns, replies, strict=True):
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": reply}]
    messages.append({"role": "user", "content": message})
    return Row(None, messages, None, None, {}, ORIGIN)


def check_system_prompt(tokenizer: PreTrainedTokenizerBase, system: str, source: str) -> None:
    """Raises UserError, which begins with `source`, if a model would not read a system prompt."""
    if not system:
        return
    remedy = "drop --system_prompt, or write it into your first message."
    if tokenizer.chat_template is None:
        raise UserError(f"{source}: without a chat template there is no place for a system prompt: {remedy}")
    try:
        text = prompt_text(tokenizer, chat_prompt(tokenizer, (), "Hello", system))
    except UserError as error:
        raise UserError(f"{source}: its chat template takes no system prompt: {remedy}") from error
    if system.strip() not in text:
        raise UserError(f"{source}: its chat template leaves the system prompt out: {remedy}")


def summary_prompt(subreddit: str, title: str, post: str) -> Row:
    r"""The prompt for a summary, as in the published TL;DR data: "POST\nSubreddit: r/S\n<post>\nTL;DR: ".

    These data have no titles; a title is put on a line of its own before the post.

    Raises:
        UserError: there is no post.
    """
    if not post.strip():
        raise UserError("the post is empty: type or paste one first.")
    text = "\n".join(part.strip() for part in (title, post) if part.strip())
    name = subreddit.strip().removeprefix("/").removeprefix("r/")
    prompt = tldr_prompt({"post": text, "subreddit": name or None})
    return Row(prompt, None, None, None, {}, "the post")
