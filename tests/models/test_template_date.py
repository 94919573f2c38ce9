# SPDX-License-Identifier: Apache-2.0
"""Chat templates that read the clock: one date per run, and texts that do not change with the day."""

import datetime
import json
import os
from pathlib import Path
from typing import Any

import pytest

import data_cases
from cli_runs import write_jsonl
from data_cases import flags_of, talk_row
from data_cases import look_at_data as main
from dialogue_cases import dialogue
from dschat.base.errors import UserError
from dschat.base.fingerprints import template_fingerprint
from dschat.data.encoding import prompt_text
from dschat.data.examples import SFTExample
from dschat.models import template_date as clock
from factories import make_tokenizer

# As Llama 3.2's: a variable first, then the clock.
DATED = (
    "{% if not date_string is defined %}{% set date_string = strftime_now('%d %b %Y') %}{% endif %}"
    "{{ date_string }}: {% for m in messages %}{{ m.content }} {% endfor %}"
)
PLAIN = "{% for m in messages %}{{ m.content }} {% endfor %}"
TALK = dialogue("the cat")


@pytest.fixture(autouse=True)
def _no_date(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(clock.DATE_VARIABLE, raising=False)
    monkeypatch.setenv(clock.RUN_VARIABLE, "2024-07-26")
    monkeypatch.setenv("MA_RLHF_CACHE", str(tmp_path / "cache"))


def dated_tokenizer(template: str = DATED) -> Any:
    tokenizer = make_tokenizer(texts=("the cat a dog ran: 0123456789 JulDecan",))
    tokenizer.chat_template = template
    return tokenizer


@pytest.fixture
def talks(tmp_path: Path) -> Path:
    """40 conversations of a question and an answer."""
    rows = [{"messages": dialogue("the cat", f"a dog {i}")} for i in range(40)]
    return write_jsonl(tmp_path / "talks" / "train.jsonl", rows).parent


def test_a_template_reads_the_date_of_the_run() -> None:
    """The expected text is strftime's of that day, whatever today is."""
    tokenizer = dated_tokenizer()
    assert prompt_text(tokenizer, talk_row(TALK)) == "26 Jul 2024: the cat "
    tokenizer.chat_template = "{{ strftime_now('%Y-%m-%d %H:%M:%S') }}"
    assert prompt_text(tokenizer, talk_row(TALK)) == "2024-07-26 00:00:00"


def test_a_process_keeps_its_date_past_midnight(monkeypatch) -> None:
    monkeypatch.delenv(clock.RUN_VARIABLE)
    days = iter([datetime.date(2030, 1, 1), datetime.date(2030, 1, 2)])

    class Day(datetime.date):
        @classmethod
        def today(cls) -> datetime.date:
            return next(days)

    monkeypatch.setattr(clock, "date", Day)
    texts = [prompt_text(dated_tokenizer(), talk_row(TALK)) for _ in range(2)]
    assert texts == ["01 Jan 2030: the cat "] * 2
    assert os.environ[clock.RUN_VARIABLE] == "2030-01-01", "processes that it starts inherit it"


def test_users_may_set_the_date_of_a_new_run(monkeypatch) -> None:
    monkeypatch.setenv(clock.DATE_VARIABLE, "2025-02-03")
    assert clock.begin_date() == "2025-02-03" == clock.template_date()
    assert clock.begin_date("2024-01-01") == "2024-01-01" == clock.template_date(), "a run that goes on keeps its own"
    assert clock.begin_date("20240101") == "2024-01-01"
    monkeypatch.setenv(clock.DATE_VARIABLE, "yesterday")
    with pytest.raises(UserError, match="MA_RLHF_DATE yesterday: give a date as in"):
        clock.begin_date()


@pytest.mark.parametrize(("template", "changes"), [(DATED, True), (PLAIN, False)])
def test_cached_examples_are_of_a_date_where_the_template_reads_it(template, changes, talks, monkeypatch) -> None:
    keys = []
    for day in ("2024-07-26", "2024-07-27"):
        monkeypatch.setenv(clock.RUN_VARIABLE, day)
        loader = data_cases.loader_of(SFTExample, flags_of(talks), 100, tokenizer=dated_tokenizer(template))
        keys.append(loader.key)
    assert (keys[0] != keys[1]) == changes


def test_check_and_preview_say_the_date(talks, tmp_path, capsys) -> None:
    for name, template in (("dated", DATED), ("plain", PLAIN)):
        dated_tokenizer(template).save_pretrained(tmp_path / name)
        for command in ("check", "preview"):
            assert main([command, str(talks), "--tokenizer", str(tmp_path / name)]) == 0
            said = "the chat template writes the date (strftime_now): 2024-07-26 now" in capsys.readouterr().out
            assert said == (name == "dated")


def test_fingerprints_of_templates() -> None:
    """A special token counts where the template names it."""
    one, other = dated_tokenizer("{{ eos_token }}"), dated_tokenizer("{{ eos_token }}")
    other.pad_token = "<filler>"
    assert template_fingerprint(one) == template_fingerprint(other)
    other.eos_token = "a"
    assert template_fingerprint(one) != template_fingerprint(other)
    assert template_fingerprint(dated_tokenizer(PLAIN)) != template_fingerprint(dated_tokenizer(DATED))


# prepared folders


def prepared(talks: Path, folder: Path, tokenizer: Any, *flags: str) -> Path:
    tokenizer.save_pretrained(folder / "model")
    words = ["--tokenizer", str(folder / "model"), "--minimum_response_length", "0", *flags]
    assert main(["prepare", str(talks), "--output", str(folder / "prepared"), *words]) == 0
    return folder / "prepared"


def test_a_prepared_folder_of_another_template_is_refused(talks, tmp_path) -> None:
    folder = prepared(talks, tmp_path, dated_tokenizer(PLAIN))

    def load(template: str) -> Any:
        return data_cases.loader_of(SFTExample, flags_of(folder), 100, tokenizer=dated_tokenizer(template)).read()

    assert len(load(PLAIN).train) > 0
    with pytest.raises(
        UserError, match=r"rows of messages were written by the chat template of .*prepare the data ag"
    ):
        load(PLAIN + "!")


def test_a_prepared_folder_of_another_day_is_said(talks, tmp_path, monkeypatch, caplog) -> None:
    folder = prepared(talks, tmp_path, dated_tokenizer())
    assert json.loads((folder / "prepared.json").read_text())["template"]["date"] == "2024-07-26"
    for day, is_said in (("2024-07-26", False), ("2024-07-27", True)):
        monkeypatch.setenv(clock.RUN_VARIABLE, day)
        data_cases.loader_of(SFTExample, flags_of(folder), 100, tokenizer=dated_tokenizer())
        assert ("MA_RLHF_DATE=2024-07-26" in caplog.text) == is_said
