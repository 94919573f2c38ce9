# SPDX-License-Identifier: Apache-2.0
"""What users get wrong: one clear message on stderr, exit status 2, no traceback."""

import json
import shutil
import sys

import pytest
from transformers import AutoTokenizer

from cli_runs import STEPS, TRAINING, read_jsonl, run_process, write_jsonl
from dschat.config.ppo import PPOConfig
from dschat.config.reward import RewardConfig
from dschat.config.sft import SFTConfig
from dschat.stage import run_main

CONFIGS = {"sft": SFTConfig, "reward": RewardConfig, "ppo": PPOConfig}
HUB_NAME = "nobody-at-all/no-such-model"


def message_of(result, *words: str) -> str:
    """The one message of a failed run: a line of its own, the last, that holds every word."""
    everything = result.stdout + result.stderr
    assert "Traceback" not in everything, everything
    assert result.status == 2, everything
    lines = [line.rstrip() for line in result.stderr.replace("\r", "\n").splitlines() if line.strip()]
    messages = [line for line in lines if line.startswith(("error: ", "main.py: error: "))]
    assert len(messages) == 1, result.stderr
    assert lines[-1] == messages[0], "something follows the message:\n" + result.stderr
    for word in words:
        assert word in messages[0], f"{word!r} is not in: {messages[0]}"
    return messages[0]


# -- rules of the command line, checked before anything is loaded

BASE = {
    "sft": {"data_path": "d.jsonl", "output_dir": "out", "model_name_or_path": "m"},
    "reward": {"data_path": "d.jsonl", "output_dir": "out", "model_name_or_path": "m"},
    "ppo": {
        "data_path": "d.jsonl",
        "output_dir": "out",
        "actor_model_name_or_path": "a",
        "critic_model_name_or_path": "c",
    },
}
GOOD_FUNCTION = "def f(prompts, responses, rows):\n    return [0.0] * len(responses)\n"
RULES = {
    # of ISSUE order: numbers, batches, precision, functions, folders
    "ngram 0": ("ppo", {"ngram": 0}, ["--ngram 0", "at least 1"]),
    "ngram -1": ("ppo", {"ngram": "-1"}, ["--ngram", "at least 1"]),
    "ngram word": ("ppo", {"ngram": "five"}, ["--ngram five"]),
    "cutoff 2": ("ppo", {"parsing_cutoff": 2}, ["--parsing_cutoff 2", "at least 3"]),
    "cutoff, other spelling": ("ppo", {"parser_cutoff": 0}, ["--parsing_cutoff 0", "at least 3"]),
    "temperature 0": ("ppo", {"temperature": 0}, ["--temperature 0", "above 0"]),
    "temperature -1": ("ppo", {"temperature": -1.0}, ["--temperature -1", "above 0"]),
    "temperature nan": ("ppo", {"temperature": "nan"}, ["--temperature nan"]),
    "batch does not divide the rollout": (
        "ppo",
        {"per_device_generation_batch_size": 16, "per_device_training_batch_size": 5},
        ["--per_device_training_batch_size 5", "16", "1, 2, 4, 8 or 16"],
    ),
    "update does not divide the rollout": (
        "ppo",
        {
            "per_device_generation_batch_size": 12,
            "per_device_training_batch_size": 4,
            "gradient_accumulation_steps": 2,
        },
        ["--gradient_accumulation_steps 2", "12"],
    ),
    "global batch of step 1": (
        "sft",
        {"per_device_train_batch_size": 8, "global_batch_size": 20},
        ["--global_batch_size 20", "16 or 24"],
    ),
    "global batch of step 3": (
        "ppo",
        {"per_device_training_batch_size": 8, "global_batch_size": 64},
        ["--global_batch_size 64", "--per_device_training_batch_size"],
    ),
    "global batch and accumulation": (
        "reward",
        {"per_device_train_batch_size": 8, "global_batch_size": 16, "gradient_accumulation_steps": 4},
        ["--gradient_accumulation_steps 4", "--global_batch_size"],
    ),
    "bf16 and fp32": ("sft", {"bf16": True, "dtype": "fp32"}, ["--bf16", "--dtype fp32"]),
    "bf16 and fp16": ("ppo", {"bf16": True, "dtype": "fp16"}, ["--bf16", "--dtype fp16"]),
    "unknown condition": ("ppo", {"termination_condition": "bigram"}, ["--termination_condition bigram", "fixed"]),
    "parsing": ("ppo", {"termination_condition": "parsing"}, ["--termination_condition parsing", "version"]),
    "no such file": ("ppo", {"termination_condition": "absent.py:f"}, ["--termination_condition", "absent.py"]),
    "no such function": ("ppo", {"termination_condition": "good.py:g"}, ["--termination_condition", "g", "good.py"]),
    "no function named": ("ppo", {"reward_function": "good.py"}, ["--reward_function good.py", "module.py:function"]),
    "reward function absent": ("ppo", {"reward_function": "absent.py:f"}, ["--reward_function", "absent.py"]),
    "reward function of another name": ("ppo", {"reward_function": "good.py:g"}, ["--reward_function", "good.py"]),
    "reward function with a syntax error": ("ppo", {"reward_function": "bad.py:f"}, ["--reward_function", "bad.py"]),
    "metric function with a syntax error": ("ppo", {"metric_function": "bad.py:f"}, ["--metric_function", "bad.py"]),
    "metric named like ours": ("ppo", {"metric_function": "good.py:kl"}, ["--metric_function"]),
    "two rewards": (
        "ppo",
        {"reward_function": "good.py:f", "reward_model_name_or_path": "r"},
        ["--reward_function", "--reward_model_name_or_path"],
    ),
    "no reward": ("ppo", {"critic_model_name_or_path": None}, ["--critic_model_name_or_path", "--reward_function"]),
    "split of two": ("sft", {"data_split": "5,5"}, ["--data_split 5,5"]),
    "split with words": ("sft", {"data_split": "a,b,c"}, ["--data_split a,b,c"]),
    "split without this step": ("reward", {"data_split": "1,0,1"}, ["--data_split 1,0,1", "step 2"]),
    "finished output": ("sft", {"output_dir": "finished"}, ["--output_dir finished", "--overwrite_output_dir"]),
    "output is a file": ("ppo", {"output_dir": "good.py"}, ["--output_dir good.py"]),
    "two warm-ups": ("sft", {"num_warmup_steps": 1, "warmup_ratio": 0.1}, ["--num_warmup_steps", "--warmup_ratio"]),
    "stage 2": ("sft", {"zero_stage": 2}, ["--zero_stage 2"]),
    "LoRA": ("ppo", {"actor_lora_dim": 8}, ["--actor_lora_dim 8"]),
    "no DeepSpeed file": ("sft", {"deepspeed_config": "absent.json"}, ["--deepspeed_config absent.json"]),
    "negative rate": ("sft", {"learning_rate": -1.0}, ["--learning_rate"]),
    "no epochs": ("reward", {"num_train_epochs": 0}, ["--num_train_epochs 0"]),
    "unknown flag": ("sft", {"learning_rat": 1}, ["--learning_rat", "--learning_rate"]),
    "no number": ("sft", {"seed": "one"}, ["--seed", "one"]),
    "no such choice": ("ppo", {"ppl_mode": "word"}, ["--ppl_mode", "word"]),
    "stage 5": ("sft", {"zero_stage": 5}, ["--zero_stage", "5"]),
    "no output_dir": ("sft", {"output_dir": None}, ["--output_dir"]),
}


@pytest.mark.parametrize("name", RULES)
def test_rules(name, tmp_path, monkeypatch, capsys):
    from cli_runs import Result, arguments

    step, flags, words = RULES[name]
    (tmp_path / "good.py").write_text(GOOD_FUNCTION + "kl = f\n")
    (tmp_path / "bad.py").write_text("def f(prompts, responses, rows:\n    return 1\n")
    (tmp_path / "finished").mkdir()
    (tmp_path / "finished" / "run.json").write_text(json.dumps({"finished": True}))
    if "reward_function" in flags and "reward_model_name_or_path" not in flags:
        flags = flags | {"critic_model_name_or_path": None}
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["main.py", *arguments(BASE[step] | flags)])

    def never(config, stage):
        raise AssertionError("the bad input was accepted")

    try:
        status = run_main(step, CONFIGS[step], never)
    except SystemExit as exit:
        status = exit.code
    captured = capsys.readouterr()
    message_of(Result(status, captured.out, captured.err), *words)
    assert not (tmp_path / "out").exists()


def test_a_good_function_passes_the_rules(tmp_path, monkeypatch):
    from cli_runs import arguments
    from dschat.config.parse import parse

    (tmp_path / "good.py").write_text(GOOD_FUNCTION)
    monkeypatch.chdir(tmp_path)
    flags = BASE["ppo"] | {"critic_model_name_or_path": None, "reward_function": "good.py:f"}
    assert parse(PPOConfig, arguments(flags)).reward_function == "good.py:f"


# -- one of each step as a real process


def test_a_corrupt_row_as_a_process(sft_flags, tmp_path):
    file = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "a", "response": "b"}] * 3)
    file.write_text(file.read_text().replace('"a", "response"', '"a" "response"', 2).replace('"a" "', '"a", "', 1))
    result = run_process("sft", sft_flags | {"data_path": file, "output_dir": tmp_path / "out"})
    message_of(result, "rows.jsonl:2", "JSON")


def test_equal_pad_and_eos_as_a_process(reward_flags, tmp_path):
    base = with_tokens(reward_flags["model_name_or_path"], tmp_path / "base", pad_token="<eos>")
    result = run_process("reward", reward_flags | {"model_name_or_path": base, "output_dir": tmp_path / "out"})
    message_of(result, "--model_name_or_path", "pad and eos", "step 1")


def test_an_unknown_condition_as_a_process(tmp_path):
    flags = BASE["ppo"] | {"termination_condition": "bigram", "output_dir": tmp_path / "out"}
    message_of(run_process("ppo", flags), "--termination_condition bigram")


@pytest.mark.parametrize(
    "variables",
    [{"HF_HUB_OFFLINE": "1"}, {"HF_HUB_OFFLINE": None, "HF_ENDPOINT": "http://127.0.0.1:9"}],
    ids=["offline", "unreachable"],
)
def test_a_hub_name_without_the_hub(variables, sft_flags, tmp_path):
    flags = sft_flags | {"model_name_or_path": HUB_NAME, "output_dir": tmp_path / "out"}
    result = run_process("sft", flags, HF_HOME=str(tmp_path / "hf"), **variables)
    message_of(result, "--model_name_or_path", HUB_NAME, "Hugging Face hub", "hf download")


def test_the_quickstart_says_where_it_failed(tmp_path):
    from cli_runs import run_command

    blocked = tmp_path / "file"
    blocked.write_text("")
    result = run_command([sys.executable, TRAINING / "quickstart" / "main.py", "--small", "--output_dir", blocked])
    assert result.status != 0 and "Traceback" not in result.stderr, result.stderr
    assert str(blocked) in result.stderr


# -- data


ROWS = [{"prompt": f"question {i}", "chosen": f" yes {i}", "rejected": f" no {i}"} for i in range(40)]


def changed(place: int, **columns) -> list[dict]:
    """ROWS with one row changed; None removes a column."""
    row = {name: value for name, value in (ROWS[place] | columns).items() if value is not None}
    return [*ROWS[:place], row, *ROWS[place + 1 :]]


DATA = {
    "missing prompt": ("sft", changed(6, prompt=None), ["rows.jsonl:7", "'prompt'", "--prompt_key"]),
    "missing prompt in step 3": ("ppo", changed(6, prompt=None), ["rows.jsonl:7", "'prompt'", "--prompt_key"]),
    "number as prompt": ("sft", changed(0, prompt=5), ["rows.jsonl:1", "prompt"]),
    "number as response": ("reward", changed(39, chosen=5), ["rows.jsonl:40", "chosen"]),
    "missing response": ("sft", changed(3, chosen=None, rejected=None), ["rows.jsonl:4", "--response_key"]),
    "missing rejected": ("reward", changed(3, rejected=None), ["rows.jsonl:4", "rejected", "--rejected_key"]),
    "list of nothing": ("sft", changed(1, messages=[], prompt=None), ["rows.jsonl:2", "messages"]),
    "empty file": ("ppo", [], ["rows.jsonl", "empty"]),
    "fewer than a batch": ("sft", ROWS[:6], ["--data_path", "8"]),
    "fewer than a batch in step 2": ("reward", ROWS[:6], ["--data_path", "8"]),
    "fewer than a rollout": ("ppo", ROWS[:6], ["--data_path", "16"]),
}


@pytest.mark.parametrize("name", DATA)
def test_data(name, request, run, tmp_path):
    step, rows, words = DATA[name]
    file = write_jsonl(tmp_path / "rows.jsonl", rows)
    split = {"sft": "1,0,0", "reward": "0,1,0", "ppo": "0,0,1"}[step]
    result = run(step, request.getfixturevalue(f"{step}_flags") | {"data_path": file, "data_split": split})
    message_of(result, *words)


CORRUPT = {
    "cut short": b'{"prompt": "a", "response": "b"}\n{"prompt": "a", "resp',
    "not UTF-8": b'{"prompt": "a", "response": "b"}\n{"prompt": "\xff\xfe", "response": "b"}\n',
    "a list": b'{"prompt": "a", "response": "b"}\n["a", "b"]\n',
    "deep": b'{"prompt": "a", "response": "b"}\n' + b"[" * 100_000 + b"\n",
}


@pytest.mark.parametrize("name", CORRUPT)
def test_corrupt_rows(name, run, sft_flags, tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_bytes(CORRUPT[name])
    message_of(run("sft", sft_flags | {"data_path": file}), "rows.jsonl:2")


@pytest.mark.parametrize("step", STEPS)
def test_no_such_data(step, request, run, tmp_path):
    flags = request.getfixturevalue(f"{step}_flags")
    absent = tmp_path / "absent.jsonl"
    message_of(run(step, flags | {"data_path": absent}), f"--data_path {absent}", "no such file")


def test_other_paths_of_data(run, sft_flags, tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "notes.txt").write_text("x")
    (tmp_path / "rows.csv").write_text("prompt,response\na,b\n")
    (tmp_path / "rows.parquet").write_bytes(b"PAR1 but not really")
    for path, words in (
        ("Dahoas/rm-static", ["--data_path Dahoas/rm-static", "hub", "local"]),
        (tmp_path / "folder", ["--data_path", "train*.jsonl", "notes.txt"]),
        (tmp_path / "rows.csv", ["--data_path", ".jsonl"]),
        (tmp_path / "rows.parquet", ["--data_path", "rows.parquet"]),
    ):
        message_of(run("sft", sft_flags | {"data_path": path}), *words)


def test_one_bad_source_of_two_is_named(run, sft_flags, tmp_path):
    good = write_jsonl(tmp_path / "good.jsonl", ROWS)
    bad = write_jsonl(tmp_path / "bad.jsonl", changed(11, prompt=None))
    message_of(run("sft", sft_flags | {"data_path": [good, bad]}), "bad.jsonl:12")


def test_messages_without_a_template(run, sft_flags, tmp_path):
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    file = write_jsonl(tmp_path / "rows.jsonl", [{"messages": talk}] * 40)
    message_of(run("sft", sft_flags | {"data_path": file}), "rows.jsonl:", "chat template")


def test_prompts_that_are_all_too_long(run, sft_flags, reward_flags, ppo_flags, tmp_path):
    message_of(run("ppo", ppo_flags | {"max_prompt_seq_len": 4}), "--max_prompt_seq_len 4", "prompt too long")
    for step, flags in (("sft", sft_flags), ("reward", reward_flags)):
        message_of(run(step, flags | {"max_seq_len": 4}), "--max_seq_len 4")


# -- models and tokenizers


def with_tokens(model, folder, **tokens):
    """A copy of a model's folder whose tokenizer has other special tokens; None removes one."""
    shutil.copytree(model, folder, ignore=shutil.ignore_patterns("checkpoints", "tensorboard"))
    file = folder / "tokenizer_config.json"
    content = {k: v for k, v in (json.loads(file.read_text()) | tokens).items() if v is not None}
    file.write_text(json.dumps(content))
    return folder


MODEL_FLAGS = [
    ("sft", "model_name_or_path"),
    ("reward", "model_name_or_path"),
    ("ppo", "actor_model_name_or_path"),
    ("ppo", "critic_model_name_or_path"),
    ("ppo", "reward_model_name_or_path"),
]


@pytest.mark.parametrize(("step", "flag"), MODEL_FLAGS)
def test_no_such_model(step, flag, request, run, tmp_path):
    flags = request.getfixturevalue(f"{step}_flags")
    for path in (tmp_path / "absent", HUB_NAME, "no-such-model"):
        message_of(run(step, flags | {flag: path}), f"--{flag} {path}")


@pytest.mark.parametrize("damage", ["empty folder", "no weights", "cut weights", "no config", "bad config", "pickle"])
@pytest.mark.parametrize(("step", "flag"), MODEL_FLAGS[:3])
def test_a_damaged_model(step, flag, damage, request, run, tmp_path):
    flags = request.getfixturevalue(f"{step}_flags")
    folder = tmp_path / "damaged"
    shutil.copytree(flags[flag], folder, ignore=shutil.ignore_patterns("checkpoints", "tensorboard"))
    weights, config = folder / "model.safetensors", folder / "config.json"
    if damage == "empty folder":
        shutil.rmtree(folder)
        folder.mkdir()
    elif damage == "no weights":
        weights.unlink()
    elif damage == "cut weights":
        weights.write_bytes(weights.read_bytes()[:5000])
    elif damage == "no config":
        config.unlink()
    elif damage == "bad config":
        config.write_text("{")
    else:
        weights.rename(folder / "pytorch_model.bin")
    message_of(run(step, flags | {flag: folder}), f"--{flag} {folder}")


@pytest.mark.parametrize(("step", "flag"), MODEL_FLAGS)
def test_a_tokenizer_without_eos(step, flag, request, run, tmp_path):
    flags = request.getfixturevalue(f"{step}_flags")
    model = flags.get(flag) or flags["critic_model_name_or_path"]
    folder = with_tokens(model, tmp_path / "model", eos_token=None)
    message_of(run(step, flags | {flag: folder}), f"--{flag} {folder}", "no eos token")


@pytest.mark.parametrize(("step", "flag"), MODEL_FLAGS[1:])
@pytest.mark.parametrize("pad", ["<eos>", None], ids=["pad is eos", "no pad"])
def test_pad_and_eos(step, flag, pad, request, run, tmp_path):
    flags = request.getfixturevalue(f"{step}_flags")
    model = flags.get(flag) or flags["critic_model_name_or_path"]
    folder = with_tokens(model, tmp_path / "model", pad_token=pad)
    message_of(run(step, flags | {flag: folder}), f"--{flag} {folder}", "pad")


@pytest.mark.parametrize("flag", ["critic_model_name_or_path", "reward_model_name_or_path"])
def test_other_tokenizers(flag, run, ppo_flags, reward, inputs, tmp_path):
    from dschat.models.tiny import train_tokenizer

    shutil.copytree(reward, tmp_path / "other")
    rows = read_jsonl(inputs / "data" / "comparisons" / "train.jsonl")
    train_tokenizer([row["summaries"][0]["text"] for row in rows], 400).save_pretrained(tmp_path / "other")
    result = run("ppo", ppo_flags | {flag: tmp_path / "other"})
    message_of(result, "--actor_model_name_or_path", f"--{flag}", "different tokenizers")


def test_a_model_without_a_score_head(run, reward_flags, sft, tmp_path):
    from transformers import BertConfig, BertModel

    tokenizer = AutoTokenizer.from_pretrained(sft)
    size = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    BertModel(BertConfig(vocab_size=len(tokenizer), **size)).save_pretrained(tmp_path / "bert")
    tokenizer.save_pretrained(tmp_path / "bert")
    message_of(run("reward", reward_flags | {"model_name_or_path": tmp_path / "bert"}), "--model_name_or_path")


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("text", ["end of turn", ""], ids=["several", "empty"])
def test_the_end_token_is_one_token(step, text, request, run):
    flags = request.getfixturevalue(f"{step}_flags")
    message_of(run(step, flags | {"end_of_conversation_token": text}), "--end_of_conversation_token")


@pytest.mark.parametrize("step", STEPS)
def test_fp16_without_a_gpu(step, request, run):
    message_of(run(step, request.getfixturevalue(f"{step}_flags") | {"dtype": "fp16"}), "--dtype fp16", "GPU")


# -- functions


FAULTS = {
    "two dimensions": ("import torch\ndef f(p, r, rows):\n    return torch.zeros(len(r), 1)\n", ["(16, 1)"]),
    "one number": ("def f(p, r, rows):\n    return 1.0\n", ["one number per response"]),
    "too few": ("def f(p, r, rows):\n    return [0.0] * (len(r) - 1)\n", ["one number per response"]),
    "not finite": ("def f(p, r, rows):\n    return [float('nan')] * len(r)\n", ["finite"]),
    "nothing": ("def f(p, r, rows):\n    return None\n", []),
    "words": ("def f(p, r, rows):\n    return ['good'] * len(r)\n", []),
    "fails on import": ("import absent_module\ndef f(p, r, rows):\n    return [0.0]\n", ["absent_module"]),
    "exits on import": ("import sys\nsys.exit(0)\ndef f(p, r, rows):\n    return [0.0]\n", []),
    "takes other arguments": ("def f(responses):\n    return [0.0] * len(responses)\n", []),
    "is no function": ("f = 3\n", ["f"]),
}


@pytest.mark.parametrize("flag", ["reward_function", "metric_function"])
@pytest.mark.parametrize("name", FAULTS)
def test_functions(name, flag, run, ppo_flags, tmp_path):
    source, words = FAULTS[name]
    file = tmp_path / "own.py"
    file.write_text(source)
    critic = {"critic_model_name_or_path": None} if flag == "reward_function" else {}
    message_of(run("ppo", ppo_flags | critic | {flag: f"{file}:f"}), f"--{flag}", *words)


CONDITIONS = {
    "other shape": "def f(trajectory, tokenizer):\n    return trajectory.response_mask[:, :1]\n",
    "other type": "def f(trajectory, tokenizer):\n    return trajectory.response_mask.long()\n",
    "a list": "def f(trajectory, tokenizer):\n    return [[True]]\n",
    "fails on import": "import absent_module\ndef f(trajectory, tokenizer):\n    return 1\n",
}


@pytest.mark.parametrize("name", CONDITIONS)
def test_conditions(name, run, ppo_flags, tmp_path):
    file = tmp_path / "own.py"
    file.write_text(CONDITIONS[name])
    message_of(run("ppo", ppo_flags | {"termination_condition": f"{file}:f"}), "--termination_condition")


# -- the rest


@pytest.mark.parametrize("step", STEPS)
def test_an_output_dir_that_cannot_be_made(step, request, run, tmp_path):
    (tmp_path / "file").write_text("")
    flags = request.getfixturevalue(f"{step}_flags") | {"output_dir": tmp_path / "file" / "out"}
    message_of(run(step, flags), "--output_dir")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"train_batch_size": 1024}', ["--deepspeed_config", "train_batch_size"]),
        ('{"train_micro_batch_size_per_gpu": 3}', ["--deepspeed_config", "train_micro_batch_size_per_gpu"]),
        ("[]", ["--deepspeed_config"]),
        ("{", ["--deepspeed_config"]),
    ],
)
def test_a_deepspeed_config_that_contradicts(content, words, run, sft_flags, tmp_path):
    file = tmp_path / "ds.json"
    file.write_text(content)
    message_of(run("sft", sft_flags | {"deepspeed_config": file}), *words)


def test_no_temporary_record_counts_as_finished(run, ppo_flags, tmp_path):
    """A run that stopped at bad input leaves no folder that looks like a result."""
    run("ppo", ppo_flags | {"max_prompt_seq_len": 4}).expect(2)
    record = tmp_path / "out" / "run.json"
    assert not record.exists() or json.loads(record.read_text())["finished"] is False
    assert not (tmp_path / "out" / "actor").exists()
