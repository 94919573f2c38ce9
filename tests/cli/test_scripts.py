# SPDX-License-Identifier: Apache-2.0
"""The training scripts: run_gemma.sh of each step through the deepspeed launcher, and what all of them share."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from cli_runs import STEPS, TRAINING, built_once, environment, files_under, run_command, training_rows
from launches import free_port
from script_runs import GEMMA, SCRIPTS, VARIABLES, parsed, recorded, run_recorded, script_id

SMALL = {
    "sft": "--data_split 1,0,0 --max_seq_len 192 --per_device_train_batch_size 8 --global_batch_size 8",
    "reward": "--data_split 0,32,32 --max_seq_len 192 --per_device_train_batch_size 8 --global_batch_size 8",
    "dpo": "--data_split 0,32,32 --max_seq_len 192 --per_device_train_batch_size 8 --global_batch_size 8",
    "ppo": "--data_split 0,32,32 --max_prompt_seq_len 160 --max_answer_seq_len 8 --per_device_generation_batch_size 16"
    " --per_device_training_batch_size 8 --global_batch_size 8",
}
OUTPUT = {step: f"models/tldr-gemma-2b/{step}" for step in STEPS}
TWO_NODES = STEPS["ppo"] / "training_scripts" / "run_gemma_two_nodes.sh"
NVIDIA_SMI = """#!/bin/sh
cat <<'END'
GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-1)
  MIG 1g.10gb     Device  0: (UUID: MIG-1)
GPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-2)
END
"""
NO_DRIVER = "#!/bin/sh\necho 'NVIDIA-SMI has failed' >&2; exit 9\n"
HERE = {"NODE_RANK": "0", "MASTER_ADDR": "10.0.0.1"}


def launcher_variables(tmp_path: Path, **variables: str) -> dict[str, str | None]:
    """A script's environment with the real launcher."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    given = {"PROJ_PATH": str(tmp_path), "NUM_GPUS": "1", "MASTER_PORT": free_port(), "PATH": path}
    return dict.fromkeys(VARIABLES) | given | variables


@pytest.fixture(scope="session")
def project(shared):
    """The scripts' PROJ_PATH."""
    return built_once(shared, "project", lambda folder: folder.mkdir())


@pytest.mark.parametrize("step", ["ppo", *(pytest.param(s, marks=pytest.mark.slow) for s in STEPS if s != "ppo")])
def test_a_script_runs_through_the_launcher(step, project, inputs, sft, reward):
    """Its PROJ_PATH, models and data come from the environment; flags given to it win."""
    variables = launcher_variables(
        project,
        MODEL=str(inputs / "model" if step == "sft" else sft),
        REWARD_MODEL=str(reward),
        DATA=str(inputs / "data" / ("demonstrations" if step == "sft" else "comparisons")),
    )
    words = shlex.split(SMALL[step]) + ["--num_train_epochs", "2", "--seed", "77", "--enable_tensorboard"]
    result = run_command(["bash", GEMMA[step], *words], cwd=project, **variables).expect(0)
    assert "Traceback" not in result.stderr + result.stdout
    (output,) = project.glob(f"models/*/{step}")
    record = json.loads((output / "run.json").read_text())
    assert record["finished"] is True and record["seeds"] == {"seed": 77} and record["step"] == step
    assert record["batches"]["global_batch"] == 8
    assert len(training_rows(output)) == (4 if step == "ppo" else 8)  # two epochs
    assert "tensorboard/events" in files_under(output)


def test_a_bad_flag_given_to_a_script_is_reported(tmp_path):
    variables = launcher_variables(tmp_path)
    result = run_command(["bash", GEMMA["sft"], "--learning_rats", "1"], cwd=tmp_path, **variables)
    everything = result.stdout + result.stderr
    assert result.status != 0 and "--learning_rats" in everything and not list(tmp_path.iterdir())


def test_the_cause_of_a_failure_comes_last(tmp_path):
    """Below the launcher's own lines, whichever process failed."""
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"prompt": "a", "response": \n')
    variables = launcher_variables(tmp_path, DATA=str(bad), MODEL=str(tmp_path / "absent"))
    result = run_command(["bash", GEMMA["sft"], "--dtype", "fp32"], cwd=tmp_path, **variables)
    assert result.status != 0
    assert "--model_name_or_path" in result.stderr.strip().splitlines()[-1]


LAUNCHER_THAT_STAYS = f"""#!{sys.executable}
import os, subprocess
child = subprocess.Popen(["sleep", "300"])
folder = os.environ["PROJ_PATH"]
open(folder + "/pids.part", "w").write(f"{{os.getpid()}} {{child.pid}}")
os.rename(folder + "/pids.part", folder + "/pids")
child.wait()
"""


@pytest.mark.parametrize(("sent", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_to_a_script_ends_the_launcher_and_its_processes(sent, status, tmp_path):
    launcher = tmp_path / "deepspeed"
    launcher.write_text(LAUNCHER_THAT_STAYS)
    launcher.chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    variables = environment(**launcher_variables(tmp_path, PATH=path))
    script = subprocess.Popen(["bash", str(GEMMA["sft"])], env=variables, cwd=tmp_path)
    pids = tmp_path / "pids"
    wait_until(pids.exists)
    script.send_signal(sent)
    assert script.wait(20) == status
    for pid in map(int, pids.read_text().split()):
        wait_until(lambda pid=pid: not psutil.pid_exists(pid))


def wait_until(true, seconds=20.0):
    """Fails if something has not become true by then."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.slow
def test_one_rank_that_fails_ends_the_others_at_once(inputs, sft, tmp_path):
    """Rank 0 waits for it in a collective; the cause stands last, long before the collective's time-out."""
    function = tmp_path / "mine.py"
    function.write_text(
        "import os\ndef reward(p, r, rows):\n"
        "    if os.environ['RANK'] == '1':\n        raise RuntimeError('the judge is gone')\n"
        "    return [float(len(t)) for t in r]\n"
    )
    variables = launcher_variables(
        tmp_path, MODEL=str(sft), DATA=str(inputs / "data" / "comparisons"), NUM_GPUS="2", DS_ACCELERATOR="cpu"
    )
    words = [*shlex.split(SMALL["ppo"]), "--critic_model_name_or_path", str(sft), "--global_batch_size", "16"]
    start = time.monotonic()
    result = run_command(
        ["bash", GEMMA["ppo"], *words, "--reward_function", f"{function}:reward"], cwd=tmp_path, **variables
    )
    assert result.status != 0 and time.monotonic() - start < 120
    last = result.stderr.strip().splitlines()[-1]
    assert "[rank 1]" in last and "the judge is gone" in last and str(function) in last


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("gpus", [1, 2, 8])
def test_run_gemma_is_the_preset_of_the_smallest_model(step, gpus, tmp_path, monkeypatch):
    """Through the launcher, with every word that is given to it at the end; all flags pass the step's rules."""
    launch = recorded(GEMMA[step], tmp_path, "--print_loss", NUM_GPUS=str(gpus))
    assert launch.options == ["--num_gpus", str(gpus), "--master_port", "29500"]
    assert launch.program == STEPS[step] / "main.py" and launch.flags[-1] == "--print_loss"
    preset = recorded(GEMMA[step].with_name("tldr_gemma_2b.sh"), tmp_path, "--print_loss", NUM_GPUS=str(gpus))
    assert launch.flags == preset.flags
    config = parsed(launch, step, gpus, monkeypatch)
    assert config.plan_batches(gpus).global_batch == {"sft": 512, "reward": 64, "dpo": 64, "ppo": 256}[step]
    assert Path(config.output_dir) == tmp_path / OUTPUT[step]


@pytest.mark.parametrize("script", SCRIPTS, ids=script_id)
def test_what_every_script_does(script, tmp_path):
    """Passes its words on last, saves along the way, repeats the launcher's status, leaves nothing behind, looks at
    local copies first.
    """
    (tmp_path / "scratch").mkdir()
    nodes = HERE if script == TWO_NODES else {}
    words = ["--output_dir", "two words", "--data_path", "a", "b*"]
    launch = recorded(script, tmp_path, *words, TMPDIR=str(tmp_path / "scratch"), **nodes)
    assert launch.flags[-5:] == words and launch.flags[0] == "--deepspeed"
    assert int(launch.flags[launch.flags.index("--save_steps") + 1]) > 0
    assert launch.environment["MA_RLHF_DATA"] == f"{tmp_path}/data"
    assert Path(launch.environment["MA_RLHF_ERROR_FILE"]).parent.parent == tmp_path / "scratch"
    assert not list((tmp_path / "scratch").iterdir())
    failed = run_recorded(script, tmp_path, RECORDER_STATUS="7", MA_RLHF_DATA="/elsewhere", **nodes).expect(7)
    assert not failed.stderr
    assert "MA_RLHF_DATA=/elsewhere\n" in (tmp_path / "record.env").read_text()
    assert script.read_text().startswith("#!/usr/bin/env bash\n") and "set -euo pipefail" in script.read_text()
    assert os.access(script, os.X_OK)


def test_paths_are_those_of_the_current_folder(tmp_path):
    """The scripts stay where they were called, so relative paths mean what they say; PROJ_PATH defaults to it."""
    launch = recorded(GEMMA["reward"], tmp_path, PROJ_PATH=None, MODEL="mine/sft", DATA="mine/rows.jsonl")
    place = launch.flags.index("--model_name_or_path")
    assert launch.flags[place + 1] == "mine/sft" and launch.environment["PWD"] == str(tmp_path)
    assert f"{tmp_path}/models/rows-mine/reward" in launch.flags and "mine/rows.jsonl" in launch.flags


def folders(script, tmp_path, **variables):
    """The model that a script starts from and the folder that it writes to, without tmp_path where they lie there."""
    flags = recorded(script, tmp_path, **variables).flags
    flag = "--actor_model_name_or_path" if "--actor_model_name_or_path" in flags else "--model_name_or_path"
    return [flags[flags.index(name) + 1].removeprefix(f"{tmp_path}/models/") for name in (flag, "--output_dir")]


@pytest.mark.parametrize(
    ("step", "model", "data", "expected"),
    [
        ("sft", None, None, "tldr-gemma-2b"),
        ("sft", "google/gemma-2b", "tldr", "tldr-gemma-2b"),
        ("sft", "Qwen/Qwen2.5-0.5B", None, "tldr-Qwen2.5-0.5B"),
        ("sft", None, "rows.jsonl.gz", "rows-gemma-2b"),
        ("sft", "/mnt/my model/", "/mnt/mine/train.parquet", "mine-train-my-model"),
        ("reward", "{}/models/tldr-gemma-2b/sft", None, "tldr-gemma-2b"),
        ("reward", "{}/models/tldr-gemma-2b/sft", "data/rows", "rows-tldr-gemma-2b"),
        ("reward", "{}/models/rows-Qwen2.5-0.5B/sft", "data/rows", "rows-Qwen2.5-0.5B"),
        ("dpo", "google/gemma-2b-it", None, "tldr-gemma-2b-it"),
        ("ppo", "{}/models/rows-Qwen2.5-0.5B/sft/", "rows.csv", "rows-Qwen2.5-0.5B"),
        ("ppo", "{}/models/hh-gemma-2b/ppo/actor", None, "tldr-hh-gemma-2b-ppo-actor"),
    ],
)
def test_another_model_or_data_set_has_a_folder_of_its_own(step, model, data, expected, tmp_path):
    """Named like the published run's, data set and model; what step 1 wrote keeps its name in steps 2 and 3."""
    model = model and model.format(tmp_path)
    assert folders(GEMMA[step], tmp_path, MODEL=model, DATA=data)[1] == f"{expected}/{step}"


def test_the_steps_of_one_data_set_find_each_other(tmp_path):
    """With the same DATA and nothing else given, and so do the variants of a preset."""
    variables = {"DATA": "rows.jsonl"}
    assert folders(GEMMA["sft"], tmp_path, **variables) == ["google/gemma-2b", "rows-gemma-2b/sft"]
    assert folders(GEMMA["reward"], tmp_path, **variables) == ["rows-gemma-2b/sft", "rows-gemma-2b/reward"]
    for variant in ("vanilla", "ppl", "randomized", "rloo"):
        preset = GEMMA["ppo"].with_name(f"tldr_gemma_2b_{variant}.sh")
        assert folders(preset, tmp_path, **variables) == ["rows-gemma-2b/sft", f"rows-gemma-2b/ppo-{variant}"]
        assert f"{tmp_path}/models/rows-gemma-2b/reward" in recorded(preset, tmp_path, **variables).flags


def test_a_round_of_refuel_has_a_folder_of_its_own(tmp_path):
    preset, later = TRAINING / "refuel" / "training_scripts" / "llama_3_8b_it.sh", f"{tmp_path}/models/llama-3-8b-it"
    flags = [recorded(preset, tmp_path, **given).flags for given in ({}, {"MODEL": f"{later}/refuel"})]
    assert [words[words.index("--output_dir") + 1] for words in flags] == [
        f"{later}/refuel",
        f"{later}-refuel/refuel",
    ]


@pytest.mark.parametrize("value", ["0", "-1", "two", "08"])
def test_a_number_of_gpus_that_is_none(value, tmp_path):
    result = run_recorded(GEMMA["sft"], tmp_path, NUM_GPUS=value).expect(2)
    assert result.stderr == f"error: NUM_GPUS={value}: give a whole number of at least 1.\n"


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, ["--num_gpus", "2"]),  # nvidia-smi's, without the parts of a GPU
        ("no driver", ["--num_gpus", "1"]),
        ("", ["--num_gpus", "1"]),
        ("3", ["--include", "localhost:3"]),
        ("4,5,6,7", ["--include", "localhost:4,5,6,7"]),
        ("2, 3", ["--include", "localhost:2,3"]),
        (" 3 ", ["--include", "localhost:3"]),
        (" ", ["--num_gpus", "1"]),
    ],
)
def test_gpus_are_found(visible, expected, tmp_path, monkeypatch):
    programs = tmp_path / "programs"
    programs.mkdir()
    (programs / "nvidia-smi").write_text(NO_DRIVER if visible == "no driver" else NVIDIA_SMI)
    (programs / "nvidia-smi").chmod(0o755)
    visible = None if visible == "no driver" else visible
    launch = recorded(GEMMA["ppo"], tmp_path, NUM_GPUS=None, CUDA_VISIBLE_DEVICES=visible)
    assert launch.options == [*expected, "--master_port", "29500"]
    gpus = int(expected[1]) if expected[0] == "--num_gpus" else len(expected[1].split(","))
    assert parsed(launch, "ppo", gpus, monkeypatch).plan_batches(gpus).rollout_per_rank == 256 / gpus


@pytest.mark.parametrize("visible", ["GPU-1,GPU-2", "MIG-1", "-1", "0,,1", "0,1,", "all", "0 1", "0;1", "0-3"])
@pytest.mark.parametrize("number", [None, "1"])
def test_gpus_that_the_launcher_cannot_be_told(visible, number, tmp_path):
    """It would drop them and take the machine's first ones, which may be somebody else's."""
    result = run_recorded(GEMMA["ppo"], tmp_path, NUM_GPUS=number, CUDA_VISIBLE_DEVICES=visible).expect(2)
    assert result.stderr == (
        f"error: CUDA_VISIBLE_DEVICES={visible}: the launcher takes GPUs by number alone; give the numbers that"
        " `nvidia-smi --list-gpus` shows, such as CUDA_VISIBLE_DEVICES=0,1.\n"
    )
    assert not (tmp_path / "record").exists(), "it was launched all the same"


@pytest.mark.parametrize("visible", ["4,5,6,7", "1", "0,2", "1,0", "08"])
def test_several_machines_use_their_first_gpus(visible, tmp_path):
    """The launcher numbers them from 0 there, whatever the variable says."""
    variables = HERE | {"NUM_GPUS": None}
    launch = recorded(TWO_NODES, tmp_path, CUDA_VISIBLE_DEVICES="0, 1", **variables)
    assert (tmp_path / "record.hostfile").read_text() == "node-0 slots=2\nnode-1 slots=2\n" and launch.program
    result = run_recorded(TWO_NODES, tmp_path, CUDA_VISIBLE_DEVICES=visible, **variables).expect(2)
    (message,) = result.stderr.splitlines()
    assert message.startswith(f"error: CUDA_VISIBLE_DEVICES={visible}: on several machines the launcher uses the")


def test_some_of_the_visible_gpus(tmp_path):
    variables = {"CUDA_VISIBLE_DEVICES": "4,6", "MASTER_PORT": "29501"}
    launch = recorded(GEMMA["sft"], tmp_path, NUM_GPUS="1", **variables)
    assert launch.options == ["--include", "localhost:4", "--master_port", "29501"]
    result = run_recorded(GEMMA["sft"], tmp_path, NUM_GPUS="4", **variables).expect(2)
    assert "NUM_GPUS=4, but CUDA_VISIBLE_DEVICES=4,6 names fewer" in result.stderr


@pytest.mark.parametrize("flag", ["--global_batch_size 510", "--global_batch_size=510", "--global-batch-size 510"])
def test_another_global_batch_for_another_number_of_gpus(flag, tmp_path, monkeypatch):
    """The error's own advice: 170 examples for each of 3 GPUs, in passes of 2 because 4 and 3 do not divide them."""
    message = run_recorded(GEMMA["sft"], tmp_path, NUM_GPUS="3").expect(2).stderr
    assert message == (
        "error: 3 GPUs cannot share the global batch of 512 evenly: set NUM_GPUS so that the number of GPUs is one of"
        " 1, 2, 4, 8, 16, 32, 64, 128, or add --global_batch_size 510 or another multiple of 3.\n"
    )
    plan = parsed(recorded(GEMMA["sft"], tmp_path, *flag.split(), NUM_GPUS="3"), "sft", 3, monkeypatch).plan_batches(3)
    assert (plan.global_batch, plan.update_per_rank, plan.micro_batch) == (510, 170, 2)


@pytest.mark.parametrize(
    ("gpus", "flags", "expected"),
    [
        (1, "", (32, 8, 256)),
        (16, "", (16, 1, 256)),
        (1, "--per_device_generation_batch_size 64", (64, 4, 256)),
        (2, "--global_batch_size 80", (20, 2, 80)),  # 40 for each, of which 20 is the largest part up to 32
        (1, "--global_batch_size 8 --per_device_generation_batch_size 16", (16, 1, 16)),  # two updates per rollout
    ],
)
def test_a_rollout_is_the_batch_of_one_update(gpus, flags, expected, tmp_path, monkeypatch):
    """However many GPUs there are and however many prompts each generates at once."""
    config = parsed(recorded(GEMMA["ppo"], tmp_path, *flags.split(), NUM_GPUS=str(gpus)), "ppo", gpus, monkeypatch)
    rollout = config.plan_batches(gpus).rollout_per_rank * gpus
    assert (config.per_device_generation_batch_size, config.generation_batches, rollout) == expected


def test_several_machines_with_ssh(tmp_path, monkeypatch):
    """HOSTFILE goes to the launcher, its slots are counted, and the other machines are told where local copies are."""
    hosts = tmp_path / "hosts"
    hosts.write_text("# ours\n\nfirst slots=8\nsecond slots=8  # the slow one")
    (tmp_path / ".deepspeed_env").write_text("NCCL_DEBUG=INFO\n")
    launch = recorded(GEMMA["ppo"], tmp_path, HOSTFILE=str(hosts), NUM_GPUS=None)
    assert launch.options == ["--hostfile", str(hosts), "--master_port", "29500"]
    assert parsed(launch, "ppo", 16, monkeypatch).plan_batches(16).rollout_per_rank == 16
    told = (tmp_path / "record.remote").read_text().splitlines()
    assert "NCCL_DEBUG=INFO" in told and told[-1] == f"MA_RLHF_DATA={tmp_path}/data"
    launch = recorded(GEMMA["ppo"], tmp_path, HOSTFILE=str(hosts), NUM_GPUS="4")
    assert launch.options == ["--hostfile", str(hosts), "--num_gpus", "4", "--master_port", "29500"]
    assert parsed(launch, "ppo", 8, monkeypatch).plan_batches(8).rollout_per_rank == 32


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "there is no such file"),
        ("# nobody\n", "names no machine"),
        ("first 8\nsecond\n", 'the line of second must be like "second slots=8"'),
        ("first slots=many\n", 'the line of first must be like "first slots=8"'),
    ],
)
def test_a_bad_hostfile(content, message, tmp_path):
    hosts = tmp_path / "hosts"
    if content is not None:
        hosts.write_text(content)
    result = run_recorded(GEMMA["ppo"], tmp_path, HOSTFILE=str(hosts)).expect(2)
    assert result.stderr.startswith(f"error: HOSTFILE={hosts}") and message in result.stderr


def test_two_nodes_without_ssh(tmp_path, monkeypatch):
    variables = {"NODE_RANK": "1", "MASTER_ADDR": "10.0.0.1", "NUM_GPUS": "8"}
    launch = recorded(TWO_NODES, tmp_path, **variables)
    assert launch.options[0] == "--hostfile"
    options = "--num_gpus 8 --master_port 29500 --no_ssh --node_rank 1 --master_addr 10.0.0.1"
    assert launch.options[2:] == shlex.split(options)
    assert (tmp_path / "record.hostfile").read_text() == "node-0 slots=8\nnode-1 slots=8\n"
    config = parsed(launch, "ppo", 16, monkeypatch)
    assert config.plan_batches(16).rollout_per_rank == 16 and config.zero_stage == 3
    assert Path(config.output_dir) == tmp_path / OUTPUT["ppo"]


@pytest.mark.parametrize(
    ("script", "variables", "message"),
    [
        (TWO_NODES, {"NODE_RANK": "0"}, "MASTER_ADDR is not set"),
        (TWO_NODES, {"MASTER_ADDR": "10.0.0.1"}, "NODE_RANK is not set"),
        (TWO_NODES, HERE | {"NUM_NODES": "many"}, "NUM_NODES=many: give the number"),
        (GEMMA["sft"], HERE, "NUM_NODES=: give the number of machines, or HOSTFILE."),
    ],
)
def test_what_several_nodes_need(script, variables, message, tmp_path):
    result = run_recorded(script, tmp_path, **variables).expect(2)
    assert result.stderr.startswith(f"error: {message}")


def test_every_variable_is_explained():
    """In one place, which names all that the scripts read and nothing else."""
    heading = (TRAINING / "launch.sh").read_text().partition("set -euo pipefail")[0]
    explained = {line.split()[1] for line in heading.splitlines() if line.startswith("#   ") and line[4] != " "}
    assert explained == set(VARIABLES) - {"DS_ENV_FILE"}
