# SPDX-License-Identifier: Apache-2.0
"""Data sets of the hub: how `datasets` is asked, what becomes of its answer, and the message where there is none."""

import dataclasses
import errno
import json
from types import SimpleNamespace
from unittest.mock import Mock

import datasets
import pytest

from data_cases import error_of, flags_of
from dschat.base.errors import UserError
from dschat.data import known_sets as registry
from dschat.data.sources import load_share, load_source
from dschat.settings.supervised import RewardConfig
from published_set_copies import make_rows, write_rows


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


PAIRS = [{"prompt": f"{number}", "chosen": "a", "rejected": "b"} for number in range(40)]


# what is asked


PARQUET = {"revision": "refs/convert/parquet"}
APPS = {part: f"hf://datasets/codeparrot/apps/{part}.jsonl" for part in ("train", "test")}


@pytest.mark.parametrize(
    ("path", "asked", "options"),
    [
        ("tldr", "openai/summarize_from_feedback", PARQUET | {"data_dir": "comparisons"}),
        ("Dahoas/full-hh-rlhf", "Dahoas/full-hh-rlhf", {}),
        ("codeparrot/APPS", "json", {"data_files": APPS}),
        ("gsm8k", "openai/gsm8k", {"name": "main"}),
        ("helpful-online", "Anthropic/hh-rlhf", {"data_dir": "helpful-online"}),
    ],
)
def test_forms_of_the_published_sets(path, asked, options, hub, small_sets):
    hub.answer = splits(train=PAIRS[:12], test=PAIRS[:6])
    source = load_source(path)
    assert hub.calls == [((asked,), options)]
    assert (source.name, len(source.train), len(source.eval)) == (registry.find_known(path).title, 12, 6)


def test_another_set_is_loaded_plainly(hub):
    hub.answer = splits(train=PAIRS, test=PAIRS[:3], validation=PAIRS[:2])
    source = load_source("Dahoas/rm-static")
    assert hub.calls == [(("Dahoas/rm-static",), {})]
    assert (source.name, len(source.train), len(source.eval)) == ("Dahoas/rm-static", 40, 2)
    assert source.train[3].origin == "Dahoas/rm-static train row 4"
    hub.answer = splits(train=PAIRS)
    assert (len(load_source("a/b").train), len(load_source("a/b").eval)) == (38, 2)
    hub.answer = splits(test=PAIRS)
    with pytest.raises(UserError, match="me/mine: it has evaluation rows and no training rows. Add files train"):
        load_share(flags_of("me/mine"))
    hub.answer = splits(other=PAIRS)
    assert "me/mine has neither a training nor an evaluation split, only other" in error_of("me/mine")


def test_a_share_records_the_data_set(hub, small_sets):
    hub.answer = splits(train=PAIRS[:12], test=PAIRS[:6])
    config = RewardConfig(data_path=["tldr"], data_split="2,4,4", output_dir="out", model_name_or_path="m")
    share = load_share(config)
    assert share.files == () and (len(share.train), len(share.eval)) == (5, 2)
    (described,) = json.loads(json.dumps(share.sources))
    assert (described["name"], described["train"], described["eval"]) == ("openai/summarize_from_feedback", 5, 2)
    assert (described["hub"]["id"], described["hub"]["revision"]) == (described["name"], PARQUET["revision"])
    held_out = described["hub"]["splits"]["test"]
    assert held_out["rows"] == 6 and held_out["fingerprint"]


@pytest.mark.parametrize(
    ("path", "asked", "revision", "files"),
    [
        ("tldr", "openai/summarize_from_feedback", PARQUET["revision"], "comparisons/{}/0000.parquet"),
        ("helpful-base", "Anthropic/hh-rlhf", "main", "helpful-base/{}.jsonl"),
    ],
)
def test_an_earlier_download_is_read_without_a_network(
    path, asked, revision, files, small_sets, tmp_path, monkeypatch, caplog
):
    """In the cache another part of Anthropic's set lies beside this one."""
    for file, count in ((files.format("train"), 12), (files.format("test"), 6), ("harmless-base/train.jsonl", 40)):
        write_rows(tmp_path / file, PAIRS[:count])
    download = Mock(return_value=str(tmp_path))
    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    source = load_source(path)
    assert (len(source.train), len(source.eval)) == (12, 6)
    download.assert_called_once_with(asked, repo_type="dataset", revision=revision, local_files_only=True)
    assert f"using an earlier download in {tmp_path}" in caplog.text


# counts


def test_other_counts_than_published(hub):
    hub.answer = splits(train=PAIRS[:12], test=PAIRS[:6])
    message = error_of("hh")
    assert message.startswith("--data_path hh: Dahoas/full-hh-rlhf should have 112,052 training and 12,451 evaluation")
    assert "12 training and 6 eval" in message and "--local-dir data/hh" in message
    assert "19,578 training and no evaluation rows" in error_of("webgpt")


# no answer


def test_not_available(hub):
    hub.answer = ValueError("Config name is missing.\nPlease pick one")
    message = error_of("tldr")
    assert message.startswith("--data_path tldr: there is no such local file or folder (MA_RLHF_DATA is not set)")
    assert "no data set openai/summarize_from_feedback (ValueError: Config name is missing" in message
    assert f"`{registry.find_known('tldr').fetch_command('data/tldr')}`, and set MA_RLHF_DATA=data." in message
    assert "Please pick one" not in message  # the first line is enough


@pytest.mark.parametrize("path", ["mine", "./me/mine", "me/mine.jsonl", "a/b/c"])
def test_paths_are_not_looked_up_on_the_hub(path, hub):
    message = error_of(path)
    assert f"--data_path {path}: there is no such file or folder" in message and "tldr (openai/summ" in message
    assert hub.calls == []


def test_a_cache_that_cannot_be_written(hub):
    """The remedy is about the disk, not about the network."""
    hub.answer = datasets.exceptions.DatasetGenerationError("An error occurred while generating the dataset")
    for number in (errno.ENOSPC, errno.EACCES):
        hub.answer.__cause__ = OSError(number, "the cause", "/cache/x")
        message = error_of("hh")
        assert "the cause" in message and "set HF_HOME" in message and "hf download" not in message


# folders of a download


@pytest.mark.parametrize("pattern", ["data/{}-00000-of-00001.parquet", "default/{}/0000.parquet"])
def test_a_downloaded_folder_of_several_splits_is_refused(pattern, tmp_path):
    for split in ("train_prefs", "train_sft", "test_sft"):
        write_rows(tmp_path / "mine" / pattern.format(split), [{"prompt": "a", "response": "b"}])
    message = error_of(tmp_path / "mine")
    assert "holds files of the splits train_prefs, train_sft; give a folder that holds the files of one" in message


@pytest.mark.parametrize(
    ("names", "last"),
    [
        (["00000-of-00003", "00001-of-00003"], 2),
        (["00000-of-00001", "00000-of-00002"], 1),
        (["00000-of-00001-aa", "00000-of-00001-bb"], 0),
    ],
)
def test_a_download_that_is_not_whole_is_refused(names, last, tmp_path):
    for name in names:
        write_rows(tmp_path / "mine" / "data" / f"train-{name}.parquet", [{"prompt": "a", "response": "b"}])
    said = f"/train-*: 2 files, and not number 0 to {last} of one edition; download the rest, or give one of the files"
    assert said in error_of(tmp_path / "mine")


def test_shards_in_a_folder_of_a_split_are_all_read(tmp_path):
    """Each set of files is whole by itself."""
    for name, number, count in (("books", 0, 1), ("web", 0, 2), ("web", 1, 2)):
        rows = [{"prompt": name, "chosen": "x", "rejected": "y"}] * 20
        write_rows(tmp_path / "mine" / "train" / f"{name}-{number:05}-of-{count:05}.jsonl", rows)
    share = load_share(flags_of(tmp_path / "mine", data_split=None))
    assert {row.prompt for row in [*share.train, *share.eval]} == {"books", "web"}


def test_nothing_in_a_folder_is_executed(tmp_path):
    """Scripts beside the data, under every name that loaders of data sets ever ran."""
    folder = tmp_path / "apps"
    write_rows(folder / "train.jsonl", make_rows("apps", 8))
    for name in ("apps.py", "train.py", "__init__.py", "setup.py", "dataset.py"):
        (folder / name).write_text(f"open({str(tmp_path / 'executed')!r}, 'w').close()\n")
    assert len(load_source(folder).train) == 8
    assert not (tmp_path / "executed").exists()
