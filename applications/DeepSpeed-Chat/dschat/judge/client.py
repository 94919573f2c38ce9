# SPDX-License-Identifier: Apache-2.0
"""Questions to a judge model: answered from the cache, or by the server, which is asked nothing twice."""

import json
import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

from dschat.base.chat_servers import Endpoint, RequestRejected, Unanswered, complete, open_chat, with_retries
from dschat.base.errors import UserError
from dschat.base.journal import require_writable
from dschat.base.reply_cache import Reply, ReplyCache
from dschat.judge.costs import Spending, estimated_tokens
from dschat.judge.questions import Form, JudgeQuestion, JudgingStopped, TextRefused

MOST_FAILURES = 5  # questions in a row without an answer, after which the server counts as broken

logger = logging.getLogger(__name__)


@dataclass
class AskingRound:
    """The state of questions that are asked together; threads that a round abandons do not touch the next one.

    Attributes:
        stop: set once nothing more of this round may be sent.
        failures: questions in a row without an answer.
    """

    stop: threading.Event = field(default_factory=threading.Event)
    failures: int = 0


class JudgeClient:
    """Asks a judge model from several threads at once.

    Attributes:
        round: the round that questions belong to unless they name another.
        cached: number of answers that came from the cache.
    """

    def __init__(self, endpoint: Endpoint, cache: ReplyCache, spending: Spending) -> None:
        """Open the client; nothing is sent.

        Args:
            endpoint: the judge's server and model.
            cache: cache of its answers.
            spending: counts and limits what is sent.

        Raises:
            UserError: cache or address cannot be used.
        """
        require_writable(cache.folder, f"{endpoint.flags.cache} {cache.folder}")
        self.round = AskingRound()
        self.cached = 0
        self._endpoint = endpoint
        self._cache = cache
        self._spending = spending
        self._client = open_chat(endpoint)
        self._form: Form | None = None  # the form of the first request that was answered
        self._lock = threading.Lock()

    @property
    def stop(self) -> threading.Event:
        """Set once nothing more may be sent in this round."""
        return self.round.stop

    @property
    def cost(self) -> float:
        """What was spent so far, in US dollars."""
        return self._spending.cost

    @property
    def has_prices(self) -> bool:
        """Whether the cost is counted."""
        return self._spending.has_prices

    def ask(
        self, question: JudgeQuestion, is_usable: Callable[[Reply], bool], asking: AskingRound | None = None
    ) -> Reply:
        """The answer to a question.

        Args:
            question: question to the judge.
            is_usable: whether an answer is worth caching.
            asking: the round that the question belongs to; the current one if not given.

        Raises:
            JudgingStopped, TextRefused, Unanswered: this question has no answer.
            UserError: no question gets one: key, model, address, limit or server; ends the run.
        """
        asking = asking or self.round
        digest = question.digest(self._endpoint)
        cached_reply = self._cache.get(digest, is_usable)
        if cached_reply is not None:
            with self._lock:
                self.cached += 1
            return cached_reply
        try:
            reply = self._ask_server(question, asking)
            return self._cache.put(digest, reply, is_usable)
        except UserError:
            asking.stop.set()
            raise

    def keep(self, question: JudgeQuestion, reply: Reply, is_usable: Callable[[Reply], bool]) -> None:
        """Cache the answer to the repetition of a question as that question's own, so that it is not asked again."""
        self._cache.put(question.digest(self._endpoint), reply, is_usable)

    def new_round(self) -> AskingRound:
        """Begin a round of questions, whatever became of the one before."""
        self.round = AskingRound()
        return self.round

    def _ask_server(self, question: JudgeQuestion, asking: AskingRound) -> Reply:
        """Send a question, and raise UserError if the server is broken.

        It is broken if too many questions in a row got no answer. Before its first answer a refusal counts as none,
        too; afterwards it is due to the text.
        """
        try:
            reply = self._try_forms(question, asking)
        except (TextRefused, Unanswered) as failure:
            if isinstance(failure, TextRefused) and self._form is not None:
                raise
            with self._lock:
                asking.failures += 1
                is_broken = asking.failures >= MOST_FAILURES
            if is_broken:
                raise UserError(f"{failure} ({MOST_FAILURES} questions in a row got no answer)") from failure
            raise
        with self._lock:
            asking.failures = 0
        return reply

    def _try_forms(self, question: JudgeQuestion, asking: AskingRound) -> Reply:
        """Send a question in the form that was answered before; before the first answer, in one after the other."""
        form = self._form or Form()
        while True:
            body = form.body(self._endpoint, question)
            try:
                reply = with_retries(partial(self._send, body, asking), self._endpoint, asking.stop.wait)
            except RequestRejected as refusal:
                answered_form = self._form
                next_form = answered_form or form.after(refusal.complaint)
                if next_form is None or answered_form == form:
                    raise TextRefused(f"the server refuses the text: {refusal}") from refusal
                form = next_form
            else:
                self._remember(form)
                return reply

    def _send(self, body: Mapping[str, object], asking: AskingRound) -> Reply:
        """Send a request once, within the limit on the cost.

        Raises:
            JudgingStopped: the run is being ended.
            UserError: the limit is reached; or see `complete`.
            Unanswered, RequestRejected: see `complete`.
        """
        size = len(json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode())
        longest_answer = self._endpoint.max_tokens
        with self._spending.reserve(size, longest_answer):  # no token is shorter than a byte
            if asking.stop.is_set():
                raise JudgingStopped("the questions of this round were given up")
            try:
                completion = complete(self._client, self._endpoint, body)
            except Unanswered as error:
                if error.may_be_charged:
                    self._spending.add(estimated_tokens(size), longest_answer, lost=True)
                raise
            sent = completion.tokens_sent
            answered = completion.tokens_answered
            if sent is None:
                sent = estimated_tokens(size)
            if answered is None:
                answered = estimated_tokens(len(completion.reply.text))
            self._spending.add(sent, answered)
        return completion.reply

    def _remember(self, form: Form) -> None:
        """Use the first form that is answered for the whole run."""
        with self._lock:
            if self._form is not None:
                return
            self._form = form
        if not form.temperature:
            logger.warning("%s takes no temperature 0: its verdicts may vary from run to run", self._endpoint.model)
        if form.structure != Form.structure:
            logger.info("the server takes no %s; asking for %s", Form.structure, form.structure or "plain text")
        if not form.system:
            logger.info("%s takes no system message: the instructions are in the user's", self._endpoint.model)
