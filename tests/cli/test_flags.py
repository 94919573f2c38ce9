# SPDX-License-Identifier: Apache-2.0
"""Each main with the flags and the forms of data that change what it does: forked, a few updates each."""

import json
import math

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from cli_runs import evaluation_rows, read_jsonl, training_rows, write_jsonl

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}<assistant>"
FUNCTIONS = """
import torch

def length(prompts, responses, rows):
    assert len(prompts) == len(responses) == len(rows)
    return torch.tensor([float(len(response)) for response in responses])

def subreddit(prompts, responses, rows):
    return [float(len(row["info"]["subreddit"])) for row in rows]

def thirds(trajectory, tokenizer):
    assert tokenizer.eos_token == "<eos>"
    mask = trajectory.response_mask
    return mask & (mask.cumsum(1) % 3 == 0)
"""


@pytest.fixture
def functions(tmp_path):
    """A file of reward functions and a termination condition."""
    file = tmp_path / "own.py"
    file.write_text(FUNCTIONS)
    return file


@pytest.fixture(scope="session")
def texts(inputs):
    """Prompt, better and worse response of every training comparison, without leading spaces."""
    rows = read_jsonl(inputs / "data" / "comparisons" / "train.jsonl")
    return [
        {
            "prompt": row["info"]["post"],
            "chosen": row["summaries"][row["choice"]]["text"],
            "rejected": row["summaries"][1 - row["choice"]]["text"],
        }
        for row in rows
    ]


def with_template(model, folder):
    """A copy of a model's folder whose tokenizer has a chat template."""
    import shutil

    shutil.copytree(model, folder, ignore=shutil.ignore_patterns("checkpoints", "tensorboard"))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


def own_metrics(rows):
    """Metrics without what depends on the clock."""
    return [{k: v for k, v in row.items() if k != "seconds" and not k.startswith("time/")} for row in rows]


# -- forms of data


def test_messages_in_all_steps(run, sft_flags, reward_flags, ppo_flags, sft, reward, texts, tmp_path):
    talks = [
        {
            "messages": [{"role": "user", "content": t["prompt"]}, {"role": "assistant", "content": t["chosen"]}],
            "rejected": t["rejected"],
        }
        for t in texts
    ]
    data = write_jsonl(tmp_path / "talks.jsonl", talks)
    actor, critic = with_template(sft, tmp_path / "actor"), with_template(reward, tmp_path / "critic")
    common = {"data_path": data, "data_split": "20,20,20"}
    for step, flags in (
        ("sft", sft_flags | {"model_name_or_path": actor}),
        ("reward", reward_flags | {"model_name_or_path": actor}),
        ("ppo", ppo_flags | {"actor_model_name_or_path": actor, "critic_model_name_or_path": critic}),
    ):
        run(step, flags | common | {"output_dir": tmp_path / step}).expect(0)
        assert training_rows(tmp_path / step), step
        # 64 rows: 61 to train (95 to 5), of which a third is each step's
        assert json.loads((tmp_path / step / "run.json").read_text())["data"]["sources"][0]["train"] in (20, 21)
    sample = read_jsonl(tmp_path / "ppo" / "samples" / "update-000000.jsonl")[0]
    assert sample["prompt"].startswith("<user>") and sample["prompt"].endswith("\n<assistant>")
    assert AutoTokenizer.from_pretrained(tmp_path / "ppo" / "actor").chat_template == TEMPLATE


def test_parquet_in_all_steps(run, sft_flags, reward_flags, ppo_flags, texts, tmp_path):
    import pyarrow
    from pyarrow import parquet

    folder = tmp_path / "tables"
    folder.mkdir()
    columns = {name: [text[name] for text in texts] for name in ("prompt", "chosen", "rejected")}
    table = pyarrow.table({"question": columns["prompt"], "good": columns["chosen"], "bad": columns["rejected"]})
    parquet.write_table(table.slice(0, 48), folder / "train-00000-of-00001.parquet")
    parquet.write_table(table.slice(48), folder / "test-00000-of-00001.parquet")
    names = {"prompt_key": "question", "chosen_key": "good", "rejected_key": "bad"}
    common = {"data_path": folder, "data_split": "1,1,1", **names}
    for step, flags in (("sft", sft_flags), ("reward", reward_flags), ("ppo", ppo_flags)):
        run(step, flags | common | {"output_dir": tmp_path / step}).expect(0)
        sources = json.loads((tmp_path / step / "run.json").read_text())["data"]["sources"]
        assert [source["name"] for source in sources] == ["tables"] and sources[0]["train"] == 16
    assert training_rows(tmp_path / "ppo")[-1]["samples"] == 16


@pytest.mark.parametrize("step", ["sft", "reward", "ppo"])
def test_two_sources(step, request, run, texts, tmp_path):
    flags = request.getfixturevalue(f"{step}_flags")
    own = write_jsonl(tmp_path / "own.jsonl", texts)
    split = {"sft": "1,0,0", "reward": "0,32,32", "ppo": "0,32,32"}[step]
    paths = {"data_path": [flags["data_path"], own], "data_split": split}
    run(step, flags | paths).expect(0)
    record = json.loads((tmp_path / "out" / "run.json").read_text())
    first, second = record["data"]["sources"]
    assert (first["train"], second["name"]) == (32, "own")
    assert second["train"] in ({"sft": (60, 61)}.get(step, (30, 31)))
    assert len(record["data"]["sha256"]) == 3
    card = (tmp_path / "out" / ("actor" if step == "ppo" else ".") / "README.md").read_text()
    assert "- `own`:" in card and f"- `{first['name']}`:" in card


def test_a_response_column(run, sft_flags, texts, tmp_path):
    rows = [{"prompt": text["prompt"], "answer": text["chosen"]} for text in texts]
    data = write_jsonl(tmp_path / "plain.jsonl", rows)
    run("sft", sft_flags | {"data_path": data, "response_key": "answer"}).expect(0)
    assert len(training_rows(tmp_path / "out")) == 7  # of 61 rows


def test_too_long_rows_are_counted(run, sft_flags, ppo_flags, texts, tmp_path):
    rows = [dict(text, prompt=text["prompt"] * (20 if i % 4 == 0 else 1)) for i, text in enumerate(texts)]
    folder = tmp_path / "mixed"
    write_jsonl(folder / "train.jsonl", rows)
    write_jsonl(folder / "eval.jsonl", texts[:8])
    common = {"data_path": folder, "data_split": "1,0,0"}
    screen = run("sft", sft_flags | common | {"output_dir": tmp_path / "sft"}).expect(0).stderr
    record = json.loads((tmp_path / "sft" / "run.json").read_text())
    assert sum(record["data"]["dropped"]["train"].values()) == 16 and record["data"]["dropped"]["eval"] == {}
    assert "16 rows dropped" in screen
    screen = run("ppo", ppo_flags | common | {"data_split": "0,0,1", "output_dir": tmp_path / "ppo"}).expect(0).stderr
    assert "16 rows dropped (prompt too long)" in screen
    assert training_rows(tmp_path / "ppo")[-1]["samples"] == 48


# -- flags of steps 1 and 2


def test_sft_on_prompt(run, sft, sft_flags, tmp_path):
    run("sft", sft_flags | {"sft_on_prompt": True}).expect(0)
    first, plain = evaluation_rows(tmp_path / "out")[0], evaluation_rows(sft)[0]
    assert first["eval/loss"] != pytest.approx(plain["eval/loss"], abs=1e-7)  # other tokens count
    assert training_rows(tmp_path / "out")[-1]["loss/sft"] < training_rows(tmp_path / "out")[0]["loss/sft"]


@pytest.mark.parametrize("step", ["sft", "reward"])
def test_accumulation_and_checkpointing_change_nothing(step, request, run, tmp_path):
    plain = training_rows(request.getfixturevalue(step))
    changed = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "gradient_checkpointing": True}
    run(step, request.getfixturevalue(f"{step}_flags") | changed).expect(0)
    rows = training_rows(tmp_path / "out")
    assert len(rows) == len(plain) == 4
    for row, other in zip(rows, plain, strict=True):
        assert row["samples"] == other["samples"] and row["lr"] == other["lr"]
        for key in (f"loss/{step}", "grad_norm"):
            assert row[key] == pytest.approx(other[key], rel=2e-3, abs=1e-6), key
    batches = json.loads((tmp_path / "out" / "run.json").read_text())["batches"]
    assert (batches["micro_batch"], batches["accumulation"], batches["global_batch"]) == (2, 4, 8)


def test_the_global_batch_sets_the_accumulation(run, sft_flags, tmp_path):
    run("sft", sft_flags | {"per_device_train_batch_size": 2, "global_batch_size": 16}).expect(0)
    batches = json.loads((tmp_path / "out" / "run.json").read_text())["batches"]
    assert (batches["accumulation"], batches["global_batch"], batches["total_updates"]) == (8, 16, 2)


@pytest.mark.parametrize("step", ["sft", "reward"])
def test_clipping_schedule_and_evaluation(step, request, run, tmp_path):
    flags = {
        "gradient_clipping": 0.001,
        "lr_scheduler_type": "linear",
        "warmup_ratio": 0.5,
        "num_train_epochs": 2,
        "eval_interval": 3,
        "eval_iters": 1,
        "per_device_eval_batch_size": 4,
        "weight_decay": 0,
    }
    run(step, request.getfixturevalue(f"{step}_flags") | flags).expect(0)
    rows = training_rows(tmp_path / "out")
    # 8 updates, warm-up over 4, the rate of the first is 0
    assert [row["lr"] for row in rows] == pytest.approx(
        [3e-3 * x for x in (0, 1 / 4, 2 / 4, 3 / 4, 1, 3 / 4, 2 / 4, 1 / 4)]
    )
    assert all(row["grad_norm"] > 0.001 for row in rows[:1]), "the norm is that before clipping"
    assert [row["update"] for row in evaluation_rows(tmp_path / "out")] == [0, 3, 6, 8]


@pytest.mark.parametrize("spelling", [{"bf16": True}, {"dtype": "bf16"}], ids=["--bf16", "--dtype"])
@pytest.mark.parametrize("step", ["sft", "reward", "ppo"])
def test_bf16_on_a_cpu(step, spelling, request, run, tmp_path):
    flags = request.getfixturevalue(f"{step}_flags")
    run(step, flags | spelling).expect(0)
    assert all(math.isfinite(v) for row in read_jsonl(tmp_path / "out" / "metrics.jsonl") for v in row.values())
    folder = tmp_path / "out" / ("actor" if step == "ppo" else "")
    auto_class = AutoModelForSequenceClassification if step == "reward" else AutoModelForCausalLM
    assert auto_class.from_pretrained(folder).dtype == torch.bfloat16
    name = "config.json" if step == "ppo" else "train_config.json"
    assert json.loads((tmp_path / "out" / name).read_text())["dtype"] == "bf16"


@pytest.mark.parametrize("step", ["sft", "reward", "ppo"])
def test_no_self_checks_and_inert_flags(step, request, run):
    inert = {"print_loss": True, "num_padding_at_beginning": 0, "enable_hybrid_engine": True, "inference_tp_size": 1}
    extra = {"no_self_checks": True, "deepspeed": True, "local_rank": 0}
    flags = request.getfixturevalue(f"{step}_flags") | inert | extra
    screen = run(step, flags).expect(0).stderr
    assert all(screen.count(f"--{name} does nothing here") == 1 for name in inert)


def test_a_model_without_pad_goes_through_all_steps(run, inputs, sft_flags, reward_flags, prompt_flags, tmp_path):
    import shutil

    base = tmp_path / "base"
    shutil.copytree(inputs / "model", base)
    tokenizer = AutoTokenizer.from_pretrained(base)
    vocabulary = len(tokenizer)
    tokenizer.pad_token = "<eos>"  # as for Llama and GPT-2, though <pad> is held in reserve here
    tokenizer.save_pretrained(base)
    run("sft", sft_flags | {"model_name_or_path": base, "output_dir": tmp_path / "sft"}).expect(0)
    made = AutoTokenizer.from_pretrained(tmp_path / "sft")
    assert (made.pad_token, made.eos_token) == ("<pad>", "<eos>") and len(made) == vocabulary
    model = {"model_name_or_path": tmp_path / "sft", "output_dir": tmp_path / "reward"}
    run("reward", reward_flags | model).expect(0)
    models = {"actor_model_name_or_path": tmp_path / "sft", "critic_model_name_or_path": tmp_path / "reward"}
    run("ppo", prompt_flags | models | {"output_dir": tmp_path / "ppo"}).expect(0)
    config = AutoModelForSequenceClassification.from_pretrained(tmp_path / "ppo" / "critic").config
    assert config.pad_token_id == made.pad_token_id != config.eos_token_id


def test_an_added_pad_token_grows_the_model_and_survives(run, inputs, sft_flags, reward_flags, tmp_path):
    from transformers import AutoModelForCausalLM as Model

    from factories import make_causal_lm, make_tokenizer, save_folder

    rows = read_jsonl(inputs / "data" / "demonstrations" / "train.jsonl")
    corpus = [summary["text"] for row in rows for summary in row["summaries"]]
    tokenizer = make_tokenizer(300, corpus, pad_token=None)
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    backend["added_tokens"] = [token for token in backend["added_tokens"] if token["content"] != "<pad>"]
    # <pad> is renamed, so that nothing is left in reserve
    text = json.dumps(backend).replace('"<pad>"', '"<old>"')
    from tokenizers import Tokenizer

    tokenizer._tokenizer = Tokenizer.from_str(text)
    base = save_folder(tmp_path / "base", make_causal_lm("gemma", vocab_size=len(tokenizer)), tokenizer)
    flags = sft_flags | {"model_name_or_path": base, "output_dir": tmp_path / "sft", "max_seq_len": 400}
    screen = run("sft", flags).expect(0).stderr
    assert "added <pad>" in screen
    made = AutoTokenizer.from_pretrained(tmp_path / "sft")
    assert made.pad_token == "<pad>" and made.pad_token_id == len(tokenizer)
    assert Model.from_pretrained(tmp_path / "sft").get_input_embeddings().num_embeddings == len(tokenizer) + 1
    flags = reward_flags | {"model_name_or_path": tmp_path / "sft", "max_seq_len": 400}
    run("reward", flags).expect(0)


def test_an_own_end_token(run, sft_flags, inputs, tmp_path):
    import shutil

    base = tmp_path / "base"
    shutil.copytree(inputs / "model", base)
    run("sft", sft_flags | {"model_name_or_path": base, "end_of_conversation_token": "|"}).expect(0)
    assert training_rows(tmp_path / "out")


# -- flags of step 3


def test_a_reward_function_needs_no_other_model(run, prompt_flags, sft, functions, tmp_path):
    own = {
        "actor_model_name_or_path": sft,
        "reward_function": f"{functions}:length",
        "metric_function": f"{functions}:subreddit",
    }
    run("ppo", prompt_flags | own).expect(0)
    samples = read_jsonl(tmp_path / "out" / "samples" / "update-000004.jsonl")
    assert all(sample["score"] == len(sample["response"]) for sample in samples)
    for sample in samples:
        subreddit = sample["prompt"].split("\n")[1].removeprefix("Subreddit: r/")
        assert sample["subreddit"] == len(subreddit)
    assert all("objective/subreddit" in row for row in training_rows(tmp_path / "out"))
    critic = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out" / "critic")
    assert critic.score.out_features == 1 and float(critic.score.weight.abs().max()) > 0


def test_a_separate_reward_model(run, ppo_flags, sft, reward, ppo, tmp_path):
    models = {"critic_model_name_or_path": sft, "reward_model_name_or_path": reward}
    run("ppo", ppo_flags | models).expect(0)
    before, same = evaluation_rows(tmp_path / "out")[0], evaluation_rows(ppo)[0]
    assert before["eval/scores"] == pytest.approx(same["eval/scores"], abs=1e-6)  # the critic differs, the score not
    sample = read_jsonl(tmp_path / "out" / "samples" / "update-000000.jsonl")[0]
    assert {token["value"] for token in sample["tokens"]} == {0.0}  # a new value head is zero


@pytest.mark.parametrize("mode", ["chunk", "prefix", "token"])
def test_ppl(mode, run, ppo_flags, tmp_path):
    run("ppo", ppo_flags | {"termination_condition": "ppl", "ppl_mode": mode}).expect(0)
    assert all(1 <= row["macro/length"] <= 16 for row in training_rows(tmp_path / "out"))


def test_randomized_over_two_epochs(run, ppo_flags, tmp_path):
    flags = ppo_flags | {
        "termination_condition": "randomized",
        "num_train_epochs": 2,
        "repeat_times": 2,
        "ngram_lengths": [1, 3],
        "max_answer_seq_len": 24,
    }
    for name in ("first", "again"):
        run("ppo", flags | {"output_dir": tmp_path / name}).expect(0)
    rows = training_rows(tmp_path / "first")
    assert [row["update"] for row in rows] == [2, 4, 6, 8]
    assert [row["samples"] for row in rows] == [16, 32, 48, 64]
    assert own_metrics(rows) == own_metrics(training_rows(tmp_path / "again"))
    for sample in read_jsonl(tmp_path / "first" / "samples" / "update-000008.jsonl"):
        actions = [token["macro_action"] for token in sample.get("tokens", [])]
        lengths = [actions.count(action) for action in dict.fromkeys(actions)]
        assert sorted(lengths[:4]) == [1, 1, 3, 3] or len(actions) < 8
    segmented = [
        [[token["macro_action"] for token in sample["tokens"]] for sample in read_jsonl(file) if "tokens" in sample]
        for file in sorted((tmp_path / "first" / "samples").glob("*.jsonl"))
    ]
    assert len({tuple(actions) for actions in segmented[0]}) > 1  # rows differ


def test_an_own_termination_condition(run, ppo_flags, functions, tmp_path):
    run("ppo", ppo_flags | {"termination_condition": f"{functions}:thirds"}).expect(0)
    for sample in read_jsonl(tmp_path / "out" / "samples" / "update-000004.jsonl"):
        actions = [token["macro_action"] for token in sample.get("tokens", [])]
        assert actions == [position // 3 for position in range(len(actions))]


def test_vanilla_ppo_and_whole_responses(run, ppo_flags, tmp_path):
    for ngram in ("1", "inf"):
        run("ppo", ppo_flags | {"ngram": ngram, "output_dir": tmp_path / ngram}).expect(0)
    assert all(row["macro/length"] == 1 for row in training_rows(tmp_path / "1"))
    assert all(row["macro/count"] == 1 for row in training_rows(tmp_path / "inf"))


def test_gradient_flags_of_step_3_change_nothing(run, ppo_flags, tmp_path):
    """Accumulation, checkpointing and generation in parts; greedy, because the draws depend on the batch."""
    greedy = ppo_flags | {"top_k": 1}
    changed = {
        "per_device_training_batch_size": 2,
        "gradient_accumulation_steps": 4,
        "actor_gradient_checkpointing": True,
        "critic_gradient_checkpointing": True,
        "per_device_generation_batch_size": 8,
        "generation_batches": 2,
    }
    run("ppo", greedy | {"output_dir": tmp_path / "plain"}).expect(0)
    run("ppo", greedy | changed | {"output_dir": tmp_path / "changed"}).expect(0)
    first, other = (training_rows(tmp_path / name)[0] for name in ("plain", "changed"))
    assert set(first) == set(other)
    for key in set(first) - {"seconds", "val/ratio"}:
        if not key.startswith("time/"):
            assert other[key] == pytest.approx(first[key], rel=5e-3, abs=1e-5), key


def test_the_other_variants_together(run, ppo_flags, tmp_path):
    flags = {
        "adaptive_kl_target": 0.5,
        "adaptive_kl_horizon": 100,
        "kl_ctl": 0.1,
        "kl_estimator": "k3",
        "value_function": "position",
        "macro_reward": "mean",
        "isolate_last_token": True,
        "policy_ratio": "macro_mean",
        "whiten_advantages": True,
        "clip_reward_value": 0.001,
        "missing_eos_penalty": 1.0,
        "ppo_epochs": 2,
        "temperature": 0.7,
        "top_p": 0.9,
        "cliprange": 0.1,
        "cliprange_value": 0.1,
        "gamma": 0.99,
        "lam": 0.9,
        "print_answers": True,
        "tensorboard_path": tmp_path / "board",
        "enable_tensorboard": True,
    }
    screen = run("ppo", ppo_flags | flags).expect(0).stderr
    rows = training_rows(tmp_path / "out")
    assert [row["update"] for row in rows] == [4, 8] and rows[0]["objective/kl_coef"] == 0.1
    assert rows[1]["objective/kl_coef"] < 0.1  # the KL is below its target
    assert list((tmp_path / "board").glob("events*")) and not (tmp_path / "out" / "tensorboard").exists()
    assert screen.count("response: ") >= 4 and "--top_k 0 and --top_p 0.9" in screen
    for sample in read_jsonl(tmp_path / "out" / "samples" / "update-000000.jsonl"):
        actions = [token["macro_action"] for token in sample.get("tokens", [])]
        assert actions[-1:] != actions[-2:-1]


@pytest.mark.parametrize("value_function", ["equal", "unit", "position", "first"])
@pytest.mark.parametrize("ratio", ["token", "macro"])
def test_value_functions_and_ratios(value_function, ratio, run, ppo_flags, tmp_path):
    run("ppo", ppo_flags | {"value_function": value_function, "policy_ratio": ratio}).expect(0)
    assert all(math.isfinite(v) for row in read_jsonl(tmp_path / "out" / "metrics.jsonl") for v in row.values())


def test_a_learnable_reward_rises(run, prompt_flags, sft, functions, tmp_path):
    functions.write_text("def spaces(p, responses, rows):\n    return [r.count(' ') / 4 for r in responses]\n")
    own = {
        "actor_model_name_or_path": sft,
        "reward_function": f"{functions}:spaces",
        "data_split": "0,0,1",
        "ngram": 1,
        "ppo_epochs": 2,
        "num_train_epochs": 8,
        "actor_learning_rate": 3e-3,
        "kl_ctl": 0,
    }
    run("ppo", prompt_flags | own).expect(0)
    evaluated = evaluation_rows(tmp_path / "out")
    assert evaluated[-1]["eval/scores"] > 1.3 * evaluated[0]["eval/scores"] > 0
