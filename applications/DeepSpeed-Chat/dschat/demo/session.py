# SPDX-License-Identifier: Apache-2.0
"""What page and terminal share: prompts of what was typed, the models that are loaded, and their answers."""

import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedTokenizerBase

from dschat.base.errors import UserError
from dschat.data.encoding import encode_prompts, prompt_text, reply_contents
from dschat.data.formats import tldr_prompt
from dschat.data.rows import Row
from dschat.demo.models import Opened, chosen, find_checkpoints, find_model, open_model, own_sampling
from dschat.demo.options import DemoOptions
from dschat.demo.stream import STOPPED, ChatQuestion, Draft, MacroActionsOf, stream
from dschat.lab.macro_actions import MacroToken
from dschat.lab.policy import choose_device
from dschat.models.opening import choose_dtype
from dschat.rollouts.sampling import Sampling, row_seed
from dschat.scoring.reward_reader import RewardReader, load_reward_model, load_reward_tokenizer
from dschat.scoring.source import ResponseTexts
from dschat.settings.macro_actions import TerminationFlags

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
FLAGS = ("--model", "--other")
NUMBERS = ("temperature", "top_k", "top_p", "max_new_tokens")  # of how answers are drawn
NOT_LOADED = "no model is loaded: choose a run folder and a checkpoint, then Load model."
BUSY = 0.1  # seconds between two looks whether one who waits has been stopped
MakePrompt = Callable[[int, Opened], "Prompt"]  # for a side and its model


@dataclass(frozen=True)
class Prompt:
    """What a model is asked."""

    row: Row  # the prompt as training has it; messages where the tokenizer has a chat template
    markers: tuple[str, ...] = ()  # texts that begin somebody else's turn: an answer ends before them


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
        answers = reply_contents(tokenizer, [answer for _, answer in turns])
        messages = []
        for (question, _), answer in zip(turns, answers, strict=True):
            messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        messages.append({"role": "user", "content": message})
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


@dataclass(frozen=True)
class SamplingChoice:
    """How answers are drawn; see the flags."""

    temperature: float = 0.8
    top_k: int = 50
    top_p: float = 1.0
    max_new_tokens: int = 128
    do_sample: bool = True  # False = greedy

    @classmethod
    def of(cls, values: Mapping[str, float], do_sample: bool) -> "SamplingChoice":
        """The numbers that are there, the defaults for others; temperature 0 is greedy."""
        return cls(
            temperature=values.get("temperature") or cls.temperature,
            top_k=int(values.get("top_k", cls.top_k)),
            top_p=values.get("top_p", cls.top_p),
            max_new_tokens=int(values.get("max_new_tokens", cls.max_new_tokens)),
            do_sample=do_sample and values.get("temperature") != 0,
        )

    def sampling(self, model: Opened, prompt_length: int) -> Sampling:
        """The same for a model, which may not read so long a text.

        Raises:
            UserError: the prompt alone is as long as what it reads.
        """
        room = model.limit - prompt_length
        if room < 1:
            raise UserError(
                f"the conversation has {prompt_length} tokens and the model reads at most {model.limit}: clear it."
            )
        return Sampling(
            max_new_tokens=min(self.max_new_tokens, room),
            end_ids=model.end_ids,
            pad_id=model.tokenizer.pad_token_id,
            bos_id=model.tokenizer.bos_token_id,
            temperature=self.temperature if self.do_sample else 0.0,
            top_k=self.top_k,
            top_p=self.top_p,
        )


@dataclass(frozen=True)
class ShownAnswer:
    """A model's answer, as far as it is there."""

    text: str = ""  # without special tokens
    done: str | None = None  # why it ended; None before that
    # Of the whole answer, each with the number of its macro action; empty before it is done.
    tokens: Sequence[MacroToken] = ()
    score: float | None = None  # the reward model's; None without one, or where there is a note instead
    seconds: float = 0.0  # that drawing took
    note: str = ""  # what went wrong, in words

    @property
    def caption(self) -> str:
        """Score, length and time in one line."""
        score = [] if self.score is None else [f"score {self.score:+.3f}".replace("-", "−")]
        count = len(self.tokens)
        length = f"{count} token{'' if count == 1 else 's'} in {self.seconds:.1f} s"
        return " · ".join([*score, length, *filter(None, [self.done, self.note])])


@dataclass(frozen=True)
class Turn:
    """A message and every model's answer to it."""

    message: str
    answers: tuple[ShownAnswer, ...]


@dataclass(frozen=True)
class Chat:
    """The turns so far. Each model goes on from its own answers."""

    turns: tuple[Turn, ...] = ()

    def prompt(self, message: str, side: int, model: Opened) -> Prompt:
        """What a model is asked next; raises UserError for an empty message."""
        earlier = [(turn.message, turn.answers[side].text) for turn in self.turns]
        return chat_prompt(model.tokenizer, earlier, message)

    def with_turn(self, message: str, answers: list[ShownAnswer]) -> "Chat":
        """The same with one turn more."""
        return Chat((*self.turns, Turn(message, tuple(answers))))


@dataclass
class _Side:
    model: Opened | None = None
    macro: MacroActionsOf | None = None
    status: str = "No model is loaded."


@dataclass
class Session:
    """The models of a demo. One answer, or one loading, at a time; the methods may be called by several threads."""

    options: DemoOptions
    termination: TerminationFlags
    task: str = "chat"  # or summary
    reader: RewardReader | None = None
    _sides: list[_Side] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _asked: int = 0

    def __post_init__(self) -> None:
        """Chooses the device and opens the reward model. Raises UserError where that is not possible."""
        self.device = choose_device(device=self.options.compute.device)
        self.dtype = choose_dtype(self.options.compute.dtype, self.device)
        self._sides = [_Side() for _ in range(self.options.demo.sides)]
        if self.options.demo.reward_model is not None:
            path, template = self.options.demo.reward_model, self.options.demo.rm_template
            tokenizer = load_reward_tokenizer(path, template)
            self.reader = load_reward_model(path, tokenizer, template, self.device, self.dtype)

    def status(self, side: int) -> str:
        """What is loaded there."""
        return self._sides[side].status

    def path(self, side: int) -> str | None:
        """Where what is loaded there was opened."""
        model = self._sides[side].model
        return None if model is None else model.path

    def load(self, side: int, path: str) -> str:
        """Opens a model in the place of the one before, which is let go first; returns the status line.

        What can be refused is refused while the one before is still there. Raises UserError.
        """
        with self._one_at_a_time(threading.Event()):
            end_token = self.options.demo.end_of_conversation_token
            found = find_model(path, FLAGS[side], end_token)
            self._sides[side] = _Side()
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
            model = open_model(path, found, FLAGS[side], self.device, self.dtype)
            macro = MacroActionsOf(model, self.termination, self.options.demo.seed)
            has_template = model.tokenizer.chat_template is not None
            form = "" if self.task == "summary" else "; chat template" if has_template else "; Human / Assistant form"
            self._sides[side] = _Side(model, macro, f"{model.status}{form}")
            return self._sides[side].status

    def load_named(self, side: int) -> str:
        """Opens what --model or --other names, if it does: the first of a run's models; returns the status line."""
        place = (self.options.demo.model, self.options.demo.other)[side]
        return self.status(side) if place is None else self.load(side, chosen(find_checkpoints(place), place).path)

    def choice(self, path: str | None) -> tuple[SamplingChoice, str]:
        """How a run or model draws, with what the flags say instead; and where that is from, in words."""
        own, words = own_sampling(path) if path else ({}, "defaults")
        given = {name: getattr(self.options.demo, name) for name in NUMBERS}
        values = own | {name: value for name, value in given.items() if value is not None}
        return SamplingChoice.of(values, bool(values.get("temperature", 1))), words

    def answer(
        self, make_prompt: MakePrompt, choice: SamplingChoice, stop: threading.Event
    ) -> Generator[list[ShownAnswer]]:
        """Every side's answer, growing; in the last answers all are done.

        Args:
            make_prompt: gives the prompt of a side.
            choice: how to draw.
            stop: ends all answers, also while this one waits for another.

        Raises:
            UserError: a model is missing, or cannot answer this.
        """
        with self._one_at_a_time(stop) as mine:
            if not mine:
                yield [ShownAnswer(done=STOPPED) for _ in self._sides]
                return
            models = [side.model for side in self._sides if side.model is not None]
            if len(models) < len(self._sides):
                raise UserError(NOT_LOADED)
            prompts = [make_prompt(number, model) for number, model in enumerate(models)]
            seed = row_seed(self.options.demo.seed, self._asked)
            self._asked += 1
            questions = []
            for model, prompt in zip(models, prompts, strict=True):
                (ids,) = encode_prompts(model.tokenizer, [prompt.row])
                if not ids:
                    raise UserError("the prompt has no tokens; type something.")
                questions.append(ChatQuestion(model, ids, choice.sampling(model, len(ids)), prompt.markers))
            answers = [ShownAnswer() for _ in models]
            start = time.perf_counter()
            with closing(stream(questions, seed, stop)) as growing:
                try:
                    for number, draft in growing:
                        answers[number] = ShownAnswer(draft.text)
                        if draft.done is not None:
                            seconds = time.perf_counter() - start
                            answers[number] = self._judged(number, prompts[number].row, draft, seconds)
                        yield list(answers)
                finally:
                    stop.set()  # the reader may have left, or one of two answers failed

    @contextmanager
    def _one_at_a_time(self, stop: threading.Event) -> Iterator[bool]:
        """Waits until nobody else uses the models; False where it was stopped meanwhile."""
        while not self._lock.acquire(timeout=BUSY):
            if stop.is_set():
                yield False
                return
        try:
            yield True
        finally:
            self._lock.release()

    def _judged(self, number: int, row: Row, draft: Draft, seconds: float) -> ShownAnswer:
        """The whole answer with its score and macro actions; what cannot be had is a note."""
        side, notes = self._sides[number], []
        assert side.model is not None and side.macro is not None  # they answered
        prompt = prompt_text(side.model.tokenizer, row)
        tokens: Sequence[MacroToken] = ()
        score = None
        try:
            (prompt_ids,) = encode_prompts(side.model.tokenizer, [row])
            tokens = side.macro(prompt_ids, draft.ids)
        except UserError as error:
            notes.append(str(error))
        try:
            if self.reader is not None and draft.ids:
                score = float(self.reader(ResponseTexts([prompt], [draft.text], [row])))
        except UserError as error:
            notes.append(str(error))
        return ShownAnswer(draft.text, draft.done, tokens, score, seconds, " ".join(notes))
