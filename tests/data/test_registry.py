# SPDX-License-Identifier: Apache-2.0
"""Names, row counts and commands of the published sets, and where local copies are looked for."""

import re
from pathlib import Path

import pytest

from dschat.base.errors import UserError
from dschat.data.compared_sets import compared_set
from dschat.data.known_sets import KNOWN_SETS, describe_counts, fetch_command, find_known
from dschat.data.sources import load_source
from published_set_copies import make_rows, write_all, write_rows, write_set

DOCUMENT = (Path(__file__).resolve().parents[2] / "docs" / "data.md").read_text(encoding="utf-8")
ANTHROPIC_PARTS = ("harmless-base", "helpful-base", "helpful-online", "helpful-rejection-sampled")
IDS = {"tldr": "openai/summarize_from_feedback", "hh": "Dahoas/full-hh-rlhf"}


def by_name(name):
    known = find_known(name)
    assert known is not None
    return known


def test_names_and_counts_are_those_of_the_document():
    rows = re.findall(r"^\| (`.+`) \| (\w\S*/[^ ,]+).* \| ([\d,]+)(?: / ([\d,]+)|, split 95 to 5) \| ", DOCUMENT, re.M)
    assert len(rows) == len(KNOWN_SETS)
    for known, (names, hub_id, train, held_out) in zip(KNOWN_SETS, rows, strict=True):
        assert (known.names()[:-1], known.hub_id) == (tuple(re.findall("`(.+?)`", names)), hub_id)
        assert describe_counts(*known.counts) == f"{train} training and {held_out or 'no'} evaluation rows"


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("tldr", "--revision refs/convert/parquet --include 'comparisons/*.parquet'"),
        ("hh", "--include '*.parquet'"),
        ("gsm8k", "--include 'main/*.parquet'"),
        ("helpful-online", "--include 'helpful-online/*.jsonl.gz'"),
    ],
)
def test_fetch_commands(name, options):
    command = f"hf download {by_name(name).hub_id} --repo-type dataset {options} --local-dir '/my data/{name}'"
    assert by_name(name).fetch_command(f"/my data/{name}") == command
    assert fetch_command("a/b", "DIR") == "hf download a/b --repo-type dataset --local-dir DIR"


# local copies


@pytest.fixture
def copies(tmp_path, monkeypatch):
    monkeypatch.setenv("MA_RLHF_DATA", str(tmp_path))
    return write_all(tmp_path, rows=20, eval_rows=6)


@pytest.mark.parametrize("path", ["webgpt", "codeparrot/apps"])
def test_the_local_copy_comes_first(path, copies, caplog, monkeypatch):
    monkeypatch.setattr("datasets.load_dataset", lambda *args, **options: pytest.fail("asked the hub"))
    known = by_name(path)
    source = load_source(path)
    train, held_out = (19, 1) if known.name == "webgpt" else (20, 6)
    assert (source.name, len(source.train), len(source.eval), source.hub) == (known.name, train, held_out, None)
    assert all(file.parent == copies[known.name] for file in source.files)
    assert f"{copies[known.name]} has 20 training and" in caplog.text
    assert f"the published {known.hub_id} has {known.train_rows:,} training and" in caplog.text


@pytest.fixture
def here(tmp_path, monkeypatch):
    """The current folder."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


@pytest.mark.parametrize("path", ["tldr", "hh-rlhf"])
def test_a_short_name_never_means_what_lies_in_the_current_folder(path, copies, here, caplog):
    name = by_name(path).name
    write_set(here / path, name, 4, 2)
    source = load_source(path)
    assert all(file.parent == copies[name] for file in source.files) and source.files
    assert f"{path} is the published data set {IDS[name]};" in caplog.text
    assert f"for the one in the current folder give ./{path}\n" in caplog.text
    source = load_source(f"./{path}")
    assert len(source.train) + len(source.eval) == (4 if name == "webgpt" else 6)
    assert {str(file.parent) for file in source.files} == {path}
    assert load_source(Path(path)).files == source.files, "a Path is no name"


# folders as `hf download` leaves them


@pytest.mark.parametrize(
    ("name", "files"),
    [
        ("tldr", ["comparisons/train/0000.parquet", "comparisons/validation/0000.parquet"]),
        ("hh", ["data/train-00000-of-00001.parquet", "data/test-00000-of-00001.parquet"]),
        ("webgpt", ["default/train/0000.parquet"]),
        ("tldr", ["train/0000.parquet", "train/0001.parquet", "validation/0000.parquet"]),
        ("hh", [f"{part}/{split}.jsonl" for split in ("train", "test") for part in ANTHROPIC_PARTS]),
    ],
)
def test_downloaded_folders(name, files, tmp_path):
    for file in files:
        write_rows(tmp_path / file, make_rows(name, 10), name)
    write_rows(tmp_path / "axis/train/0000.parquet", [{"info": {"id": "x"}}])
    (tmp_path / ".cache/huggingface").mkdir(parents=True)
    source = load_source(tmp_path)
    assert [str(file.relative_to(tmp_path)) for file in source.files] == files
    assert len(source.train) + len(source.eval) == 10 * len(files)


def test_names_under_which_responses_are_compared(caplog):
    assert compared_set("TLDR") == compared_set("openai/summarize_from_feedback") == "summarize"
    with caplog.at_level("INFO", logger="dschat"):
        assert [compared_set(name, own=True) for name in ("hh", "my-set.2")] == ["hh-rlhf", "my-set.2"]
    assert caplog.messages == [
        "--dataset my-set.2: a data set of your own (published ones: summarize, hh-rlhf, webgpt)"
    ]
    with pytest.raises(UserError, match="--dataset apps: unknown"):  # a published one, of which nothing is compared
        compared_set("apps", own=True)
    for name in ("..", "a b"):
        with pytest.raises(UserError, match="the name of your own data may hold only letters"):
            compared_set(name, own=True)
