# SPDX-License-Identifier: Apache-2.0
"""The date that chat templates read is kept in run.json and by interrupted commands, and given again on resume."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from dschat.base.journal import Journal
from dschat.base.lock import close_all
from dschat.evaluation.runner import restore_date
from dschat.models import template_date as clock
from dschat.run import identity
from dschat.run.identity import DATE, differences, identity_of
from factories import make_tokenizer, ppo_config, run_of

DATED = "{{ strftime_now('%d %b %Y') }}"


@pytest.fixture(autouse=True)
def _day(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(clock.DATE_VARIABLE, "2024-07-26")
    monkeypatch.setenv(clock.RUN_VARIABLE, "1999-01-01")


def record_of(place: Path) -> dict[str, Any]:
    return dict(json.loads((place / "run.json").read_text()))


def test_a_run_that_goes_on_keeps_its_date(tmp_path, group, monkeypatch) -> None:
    place = tmp_path / "run"
    assert run_of("ppo", ppo_config(place)).record.template_date == "2024-07-26" == clock.template_date()
    assert record_of(place)["template_date"] == "2024-07-26"
    (place / "checkpoints" / "step-1").mkdir(parents=True)
    close_all()
    monkeypatch.setenv(clock.DATE_VARIABLE, "2024-07-27")
    for wanted, output, date in (
        ("latest", place, "2024-07-26"),
        (str(place / "checkpoints" / "step-1"), place, "2024-07-26"),
        (str(place / "checkpoints" / "step-1"), tmp_path / "other", "2024-07-26"),
        ("latest", tmp_path / "new", "2024-07-27"),
    ):
        run = run_of("ppo", ppo_config(output, resume_from_checkpoint=wanted))
        assert run.record.template_date == date == clock.template_date() == os.environ[clock.RUN_VARIABLE]
        close_all()


def test_a_checkpoint_of_another_day_differs_where_the_template_reads_it(tmp_path, group, monkeypatch) -> None:
    monkeypatch.setattr(identity, "model_hash", lambda path: path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "unused.py").touch()  # the reward function's file
    config = ppo_config(tmp_path)
    data: dict[str, Any] = {"sources": [], "sha256": {}}
    for template, differs in ((DATED, True), ("{{ messages }}", False)):
        tokenizer = make_tokenizer()
        tokenizer.chat_template = template
        identities = []
        for day in ("2024-07-26", "2024-07-27"):
            monkeypatch.setenv(clock.RUN_VARIABLE, day)
            identities.append(identity_of(config, config.plan_batches(1), tokenizer, data))
        assert differences(*identities) == ([f"{DATE} has changed"] if differs else [])


def test_an_interrupted_command_goes_on_with_its_date(tmp_path, monkeypatch) -> None:
    file = tmp_path / "rows.jsonl"
    restore_date(file, False)
    journal = Journal(file, {clock.SETTING: clock.template_date()})
    journal.append([{"number": 0}])
    journal.close()
    monkeypatch.setenv(clock.DATE_VARIABLE, "2024-07-27")
    restore_date(file, False)
    assert clock.template_date() == "2024-07-26"
    restore_date(file, True)
    assert clock.template_date() == "2024-07-27", "a run that overwrites begins anew"
    restore_date(file, False)
    again = Journal(file, {clock.SETTING: clock.template_date()})
    assert again.rows == [{"number": 0}]
    again.close()
