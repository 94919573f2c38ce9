# SPDX-License-Identifier: Apache-2.0
"""`dschat plan`: what it says, and how it ends."""

import json
import re
from pathlib import Path

import pytest
from transformers import GemmaConfig

from cli_runs import write_jsonl
from dschat.cli import main as dschat


@pytest.fixture(name="model")
def _model(tmp_path):
    """A folder with nothing but a config."""
    config = GemmaConfig(
        vocab_size=4000,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
    )
    config.save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


def main(words):
    """`dschat plan`."""
    return dschat(["plan", *words])


def planned(capsys, *words) -> list[dict]:
    """The plans that a command prints, in JSON."""
    assert main([*words, "--json"]) in (0, 1)
    return json.loads(capsys.readouterr().out)


def ppo_flags(model: str) -> list[str]:
    return ["--actor_model_name_or_path", model, "--critic_model_name_or_path", model]


def test_the_flags_of_a_step(model, capsys):
    """Two layers: (4000 · 64 + 64) + 2 · (64 · 64 · 2 + 64 · 32 · 2 + 3 · 64 · 128 + 2 · 64) weights."""
    sizes = ["--per_device_generation_batch_size", "8", "--per_device_training_batch_size", "4"]
    words = ["--step", "3", "--gpus", "2", "--prompts", "100", *ppo_flags(model), *sizes]
    (plan,), (graphs,) = (planned(capsys, *words, "--decode_graphs", how) for how in ("off", "auto"))
    parameters = 4000 * 64 + 64 + 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128 + 2 * 64)
    models = {one["role"]: one for one in plan["models"]}
    assert list(models) == ["actor", "critic", "reference", "reward model"]
    assert models["actor"]["parameters"] == parameters and models["critic"]["trained"] == parameters + 64
    assert models["actor"]["bytes"]["optimizer"] == 12 * parameters // 2 and models["reference"]["trained"] == 0
    phases = {phase["name"]: phase for phase in plan["phases"]}
    assert list(phases) == ["generate", "score", "train", "update"]
    # 8 slots of 512 + 512 tokens, 2 tensors of 2 layers, 2 key-value heads of 16, bf16.
    cache = 8 * 1024 * 2 * 2 * 2 * 16 * 2
    assert phases["generate"]["parts"]["KV cache"] == cache
    # CUDA graphs write into the same buffers in every rollout, and hold what a step of 8 rows makes.
    before, after = ([phase["kept"] for phase in one["phases"]] for one in (plan, graphs))
    (step,) = {kept - smaller - cache for kept, smaller in zip(after, before, strict=True)}
    assert phases["generate"]["parts"]["logits"] < step < 1.1 * phases["generate"]["parts"]["logits"]
    assert graphs["phases"][0]["total"] == plan["phases"][0]["total"] + step
    assert plan["peak"] == max(phase["total"] for phase in plan["phases"]) + 2_500_000_000
    assert plan["counts"]["updates"] == 100 // 16 * 2 and plan["counts"]["trained"] == 96
    assert plan["fits"] is True


def test_models_that_are_kept_along_the_way_take_room_on_the_disk(model, capsys):
    words = ["--step", "3", "--prompts", "1000", *ppo_flags(model)]
    assert main(words) in (0, 1)
    assert "--save_models" not in capsys.readouterr().out
    assert main([*words, "--save_models", "50"]) in (0, 1)
    assert re.search(r"Disk: .* --save_models keeps 0\.0 GB more every 50 updates\.", capsys.readouterr().out)


def test_an_evaluation_may_score_more_rows_at_once_than_a_rollout(model, capsys):
    """By tokens, passes without gradients hold 4 times as much, of a rollout's 8 rows or an evaluation's 32."""
    sizes = ["--per_device_generation_batch_size", "8", "--per_device_training_batch_size", "8"]
    sizes += ["--max_tokens_per_micro_batch", "8192"]
    words = ["--step", "3", "--prompts", "100", *ppo_flags(model), *sizes]

    def scoring(*more: str, gpus: str = "1") -> int:
        (plan,) = planned(capsys, *words, "--gpus", gpus, *more)
        return next(phase["parts"] for phase in plan["phases"] if phase["name"] == "score")["activations"]

    assert scoring("--eval_prompts", "32") == scoring("--eval_prompts", "0") == scoring("--eval_prompts", "512")
    assert scoring("--eval_prompts", "64", gpus="2") == scoring("--eval_prompts", "32")
    assert scoring("--eval_prompts", "32", gpus="4") == scoring("--eval_prompts", "8"), "8 rows a process"
    assert scoring("--eval_prompts", "32") / scoring("--eval_prompts", "8") == pytest.approx(4, rel=0.01)


def test_the_data_of_a_step_in_any_spelling(model, tmp_path, capsys):
    """None is made up beside them."""
    content = [{"prompt": "a", "chosen": f" b{n}", "rejected": " c"} for n in range(8)]
    rows = write_jsonl(tmp_path / "rows.jsonl", content)
    words = ["--step", "dpo", "--gpus", "1", "--model_name_or_path", model, "--per_device_train_batch_size", "1"]
    counts = []
    for flags in (["--data_path", str(rows)], ["--data-path", str(rows)], [f"--data_path={rows}"]):
        (plan,) = planned(capsys, *words, *flags)
        counts.append(plan["counts"])
    assert counts[0] and counts == [counts[0]] * 3


def test_a_run_without_a_critic(model, capsys):
    """8 prompts with 4 responses each are 32 slots; 100 prompts make 6 rollouts of 16, each with 64 / 8 updates."""
    flags = ["--actor_model_name_or_path", model, "--reward_model_name_or_path", model]
    flags += ["--advantage_estimator", "rloo", "--samples_per_prompt", "4", "--per_device_generation_batch_size", "8"]
    flags += ["--per_device_training_batch_size", "4"]
    words = ["--step", "3", "--gpus", "2", "--prompts", "100"]
    (plan,) = planned(capsys, *words, *flags, "--decode_graphs", "off")
    assert [one["role"] for one in plan["models"]] == ["actor", "reference", "reward model"]
    phases = {phase["name"]: phase for phase in plan["phases"]}
    assert phases["generate"]["parts"]["KV cache"] == 32 * 1024 * 2 * 2 * 2 * 16 * 2
    assert plan["counts"]["updates"] == 6 * (64 // 8) and plan["counts"]["trained"] == 96
    assert main([*words, *flags]) == 0
    out = capsys.readouterr().out
    assert "96 prompts, 4 responses each." in out and "critic" not in out
    assert main([*words, *flags, "--gpu_memory", "2.51"]) == 1 and "critic" not in capsys.readouterr().out


def test_later_turns_need_more_columns(model, tmp_path, capsys):
    """An episode of 512 + 511 tokens shares columns with one whose reply may have 512 tokens, or those of a turn."""
    (tmp_path / "game.py").write_text("class Guess: ...")
    flags = ["--actor_model_name_or_path", model, "--environment", f"{tmp_path}/game.py:Guess"]
    flags += ["--critic_model_name_or_path", model, "--decode_graphs", "off"]
    flags += ["--per_device_generation_batch_size", "8", "--per_device_training_batch_size", "4"]
    words = ["--step", "3", "--gpus", "2", "--prompts", "100", *flags]
    (plan,) = planned(capsys, *words)
    assert plan["phases"][0]["parts"]["KV cache"] == 8 * (1023 + 512) * 2 * 2 * 2 * 16 * 2
    (plan,) = planned(capsys, *words, "--max_turn_seq_len", "100")
    assert plan["phases"][0]["parts"]["KV cache"] == 8 * (1023 + 100) * 2 * 2 * 2 * 16 * 2


def test_a_gpu_that_is_too_small(model, capsys):
    """What helps is named, with the peak that it leaves, and the exit status tells a script."""
    words = ["--step", "1", "--model_name_or_path", model, "--per_device_train_batch_size", "64", "--gpu_memory", "4"]
    assert main(words) == 1
    out = capsys.readouterr().out
    assert "DOES NOT FIT: a GPU would hold" in out
    found = re.search(r"  --per_device_train_batch_size 32 --gradient_accumulation_steps 2: (\d\.\d) GB", out)
    assert found and float(found[1]) <= 4
    assert main([*words, "--per_device_train_batch_size", "32", "--gradient_accumulation_steps", "2"]) == 0


def test_a_step_that_does_not_sample_needs_no_other_actor(model, capsys):
    """Even where CUDA's 2.5 GB alone are too much. A single process writes the whole checkpoint."""
    words = ["--step", "1", "--model_name_or_path", model, "--gpu_memory", "1"]
    assert main([*words, "--gpus", "1"]) == 1
    out = capsys.readouterr().out
    assert "What helps: more GPUs, smaller batches" in out and "actor" not in out
    assert "GB for a checkpoint, " in out and "main process" not in out
    assert main([*words, "--gpus", "2"]) == 1
    assert "GB from the main process, 0.0 GB from each other one), " in capsys.readouterr().out


def test_an_actor_that_no_gpu_holds_whole(model, capsys, monkeypatch):
    """Its 0.7 MB and CUDA's 2.5 GB are more than 2.5005 GB, wherever the weights lie between rollouts."""
    monkeypatch.setattr("dschat.settings.rollouts.find_spec", lambda name: None)  # vLLM is not installed
    words = ["--step", "3", *ppo_flags(model), "--zero_stage", "3", "--gpus", "128", "--prompts", "9999"]
    words += ["--lora_dim", "8"]
    assert main([*words, "--gpu_memory", "2.5005"]) == 1
    out = capsys.readouterr().out
    (told,) = (line for line in out.splitlines() if "What helps" in line)
    assert "a smaller actor, GPUs with more memory, or in step 3 --rollout_engine vllm" in told
    assert "more GPUs or LoRA do not help" in told
    assert "use more GPUs" not in out and ", LoRA (" not in out
    assert main([*words, "--gpu_memory", "2.51"]) == 1  # for the lack of room for other things
    assert "What helps: more GPUs, smaller batches" in capsys.readouterr().out


def test_vllm_holds_the_actor_whole(model, capsys, caplog):
    """bf16: 2 bytes of each of its weights, which must fit into vLLM's share of the GPU. The largest tensor is
    gathered and copied on its way."""
    words = ["--step", "3", *ppo_flags(model), "--zero_stage", "3", "--rollout_engine", "vllm", "--prompts", "9999"]
    weights = 4000 * 64 + 64 + 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128 + 2 * 64)
    for memory, held in (("80", 20 * 10**9), ("0.0006", 2 * weights)):
        (plan,) = planned(capsys, *words, "--vllm_gpu_memory", "0.25", "--gpu_memory", memory)
        assert {phase["name"]: phase["parts"] for phase in plan["phases"]}["generate"] == {
            "vLLM": held,
            "weights passed on": 2 * 2 * 4000 * 64,
        }
    shared = ["--vllm_gpu_memory", "0.25", "--gpu_memory", "0.0003", "--gpus", "2", "--vllm_tensor_parallel", "2"]
    (plan,) = planned(capsys, *words, *shared)
    assert {phase["name"]: phase["parts"] for phase in plan["phases"]}["generate"]["vLLM"] == weights
    assert main([*words, "--vllm_gpu_memory", "0.000008"]) == 2
    assert "--vllm_gpu_memory 8e-06: vLLM would have 0.0 GB of a GPU, and holds the actor whole" in caplog.text


def test_refuel_online_of_a_preset(model, capsys, monkeypatch):
    """Of the 2 layers the topmost and the norm are trained. A dialogue has 4096 tokens, 16 are drawn at once, and the
    4 of a round wait for nothing. A million dialogues are 31,250 rounds of 32, each with 4 updates."""
    monkeypatch.setenv("MODEL", model)
    monkeypatch.setenv("REWARD_MODEL", model)
    words = ["hh_llama3_8b_online", "--trained_layers", "1", "--prompts", "100000", "--decode_graphs", "off"]
    (plan,) = planned(capsys, *words)
    layer = 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128 + 2 * 64
    models = {one["role"]: one for one in plan["models"]}
    assert plan["step"] == "refuel_online" and list(models) == ["policy", "reference", "reward model"]
    assert models["policy"]["trained"] == layer + 64
    assert models["reward model"]["parameters"] == models["policy"]["parameters"] + 64
    phases = {phase["name"]: phase["parts"] for phase in plan["phases"]}
    assert phases["generate"]["KV cache"] == 16 * 4096 * 2 * 2 * 2 * 16 * 2
    assert plan["counts"]["updates"] == 4 * 31_250 and plan["counts"]["trained"] == 10**6
    (offloaded,) = planned(capsys, *words, "--offload")
    kept = [one["phases"][0]["kept"] for one in (plan, offloaded)]
    away = 2 * sum(models[role]["parameters"] for role in ("reference", "reward model"))
    assert kept[0] - kept[1] == away + models["policy"]["bytes"]["optimizer"]


def test_the_policy_of_refuel_online_passes_without_gradients_where_there_is_a_kl(model, capsys):
    """In evaluations, 4 times as many tokens as in the passes of its updates; with adapters no other model does."""
    Path("rewards.py").write_text("def length(prompts, responses):\n    return [0.0 for one in responses]\n")
    words = ["--step", "refuel_online", "--model_name_or_path", model, "--reward_function", "rewards.py:length"]
    words += ["--lora_dim", "4", "--max_tokens_per_micro_batch", "8192", "--prompts", "100000"]

    def scoring(coefficient: str) -> int:
        (plan,) = planned(capsys, *words, "--kl_coef", coefficient)
        return next(phase["parts"] for phase in plan["phases"] if phase["name"] == "score")["activations"]

    assert scoring("0.05") / scoring("0") == pytest.approx(4, rel=0.02)


def test_a_deepspeed_config_is_read(model, tmp_path, capsys, caplog):
    """At ZeRO 2 in bf16 a bucket of 1000 elements, two where gradients are reduced beside the backward pass; the
    optimiser in main memory; and what flags decide ends as the run would."""
    file = tmp_path / "ds.json"
    words = ["--step", "1", "--model_name_or_path", model, "--zero_stage", "2", "--prompts", "9999", "--gpus", "2"]

    def plan(**zero):
        file.write_text(json.dumps({"zero_optimization": zero}))
        return planned(capsys, *words, "--deepspeed_config", str(file))[0]

    weights = plan()["models"][0]["parameters"]
    for beside, buffers in ((False, 1), (True, 2)):
        small = plan(reduce_bucket_size=1000, overlap_comm=beside)
        assert {phase["name"]: phase["parts"] for phase in small["phases"]}["train"]["ZeRO"] == 2 * 1000 * buffers
    away = plan(offload_optimizer={"device": "cpu"})["models"][0]["bytes"]
    assert (away["optimizer"], away["host"]) == (0, (12 + 8 + 2) * weights // 2)
    with file.open("w") as opened:
        json.dump({"zero_optimization": {"stage": 2}}, opened)
    assert main([*words, "--deepspeed_config", str(file)]) == 2
    assert "zero_optimization.stage is decided by --zero_stage" in caplog.messages[-1]


def test_each_remedy_once(model, capsys):
    """At ZeRO 3 the next stage is 3 again, also beside --offload."""
    words = ["--step", "1", "--model_name_or_path", model, "--zero_stage", "3", "--prompts", "999"]
    (plan,) = planned(capsys, *words)
    (plan,) = planned(capsys, *words, "--gpu_memory", str((plan["peak"] - 1000) / 1e9))
    flags = [remedy["flags"] for remedy in plan["remedies"]]
    assert "--zero_stage 3 --offload" in flags and len(set(flags)) == len(flags)


def test_config_stands_for_a_model_that_does_not_exist_yet(model, capsys):
    words = ["--step", "1", "--prompts", "999"]
    (plan,) = planned(capsys, *words, "--model_name_or_path", "output/step1", "--config", model)
    assert plan["peak"] == planned(capsys, *words, "--model_name_or_path", model)[0]["peak"]


def test_layers_that_keep_their_activations_are_a_remedy(model, capsys):
    """Between recomputation of all layers and of none."""
    words = ["--step", "1", "--model_name_or_path", model, "--prompts", "999"]
    flags = {0: [], 1: ["--gradient_checkpointing"], 2: ["--gradient_checkpointing", "--checkpoint_every", "2"]}
    peaks = {every: planned(capsys, *words, *flags[every])[0]["peak"] for every in flags}
    assert peaks[1] < peaks[2] < peaks[0]
    (plan,) = planned(capsys, *words, *flags[2], "--gpu_memory", str((peaks[2] - 1000) / 1e9))
    remedies = {remedy["flags"]: remedy["peak"] for remedy in plan["remedies"]}
    assert remedies["--gradient_checkpointing_every 1"] == peaks[1]


def test_main_memory_is_that_of_a_node(model, capsys):
    """16 processes of 3 GB, 8 of them on a node unless a flag says otherwise."""
    words = ["--step", "1", "--model_name_or_path", model, "--gpus", "16", "--prompts", "9999"]
    assert planned(capsys, *words)[0]["host"]["processes"] == 8 * 3 * 10**9
    assert planned(capsys, *words, "--gpus_per_node", "4")[0]["host"]["processes"] == 4 * 3 * 10**9
    assert main([*words, "--main_memory", "25"]) == 0
    out = capsys.readouterr().out
    assert "16 GPUs of 80 GB, 8 on a node" in out and "Main memory of a node: 24 GB" in out
    assert main([*words, "--main_memory", "25", "--gpus_per_node", "16"]) == 1
    assert "DOES NOT FIT: it has 25 GB" in capsys.readouterr().out


def test_a_preset_of_all_steps(model, capsys, monkeypatch):
    """With a small model; docs/presets.md has the published ones, which tests/plan/test_presets_page.py plans."""
    monkeypatch.setenv("MODEL", model)
    monkeypatch.setenv("REWARD_MODEL", model)
    plans = planned(capsys, "tldr_gemma_2b", "--gpus", "4")
    assert [plan["step"] for plan in plans] == ["1", "2", "dpo", "3"]
    assert plans[3]["machine"]["processes"] == 4 and plans[3]["counts"]["updates"] == 37_143 // 256
    assert plans[2]["counts"]["updates"] == 37_143 // 64
    main(["tldr_gemma_2b", "--step", "1", "--gpus", "4"])
    assert "About 18,572 training rows: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["no_such_preset"], "no_such_preset: there is no such preset. Give a YAML file, or one of "),
        ([__file__], "--step is missing"),
        (["tldr_gemma_7b", "--step", "dpo"], "there is no such preset of dpo"),
        (
            ["ppo", "--gpus", "1"],
            "ppo is a step: write --step ppo, with a preset, a YAML file or the flags of the step",
        ),
        ([], "give a preset, or --step (sft, reward, dpo, ppo, refuel, refuel-online) with"),
        (["tldr_gemma_2b", "--config", "./absent"], "--config ./absent: no such folder"),
        (
            ["tldr_gemma_2b", "--step", "1", "--prompts", "8"],
            "8 training examples are fewer than one global batch of 512. Give --",
        ),
    ],
)
def test_errors(words, message, caplog):
    """One message that names what is wrong."""
    assert main(words) == 2
    assert message in caplog.messages[-1]
