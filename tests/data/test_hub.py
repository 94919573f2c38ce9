# SPDX-License-Identifier: Apache-2.0
"""Data sets of the hub: how `datasets` is asked, what becomes of its answer, and the message where there is none."""

import dataclasses
import errno
import json
import os
from types import SimpleNamespace
from unittest.mock import Mock

import datasets
import pytest

from data_cases import error_of, flags_of
from dschat.base.errors import UserError
from dschat.data import known_sets as registry
from dschat.data.sources import load_share, load_source
from dschat.settings.supervised import RewardConfig
from published_set_copies import EVAL_SPLITS, make_rows, write_rows


@pytest.fixture(autouse=True)
def no_copies(monkeypatch, tmp_path):
    """No local copy, no cache of an earlier download, nothing in the working folder."""
    monkeypatch.delenv("MA_RLHF_DATA", raising=False)
    monkeypatch.setattr("huggingface_hub.snapshot_download", Mock(side_effect=FileNotFoundError("no snapshot")))
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def small_sets(monkeypatch):
    """The published sets with 12 training rows and 6 evaluation rows."""
    small = [dataclasses.replace(k, train_rows=12, eval_rows=k.eval_rows and 6) for k in registry.KNOWN_SETS]
    monkeypatch.setattr(registry, "KNOWN_SETS", tuple(small))


@pytest.fixture
def hub(monkeypatch):
    """`datasets.load_dataset` that keeps its arguments and returns, or raises, what `hub.answer` holds."""
    kept = SimpleNamespace(calls=[], answer={})

    def load(*args, **options):
        kept.calls.append((args, options))
        if isinstance(kept.answer, Exception):
            raise kept.answer
        return kept.answer

    monkeypatch.setattr(datasets, "load_dataset", load)
    return kept


def splits(**rows):
    return datasets.DatasetDict(
        {name: datasets.Dataset.from_list(content, split=name) for name, content in rows.items()}
    )


def answer_for(name, train=12, held_out=6):
    content = {"train": make_rows(name, train)}
    if EVAL_SPLITS[name]:
        content[EVAL_SPLITS[name]] = make_rows(name, held_out, EVAL_SPLITS[name])
    return splits(**content)


# what is asked


PARQUET = {"revision": "refs/convert/parquet"}
APPS = {part: f"hf://datasets/codeparrot/apps/{part}.jsonl" for part in ("train", "test")}


@pytest.mark.parametrize(
    ("path", "asked", "options"),
    [
        ("openai/summarize_from_feedback", "openai/summarize_from_feedback", PARQUET | {"data_dir": "comparisons"}),
        ("Dahoas/full-hh-rlhf", "Dahoas/full-hh-rlhf", {}),
        ("webgpt", "openai/webgpt_comparisons", PARQUET | {"data_dir": "default/train"}),
        ("codeparrot/APPS", "json", {"data_files": APPS}),
    ],
)
def test_forms_of_the_published_sets(path, asked, options, hub, small_sets):
    known = registry.find_known(path)
    hub.answer = answer_for(known.name)
    source = load_source(path)
    assert hub.calls == [((asked,), options)]
    train, held_out = (11, 1) if known.name == "webgpt" else (12, 6)
    assert (source.name, len(source.train), len(source.eval), source.files) == (known.hub_id, train, held_out, ())


def test_another_set_is_loaded_plainly(hub):
    pairs = [{"prompt": f"{i}", "chosen": "a", "rejected": "b"} for i in range(40)]
    hub.answer = splits(train=pairs, test=pairs[:3], validation=pairs[:2])
    source = load_source("Dahoas/rm-static")
    assert hub.calls == [(("Dahoas/rm-static",), {})]
    assert (source.name, len(source.train), len(source.eval)) == ("Dahoas/rm-static", 40, 2)
    assert source.train[3].origin == "Dahoas/rm-static train row 4"
    hub.answer = splits(train=pairs)
    assert (len(load_source("a/b").train), len(load_source("a/b").eval)) == (38, 2)
    hub.answer = splits(test=pairs)
    assert (len(load_source("me/mine").train), len(load_source("me/mine").eval)) == (0, 40)
    with pytest.raises(UserError, match="me/mine: it has evaluation rows and no training rows. Add files train"):
        load_share(flags_of("me/mine"))
    hub.answer = splits(other=pairs)
    assert "me/mine has neither a training nor an evaluation split, only other" in error_of("me/mine")


def test_a_share_records_the_data_set(hub, small_sets):
    hub.answer = answer_for("hh")
    config = RewardConfig(data_path=["hh"], data_split="2,4,4", output_dir="out", model_name_or_path="m")
    share = load_share(config)
    assert share.files == () and (len(share.train), len(share.eval)) == (5, 2)
    (described,) = json.loads(json.dumps(share.sources))
    assert (described["name"], described["train"], described["eval"]) == ("Dahoas/full-hh-rlhf", 5, 2)
    assert described["hub"]["id"] == "Dahoas/full-hh-rlhf" and described["hub"]["revision"] == "main"
    assert {name: split["rows"] for name, split in described["hub"]["splits"].items()} == {"train": 12, "test": 6}
    assert all(split["fingerprint"] for split in described["hub"]["splits"].values())


# counts


@pytest.mark.parametrize(
    ("path", "name", "sizes", "words"),
    [
        ("hh", "hh", (12, 6), ["should have 112,052 training and 12,451 evaluation rows", "12 training and 6 eval"]),
        ("openai/webgpt_comparisons", "webgpt", (12, 0), ["19,578 training and no evaluation rows"]),
    ],
)
def test_other_counts_than_published(path, name, sizes, words, hub):
    hub.answer = answer_for(name, *sizes)
    message = error_of(path)
    assert message.startswith(f"--data_path {path}: {registry.find_known(path).hub_id} should have ")
    for word in [*words, "hf download", f"--local-dir data/{name}"]:
        assert word in message


# no answer


FAILURES = [
    datasets.exceptions.DatasetNotFoundError("Dataset doesn't exist on the Hub or cannot be accessed."),
    ValueError("Config name is missing.\nPlease pick one"),
]


@pytest.mark.parametrize("error", FAILURES, ids=lambda error: type(error).__name__)
def test_not_available(error, hub):
    hub.answer = error
    message = error_of("tldr")
    assert message.startswith("--data_path tldr: there is no such local file or folder (MA_RLHF_DATA is not set)")
    assert "no data set openai/summarize_from_feedback" in message and type(error).__name__ in message
    assert f"`{registry.find_known('tldr').fetch_command('data/tldr')}`, and set MA_RLHF_DATA=data." in message
    assert "Please pick one" not in message  # the first line is enough


@pytest.mark.parametrize("path", ["mine", "./me/mine", "me/mine.jsonl", "a/b/c"])
def test_paths_are_not_looked_up_on_the_hub(path, hub):
    message = error_of(path)
    assert f"--data_path {path}: there is no such file or folder" in message and "tldr (openai/summ" in message
    assert hub.calls == []


def test_the_cause_of_a_failure_is_shown(hub):
    hub.answer = datasets.exceptions.DatasetGenerationError("An error occurred while generating the dataset")
    hub.answer.__cause__ = OSError("No space left on device")
    assert "No space left on device" in error_of("hh")


def test_a_cache_that_cannot_be_written(hub):
    """The remedy is about the disk, not about the network."""
    for number in (errno.ENOSPC, errno.EACCES):
        hub.answer = datasets.exceptions.DatasetGenerationError("An error occurred while generating the dataset")
        hub.answer.__cause__ = OSError(number, os.strerror(number), "/cache/x")
        for name in ("hh", "me/mine"):
            message = error_of(name)
            assert os.strerror(number) in message and "set HF_HOME" in message and "hf download" not in message


# files on this machine, with the library's own builders


# several training splits


SIZES = {"train_prefs": 40, "train_sft": 7, "test_prefs": 6, "test_sft": 3}


def write_splits(folder, pattern, sizes):
    for split, count in sizes.items():
        rows = [{"prompt": f"{split} {number}", "response": "a"} for number in range(count)]
        write_rows(folder / pattern.format(split), rows)


@pytest.mark.parametrize("pattern", ["data/{}-00000-of-00001.parquet", "default/{}/0000.parquet"])
def test_a_downloaded_folder_of_several_splits_is_refused(pattern, tmp_path):
    write_splits(tmp_path / "mine", pattern, SIZES)
    message = error_of(tmp_path / "mine")
    assert "holds files of the splits train_prefs, train_sft; give a folder that holds the files of one" in message


def test_shards_in_a_folder_of_a_split_are_all_read(tmp_path):
    for name in ("books", "web"):
        rows = [{"prompt": name, "chosen": "x", "rejected": "y"}] * 20
        write_rows(tmp_path / "mine" / "train" / f"{name}-00000-of-00001.jsonl", rows)
    share = load_share(flags_of(tmp_path / "mine", data_split=None))
    assert {row.prompt for row in [*share.train, *share.eval]} == {"books", "web"}


def test_nothing_in_a_folder_is_executed(tmp_path):
    """Scripts beside the data, under every name that loaders of data sets ever ran."""
    folder = tmp_path / "apps"
    write_rows(folder / "train.jsonl", make_rows("apps", 8))
    for name in ("apps.py", "train.py", "__init__.py", "setup.py", "dataset.py", "all/apps.py"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(f"open({str(tmp_path / 'executed')!r}, 'w').close()\n")
    assert len(load_source(folder).train) == 8
    assert len(load_source("./apps").train) == 8
    assert not (tmp_path / "executed").exists()
