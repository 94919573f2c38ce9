# SPDX-License-Identifier: Apache-2.0
"""Prepared folders: which rows are kept, what is written, what training reads of it, and what it refuses."""

import json
import pickle
import re
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import data_cases
from cli_runs import write_jsonl
from data_cases import KINDS, flags_of, numbered_pairs
from data_cases import look_at_data as main
from dschat.base.errors import UserError
from dschat.base.lock import Lock
from dschat.data.examples import EncodedRow, PairExample, PreferenceExample, PromptExample, SFTExample
from dschat.data.loading import ExampleLoader
from dschat.data.options import PrepareFlags
from dschat.data.prepared.folder import find_prepared, open_prepared
from dschat.data.prepared.make import Filter
from dschat.data.prepared.read import read_split
from dschat.data.rows import Row
from dschat.data.sources import load_share, open_data
from dschat.plan.counts import find_sources
from factories import make_tokenizer

LOOSE = ["--minimum_response_length", "0", "--validation_percentage", "0", "--max_length", "100"]


@pytest.fixture
def model(tmp_path: Path) -> str:
    """The folder of a tokenizer."""
    make_tokenizer().save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """40 training and 10 test rows, all different."""
    folder = tmp_path / "source"
    write_jsonl(folder / "train.jsonl", numbered_pairs(range(40)))
    write_jsonl(folder / "test.jsonl", numbered_pairs(range(100, 110)))
    return folder


@pytest.fixture
def prepare(source: Path, model: str, tmp_path: Path) -> Callable[..., Path]:
    """Runs the command, by default on one half of the source's rows; the folder of that name."""

    def run(name: str, *flags: str, status: int = 0, rows: Path = source) -> Path:
        folder = tmp_path / name
        split = [] if "--data_split" in flags else ["--data_split", "1,1,0"]
        assert main(["prepare", str(rows), "--output", str(folder), "--tokenizer", model, *split, *flags]) == status
        return folder

    return run


def content_of(folder: Path) -> dict[str, Any]:
    """What prepared.json holds."""
    return json.loads((folder / "prepared.json").read_text())


def loader_of(kind: type, folder: Path, limit: int = 100, **more: Any) -> ExampleLoader[Any]:
    return data_cases.loader_of(kind, flags_of(folder), limit, **more)


def example(prompt: str, chosen: str, rejected: str | None = None) -> EncodedRow:
    """A character is a token."""
    ids = [None if text is None else [*map(ord, text), 2] for text in (chosen, rejected)]
    row = Row(prompt, None, chosen, rejected, {}, "rows:1")
    return EncodedRow(prompt, chosen, rejected, list(map(ord, prompt)), ids[0], ids[1], row)


def filter_of(max_length: int, max_prompt_length: int, minimum_response_length: int, **flags: Any) -> Filter:
    flags |= {"max_length": max_length, "max_prompt_length": max_prompt_length}
    return Filter(PrepareFlags(output="out", minimum_response_length=minimum_response_length, **flags))


def test_reasons_in_their_order() -> None:
    examples = [
        example("abc", "de", "fg"),
        example("abc", "de", "hi"),  # the same input
        example("abcdef", "d", "d"),  # too long before too short
        example("bcd", "e", "e"),  # too short before the same response
        example("bcd", "ee", "f"),  # the rejected one is too short
        example("bcd", "gg", "gg"),
        example("abcde", "fghijk", "fghxyz"),
        example("abcde", "fghij", "fghiz"),  # equal in their first 4 tokens, which is all there is room for
        example("", "abc", "abd"),
    ]
    dropped: Counter[str] = Counter()
    filtered = filter_of(9, 5, 2)
    kept = list(filtered.passing(examples, dropped))
    assert [row.prompt + row.chosen for row in kept] == ["abcde", "abcdefghijk"]
    assert kept[1].chosen_ids == list(map(ord, "fghi")) and kept[1].rejected_ids == list(map(ord, "fghx"))
    reasons = ["duplicate input", "too long", "too short", "too short", "same response", "pair equal after cutting"]
    assert [reason for _, reason in filtered.skipped] == [*reasons, "prompt without tokens"]
    assert dropped == Counter(reason for _, reason in filtered.skipped)
    assert not list(filtered.passing(examples[:1], dropped)), "a test row that stands in training"
    keeps = filter_of(9, 9, 0, remove_same_inputs=False)
    assert len(list(keeps.passing([example("a", "b")] * 2, dropped))) == 2


def test_lengths_in_characters() -> None:
    """Ids count in one case, characters in the other: é is two bytes, here two tokens."""
    row = EncodedRow("é", "éé", None, [1, 8, 9], [8, 9, 8, 9, 2], None, Row("é", None, "éé", None, {}, "r"))
    for unit, most, least, is_kept in (
        *(("tokens", 3, 4, True), ("tokens", 2, 4, False), ("tokens", 3, 5, False)),
        *(("characters", 1, 2, True), ("characters", 0, 2, False), ("characters", 1, 3, False)),
    ):
        kept = list(filter_of(99, most, least, length_unit=unit).passing([row], Counter()))
        assert bool(kept) == is_kept, (unit, most, least)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", ["arrow", "pt"])
def test_a_folder_trains_like_its_source(kind, form, source, prepare) -> None:
    """Without filters, the rows of step 1's or 2's share, cut at the same place: index for index, id for id."""
    stage, part = ("preference", 2) if kind in (PairExample, PreferenceExample) else ("finetune", 1)
    folder = prepare("prepared", "--stage", stage, "--data_split", "2,4,4", "--format", form, *LOOSE)
    share = load_share(flags_of(source, step=part))
    loader = loader_of(kind, folder, limit=14)
    expected, dropped = loader_of(kind, source, limit=14)._make(share.train)
    held_out, dropped_eval = loader_of(kind, source, limit=14)._make(share.eval, held_out=True)
    read = loader.read()
    assert (read.dropped, len(share.train)) == ({"train": dropped, "eval": dropped_eval}, 8 if part == 1 else 16)
    if form == "pt" and kind is PromptExample:  # .pt files hold no rows
        assert [e.prompt_ids for e in read.train] == [e.prompt_ids for e in expected]
        assert all(b.prompt_text.startswith(a.prompt_text) for a, b in zip(read.train, expected, strict=True))
    else:
        assert list(read.train) == expected and list(read.eval) == held_out


def test_what_the_folder_says(source, prepare) -> None:
    folder = prepare("out", "--minimum_response_length", "3", "--save_skipped", "--num_samples", "15")
    info = content_of(folder)
    assert info["stage"] == "finetune" and info["read"] == {"train": 15, "test": 5}
    skipped = [json.loads(line) for line in (folder / "skipped.jsonl").read_text().splitlines()]
    assert Counter(row["reason"] for row in skipped) == sum(map(Counter, info["left_out"].values()), Counter())
    assert all(row["origin"] and row["prompt"] for row in skipped)
    assert set(info["source"]["sha256"]) == {str(source / "train.jsonl"), str(source / "test.jsonl")}
    assert info["flags"]["num_samples"] == 15 and info["flags"]["minimum_response_length"] == 3


def test_the_parts_are_disjoint(prepare) -> None:
    """The two stages hold different rows, together all; without shuffling, in the order of the files."""
    rows: dict[str, list[int]] = {}
    for stage in ("finetune", "preference"):
        folder = prepare(stage, "--stage", stage, "--no_shuffle", *LOOSE)
        train = loader_of(PromptExample, folder).read().train
        rows[stage] = [row.row.extra["n"] for row in train]
    assert rows == {"finetune": list(range(20)), "preference": list(range(20, 40))}


def test_without_shuffling_the_last_rows_are_held_out(prepare, tmp_path) -> None:
    """Of 60 rows the last 3; the two parts of the 57 follow each other, and those of the 3."""
    rows = {}
    path = write_jsonl(tmp_path / "rows.jsonl", numbered_pairs(range(60)))
    for stage in ("finetune", "preference"):
        folder = open_prepared(prepare(stage, "--stage", stage, "--no_shuffle", *LOOSE, rows=path))
        assert not (tmp_path / stage / "validation").exists(), "it has no rows"
        rows[stage] = {}
        for part in ("train", "test"):
            rows[stage][part] = [int(row.prompt.split()[-1]) for row in read_split(folder, part)]
    # Halves of 57 are rounded to 28 each, and the row that is missing goes to the first; of 3 to 2, and it is taken.
    assert rows["finetune"] == {"train": list(range(29)), "test": [57]}
    assert rows["preference"] == {"train": list(range(29, 57)), "test": [58, 59]}


def test_pt_files_are_sheeprls(prepare) -> None:
    tokenizer = make_tokenizer()
    folder = prepare("f", "--format", "pt", "--no_shuffle", *LOOSE)
    pairs = prepare("p", "--format", "pt", "--no_shuffle", "--stage", "preference", *LOOSE)
    row = torch.load(folder / "finetune_train.pt", weights_only=True)[3]
    prompt = [1, *tokenizer("no 3", add_special_tokens=False)["input_ids"]]
    ids = [*prompt, *tokenizer("yes we can 3", add_special_tokens=False)["input_ids"], 2]
    assert set(row) == {"prompt_len", "input_ids", "targets"} and row["prompt_len"] == len(prompt)
    assert row["input_ids"].tolist() == ids
    assert row["targets"].tolist() == [-1] * len(prompt) + ids[len(prompt) :]
    pair = torch.load(pairs / "preference_train.pt", weights_only=True)[3]
    assert set(pair) == {"prompt_len", "chosen_input_ids", "rejected_input_ids"}
    arguments = json.loads((folder / "args.json").read_text())
    assert arguments["ignore_index"] == -1 and arguments["max_length"] == 100 and arguments["mask_prompt"] is True
    shown = torch.load(folder / "example_prompt.pt", weights_only=True)
    assert set(shown) == {"prompt", "input_ids", "attention_mask"}


def test_a_folder_of_sheeprls_own(prepare, caplog) -> None:
    """Without prepared.json: the example prompt tells whether the tokenizer is the same."""
    folder = prepare("p", "--format", "pt", "--stage", "preference", *LOOSE)
    expected = loader_of(PairExample, folder).read().train
    (folder / "prepared.json").unlink()
    assert list(loader_of(PairExample, folder).read().train) == list(expected)
    with pytest.raises(UserError, match="other ids to the prompt in example_prompt.pt"):
        loader_of(PairExample, folder, tokenizer=make_tokenizer(texts=["zebra zebra"] * 9))
    (folder / "example_prompt.pt").unlink()
    loader_of(PairExample, folder)
    assert "nothing tells whether it was made with this tokenizer" in caplog.text
    with pytest.raises(UserError, match=r"preference_train.pt row \d+: token \d+ is none of the \d+"):
        loader_of(PairExample, folder, tokenizer=make_tokenizer(vocab_size=40)).read()


class Hostile:
    def __reduce__(self) -> Any:
        return (print, ("executed",))


def test_a_pt_file_is_never_executed(tmp_path, capsys) -> None:
    folder = tmp_path / "p"
    folder.mkdir()
    torch.save([Hostile()], folder / "finetune_train.pt")
    with pytest.raises(UserError, match="finetune_train.pt: not readable as plain tensors"):
        loader_of(SFTExample, folder).read()
    (folder / "finetune_train.pt").write_bytes(pickle.dumps(Hostile()))
    with pytest.raises(UserError, match="finetune_train.pt"):
        loader_of(SFTExample, folder).read()
    for rows in ([1], [{"prompt_len": 1}], [{"prompt_len": 3, "input_ids": torch.tensor([1, 2])}]):
        torch.save(rows, folder / "finetune_train.pt")
        with pytest.raises(UserError, match="finetune_train.pt"):
            loader_of(SFTExample, folder).read()
    assert "executed" not in capsys.readouterr().out


def test_what_does_not_fit_is_refused(source, model, prepare) -> None:
    finetune, unmasked = prepare("f", *LOOSE), prepare("u", "--no_mask_prompt", *LOOSE)
    with pytest.raises(UserError, match=f"prepared with the tokenizer of {model}.*again with --tokenizer"):
        loader_of(SFTExample, finetune, tokenizer=make_tokenizer(texts=["zebra zebra"] * 9))
    with pytest.raises(UserError, match="responses end with '<eos>', those of this run.*--end_of_conversation_token"):
        loader_of(SFTExample, finetune, eos_id=5)
    with pytest.raises(UserError, match="prepared with --no_mask_prompt.*add --sft_on_prompt"):
        loader_of(SFTExample, unmasked)
    with pytest.raises(UserError, match="with --stage finetune.*two responses.*with --stage preference"):
        loader_of(PairExample, finetune)
    with pytest.raises(UserError, match="data of one kind"):
        find_prepared([str(finetune), str(source)])
    with pytest.raises(UserError, match=r"--max_seq_len 1: none of the 20 rows is left \(response cut to nothing: 20"):
        loader_of(SFTExample, finetune, limit=1).read()
    shutil.rmtree(finetune / "train")
    with pytest.raises(UserError, match="its files of train rows are missing"):
        loader_of(SFTExample, finetune)
    (finetune / "prepared.json").write_text("{")
    with pytest.raises(UserError, match="prepared.json cannot be read"):
        loader_of(SFTExample, finetune)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--validation_percentage", "10"], "--validation_percentage 10.0 .*below 1"),
        (["--minimum_response_length", "90"], r"no training row is left of 20 \(too short: 20\)"),
        (["--data_split", "1", "--stage", "preference"], "--data_split 1 has 1 parts, none for the reward model step"),
    ],
)
def test_bad_flags(flags, message, prepare, tmp_path, caplog) -> None:
    folder = prepare("out", *flags, status=2)
    assert re.search(message, caplog.text), caplog.text
    assert not folder.exists() and not list(tmp_path.glob(".out*"))


def test_the_share_of_validation_is_rounded_down(prepare) -> None:
    """A tenth of 19 rows are 1.9; SheepRL holds out 1."""
    flags = [*LOOSE, "--num_samples", "19", "--validation_percentage", "0.1"]
    kept = content_of(prepare("out", *flags))["kept"]
    assert (kept["train"], kept["validation"]) == (18, 1)


def test_an_output_that_exists_or_is_being_written_is_refused(prepare, tmp_path, caplog) -> None:
    folder = prepare("out", *LOOSE)
    written = (folder / "prepared.json").stat()
    prepare("out", *LOOSE, status=2)
    assert f"--output {tmp_path}/out: it exists; remove it, or give another folder." in caplog.text
    assert (folder / "prepared.json").stat() == written
    lock = Lock(tmp_path / ".new.lock", "another")
    prepare("new", *LOOSE, status=2)
    assert f"--output {tmp_path}/new: another process is writing it." in caplog.text
    lock.close()
    prepare("again", status=2, rows=folder)
    assert "prepared already" in caplog.text
    assert not list(tmp_path.glob(".*"))


def test_check_describes_a_folder(model, prepare, tmp_path, capsys) -> None:
    folder = prepare("out", "--format", "pt", *LOOSE)
    capsys.readouterr()
    assert main(["check", str(folder), "--tokenizer", model]) == 0
    told = capsys.readouterr().out
    for words in ("rows       train: 20, test: 5", "gives the same ids", "length of prompt and longer response, in"):
        assert words in told
    make_tokenizer(vocab_size=90).save_pretrained(tmp_path / "other")
    assert main(["check", str(folder), "--tokenizer", str(tmp_path / "other")]) == 0
    assert "gives other ids" in capsys.readouterr().out
    (folder / "prepared.json").unlink()
    assert main(["check", str(folder)]) == 0
    assert "rows       train: 20, test: 5" in capsys.readouterr().out


def test_the_plan_counts_its_rows(prepare) -> None:
    (counted,) = find_sources(flags_of(prepare("out", *LOOSE)))
    assert (counted["train"], counted["eval"]) == (20, 5)


def test_what_prepared_rows_do_not_hold_is_refused(prepare) -> None:
    folder = prepare("prepared", *LOOSE, "--stage", "preference")
    with pytest.raises(UserError, match="--margin_key: a prepared folder holds no margins"):
        loader_of(PairExample, folder, margin_key="gap")
    with pytest.raises(UserError, match="--train_on all: a prepared folder holds one response per row"):
        loader_of(SFTExample, folder, all_turns=True)
    with pytest.raises(UserError, match="needs the rows of the source itself"):
        load_share(flags_of(folder))
    with pytest.raises(UserError, match="--prompts .*prepared: a prepared folder, whose prompts are written for one"):
        open_data(str(folder), "--prompts")
