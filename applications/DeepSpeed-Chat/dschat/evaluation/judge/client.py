# SPDX-License-Identifier: Apache-2.0
"""Questions to a judge model: answered from the cache, or asked in a form that the server takes, and never twice."""

import logging
import threading

from dschat.common.chat_servers import Endpoint, FormRefused, Reply, ReplyCache, Unanswered
from dschat.common.journal import make_writable
from dschat.errors import UserError
from dschat.evaluation.judge.costs import Spending
from dschat.evaluation.judge.question import Form, Question, TextRefused
from dschat.evaluation.judge.server import new_client, send

logger = logging.getLogger(__name__)


class JudgeClient:
    """Asks a judge model from several threads at once."""

    def __init__(self, endpoint: Endpoint, cache: ReplyCache, spending: Spending, control: Question) -> None:
        """Opens the client; nothing is sent. Raises UserError where cache or address cannot be used.

        `control` is a harmless question. It is asked where one question fails before any other has been answered: is
        it that text, or the server?
        """
        make_writable(cache.folder, f"--cache {cache.folder}")
        self.stop = threading.Event()  # set once nothing more may be sent
        self.cached = 0  # answers that came from the cache
        self._endpoint, self._cache, self._spending, self._control = endpoint, cache, spending, control
        self._client = new_client(endpoint, spending, self.stop)
        self._form: Form | None = None  # in which the server has answered
        self._lock, self._checking = threading.Lock(), threading.Lock()

    def ask(self, question: Question) -> Reply:
        """The answer to a question.

        Raises:
            Stopped, TextRefused, Unanswered: this question has no answer.
            UserError: no question gets one: key, model, address, limit or server; ends the run.
        """
        digest = question.digest(self._endpoint)
        known = self._cache.get(digest)
        if known is not None:
            with self._lock:
                self.cached += 1
            return known
        try:
            reply = self._answer(question)
            self._cache.put(digest, reply)
        except UserError:
            self.stop.set()
            raise
        return reply

    def _answer(self, question: Question) -> Reply:
        answers_before = self._spending.requests
        try:
            return self._in_a_form(question)
        except FormRefused as refusal:
            self._check_server(str(refusal), answers_before=0)
        except Unanswered as trouble:
            reason = f"no answer with --max-tries {self._endpoint.tries}: {trouble}"
            self._check_server(reason, answers_before)
            raise Unanswered(reason) from trouble
        return self._in_a_form(question)  # by now a form is known in which the server answers

    def _check_server(self, reason: str, answers_before: int) -> None:
        """Ends the run with a reason, unless other questions are being answered or the harmless one is."""
        with self._checking:
            if self._spending.requests > answers_before:
                return
            try:
                self._in_a_form(self._control, repeat=False)
            except (Unanswered, FormRefused, TextRefused) as error:
                raise UserError(reason) from error

    def _in_a_form(self, question: Question, repeat: bool = True) -> Reply:
        """Sends in the form that was answered before; before the first answer, in one after the other.

        A refusal is a TextRefused once a question was answered in the form, and a FormRefused after the last form.
        """
        client = self._client if repeat else self._client.with_options(max_retries=0)
        form = self._form or Form()
        while True:
            try:
                reply = send(client, self._endpoint, question, form)
            except FormRefused as refusal:
                known = self._form
                if known == form:
                    raise TextRefused(f"the server refuses the text: {refusal}") from refusal
                following = known or form.after(refusal.complaint)
                if following is None:
                    raise
                form = following
            else:
                self._keep(form)
                return reply

    def _keep(self, form: Form) -> None:
        """The first form that is answered is that of the run."""
        with self._lock:
            if self._form is not None:
                return
            self._form = form
        if not form.temperature:
            logger.warning("%s takes no temperature 0: its verdicts may vary from run to run", self._endpoint.model)
        if form.structure != Form.structure:
            logger.info("the server takes no %s; asking for %s", Form.structure, form.structure or "plain text")
