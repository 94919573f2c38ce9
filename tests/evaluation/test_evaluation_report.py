# SPDX-License-Identifier: Apache-2.0
"""The evaluation report on files made by hand, whose numbers can be worked out on paper."""

import dataclasses
import json
from types import SimpleNamespace

import pytest

from cli_runs import read_jsonl, write_jsonl
from dschat.base.errors import UserError
from dschat.base.statistics import Tally
from dschat.cli import main
from dschat.evaluation.comparisons import build_evaluation_report
from dschat.evaluation.responses import compared, read_pairs
from dschat.evaluation.results import section_result
from dschat.evaluation.votes import read_votes
from dschat.evaluation.votes import sections_of as sorted_votes

# 50 items: 28 wins, 9 ties, 10 losses, 3 answers that cannot be read. Item i: prompt i, 20 + i letters against 30.
FIFTY = ["A"] * 28 + ["tie"] * 9 + ["B"] * 10 + ["invalid"] * 3


def texts(number: int) -> tuple[str, str, str]:
    """Prompt and responses of an item."""
    return f"prompt {number}", "a" * (20 + number), f"{number:02d}" + "b" * 28


def verdict_row(number: int, verdict: str, rater: str = "gpt", kind: str = "judge", **more) -> dict:
    prompt, a, b = texts(number)
    row = {"prompt": prompt, "response_a": a, "response_b": b, "verdict": verdict, "kind": kind, "rater": rater}
    return row | {"model_a": "ma", "model_b": "ppo", "dataset": "summarize"} | more


def swapped(row: dict) -> dict:
    """The row as a file with the models in the other order would hold it."""
    other = {"A": "B", "B": "A"}

    def turn(order):
        return order | {"first": other[order["first"]], "verdict": other.get(order["verdict"], order["verdict"])}

    new = row | {"response_a": row["response_b"], "response_b": row["response_a"]}
    new |= {"model_a": row["model_b"], "model_b": row["model_a"], "verdict": other.get(row["verdict"], row["verdict"])}
    if "orders" in row:
        new["orders"] = [turn(order) for order in row["orders"]]
    return new


def verdict_file(folder, name, rows):
    return write_jsonl(folder / f"{name}.jsonl", rows)


def response_files(folder, rewards, names=("ma", "ppo")):
    """Two files of scored responses to the first prompts; `rewards` holds (reward a, reward b) per item."""
    files = []
    for side, name in enumerate(names):
        rows = [
            {"prompt": texts(i)[0], "response": texts(i)[1 + side], "reward": pair[side]}
            for i, pair in enumerate(rewards)
        ]
        files.append(write_jsonl(folder / f"{name}.jsonl", rows))
    return files


def sections_of(*files, dataset=""):
    """The sections of `build_evaluation_report`, without its files; a row's columns are attributes."""
    sections = []
    for section in sorted_votes(read_votes(files, 0.0), dataset):
        result = section_result(section)
        names = ("raters", "agreement", "group_agreement")
        tables = {name: [SimpleNamespace(**row) for row in getattr(result, name)] for name in names}
        sections.append(dataclasses.replace(result, **tables))
    return sections


def rater_of(section, name):
    return next(rater for rater in section.raters if rater.rater == name)


@pytest.fixture
def fifty(tmp_path):
    return verdict_file(tmp_path, "judge", [verdict_row(i, verdict) for i, verdict in enumerate(FIFTY)])


def test_the_command_writes_the_numbers_by_hand(tmp_path, fifty, capsys):
    """28 wins of 47 verdicts that count, (28 + 4.5) / 47 with half of the ties; Wilson's interval of 28 in 47.

    Of the rewards 0.1 is within the margin.
    """
    out = tmp_path / "deep" / "out"
    files = response_files(tmp_path, [(1, 0), (0.1, 0)])
    words = ["report", fifty, *files, "--output", out, "--reward_margin", 0.5, "--dataset", "tldr"]
    assert main(list(map(str, words))) == 0
    (section,) = json.loads((out / "report.json").read_text())["sections"]
    assert (section["model_a"], section["model_b"], section["items"]) == ("ma", "ppo", 50)
    rater = section["raters"][0]
    assert rater["counts"] == {"wins": 28, "ties": 9, "losses": 10, "invalid": 3, "skipped": 0}
    assert (rater["verdicts"], rater["counted"], rater["kind"]) == (50, 47, "judge")
    assert rater["rates"]["half"]["value"] == pytest.approx(32.5 / 47) and rater["position"] is None
    assert (out / "report.png").read_bytes().startswith(b"\x89PNG")
    lines = capsys.readouterr().out.splitlines()
    cells = [line.split() for line in lines]
    assert "judge gpt 50 50 47 28 9 10 3 0".split() in cells and "reward model 2 2 2 1 1 0 0 0".split() in cells
    assert "59.6 [45.3, 72.4]" in "\n".join(lines)
    assert lines[-1] == f"report: {out / 'report.json'}, {out / 'report.png'}"


def test_lengths_by_hand(tmp_path, fifty):
    """A has 20 … 69 letters, mean 44.5; B has 30. The variance of n numbers in a row is n (n + 1) / 12."""
    (section,) = sections_of(fifty)
    characters, words = section.means["characters"], section.means["words"]
    assert (characters["first"].mean, characters["second"].mean, characters["difference"].mean) == (44.5, 30, 14.5)
    assert characters["difference"].error == pytest.approx((50 * 51 / 12 / 50) ** 0.5)
    assert (words["first"].mean, words["second"].mean, words["items"]) == (1, 1, 50)


def test_files_of_opposite_order_count_together(tmp_path):
    rows = [verdict_row(i, verdict, orders=[{"first": "A", "verdict": verdict}]) for i, verdict in enumerate(FIFTY)]
    whole = sections_of(verdict_file(tmp_path, "whole", rows))
    first = verdict_file(tmp_path, "first", rows[::2])
    second = verdict_file(tmp_path, "second", [swapped(row) for row in rows[1::2]])
    (section,) = sections_of(first, second)
    assert section.models == ("ma", "ppo")
    assert section.raters[0].rates.tally == whole[0].raters[0].rates.tally
    assert section.raters[0].position["first_place"].value == whole[0].raters[0].position["first_place"].value
    assert section.raters[0].length_controlled.rate == whole[0].raters[0].length_controlled.rate


def test_equal_texts_in_a_file_are_items_of_their_own(tmp_path):
    """In whichever order the file names the models; complete files and samples of them are of the same items.

    A judge without a name is called a judge.
    """
    rows = [verdict_row(0, "A", rater=" "), verdict_row(0, "B"), swapped(verdict_row(0, "A", rater=""))]
    del rows[1]["rater"]
    (section,) = sections_of(verdict_file(tmp_path, "j", rows))
    assert (section.items, section.raters[0].rater) == (3, "judge")
    assert section.raters[0].rates.tally == Tally(2, 0, 1)
    files = response_files(tmp_path, [(1, 0)] * 2) + response_files(tmp_path, [(1, 0)] * 2, ("ma-sampled", "ppo"))[:1]
    for file in files:
        write_jsonl(file, read_jsonl(file)[:1] * 2)
    (section,) = sections_of(*files)
    assert section.items == 2 and section.raters[0].rates.tally == Tally(2, 0, 0)


def test_position_of_a_judge_by_hand(tmp_path):
    """Six items: three agree (A, B, tie), two prefer the first place in both orders, the last has an invalid order."""
    orders = ["AA", "BB", "tt", "AB", "AB", "A?"]
    names = {"A": "A", "B": "B", "t": "tie", "?": "invalid"}
    shown = [[{"first": first, "verdict": names[v]} for first, v in zip("AB", v2, strict=True)] for v2 in orders]
    rows = [verdict_row(i, "tie", orders=both) for i, both in enumerate(shown)]
    (section,) = sections_of(verdict_file(tmp_path, "j", rows))
    position = section.raters[0].position
    assert (position["both_orders"], position["consistent"].value) == (5, pytest.approx(3 / 5))
    # Wins: AA and BB one of two by the first place each, AB both, twice, A? its one: 1 + 1 + 2 + 2 + 1 of 9.
    assert (position["decided"], position["first_place"].value) == (9, pytest.approx(7 / 9))


def test_people_are_shown_together_and_alone(tmp_path):
    """Three people on four items, one pass: votes 5 A, 2 ties, 4 B."""
    votes = {"ann": "ABAA", "bob": "ABBs", "cid": "BttA"}
    names = {"A": "A", "B": "B", "t": "tie", "s": "skip"}
    people = [
        verdict_row(i, names[v], who, "human", dataset="", first="A")
        for who, given in votes.items()
        for i, v in enumerate(given)
    ]
    judge = [verdict_row(i, v) for i, v in enumerate(["A", "B", "A", "B"])]
    files = verdict_file(tmp_path, "h", people), verdict_file(tmp_path, "j", judge)
    (section,) = sections_of(*files, files[1])  # a file given twice counts once
    labels = ["judge gpt", "all 3 humans", "human ann", "human bob", "human cid"]
    assert [rater.rater for rater in section.raters] == labels
    everyone = rater_of(section, "all 3 humans")
    assert everyone.pooled and everyone.items == 4
    assert everyone.rates.tally == Tally(wins=5, ties=2, losses=4, invalid=0, skipped=1)
    assert rater_of(section, "human bob").rates.tally == Tally(1, 0, 2, 0, 1)
    # Of the nine votes with a winner the first response, A, got five.
    assert (everyone.position["decided"], everyone.position["first_place"].value) == (9, pytest.approx(5 / 9))
    assert everyone.position["consistent"] is None
    found = {one.raters: one for one in section.agreement}
    assert len(found) == 6 and found["human ann", "human bob"].same.value == pytest.approx(2 / 3)
    assert [(group.name, group.items) for group in section.group_agreement] == [("humans", 3), ("all raters", 3)]
    again = verdict_file(tmp_path, "k", judge[:1])
    with pytest.raises(UserError, match="j.jsonl and .*k.jsonl: several verdicts of judge gpt on the same responses"):
        sections_of(*files, again)


def test_reward_model_judges_two_files_of_responses(tmp_path):
    """Differences 1, −1, 0, 0.5: two wins, a loss and a tie."""
    files = response_files(tmp_path, [(2, 1), (1, 2), (1, 1), (1.5, 1)])
    (section,) = sections_of(*files)
    (rater,) = section.raters
    assert (section.models, rater.rater, rater.rates.tally) == (("ma", "ppo"), "reward model", Tally(2, 1, 1))
    # Means 1.375 and 1.25, difference 0.125 of 1, −1, 0, 0.5: squares 2.1875, error √(2.1875 / 3 / 4).
    reward = section.means["reward"]
    assert (reward["first"].mean, reward["second"].mean) == (1.375, 1.25)
    assert reward["difference"].error == pytest.approx((2.1875 / 12) ** 0.5)


def test_rewards_of_different_reward_models_are_not_compared(tmp_path):
    """One of another name but with the same hash is the same, as are equal names of a user's without a hash; a file
    that does not say is believed.
    """
    files = response_files(tmp_path, [(2, 1), (1, 2)])

    def written_by(*scorers):
        for file, scorer in zip(files, scorers, strict=True):
            rows = [row | ({"scorer": scorer} if scorer else {}) for row in read_jsonl(file)]
            write_jsonl(file, rows)

    for scorers in [("rm 12ab12ab12ab", "copy 12ab12ab12ab"), ("rm 12ab12ab12ab", ""), ("my model", "my  model")]:
        written_by(*scorers)
        (section,) = sections_of(*files)
        assert section.raters[0].rates.tally == Tally(1, 0, 1)
    written_by("rm 12ab12ab12ab", "rm 34cd34cd34cd")
    with pytest.raises(
        UserError, match="ma.jsonl:1 are by rm 12ab12ab12ab, those of .*ppo.jsonl:1 by rm 34cd34cd34cd"
    ):
        sections_of(*files)
    written_by("your model", "my model")
    with pytest.raises(UserError, match="are by your model, those of .* by my model"):
        sections_of(*files)


def test_half_a_surrogate_pair_is_the_question_mark_that_files_of_votes_have_for_it(tmp_path):
    """A person and the reward model both have an opinion of the pair; the longer response has the half."""
    a, b = response_files(tmp_path, [(2, 1)])
    row = read_jsonl(a)[0]
    row["response"] += "\ud83d"
    a.write_text(json.dumps(row))  # escaped, as other tools write it
    (pair,) = read_pairs(a, "A", b, "B")
    vote = compared(pair, "A", "human", "zoe", ("ma", "ppo"), "", {}).to_row()
    (section,) = sections_of(a, b, write_jsonl(tmp_path / "votes.jsonl", [vote]))
    assert {rater.rater: rater.items for rater in section.raters} == {"reward model": 1, "human zoe": 1}
    assert section.agreement[0].items == 1


def test_rewards_that_do_not_say_what_gave_them(tmp_path, caplog):
    """No column, null and blanks are the same: taken to be by the scorer of others, which is said if one has it."""
    files = response_files(tmp_path, [(2, 1), (1, 2)])
    rows = [read_jsonl(file) for file in files]
    write_jsonl(files[0], [rows[0][0] | {"scorer": "  "}, rows[0][1]])
    (section,) = sections_of(*files)
    assert section.raters[0].rates.tally == Tally(1, 0, 1) and "column" not in caplog.text
    write_jsonl(files[0], [rows[0][0] | {"scorer": "  "}, rows[0][1] | {"scorer": " rm  12ab12ab12ab "}])
    (section,) = sections_of(*files)
    assert section.raters[0].rates.tally == Tally(1, 0, 1)
    said = (
        "ma.jsonl:1: no column 'scorer' says what gave the rewards (3 of 4). They are taken to be by rm 12ab12ab12ab"
    )
    assert said in caplog.text


def test_files_of_responses_join_the_section_of_the_models_they_are_called_after(tmp_path):
    """In either order, and with more items than were judged."""
    judge = verdict_file(tmp_path, "judge", [verdict_row(i, v) for i, v in enumerate(["A", "A", "B"])])
    rewards = [(1, 0), (0, 1), (0, 1), (1, 0), (1, 0)]
    files = response_files(tmp_path, rewards, names=("ma-sampled", "ppo-sampled"))
    (section,) = sections_of(judge, *files[::-1])
    assert (section.models, section.dataset) == (("ma", "ppo"), "summarize")
    assert rater_of(section, "reward model").rates.tally == Tally(3, 0, 2)
    assert rater_of(section, "judge gpt").rates.tally == Tally(2, 0, 1)
    assert (section.agreement[0].items, section.agreement[0].same.value) == (3, pytest.approx(2 / 3))


def test_where_no_data_set_is_named(tmp_path):
    """Votes belong to the one data set that others on the same models name; of several the user says which."""
    rows = [verdict_row(0, "A"), verdict_row(0, "A", model_b="sft", dataset="webgpt")]
    judge = verdict_file(tmp_path, "judge", rows)
    people = verdict_file(tmp_path, "people", [verdict_row(i, "A", "ann", "human", dataset="") for i in (0, 7)])
    files = response_files(tmp_path, [(1, 0)])
    joined = sections_of(people, judge, *files)
    assert [(one.models[1], one.dataset) for one in joined] == [("ppo", "summarize"), ("sft", "webgpt")]
    assert [rater.rater for rater in joined[0].raters] == ["judge gpt", "human ann", "reward model"]
    assert [one.dataset for one in sections_of(people, *files)] == [""]
    assert [one.dataset for one in sections_of(people, *files, dataset="hh-rlhf")] == ["hh-rlhf"]
    other = verdict_file(tmp_path, "other", [verdict_row(0, "B", dataset="webgpt")])
    for unnamed in ([people], files):
        words = f"FILE {unnamed[0]}: it names no data set, .* on summarize and webgpt. Say with --dataset which"
        with pytest.raises(UserError, match=words):
            sections_of(judge, other, *unnamed)


def test_files_of_several_data_sets_stay_with_their_verdicts(tmp_path):
    """Files of one name are told apart by their folders, which no verdict knows; texts say whose they are."""
    verdicts = []
    responses = {}
    for dataset in ("summarize", "hh-rlhf"):
        rows = [verdict_row(number, "A", dataset=dataset, prompt=f"{dataset} {number}") for number in (0, 1)]
        verdicts.append(verdict_file(tmp_path, dataset, rows))
        for name, side, reward in (("ma", "response_a", 1.0), ("ppo", "response_b", 0.0)):
            scored = [{"prompt": row["prompt"], "response": row[side], "reward": reward} for row in rows]
            responses[dataset, name] = write_jsonl(tmp_path / dataset / f"{name}.jsonl", scored)
    files = [responses[dataset, name] for name in ("ppo", "ma") for dataset in ("summarize", "hh-rlhf")]
    sections = sections_of(*verdicts, *files)
    assert [(one.models, one.dataset) for one in sections] == [
        (("ma", "ppo"), "summarize"),
        (("ma", "ppo"), "hh-rlhf"),
    ]
    for section in sections:
        assert [rater.rater for rater in section.raters] == ["judge gpt", "reward model"]
        assert section.raters[1].rates.tally == Tally(2, 0, 0)


def test_criteria_have_rates_of_their_own(tmp_path):
    rows = [
        verdict_row(0, "A", aspects={"accuracy": "A", "use": "tie"}),
        verdict_row(1, "B", aspects={"accuracy": "A", "use": "invalid"}),
        verdict_row(2, "A", aspects={}),
    ]
    (section,) = sections_of(verdict_file(tmp_path, "webgpt", rows))
    aspects = section.raters[0].aspects
    assert {name: rates.tally for name, rates in aspects.items()} == {
        "accuracy": Tally(2, 0, 0),
        "use": Tally(0, 1, 0, invalid=1),
    }
    (turned,) = sections_of(verdict_file(tmp_path, "x", [rows[2] | {"model_a": "ppo", "model_b": "ma"}, rows[0]]))
    assert turned.raters[0].aspects["accuracy"].tally == Tally(0, 0, 1)


def test_what_cannot_be_reported_is_named(tmp_path):
    a, b = response_files(tmp_path, [(2, 1), (1, 2)])
    orders = verdict_file(tmp_path, "orders", [verdict_row(0, "A"), verdict_row(1, "A", orders=[{"first": "A"}])])
    aspects = verdict_file(tmp_path, "aspects", [verdict_row(1, "A", aspects={"use": 1})])
    bare = write_jsonl(tmp_path / "bare.jsonl", [{"prompt": f"prompt {i}", "response": "r"} for i in range(2)])
    other = write_jsonl(tmp_path / "x.jsonl", [{"text": "t"}])
    elsewhere = write_jsonl(tmp_path / "other.jsonl", [{"prompt": "other", "response": "r", "reward": 1}] * 2)
    same_model = write_jsonl(tmp_path / "ma-sampled.jsonl", read_jsonl(a))
    unpaired = r"FILE .*ma\.jsonl: no file of another model answers the same 2 prompts"
    (tmp_path / "taken").write_text("")
    for files, place, words in (
        ([a, elsewhere], "out", unpaired),
        ([a, same_model], "out", unpaired),
        ([a, bare], "out", r"bare\.jsonl:1: the row has no reward to compare"),
        ([orders], "out", r"orders\.jsonl:2: orders must be a list"),
        ([aspects], "out", r"aspects\.jsonl:1: aspects must be an object of verdicts"),
        ([other], "out", r"x\.jsonl:1: neither a verdict .* nor a response .* columns are 'text'"),
        ([], "out", "at least one file"),
        ([a, b], "taken", "--output .*taken: cannot be written"),
    ):
        with pytest.raises(UserError, match=words):
            build_evaluation_report(files, tmp_path / place)
    assert not (tmp_path / "out").exists()
