# SPDX-License-Identifier: Apache-2.0
"""Training on the scores of a judge model is stopped anywhere and goes on."""

from functools import partial

import pytest

from dschat.base.chat_servers import Endpoint
from dschat.base.reply_cache import ReplyCache
from dschat.judge.client import JudgeClient
from dschat.judge.costs import Spending
from dschat.judge.rubrics import Rubric
from dschat.judge.scores import JudgeScores, JudgeSettings
from fake_judge import graded_in
from resume_runs import RLOO, check_every_stop, ppo

RANKING = Rubric("Rank them.", judge="ranking")


def places_by_length(messages):
    """The longest text is the best."""
    _, *responses = graded_in(messages).items()
    lengths = {name: len(text) for name, text in responses}
    places = {name: 1 + sum(other > length for other in lengths.values()) for name, length in lengths.items()}
    return str(places).replace("'", '"')


def judged_rloo(folder, server, **flags):
    """A run of step 3 whose cache lies in the output folder."""
    endpoint = Endpoint("m", server.url, 50, 5.0, 2, "none")
    client = JudgeClient(endpoint, ReplyCache(folder / ".judge-cache"), Spending(None))
    return ppo(folder, reward=JudgeScores(client, JudgeSettings(RANKING, 3, 60.0, False)), **RLOO, **flags)


@pytest.mark.slow
def test_a_judged_run_stops_anywhere(server, group, tmp_path):
    server.answer = places_by_length
    assert check_every_stop(partial(judged_rloo, server=server), tmp_path, 47, first=20) > 60
    assert max(server.answered.values()) <= 1 + 3 * 60  # bounded by the folders, each of which asks once
