# SPDX-License-Identifier: Apache-2.0
"""A model that answers: loading it, its answer to a prompt while it grows, and what is shown of a finished one.

Answers are generated in a thread, and transformers' `TextIteratorStreamer` passes on whole words. A finished answer is
decoded at once, as everywhere else in this package, and cut into macro actions as training with the same flags would.
"""

import logging
import threading
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StoppingCriteriaList,
    TextIteratorStreamer,
)

from dschat.base.errors import UserError
from dschat.data.encoding import decode_response, decode_sampled, encode_prompts
from dschat.data.rows import Row
from dschat.data.turn_end import turn_end
from dschat.demo.options import DemoOptions
from dschat.demo.sampling import SamplingChoice
from dschat.evaluation.macro_actions import MacroToken
from dschat.evaluation.policy import Compute, locate_policy
from dschat.models.limits import position_limit, trained_length
from dschat.models.load import load_causal_lm
from dschat.models.policy import PolicyModel
from dschat.models.tokenizer import end_token_id, load_tokenizer, own_end_ids, token_texts
from dschat.rollouts.termination import TerminationCondition
from macro_actions.segments import segment
from macro_actions.types import Rollout, Trajectory

logger = logging.getLogger(__name__)

ENDED = "ended"
MARKER = "ended: it began the next turn"
LENGTH = "cut at its longest"


@dataclass(frozen=True)
class GrowingAnswer:
    """A model's answer so far, as page and terminal show it."""

    text: str = ""  # without special tokens
    done: str | None = None  # why it ended; None before
    tokens: Sequence[MacroToken] = ()  # with the numbers of their macro actions; empty before it is done
    score: float | None = None  # the reward model's; None without one
    seconds: float = 0.0  # that generating took

    @property
    def caption(self) -> str:
        """Score, length, macro actions and time in one line; empty before the answer is done."""
        if self.done is None:
            return ""
        parts = [] if self.score is None else [f"score {self.score:+.3f}".replace("-", "−")]
        count = self.tokens[-1].macro_action + 1 if self.tokens else 0
        parts.append(f"{len(self.tokens)} tokens, {count} macro actions, in {self.seconds:.1f} s")
        parts.append(self.done)
        return " · ".join(parts)


@dataclass(frozen=True)
class LoadedModel:
    """A causal LM, ready to answer."""

    name: str  # as the user gave it
    path: str  # of the model itself
    causal_lm: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    end_ids: tuple[int, ...]  # any of them ends an answer
    limit: int | None  # maximum sequence length in tokens, if the config names one
    condition: TerminationCondition  # that cuts its answers
    reads_logprobs: bool  # whether the condition reads log-probs

    @property
    def status(self) -> str:
        """The line that says what is loaded."""
        size = f"{self.causal_lm.num_parameters() / 1e6:.2f} million parameters"
        return f"{self.name}: {size}, on {self.causal_lm.device}"


def load_model(name: str, flag: str, options: DemoOptions, where: Compute) -> LoadedModel:
    """Loads a model that answers.

    Args:
        name: a model's folder, a run's output folder with actor/, or a hub id.
        flag: the flag that named it, for messages.
        options: the end token, and how answers are cut.
        where: device and dtype.

    Raises:
        UserError: there is no model, it writes no text, or memory does not suffice.
    """
    path = locate_policy(name)
    end_token = options.demo.end_of_conversation_token
    tokenizer = load_tokenizer(path, flag, end_token=end_token)  # refuses a tokenizer without EOS
    end_ids = {tokenizer.eos_token_id, end_token_id(tokenizer, end_token), *own_end_ids(path)}
    if tokenizer.chat_template is not None:
        try:
            end_ids.add(turn_end(tokenizer).token_id)
        except UserError as error:
            logger.warning("%s %s: %s Answers end with EOS alone.", flag, path, error)
    try:
        causal_lm = load_causal_lm(path, flag, where.dtype, tokenizer).to(where.device).requires_grad_(False)
    except torch.OutOfMemoryError as error:
        raise UserError(
            f"{flag} {name}: does not fit into the memory of {where.device}. Give --dtype bf16, or --device cpu."
        ) from error
    causal_lm.generation_config = GenerationConfig()  # its fields would fill settings that the page leaves open
    limit = position_limit(causal_lm) or trained_length(causal_lm.config)
    flags = options.termination
    condition = TerminationCondition(flags, tokenizer, tokenizer.eos_token_id, options.demo.seed)
    return LoadedModel(
        name, path, causal_lm, tokenizer, tuple(sorted(end_ids)), limit, condition, flags.reads_logprobs
    )


def answer(
    model: LoadedModel, row: Row, markers: Sequence[str], choice: SamplingChoice, seed: int
) -> Generator[GrowingAnswer]:
    """Yields the answer to a prompt as it grows; the last one is done. Closing the iterator ends the generation.

    Args:
        model: nobody else may use it meanwhile.
        row: the prompt.
        markers: texts before which the answer ends.
        choice: sampling settings.
        seed: of sampling; sets the global random state.

    Raises:
        UserError: the prompt is empty or too long, or memory does not suffice.
    """
    (prompt_ids,) = encode_prompts(model.tokenizer, [row])
    room = choice.max_new_tokens if model.limit is None else model.limit - len(prompt_ids)
    if not prompt_ids:
        raise UserError("the prompt has no tokens; type something.")
    if room < 1:
        raise UserError(f"the conversation has {len(prompt_ids)} tokens, the model reads {model.limit}: clear it.")
    start = time.perf_counter()
    generation = _Generation(model, prompt_ids, markers, choice.arguments(room), seed)
    try:
        text = ""
        for words in generation.streamer:
            text += words
            yield GrowingAnswer(_before_marker(text, markers))
        finished = generation.result()
    finally:
        generation.stop.set()
        generation.join()
    tokens = macro_tokens(model, prompt_ids, generation.ids)
    yield replace(finished, tokens=tokens, seconds=time.perf_counter() - start)


class _Generation(threading.Thread):
    """One call of transformers' `generate`, in a thread that passes words to a streamer."""

    def __init__(
        self,
        model: LoadedModel,
        prompt_ids: Sequence[int],
        markers: Sequence[str],
        arguments: dict[str, Any],
        seed: int,
    ) -> None:
        """Starts to generate; arguments as for `answer`."""
        super().__init__(daemon=True)
        self._model = model
        self._prompt_ids = list(prompt_ids)
        self._markers = markers
        self._arguments = arguments
        self._seed = seed
        self._error: BaseException | None = None
        self.stop = threading.Event()
        self.ids: list[int] = []
        decoder = cast(PreTrainedTokenizerBase, _ResponseDecoder(model.tokenizer))
        self.streamer = TextIteratorStreamer(decoder, skip_prompt=True)
        self.start()

    def run(self) -> None:
        """Generates; what goes wrong is raised by `result`."""
        try:
            self._generate()
        except BaseException as error:
            self._error = error
        self.streamer.end()

    @torch.no_grad()
    def _generate(self) -> None:
        model = self._model
        input_ids = torch.tensor([self._prompt_ids], device=model.causal_lm.device)
        torch.manual_seed(self._seed)
        sequences: torch.Tensor = model.causal_lm.generate(  # type: ignore[operator]
            input_ids=input_ids,
            attention_mask=torch.ones_like(input_ids),
            eos_token_id=list(model.end_ids),
            pad_token_id=model.tokenizer.pad_token_id,
            stopping_criteria=StoppingCriteriaList([_StopsAnswer(self.stop)]),
            stop_strings=list(self._markers) or None,
            tokenizer=model.tokenizer,
            streamer=self.streamer,
            **self._arguments,
        )
        self.ids = sequences[0, len(self._prompt_ids) :].tolist()

    def result(self) -> GrowingAnswer:
        """The whole answer; raises what ended the thread."""
        self.join()
        if isinstance(self._error, torch.OutOfMemoryError):
            message = "the memory does not hold the conversation: clear it, or ask for fewer new tokens."
            raise UserError(message) from self._error
        if self._error is not None:
            raise self._error
        has_end = bool(self.ids) and self.ids[-1] in self._model.end_ids
        whole_text = decode_sampled(self._model.tokenizer, self.ids, has_end)
        text = _before_marker(whole_text, self._markers)
        if text != whole_text:
            while self.ids and len(decode_response(self._model.tokenizer, self.ids[:-1])) >= len(text):
                self.ids.pop()  # a token of the marker
            return GrowingAnswer(text, MARKER)
        if has_end:
            return GrowingAnswer(text, ENDED)
        return GrowingAnswer(text, LENGTH)


class _StopsAnswer(StoppingCriteria):
    """Ends an answer after the current token once an event is set."""

    def __init__(self, stop: threading.Event) -> None:
        self._stop = stop

    def __call__(self, input_ids: Tensor, scores: Tensor, **options: object) -> Tensor:
        return torch.full(input_ids.shape[:1], self._stop.is_set(), dtype=torch.bool, device=input_ids.device)


class _ResponseDecoder:
    """Decodes for a streamer. A tokenizer's own `decode` drops spaces at the beginning of a response."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer

    def decode(self, ids: Sequence[int]) -> str:
        return decode_response(self._tokenizer, ids)


def _before_marker(text: str, markers: Sequence[str]) -> str:
    """The text before the first marker."""
    for marker in markers:
        text = text.partition(marker)[0]
    return text


def macro_tokens(model: LoadedModel, prompt_ids: Sequence[int], answer_ids: Sequence[int]) -> list[MacroToken]:
    """The tokens of an answer, each with the number of its macro action.

    `ppl`, `surprise` and a user's function read the log-probs of the model that answers, not the reference's.

    Args:
        model: that gave the answer.
        prompt_ids: P of them.
        answer_ids: R of them, possibly none.

    Raises:
        UserError: a user's function fails.
    """
    if not answer_ids:
        return []
    ids = torch.tensor([[*prompt_ids, *answer_ids]])
    mask = torch.ones(1, len(answer_ids), dtype=torch.bool)
    zero = torch.zeros(1)
    rollout = Rollout(ids, torch.ones_like(ids).bool(), mask, prompt_index=zero.long(), finished=~zero.bool())
    logprobs = _logprobs(model, rollout) if model.reads_logprobs else torch.zeros(mask.shape)
    trajectory = Trajectory(rollout, logprobs, logprobs, values=torch.zeros(mask.shape), scores=zero)
    numbers = segment(model.condition(trajectory, 0).ends, mask).index[0].tolist()
    texts = token_texts(list(answer_ids), model.tokenizer)
    return [MacroToken(text, number) for text, number in zip(texts, numbers, strict=True)]


@torch.no_grad()
def _logprobs(model: LoadedModel, rollout: Rollout) -> Tensor:
    """The model's log-probs of the answer, shape (1, R), float32 on the CPU."""
    device = model.causal_lm.device
    input_ids = rollout.input_ids.to(device)
    attention_mask = rollout.attention_mask.to(device)
    logprobs, _ = PolicyModel(model.causal_lm)(input_ids, attention_mask, rollout.response_mask.shape[1], 1.0)
    return logprobs.float().cpu()
