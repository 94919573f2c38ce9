# SPDX-License-Identifier: Apache-2.0
"""What is looked at before anything is loaded; a failure names the rank."""

import json
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import GemmaConfig

from cli_runs import STEPS
from dschat.base.errors import UserError
from dschat.models.tiny import make_model
from dschat.plan.minimum import minimum_memory
from dschat.quickstart.synthetic import make_rows, row_texts
from dschat.run.preflight import MinimumMemory, ProcessReport, check_reports, preflight, shared_flags
from dschat.settings.ppo import PPOConfig
from dschat.settings.supervised import SFTConfig
from factories import ppo_config
from launches import launch

FOLDER = Path("runs/ppo")
# 10 · 8 + 8 + 2 · 464 weights, by hand in tests/plan.
TINY_SIZES = {
    **{"vocab_size": 10, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 2},
}
VERSIONS = (("torch", "2.13.0"), ("transformers", "5.23.0"))
FLAGS = {"--seed": "1", "--eval_interval": "2"}


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    """A name that is no folder here is not asked for at the hub."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def reports(*changes, hosts=("a", "a")):
    """One per rank, healthy but for the changes {rank: fields}."""
    healthy = [ProcessReport(rank, host, VERSIONS, FLAGS, None, 10**9, 10**8) for rank, host in enumerate(hosts)]
    for rank, fields in changes:
        healthy[rank] = replace(healthy[rank], **fields)
    return healthy


def test_another_version_is_named_with_its_rank_and_host():
    other = (("torch", "2.13.0"), ("transformers", "5.20.0"))
    with pytest.raises(UserError, match=r"rank 1 \(b\) has transformers 5\.20\.0, rank 0 \(a\) has 5\.23\.0"):
        check_reports(reports((1, {"versions": other}), hosts=("a", "b")), FOLDER)


def test_a_flag_that_another_machine_was_not_given_is_named():
    """Also one that a resumed run may change: it decides which collectives the ranks enter."""
    other = {"--seed": "1", "--eval_interval": "0"}
    with pytest.raises(UserError, match=r"rank 1 \(b\) has --eval_interval 0, rank 0 \(a\) has 2: start every node"):
        check_reports(reports((1, {"flags": other}), hosts=("a", "b")), FOLDER)


def test_where_things_are_may_differ_between_machines(tmp_path):
    names = shared_flags(ppo_config(tmp_path)).keys()
    assert names >= {"--eval_interval", "--max_steps", "--save_steps", "--zero_stage", "--seed"}
    places = {
        "--data_path",
        "--output_dir",
        "--node_rank",
        "--num_gpus",
        "--master_addr",
        "--local_rank",
        "--vllm_url",
    }
    assert not names & places


def test_a_folder_that_a_rank_cannot_use_is_named():
    problem = "does not see the folder that rank 0 writes to"
    with pytest.raises(UserError, match=rf"--output_dir runs/ppo: rank 1 \(b\): {problem}"):
        check_reports(reports((1, {"folder_problem": problem}), hosts=("a", "b")), FOLDER)


def test_memory_is_shared_by_the_processes_of_a_node():
    """0.6 GB of weights fit into 1 GB, but not twice."""
    needed = {"needed_memory": 6 * 10**8}
    check_reports(reports((0, needed), (1, needed), hosts=("a", "b")), FOLDER)
    with pytest.raises(UserError, match=r"rank 0 \(a\) can use 0\.5 GB .*2 processes share.*take 0\.6 GB"):
        check_reports(reports((0, needed), (1, needed)), FOLDER)
    with pytest.raises(UserError, match=r"rank 1 \(b\) can use 1\.0 GB .*take 3\.0 GB"):
        check_reports(reports((1, {"needed_memory": 3 * 10**9}), hosts=("a", "b")), FOLDER)


def test_a_gpu_that_is_too_small_is_named_with_its_flags():
    small = {"gpu_memory": 8 * 10**10, "needed_gpu_memory": 9 * 10**10}
    with pytest.raises(UserError, match=r"rank 1 \(b\) has a GPU of 80\.0 GB.*take 90\.0 GB. Add --zero_stage 3"):
        check_reports(reports((1, small), hosts=("a", "b")), FOLDER)


def test_a_gpu_that_cannot_hold_the_whole_actor():
    """Of 60 GB, beside the 40 GB that it keeps; 80 GB are there."""
    needed = {"gpu_memory": 8 * 10**10, "needed_gpu_memory": 4 * 10**10}
    check_reports(reports((1, needed | {"sampling_memory": 10**10}), hosts="aabb"), FOLDER)
    said = "rank 1 .* while responses are sampled, 60.0 GB for the whole actor.* --vllm_tensor_parallel"
    with pytest.raises(UserError, match=said):
        check_reports(reports((1, needed | {"sampling_memory": 6 * 10**10}), hosts="aabb"), FOLDER)


def sft(output_dir, model="a/hub-model", **flags):
    """Flags of a run of step 1."""
    return SFTConfig(data_path=["unused"], output_dir=str(output_dir), model_name_or_path=str(model), **flags)


def test_a_folder_without_rights_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write everywhere
    with pytest.raises(UserError, match=r"rank 0 .*: cannot be written"):
        preflight(sft(tmp_path))


def test_a_model_that_does_not_fit_is_refused(tmp_path):
    """An embedding of 10⁶ · 10⁵ weights, tied: float32 weights and two moments are 1200 GB, and a layer is small."""
    sizes = {"hidden_size": 100_000, "intermediate_size": 4, "num_hidden_layers": 1, "num_attention_heads": 1}
    GemmaConfig(vocab_size=10**6, num_key_value_heads=1, head_dim=2, **sizes).save_pretrained(tmp_path / "model")
    with pytest.raises(UserError, match=r"rank 0 .*optimiser states .* take 1200\.0 GB. Use fewer .*--zero_stage 3"):
        preflight(sft(tmp_path / "run", tmp_path / "model"))
    with pytest.raises(UserError, match=r"rank 0 .* take 1800\.0 GB"):  # bf16: a float32 copy and gradients
        preflight(sft(tmp_path / "run", tmp_path / "model", dtype="bf16"))


def test_what_a_run_surely_needs(tmp_path):
    """1016 weights; a scalar model has 8 more.

    On a CPU in float32: actor and critic 12 bytes a weight, their copies, which never train, 4.
    """
    GemmaConfig(**TINY_SIZES).save_pretrained(tmp_path)
    model = str(tmp_path)
    names = {"actor_model_name_or_path": model, "critic_model_name_or_path": model}
    config = PPOConfig(data_path=["unused"], output_dir="unused", **names)
    # On the disk: a checkpoint has 12 bytes a weight, and the models 4; in bf16 14 and 2.
    both = 1016 + 1024
    assert minimum_memory(config, 1, torch.device("cpu")) == MinimumMemory(16 * both, 0, disk=16 * both)
    # On a GPU in bf16: 2 + 12 bytes and 4 of gradients, which are never given back; and 2.
    assert minimum_memory(config, 1, torch.device("cuda")) == MinimumMemory(0, 20 * both, disk=16 * both)
    assert minimum_memory(sft("unused"), 1, torch.device("cpu")) is None
    # ZeRO 3 puts the actor's weights together, unless vLLM draws.
    for engine, drawing in (("continuous", 2 * 1016), ("generate", 2 * 1016), ("vllm", 0)):
        sharded = PPOConfig(data_path=["unused"], output_dir="unused", zero_stage=3, rollout_engine=engine, **names)
        assert minimum_memory(sharded, 2, torch.device("cuda")).drawing == drawing


def test_a_disk_that_may_be_too_small_is_a_warning(tmp_path, caplog, monkeypatch):
    """1016 weights: three checkpoints of 12 bytes a weight, two to keep and one being written, and 4 for the model.

    A run that resumes has a part of them.
    """
    GemmaConfig(**TINY_SIZES).save_pretrained(tmp_path / "model")
    needed = (3 * 12 + 4) * 1016
    flags = {"save_steps": 1, "eval_interval": 0}
    config = sft(tmp_path / "some" / "run", tmp_path / "model", **flags)
    asked = []

    def usage(free: int):
        return lambda path: asked.append(path) or SimpleNamespace(free=free)

    monkeypatch.setattr("shutil.disk_usage", usage(needed))
    preflight(config)
    assert asked == [tmp_path] and "are free" not in caplog.text
    monkeypatch.setattr("shutil.disk_usage", usage(needed - 1))
    preflight(config)
    (message,) = [message for message in caplog.messages if "are free" in message]
    assert "--save_total_limit" in message and str(tmp_path / "some" / "run") in message
    caplog.clear()
    preflight(sft(tmp_path / "some" / "run", tmp_path / "model", resume_from_checkpoint="latest", **flags))
    assert "are free" not in caplog.text


APART = """
import os, sys
from pathlib import Path

os.chdir(Path(__file__).parent / os.environ["RANK"])  # two nodes without shared storage
sys.argv = [sys.argv[0], "--data_path", "unused", "--model_name_or_path", "unused", "--output_dir", "run"]

def train(config, stage):
    raise AssertionError("went on")

from dschat.settings.supervised import SFTConfig
from dschat.settings.parse import parse
from dschat.main import run_main
from dschat.run import preflight

preflight.VISIBLE_WITHIN = 0
sys.exit(run_main("sft", lambda: parse(SFTConfig), lambda: train))
"""


@pytest.mark.xdist_group("launcher")
@pytest.mark.slow
def test_a_failure_on_one_rank_ends_all_and_says_why(tmp_path):
    for rank in (0, 1):
        (tmp_path / str(rank)).mkdir()
    (tmp_path / "apart.py").write_text(APART)
    result = launch(tmp_path / "apart.py", [])
    assert result.status != 0, result.stdout
    cause = "--output_dir run: rank 1 ("
    assert cause in result.stdout and "does not see the folder that rank 0 writes to" in result.stdout
    assert "Traceback" not in result.stdout and "went on" not in result.stdout
    assert not (tmp_path / "0" / "run").exists()


OTHER_DATA = """
import os, runpy, sys
from pathlib import Path

place = Path(__file__).parent
os.chdir(place / os.environ["RANK"])  # two nodes with data of their own; the output folder is shared
flags = "--data_path data.jsonl --max_seq_len 96 --per_device_train_batch_size 1 --dtype fp32"
main, given = sys.argv[-1], [f"--model_name_or_path={place / 'model'}", f"--output_dir={place / 'run'}"]
sys.argv = [main, *flags.split(), *given]
runpy.run_path(main, run_name="__main__")
"""


@pytest.mark.xdist_group("launcher")
@pytest.mark.slow
def test_nodes_with_other_data_are_refused_before_training(tmp_path):
    """Of as many rows, one differs."""
    rows = make_rows(40, 1, "comparisons")
    make_model(tmp_path / "model", row_texts(rows), seed=1)
    for rank in (0, 1):
        (tmp_path / str(rank)).mkdir()
        own = [*rows[:-1], rows[-rank]]
        (tmp_path / str(rank) / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in own))
    (tmp_path / "other.py").write_text(OTHER_DATA)
    result = launch(tmp_path / "other.py", [STEPS["sft"] / "main.py"])
    assert result.status != 0
    assert "rank 1 (" in result.stdout and "different things: the data (data.jsonl). Start every node" in result.stdout
    assert "Traceback" not in result.stdout and not (tmp_path / "run").exists()
