# SPDX-License-Identifier: Apache-2.0
"""The part that page and terminal share: prompts from the typed text, the loaded models, and their answers."""

import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedTokenizerBase

from dschat.base.errors import UserError
from dschat.data.encoding import encode_prompts, prompt_text
from dschat.data.formats import tldr_prompt
from dschat.data.rows import Row
from dschat.data.turn_end import reply_contents
from dschat.demo.models import (
    SAMPLING_SETTINGS,
    LoadedModel,
    find_models,
    load_model,
    open_model_files,
    saved_sampling,
    select_model,
)
from dschat.demo.options import ChatOptions, DemoOptions
from dschat.demo.stream import LENGTH, STOPPED, ChatQuestion, Draft, MacroActionCutter, stream
from dschat.evaluation.macro_actions import MacroToken
from dschat.evaluation.policy import choose_device
from dschat.models.opening import choose_dtype
from dschat.rollouts.sampling import Sampling, row_seed
from dschat.scoring.reward_reader import RewardReader, load_reward_model, load_reward_tokenizer
from dschat.scoring.source import ResponseTexts
from dschat.settings.macro_actions import TerminationFlags

HUMAN = "\n\nHuman:"
ASSISTANT = "\n\nAssistant:"
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
NOT_LOADED = "no model is loaded: choose a run folder and a checkpoint, then Load model."
POLL_INTERVAL = 0.1  # seconds between two checks whether a waiting answer has been stopped
MakePrompt = Callable[[int, LoadedModel], "Prompt"]  # for a side and its model


@dataclass(frozen=True)
class Prompt:
    """The prompt of one answer."""

    row: Row  # as in training; messages if the tokenizer has a chat template
    markers: tuple[str, ...] = ()  # texts that begin the user's next turn, before which an answer ends


def chat_prompt(
    tokenizer: PreTrainedTokenizerBase, turns: Sequence[tuple[str, str]], message: str, system: str = ""
) -> Prompt:
    r"""The prompt for the next turn of a dialogue.

    Without a chat template it has the form of HH-RLHF: "\n\nHuman: …\n\nAssistant: …\n\nHuman: …\n\nAssistant:".

    Args:
        tokenizer: tokenizer of the model that answers.
        turns: earlier messages, each with the model's answer.
        message: the next message.
        system: system prompt, for a tokenizer with a chat template.

    Raises:
        UserError: the message is empty.
    """
    if not message.strip():
        raise UserError("type a message first.")
    if tokenizer.chat_template is not None:
        answers = reply_contents(tokenizer, [answer for _, answer in turns])
        messages = [{"role": "system", "content": system}] if system else []
        for (question, _), answer in zip(turns, answers, strict=True):
            messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        messages.append({"role": "user", "content": message})
        return Prompt(Row(None, messages, None, None, {}, ORIGIN))
    text = "".join(f"{HUMAN} {question.strip()}{ASSISTANT} {answer.strip()}" for question, answer in turns)
    text += f"{HUMAN} {message.strip()}{ASSISTANT}"
    return Prompt(Row(text, None, None, None, {}, ORIGIN), (HUMAN,))


def check_system_prompt(tokenizer: PreTrainedTokenizerBase, system: str, source: str) -> None:
    """Raises UserError, which begins with `source`, if a model would not read a system prompt."""
    if not system:
        return
    remedy = "drop --system_prompt, or write it into your first message."
    if tokenizer.chat_template is None:
        raise UserError(f"{source}: without a chat template there is no place for a system prompt: {remedy}")
    try:
        text = prompt_text(tokenizer, chat_prompt(tokenizer, (), "Hello", system).row)
    except UserError as error:
        raise UserError(f"{source}: its chat template takes no system prompt: {remedy}") from error
    if system.strip() not in text:
        raise UserError(f"{source}: its chat template leaves the system prompt out: {remedy}")


def summary_prompt(subreddit: str, title: str, post: str) -> Prompt:
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
    return Prompt(Row(prompt, None, None, None, {}, "the post"))


@dataclass(frozen=True)
class SamplingChoice:
    """Sampling settings of answers; see the flags."""

    temperature: float = 0.8
    top_k: int = 50
    top_p: float = 1.0
    max_new_tokens: int = 128
    do_sample: bool = True  # False = greedy

    @classmethod
    def of(cls, values: Mapping[str, float], do_sample: bool) -> "SamplingChoice":
        """Settings from numbers, with defaults for missing ones; temperature 0 is greedy."""
        return cls(
            temperature=values.get("temperature") or cls.temperature,
            top_k=int(values.get("top_k", cls.top_k)),
            top_p=values.get("top_p", cls.top_p),
            max_new_tokens=int(values.get("max_new_tokens", cls.max_new_tokens)),
            do_sample=do_sample and values.get("temperature") != 0,
        )

    def sampling(self, model: LoadedModel, prompt_length: int) -> Sampling:
        """The settings for one model, with fewer new tokens if its sequence length is limited.

        Args:
            model: that answers.
            prompt_length: in tokens.

        Raises:
            UserError: the prompt alone is as long as the model's limit.
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
    """A model's answer so far, as page and terminal show it."""

    text: str = ""  # without special tokens
    done: str | None = None  # why it ended; None before
    tokens: Sequence[MacroToken] = ()  # with the numbers of their macro actions; empty before it is done
    score: float | None = None  # the reward model's; None without one, or if there is a note instead
    seconds: float = 0.0  # that generating took
    note: str = ""  # errors, in words

    @property
    def caption(self) -> str:
        """Score, length and time in one line."""
        parts = []
        if self.score is not None:
            parts.append(f"score {self.score:+.3f}".replace("-", "−"))
        token_count = len(self.tokens)
        parts.append(f"{token_count} token{'' if token_count == 1 else 's'} in {self.seconds:.1f} s")
        if self.done:
            parts.append(self.done)
        if self.note:
            parts.append(self.note)
        return " · ".join(parts)


@dataclass(frozen=True)
class Turn:
    """A message and every model's answer to it."""

    message: str
    answers: tuple[ShownAnswer, ...]


@dataclass(frozen=True)
class Chat:
    """The turns so far, after a system prompt if there is one. Each model continues from its own answers."""

    turns: tuple[Turn, ...] = ()
    system: str = ""

    def prompt(self, message: str, side: int, model: LoadedModel) -> Prompt:
        """The next prompt of a model; raises UserError for an empty message."""
        earlier = [(turn.message, turn.answers[side].text) for turn in self.turns]
        return chat_prompt(model.tokenizer, earlier, message, self.system)

    def with_turn(self, message: str, answers: list[ShownAnswer]) -> "Chat":
        """A chat with one more turn."""
        return Chat((*self.turns, Turn(message, tuple(answers))), self.system)


@dataclass
class _Side:
    """One of the models side by side."""

    model: LoadedModel | None = None
    cutter: MacroActionCutter | None = None
    status: str = "No model is loaded."


@dataclass
class Session:
    """The models of a demo. They generate or are loaded one request at a time; methods are thread-safe."""

    options: DemoOptions
    termination: TerminationFlags
    task: str = "chat"  # or summary
    reader: RewardReader | None = None
    _sides: list[_Side] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _question_count: int = 0

    def __post_init__(self) -> None:
        """Chooses the device and loads the reward model. Raises UserError if that is not possible."""
        self.device = choose_device(device=self.options.compute.device)
        self.dtype = choose_dtype(self.options.compute.dtype, self.device)
        self._sides = [_Side() for _ in range(self.options.demo.sides)]
        if self.options.demo.reward_model is not None:
            path = self.options.demo.reward_model
            template = self.options.demo.rm_template
            tokenizer = load_reward_tokenizer(path, template)
            self.reader = load_reward_model(path, tokenizer, template, self.device, self.dtype)

    def new_chat(self) -> Chat:
        """A conversation before its first message."""
        options = self.options
        return Chat(system=(options.chat.system_prompt or "") if isinstance(options, ChatOptions) else "")

    def status(self, side: int) -> str:
        """The status line of a side."""
        return self._sides[side].status

    def path(self, side: int) -> str | None:
        """The path of the loaded model of a side."""
        model = self._sides[side].model
        return None if model is None else model.path

    def load(self, side: int, path: str) -> str:
        """Loads a model instead of another; returns the status line.

        The other model is freed before the weights are read, after all other checks. Raises UserError.
        """
        flag = FLAGS[side]
        with self._exclusive(threading.Event()):
            files = open_model_files(path, flag, self.options.demo.end_of_conversation_token)
            check_system_prompt(files.tokenizer, self.new_chat().system, f"{flag} {path}")
            self._sides[side] = _Side()
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
            model = load_model(path, files, flag, self.device, self.dtype)
            cutter = MacroActionCutter(model, self.termination, self.options.demo.seed)
            status = model.status
            if self.task == "chat":
                has_template = model.tokenizer.chat_template is not None
                status += "; chat template" if has_template else "; Human / Assistant form"
            self._sides[side] = _Side(model, cutter, status)
            return status

    def load_named(self, side: int) -> str:
        """Loads the model of --model or --other, the first one of a run; returns the status line."""
        path = self.options.demo.model if side == 0 else self.options.demo.other
        if path is None:
            return self.status(side)
        return self.load(side, select_model(find_models(path), path).path)

    def choice(self, path: str | None) -> tuple[SamplingChoice, str]:
        """Sampling settings of the flags, or else of the run or model; and their source, in words."""
        settings: dict[str, float] = {}
        source = "defaults"
        if path:
            settings, source = saved_sampling(path)
        for name in SAMPLING_SETTINGS:
            value = getattr(self.options.demo, name)
            if value is not None:
                settings[name] = value
        return SamplingChoice.of(settings, bool(settings.get("temperature", 1))), source

    def answer(
        self, make_prompt: MakePrompt, choice: SamplingChoice, stop: threading.Event
    ) -> Generator[list[ShownAnswer]]:
        """Yields every side's answer as it grows; in the last list all answers are done.

        Args:
            make_prompt: makes the prompt of a side.
            choice: sampling settings.
            stop: ends all answers, also while this one waits for another.

        Raises:
            UserError: a model is missing, or cannot answer this.
        """
        with self._exclusive(stop) as is_ours:
            if not is_ours:
                yield [ShownAnswer(done=STOPPED) for _ in self._sides]
                return
            models = []
            for side in self._sides:
                if side.model is not None:
                    models.append(side.model)
            if len(models) < len(self._sides):
                raise UserError(NOT_LOADED)
            prompts = [make_prompt(number, model) for number, model in enumerate(models)]
            questions = []
            for model, prompt in zip(models, prompts, strict=True):
                questions.append(self._question(model, prompt, choice))
            seed = row_seed(self.options.demo.seed, self._question_count)
            self._question_count += 1

            answers = [ShownAnswer() for _ in models]
            start = time.perf_counter()
            with closing(stream(questions, seed, stop)) as drafts:
                try:
                    for number, draft in drafts:
                        answers[number] = ShownAnswer(draft.text)
                        if draft.done is not None:
                            seconds = time.perf_counter() - start
                            answers[number] = self._finish(self._sides[number], prompts[number].row, draft, seconds)
                        yield list(answers)
                finally:
                    stop.set()  # the reader may have left, or one of two answers failed

    def _question(self, model: LoadedModel, prompt: Prompt, choice: SamplingChoice) -> ChatQuestion:
        (ids,) = encode_prompts(model.tokenizer, [prompt.row])
        if not ids:
            raise UserError("the prompt has no tokens; type something.")
        return ChatQuestion(model, ids, choice.sampling(model, len(ids)), prompt.markers)

    @contextmanager
    def _exclusive(self, stop: threading.Event) -> Iterator[bool]:
        """Waits until nobody else uses the models; False if it was stopped meanwhile."""
        while not self._lock.acquire(timeout=POLL_INTERVAL):
            if stop.is_set():
                yield False
                return
        try:
            yield True
        finally:
            self._lock.release()

    def _finish(self, side: _Side, row: Row, draft: Draft, seconds: float) -> ShownAnswer:
        """Adds the score and the macro actions to a whole answer; their errors become a note."""
        assert side.model is not None and side.cutter is not None  # they answered
        notes = []
        tokens: Sequence[MacroToken] = ()
        try:
            (prompt_ids,) = encode_prompts(side.model.tokenizer, [row])
            tokens = side.cutter(prompt_ids, draft.ids)
        except UserError as error:
            notes.append(str(error))

        score = None
        try:
            if self.reader is not None and draft.ids:
                prompt = prompt_text(side.model.tokenizer, row)
                texts = ResponseTexts([prompt], [draft.text], [row], [draft.done not in (LENGTH, STOPPED)])
                score = float(self.reader(texts))
        except UserError as error:
            notes.append(str(error))
        return ShownAnswer(draft.text, draft.done, tokens, score, seconds, " ".join(notes))
