# SPDX-License-Identifier: Apache-2.0
"""Examples through worker processes and the cache are those of one process, whatever happens to either."""

import datetime
import logging
import multiprocessing
import os
import signal
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import data_cases
import dschat
from cli_runs import write_jsonl
from data_cases import KINDS, TEXTS, flags_of, numbered_pairs, text_row
from dschat.base.errors import UserError
from dschat.data import tokenised
from dschat.data.check import check_report
from dschat.data.examples import PairExample, PreferenceExample, PromptExample, SFTExample, prompt_examples
from dschat.data.loading import ENTRY, ExampleLoader, StepData, cache_folder, encoder_version
from dschat.data.preview import Settings
from dschat.data.tokenised import (
    BATCH,
    Examples,
    NotStorable,
    encode_rows,
    lengths_of,
    num_workers,
    open_table,
    row_of,
    row_text,
)
from factories import make_tokenizer
from fault_runs import small_files_only
from published_set_copies import write_rows


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MA_RLHF_CACHE", str(tmp_path / "cache"))


def write(folder: Path) -> Path:
    """A folder of rows, one of which is dropped as a pair."""
    rows = numbered_pairs(range(60))
    rows[7]["rejected"] = rows[7]["chosen"]
    return write_jsonl(folder / "train.jsonl", rows).parent


def found_by(loader: ExampleLoader[Any], show: bool = False) -> StepData[Any] | None:
    """What the loader's cache holds."""
    return loader.open(loader.key, show)


def loader_of(kind: type, folder: Path, tokenizer: Any = None, limit: int = 40, **changes: Any) -> ExampleLoader[Any]:
    """A loader of one kind of example; `changes` are flags."""
    flags = flags_of(folder, **({"data_split": "1,1,1"} | changes))
    return data_cases.loader_of(kind, flags, limit, tokenizer=tokenizer)


@pytest.mark.parametrize("kind", KINDS)
def test_the_cache_gives_what_reading_gives(kind, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(tokenised, "BATCH", 7)
    folder = write(tmp_path / "data")
    step = {"data_split": "0,1,0", "step": 2} if kind in (PairExample, PreferenceExample) else {"data_split": "1,0,0"}
    read = loader_of(kind, folder, **step).read()
    made = loader_of(kind, folder, **step).make()
    found = found_by(loader_of(kind, folder, **step))
    assert found is not None and isinstance(found.train, Examples)
    assert len(read.train) + read.dropped["train"].total() == 57 and len(read.eval) == 3
    for data in (made, found):
        assert list(data.train) == read.train and list(data.eval) == read.eval
        assert (data.sources, data.files, data.dropped) == (read.sources, read.files, read.dropped)
        assert lengths_of(data.train) == list(map(len, read.train)) == lengths_of(read.train)
        assert list(data.train[5:9]) == read.train[5:9] and list(data.train[::20]) == read.train[::20]
        assert data.train[-1] == read.train[-1]


@pytest.mark.parametrize("is_written", [pytest.param(False, marks=pytest.mark.slow), True])
def test_workers_keep_the_order(is_written, tmp_path, monkeypatch) -> None:
    """Two real processes, more batches than they hold at a time; one of them reads the rest of a batch."""
    monkeypatch.setattr(tokenised, "workers_for", lambda rows: 2)
    rows = [text_row(f"{TEXTS[i % 5]} {i}", line=i) for i in range(6 * BATCH + 1)]
    make = partial(prompt_examples, tokenizer=make_tokenizer(), max_prompt_seq_len=12)
    file = tmp_path / "rows.arrow" if is_written else None
    found, counts = encode_rows(PromptExample, make, rows, "tokenising rows", file)
    expected, dropped = make(rows)
    assert list(found) == expected
    assert counts == dropped and dropped.total() > 0
    if file is not None:
        assert list(Examples(PromptExample, open_table(PromptExample, sorted(tmp_path.glob("rows*"))))) == expected


def kill_parent_in_worker(rows, pid_file, held_out=False):
    if not pid_file.exists():
        pid_file.write_text(str(os.getpid()))
        os.kill(os.getppid(), signal.SIGKILL)
    return [SFTExample([1], [2]) for _ in rows], Counter()


def encode_until_killed(pid_file: Path) -> None:
    """Starts workers, of which the first kills this process."""
    rows = [text_row("a", "b")] * (20 * BATCH)
    encode_rows(SFTExample, partial(kill_parent_in_worker, pid_file=pid_file), rows, "tokenising rows")


def test_workers_end_with_a_process_that_is_killed(tmp_path, monkeypatch) -> None:
    """None of them keeps the pipe open that the process had."""
    monkeypatch.setattr(tokenised, "workers_for", lambda rows: 2)
    receiver, sender = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=encode_until_killed, args=[tmp_path / "pid"])
    process.start()
    sender.close()
    assert receiver.poll(100), "a worker lives on"
    with pytest.raises(EOFError):
        receiver.recv()
    process.join()
    assert process.exitcode == -signal.SIGKILL and (tmp_path / "pid").exists()


def test_workers_share_the_cores(monkeypatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(12)), raising=False)
    for variable, ranks, workers in (("LOCAL_WORLD_SIZE", 4, 3), ("LOCAL_SIZE", 6, 2), ("LOCAL_SIZE", 16, 1)):
        with monkeypatch.context() as launcher:
            launcher.setenv(variable, str(ranks))
            assert num_workers() == workers


def test_the_key_is_of_all_that_matters(tmp_path) -> None:
    folder = write(tmp_path / "data")
    base = loader_of(SFTExample, folder).key
    assert loader_of(SFTExample, folder).key == base
    assert loader_of(SFTExample, folder, seed=4).key == base, "runs of other seeds read the same rows"
    other = make_tokenizer()
    other.bos_token = "a"
    changes = ({"limit": 39}, {"step": 3}, {"data_split": "1,1"}, {"chosen_key": "rejected"})
    keys = [loader_of(SFTExample, folder, **change).key for change in (*changes, {"tokenizer": other})]
    keys.append(loader_of(PromptExample, folder).key)
    (folder / "train.jsonl").write_text((folder / "train.jsonl").read_text().replace("cat", "bat"))
    keys.append(loader_of(SFTExample, folder).key)
    assert len({base, *keys}) == 8


def test_the_key_is_of_the_code_that_makes_ids(tmp_path, monkeypatch) -> None:
    """Changed is a file that reads rows, then one below a folder of it, then one that encodes them."""
    files = [tmp_path / name for name in ("data/files.py", "data/prepared/read.py", "models/ids.py")]
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("x = 1\n")
    monkeypatch.setattr(dschat, "__path__", [str(tmp_path)])
    versions = [encoder_version()]
    for file in files:
        file.write_text("x = 2\n")
        versions.append(encoder_version())
    assert len({version["code"] for version in versions}) == 4


def test_damaged_entries_are_made_anew(tmp_path, caplog) -> None:
    folder = write(tmp_path / "data")
    made = loader_of(SFTExample, folder).make()
    expected = list(made.train)
    (entry,) = cache_folder().iterdir()
    for file, damage in (("train.arrow", lambda content: content[:-20]), (ENTRY, lambda content: b"[]")):
        (entry / file).write_bytes(damage((entry / file).read_bytes()))
        loader = loader_of(SFTExample, folder)
        assert found_by(loader) is None and "damaged" in caplog.text
        assert not entry.exists() and list(made.train) == expected  # the open file lives on
        assert list(loader.make().train) == expected
        caplog.clear()


def test_a_cache_that_cannot_be_written(tmp_path, monkeypatch, caplog) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MA_RLHF_CACHE", str(tmp_path / "file"))
    loader = loader_of(SFTExample, write(tmp_path / "data"))
    assert loader.make().train == loader.read().train
    assert "cannot be kept" in caplog.text


def on_a_full_disk(work: Callable[[], Any], largest: int = 2000) -> Any:
    """What `work` returns, which is sent through a pipe, in a fork whose files cannot grow beyond a size in bytes."""
    receiver, sender = multiprocessing.Pipe(duplex=False)

    def run() -> None:
        small_files_only(largest)
        try:
            sender.send(work())
        except BaseException as error:
            sender.send(f"{type(error).__name__}: {error}")

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    assert receiver.poll(60), "the fork ended without an answer"
    answer = receiver.recv()
    process.join()
    return answer


def test_a_cache_on_a_full_disk(tmp_path, caplog) -> None:
    loader = loader_of(SFTExample, write(tmp_path / "data"))
    train, text = on_a_full_disk(lambda: (list(loader.make().train), caplog.text))
    assert train == loader.read().train
    assert "tokenised data cannot be kept" in text and "File too large" in text
    assert not list(cache_folder().glob("*")), "nothing is left on the full disk"


def test_rows_that_json_would_change_are_not_kept(tmp_path, caplog) -> None:
    for value in ((1, 2), {1: 2}):
        with pytest.raises(NotStorable):
            row_text(text_row("a", value=[{"deep": value}]))
    row = text_row("é\u2028", x=[0.1, 1e300, -0.0, None, "\ud800"])
    assert row_of(row_text(row)) == row
    rows = [{"prompt": "the cat", "day": datetime.date(2024, 1, 2)}] * 40
    file = write_rows(tmp_path / "train.parquet", rows)
    loader = loader_of(PromptExample, file, step=3)
    with caplog.at_level(logging.INFO):
        data = loader.make()
    assert data.train[0].row.extra["day"] == datetime.date(2024, 1, 2)
    assert "not kept" in caplog.text and not list(cache_folder().glob("*"))


def test_nothing_left_is_refused_as_ever(tmp_path) -> None:
    loader = loader_of(SFTExample, write(tmp_path / "data"), limit=1)
    with pytest.raises(UserError) as read:
        loader.read()
    with pytest.raises(UserError) as made:
        loader.make()
    assert str(made.value) == str(read.value) and "none of the" in str(read.value)
    assert not list(cache_folder().glob("*"))


def test_notes_on_responses(tmp_path, caplog) -> None:
    """Empty, labelled as bad, beginning with their prompts; a step reads its own responses, in training alone."""
    question = "What is the capital of France?"
    rows: list[dict[str, object]] = [
        {"prompt": question, "chosen": f"{question} Paris.", "rejected": "b"},
        {"prompt": question, "chosen": f"{question} It is Paris.", "rejected": " \n", "label": "False"},
        {"prompt": "It is", "chosen": "It is so", "rejected": "b", "label": 0},  # short, and a class
        {"prompt": "a", "chosen": "", "rejected": "b", "kto_tag": True},
    ]
    for name in ("train", "test"):
        write_jsonl(tmp_path / f"{name}.jsonl", rows)
    repeated = "the responses of 2 of 4 rows begin with their prompt"
    labelled = "1 of 4 responses are labelled false"
    for kind, expected in (
        (SFTExample, ["1 responses without any text", labelled, repeated]),
        (PairExample, ["2 responses without any text", repeated]),
        (PromptExample, []),
    ):
        loader_of(kind, tmp_path, data_split="1,0,0").make()
        notes = [message for message in caplog.messages if "correct or remove these rows" in message]
        assert len(notes) == len(expected) and all(map(str.startswith, notes, expected))
        caplog.clear()
    report = check_report(str(tmp_path), None, Settings())
    assert "empty      4 responses" in report and "labelled   2 of 8" in report and "repeated   the" in report


def test_what_validates_is_part_of_the_key_and_is_said_again(tmp_path, caplog) -> None:
    """The warning of turns that end otherwise depends on a flag that prompts do not."""

    def validate(rows: Any, end_id: int) -> None:
        logging.getLogger("dschat.data.encoding").warning("%d rows, end %d", len(rows), end_id)

    folder = write(tmp_path / "data")
    keys = []
    for end_id in (2, 3):
        loader = loader_of(PromptExample, folder)
        loader._validate = partial(validate, end_id=end_id)
        loader.make()
        assert f"rows, end {end_id}" in caplog.text
        caplog.clear()
        assert found_by(loader, show=True) is not None and f"rows, end {end_id}" in caplog.text
        keys.append(loader.key)
    assert keys[0] != keys[1]
