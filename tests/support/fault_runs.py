# SPDX-License-Identifier: Apache-2.0
"""Small runs of steps 1 and 3 that are killed, stopped or given a full disk, and comparisons of their outputs."""

import ctypes
import json
import os
import random
import resource
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cli_runs import Result, read_jsonl, result_of, sft_flags_of, start_forked

RESUME = {"resume_from_checkpoint": True}
# A reward function, in a file that can let a process be signalled at a moment. FAULT has the function at which it
# happens, as module:name; at which of its calls; and the signals that it sends itself (nothing between two commas is a
# pause of more than a second), or a file that it makes before
# it waits for somebody else's.
FUNCTIONS = """
import importlib, os, time

def length(prompts, responses, rows):
    return [float(len(response)) for response in responses]

def hurt(place, number, what):
    module, _, path = place.partition(":")
    *parents, name = path.split(".")
    owner = importlib.import_module(module)
    for parent in parents:
        owner = getattr(owner, parent)
    call, calls = getattr(owner, name), []

    def hurting(*args, **named):
        calls.append(name)
        if len(calls) == int(number) and what.startswith("/"):
            open(what, "w").close()
            time.sleep(2)
        elif len(calls) == int(number):
            for sent in what.split(","):
                if sent:
                    os.kill(os.getpid(), int(sent))
                else:
                    time.sleep(1.2)
        return call(*args, **named)

    setattr(owner, name, hurting)

if os.environ.get("FAULT") and os.environ.get("RANK", "0") == os.environ.get("FAULT_RANK", "0"):
    hurt(*os.environ["FAULT"].split("|"))
"""
MOMENTS = {
    "generation": "dschat.rollouts.scheduler:BatchScheduler.step|20",
    "scoring": "dschat.scoring.function:FunctionScores.__call__|3",
    "training": "dschat.training.ppo.update:_critic_step|3",
    "saving": "dschat.engine.engine:Engine.save_checkpoint|4",
    "saving-models": "dschat.run.model_folders:save_model|2",
    "learning": "dschat.training.supervised.sft:SFTTask.loss|3",
}


def make_inputs(folder: Path) -> None:
    """data/demonstrations, data/comparisons, model, and own.py with a reward function."""
    from dschat.models.tiny import make_model
    from dschat.quickstart.synthetic import make_rows, row_texts, write_corpus

    write_corpus(folder / "data", 32, 64, 8, seed=1)
    texts = row_texts(make_rows(100, 1, "demonstrations"))
    make_model(folder / "model", texts, seed=1, hidden_size=16, layers=1, vocab_size=300)
    (folder / "own.py").write_text(FUNCTIONS)


def flags_of(step: str, inputs: Path) -> dict[str, Any]:
    """Step 1: 4 updates of 8 demonstrations. Step 3: 4 rollouts of 8 prompts, 2 updates each. Both save each time."""
    common = {"save_steps": 1, "eval_interval": 2, "save_total_limit": 2}
    if step == "sft":
        return common | sft_flags_of(inputs)
    return common | {
        "data_path": inputs / "data" / "comparisons",
        "data_split": "0,32,32",
        "actor_model_name_or_path": inputs / "model",
        "critic_model_name_or_path": inputs / "model",
        "reward_function": f"{inputs / 'own.py'}:length",
        "max_prompt_seq_len": 160,
        "max_answer_seq_len": 8,
        "per_device_generation_batch_size": 8,
        "per_device_training_batch_size": 4,
        "actor_learning_rate": 1e-3,
        "critic_learning_rate": 1e-3,
        "adaptive_kl_target": 1.0,
        "enable_ema": True,
    }


class Trial:
    """A run in a folder of its own, started as often as it takes."""

    def __init__(self, step: str, flags: dict[str, Any], place: Path) -> None:
        """Starts nothing yet; output goes to `place/out`."""
        self.step, self.out, self.printed = step, place / "out", place / "printed"
        self.flags = flags | {"output_dir": self.out}

    def start(self, first: Callable[[], None] | None = None, **more: Any) -> Any:
        """Starts the run, with further flags; see `start_forked`."""
        return start_forked(self.step, self.flags | more, self.printed, first)

    def run(self, first: Callable[[], None] | None = None, **more: Any) -> Result:
        """Runs it to its end."""
        return result_of(self.start(first, **more), self.printed)

    def ended(self, process: Any, seconds: float = 60) -> Result:
        """How a process that was started ends."""
        return result_of(process, self.printed, seconds)

    def checkpoints(self) -> list[int]:
        """Updates of the checkpoints that stand under their names."""
        return sorted(int(folder.name[5:]) for folder in self.out.glob("checkpoints/step-*"))

    def clear(self) -> None:
        """Begins a new run."""
        shutil.rmtree(self.out, ignore_errors=True)


def outcome(out: Path) -> dict[str, Any]:
    """What a run leaves that two equal runs leave equal: weights, samples, cards without flags, rows without times."""
    assert json.loads((out / "run.json").read_text())["finished"] is True
    rows = read_jsonl(out / "metrics.jsonl")
    rows = [{name: x for name, x in row.items() if name != "seconds" and "time/" not in name} for row in rows]
    found: dict[str, Any] = {"metrics.jsonl": rows}
    for pattern in ("*.safetensors", "*/*.safetensors", "samples/*"):
        found |= {str(file.relative_to(out)): file.read_bytes() for file in out.glob(pattern)}
    for card in out.glob("**/README.md"):
        lines = card.read_text().replace(str(out), "OUT").splitlines()
        found[str(card.relative_to(out))] = [line for line in lines if not line.startswith("- `--")]
    assert any(name.endswith(".safetensors") for name in found)
    return found


def expect_same(expected: dict[str, Any], found: dict[str, Any]) -> None:
    """Fails with the names of what differs."""
    assert expected.keys() == found.keys(), expected.keys() ^ found.keys()
    different = [name for name in expected if expected[name] != found[name]]
    assert not different, different


def contents(folder: Path) -> dict[str, bytes]:
    """Every file under a folder."""
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def wait_for(condition: Callable[[], bool], process: Any, seconds: float = 60) -> bool:
    """Waits until something is true or the process has ended; whether it is true."""
    end = time.monotonic() + seconds
    while not condition() and process.is_alive() and time.monotonic() < end:
        time.sleep(0.0005)
    return condition()


def kill_somewhere(trial: Trial, process: Any, draw: random.Random, longest: float) -> bool:
    """Kills a run at an instant that is drawn, every second time inside a save; False if it ended before that."""
    if draw.random() < 0.5:
        process.join(draw.uniform(0.0, longest))
    else:
        writing = trial.out / ".writing"
        for _ in range(draw.randint(1, 4)):
            wait_for(lambda: not writing.exists(), process)
            wait_for(writing.exists, process)
        process.join(draw.uniform(0.0, 0.06))
    process.kill()
    process.join()
    return bool(process.exitcode == -9)


def small_files_only(limit: int) -> None:
    """In a fork: no file can become larger, as on a full disk."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))


def without_override() -> None:
    """In a fork: permissions hold for root, too."""
    if os.geteuid() != 0:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    head, data = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    assert libc.capget(head, data) == 0
    for number in (0, 3):  # effective, of capabilities below 32; CAP_DAC_OVERRIDE is number 1, CAP_DAC_READ_SEARCH 2
        data[number] &= ~(1 << 1 | 1 << 2)
    assert libc.capset(head, data) == 0
