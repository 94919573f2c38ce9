# SPDX-License-Identifier: Apache-2.0
"""The runs with critics that are trained more often: their settings, and their tables by hand."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pandas as pd
import pytest

import critic_tables
import critics

CONTENT = tomllib.loads(critics.SETTINGS.read_text(encoding="utf-8"))


@pytest.mark.parametrize(("file", "samples"), [("critics.toml", 1), ("critics_in_groups.toml", 4)])
def test_settings_are_those_of_the_quickstart_and_one_thing_more(file: str, samples: int) -> None:
    """Every credit with every training of the critic, with both critics; the rest of step 3 is the same for all.

    All have 64 responses in each of 40 rollouts.
    """
    content = tomllib.loads(critics.SETTINGS.with_name(file).read_text(encoding="utf-8"))
    trainings, credit_flags = content["trainings"], content["credits"]
    assert content["drawn"] == [name for name in trainings if name in content["drawn"]]
    configs = {}
    for setting in critics.all_settings(content):
        trial = setting.trial("quickstart", 3)
        config = critics.step3_config(trial, Path("start"), Path("output")).flat()
        assert config["critic_model_name_or_path"] == f"start/{setting.critic}"
        del config["critic_model_name_or_path"]
        configs[setting.critic, setting.training, setting.credit] = config
    assert len(configs) == len(content["critics"]) * len(trainings) * len(credit_flags)

    plain = next(iter(configs.values()))
    assert (plain["seed"], plain["ngram"], plain["lam"], plain["ppo_epochs"], plain["max_steps"]) == (
        3,
        1,
        0.95,
        1,
        40,
    )
    assert (plain["per_device_generation_batch_size"], plain["samples_per_prompt"]) == (64 // samples, samples)
    for (_, training, credit), config in configs.items():
        allowed = trainings[training].keys() | credit_flags[credit].keys()
        assert {name for name in plain if config[name] != plain[name]} <= allowed


def test_fifths_of_few_numbers() -> None:
    assert critic_tables.fifths(pd.Series([1.0, 2.0])) == (1.0, 1.0, 2.0)


def curve(training: str, credit: str, seed: int, gold: float, kl: float = 5.0) -> pd.DataFrame:
    """A run of ten updates, whose gold score in training rises by a tenth of its end and whose KL by half a nat."""
    rows = {
        "gold": [gold * update / 10 for update in range(1, 11)],
        "kl": [kl * update / 10 for update in range(1, 11)],
        "explained_variance": [0.0] * 8 + [0.4, 0.6],
        "explained_variance_middle": [update / 10 for update in range(10)],
        "cpu_seconds": [10.0 if training == "1 update" else 14.0] * 10,
        "held-out gold_scores": [gold] * 10,
        "held-out kl": [kl] * 10,
        "held-out eos_rate": [0.99] * 10,
    }
    return pd.DataFrame(rows).assign(critic="sft", training=training, credit=credit, seed=seed)


@pytest.fixture
def runs() -> pd.DataFrame:
    """Two seeds; tokens end at .3 and .4 (once), .4 and .6 (twice), macro actions at .4 and .6, .4 and .6."""
    golds = {("1 update", "tokens"): (0.3, 0.4), ("1 update", "macro"): (0.4, 0.6)}
    golds |= {("twice", "tokens"): (0.4, 0.6), ("twice", "macro"): (0.4, 0.6)}
    curves = []
    for (training, credit), ends in golds.items():
        for seed, gold in enumerate(ends):
            curves.append(curve(training, credit, seed, gold))
    return critic_tables.measure_runs(pd.concat(curves), [2.0])


def test_runs_are_compared_with_those_of_their_seed(runs: pd.DataFrame) -> None:
    """Macro actions gain .1 and .2; they reach .3 of .4 in update 8, and .4 of .6 in update 7."""
    macro = runs[(runs["training"] == "1 update") & (runs["credit"] == "macro")]
    assert macro["gain"].tolist() == pytest.approx([0.1, 0.2]) and macro["updates"].tolist() == [8.0, 7.0]
    assert macro["KL 2"].tolist() == pytest.approx([0.16, 0.24])
    assert macro["more_seconds"].tolist() == [0.0, 0.0]
    text = critic_tables.settings_table(runs, [2.0])
    row = next(line for line in text.splitlines() if "| 1 update | macro |" in line)
    assert (
        "| 1 update | macro | 2 | 0.500 ± 0.100 | +0.150 ± 0.050 | 5.0 ± 0.0 | 0.05 / 0.45 / 0.85 | 0.50 | 8 ± 0 |"
        in row
    )
    assert "| 14 (+4) |" in text


def test_what_remains_is_the_difference_at_the_same_training(runs: pd.DataFrame) -> None:
    once, twice = critic_tables.remaining_table(runs).splitlines()[2:]
    assert once.endswith("| 1 update | 2 | 0.85 / 0.85 | 0.350 ± 0.050 | +0.150 ± 0.050 | +0.150 ± 0.050 |")
    assert twice.endswith("| twice | 2 | 0.85 / 0.85 | 0.500 ± 0.100 | +0.000 ± 0.000 | +0.000 ± 0.000 |")


def test_the_picture_has_the_trainings_that_the_settings_name(tmp_path: Path) -> None:
    """The tables have both trainings, under the name of the settings."""
    curves = pd.concat([curve("1 update", "tokens", 0, 0.3), curve("twice", "tokens", 0, 0.4)])
    content = {"name": "one and two", "kl_levels": [2.0], "drawn": ["twice"]}
    critics.publish(curves, content, tmp_path, [])
    picture = (tmp_path / "learning-one-and-two.svg").read_text(encoding="utf-8")
    assert "SFT model, twice" in picture and "SFT model, 1 update" not in picture
    tables = (tmp_path / "tables.md").read_text(encoding="utf-8")
    assert tables.count("| SFT model | 1 update |") == tables.count("| SFT model | twice |") == 2


def test_seeds_that_lack_a_number_are_counted() -> None:
    assert critic_tables.estimate_text(pd.Series([0.2, float("nan"), 0.4])) == "0.300 ± 0.100 (2/3)"
    assert critic_tables.estimate_text(pd.Series([float("nan")])) == "–"


@pytest.mark.slow
def test_small(tmp_path: Path) -> None:
    """Every setting runs, and the command again makes the same tables without a run."""
    document = tmp_path / "page.md"
    name = "learning critics that keep up, what remains"
    document.write_text(f"<!-- {name} -->\n<!-- /{name} -->\n", encoding="utf-8")
    command = [sys.executable, critics.__file__, "--small", "--seeds", "1", "--output_dir", str(tmp_path / "out")]
    subprocess.run([*command, "--markdown", str(document)], check=True)
    first = document.read_text(encoding="utf-8")
    assert first.count("| reward model |") == len(CONTENT["trainings"])
    times = {file: file.stat().st_mtime_ns for file in (tmp_path / "out" / "curves").iterdir()}
    assert times
    subprocess.run([*command, "--markdown", str(document)], check=True)
    assert document.read_text(encoding="utf-8") == first
    assert all(file.stat().st_mtime_ns == time for file, time in times.items())
    assert (tmp_path / "learning-critics-that-keep-up.svg").read_text(encoding="utf-8").count("gold score") == 1
