# SPDX-License-Identifier: Apache-2.0
"""Run commands in tests and read what they leave.

`run_process` starts `python main.py …` as a user would. `run_forked` forks a process that has imported everything
already, which saves the seconds of starting. Both return a `Result`; `.expect(status)` checks its exit status.
`training_rows`, `evaluation_rows` and `read_jsonl` read metrics, `message_of` the error message of a refused command.
"""

import atexit
import fcntl
import json
import multiprocessing
import os
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import warm_python
from real_size import check_words, require_real_size

ROOT = Path(__file__).resolve().parents[2]
TRAINING = ROOT / "applications" / "DeepSpeed-Chat" / "training"
STEPS = {
    "sft": TRAINING / "step1_supervised_finetuning",
    "reward": TRAINING / "step2_reward_model_finetuning",
    "dpo": TRAINING / "step2_dpo_finetuning",
    "ppo": TRAINING / "step3_rlhf_finetuning",
}
GOLD = ROOT / "applications" / "DeepSpeed-Chat" / "dschat" / "quickstart" / "synthetic.py"
TIMEOUT = 600  # seconds; the longest run, five of step 3 on two processes, takes half of it
DEMONSTRATIONS, COMPARISONS, HELD_OUT = 32, 64, 16  # rows of the corpus
SPLIT = "0,32,32"  # of the comparisons between steps 2 and 3

# The CPU, one thread, no network: results do not depend on the machine.
PLAIN = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}
PRINTED = ("stdout.txt", "stderr.txt")
LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
PRELOADED = (
    "dschat.training.steps.sft",
    "dschat.training.steps.reward",
    "dschat.training.steps.dpo",
    "dschat.training.steps.ppo",
    "dschat.cli",
    "dschat.settings.commands",
    "dschat.run.hub",
    "dschat.run.preflight",
    "dschat.evaluation.generate",
    "dschat.evaluation.report",
    "dschat.evaluation.text",
    "pandas",  # half a second, and pyarrow imports it
    "pyarrow.compute",
    "deepspeed.runtime.zero.muon.muon_optimizer",  # every ZeRO stage imports it, and with it torch's compiler: seconds
    "dschat.plan.remedies",
    "dschat.training.ppo.evaluation",
    "deepspeed.module_inject.auto_ep_layer",
    "torch.utils.tensorboard",
    "transformers.models.gemma.modeling_gemma",
    "preloaded_state",
)
FORKS: Any = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(list(PRELOADED))


@dataclass(frozen=True)
class Result:
    """How a process ended and what it wrote."""

    status: int
    stdout: str
    stderr: str

    def expect(self, status: int) -> "Result":
        """Itself; fails with the output if it ended otherwise."""
        assert self.status == status, f"status {self.status}\n{self.stdout}\n{self.stderr}"
        return self


def environment(**changes: str | None) -> dict[str, str]:
    """The variables of a run: this process's without a launcher's, and PLAIN; None removes one."""
    kept = {name: value for name, value in os.environ.items() if name not in LAUNCHER}
    changed = PLAIN | changes
    return {name: value for name, value in (kept | changed).items() if value is not None}


ENVIRONMENT_AT_IMPORT = environment()  # before any test changes a variable: that of the process that is forked


def arguments(flags: dict[str, Any]) -> list[str]:
    """{"name": value} → ["--name", "value"]; True is a bare flag, a list several values, None leaves the flag out."""
    words: list[str] = []
    for name, value in flags.items():
        if value is None:
            continue
        values = [] if value is True else value if isinstance(value, list | tuple) else [value]
        words += [f"--{name}", *map(str, values)]
    return words


@cache
def warm_programs() -> Path:
    """A folder with `python` and `dschat` that start without the seconds of imports; see `warm_python`."""
    address = warm_python.new_address()
    folder = Path(address).parent
    warm_python.write_programs(folder, address)
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    start_fork(FORKS.Process(target=warm_python.serve, args=(address, ENVIRONMENT_AT_IMPORT), daemon=True))
    return folder


def run_command(command: Sequence[Any], cwd: Path | None = None, **changes: str | None) -> Result:
    """Any command as a process of its own; a Python program starts without the seconds of imports."""
    check_words(command)
    words = list(map(str, command))
    if words[0] == sys.executable:
        words[0] = str(warm_programs() / "python")
    return _run(words, cwd, changes)


def _run(words: list[str], cwd: Path | None, changes: dict[str, str | None]) -> Result:
    done = subprocess.run(
        words, cwd=cwd, env=environment(**changes), capture_output=True, text=True, errors="replace", timeout=TIMEOUT
    )
    return Result(done.returncode, done.stdout, done.stderr)


def sft_flags_of(inputs: Path) -> dict[str, Any]:
    """Step 1: an update of 8 demonstrations from a folder with data/ and model/."""
    return {
        "data_path": inputs / "data" / "demonstrations",
        "data_split": "1,0,0",
        "model_name_or_path": inputs / "model",
        "max_seq_len": 192,
        "per_device_train_batch_size": 8,
        "learning_rate": 3e-3,
    }


def run_process(step: str, flags: dict[str, Any], **changes: str | None) -> Result:
    """A main as its users start it: `python main.py ...`, in a new Python."""
    words = [sys.executable, str(STEPS[step] / "main.py"), *arguments(flags)]
    check_words(words)
    return _run(words, None, changes)


def run_forked(
    step: str | Path, flags: dict[str, Any] | list[str], scratch: Path, first: Callable[[], None] | None = None
) -> Result:
    """A main in a fresh fork of a process that has imported everything: the same, without the seconds of start.

    Args:
        step: sft, reward, dpo or ppo, or the path of another script.
        flags: see `arguments`, or the words themselves.
        scratch: folder for what it prints.
        first: is called in the fork before the main.
    """
    return result_of(start_forked(step, flags, scratch, first), scratch)


def start_forked(
    step: str | Path, flags: dict[str, Any] | list[str], scratch: Path, first: Callable[[], None] | None = None
) -> Any:
    """Starts what `run_forked` runs, and gives its process; `first` is called in the fork before the main."""
    scratch.mkdir(parents=True, exist_ok=True)
    files = [str(scratch / name) for name in PRINTED]
    script = step if isinstance(step, Path) else STEPS[step] / "main.py"
    command = [str(script), *(flags if isinstance(flags, list) else arguments(flags))]
    check_words(command)
    process = FORKS.Process(target=_run_here, args=(command, environment(), files, first))
    start_fork(process)
    return process


def result_of(process: Any, scratch: Path, seconds: float = TIMEOUT) -> Result:
    """How a process of `start_forked` ends; one that takes longer is killed."""
    process.join(seconds)
    if process.is_alive():
        process.kill()
        process.join()
    assert process.exitcode is not None
    files = (scratch / name for name in PRINTED)
    stdout, stderr = (file.read_text(encoding="utf-8", errors="replace") if file.exists() else "" for file in files)
    return Result(process.exitcode, stdout, stderr)


def start_fork(process: Any) -> None:
    """Starts a process of FORKS; what it is forked from is begun with the variables that libraries read on import."""
    # Until Python 3.12 the server does not get sys.path, from which it would import `preloaded_state`.
    before = dict(os.environ)
    variables = ENVIRONMENT_AT_IMPORT | {"PYTHONPATH": os.pathsep.join(sys.path)}
    try:
        os.environ.clear()
        os.environ.update(variables)
        process.start()
    finally:
        os.environ.clear()
        os.environ.update(before)


def _run_here(
    command: list[str], variables: dict[str, str], files: list[str], first: Callable[[], None] | None
) -> None:
    """What the fork does: becomes `python main.py ...`."""
    for file, descriptor in zip(files, (1, 2), strict=True):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
    os.environ.clear()
    os.environ.update(variables)
    sys.argv = command
    sys.path.insert(0, str(Path(command[0]).parent))
    if "deepspeed" in sys.modules:
        require_real_size()
    if first is not None:
        first()
    runpy.run_path(command[0], run_name="__main__")


def built_once(root: Path, name: str, build: Callable[[Path], None]) -> Path:
    """`root/name`, made by `build` (folder) in whichever test process comes first; the others wait."""
    folder = root / name
    with open(root / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = root / f"{name}.done"
        if not done.exists():
            build(folder)
            done.touch()
    return folder


def read_jsonl(file: Path) -> list[dict[str, Any]]:
    """The rows of a JSON Lines file; a bare NaN or Infinity is refused, as JSON does."""

    def refuse(constant: str) -> None:
        raise ValueError(f"{file}: {constant} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in file.read_text(encoding="utf-8").splitlines()]


def untimed(row: dict[str, Any]) -> dict[str, Any]:
    """A row of metrics without what a clock says."""
    return {name: x for name, x in row.items() if name != "seconds" and not name.startswith("time/")}


def write_jsonl(file: Path, rows: Sequence[dict[str, Any]]) -> Path:
    """Writes rows; the file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


def files_under(folder: Path) -> set[str]:
    """Every file under a folder, relative to it; event files of TensorBoard as "tensorboard/events"."""
    names = (str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())
    return {name.split(".out.tfevents")[0] for name in names}


def training_rows(folder: Path) -> list[dict[str, Any]]:
    """Rows of metrics.jsonl that report an update."""
    return [row for row in read_jsonl(folder / "metrics.jsonl") if not any(key.startswith("eval/") for key in row)]


def evaluation_rows(folder: Path) -> list[dict[str, Any]]:
    """Rows of metrics.jsonl that report an evaluation."""
    return [row for row in read_jsonl(folder / "metrics.jsonl") if any(key.startswith("eval/") for key in row)]


def check_names(folder: Path, *conditions: str, **families: Sequence[object]) -> None:
    """Every row of metrics.jsonl holds exactly the names that `dschat.base.glossary` declares for it.

    Args:
        folder: of a run.
        conditions: what the run has of `Metric.when`.
        families: what stands in the places of <…>.
    """
    from dschat.base.glossary import HEAD, metrics_of

    step = json.loads((folder / "run.json").read_text())["step"]
    written = [metric.name for metric in metrics_of(step) if metric.when in ("", *conditions)]
    for row in read_jsonl(folder / "metrics.jsonl"):
        held_out = any(name.startswith("eval/") for name in row)
        expected = set(HEAD)
        for name in written:
            if name == "eval/<metric>_stderr":
                expected |= {f"{measured}_stderr" for measured in row} & set(row)
            elif name.startswith("eval/") == held_out and name not in HEAD:
                family = re.search("<([a-z]+)>", name)
                members = families[family[1]] if family else [""]
                expected |= {re.sub("<[a-z]+>", str(member), name) for member in members}
        assert set(row) == expected


def copy_model(model: Path, folder: Path, **tokenizer: str | None) -> Path:
    """A copy of a model's folder with other fields in its tokenizer's configuration; None removes one."""
    shutil.copytree(model, folder, ignore=shutil.ignore_patterns("checkpoints", "models", "tensorboard"))
    file = folder / "tokenizer_config.json"
    content = {name: value for name, value in (json.loads(file.read_text()) | tokenizer).items() if value is not None}
    file.write_text(json.dumps(content))
    return folder


def message_of(result: Result, *words: str) -> str:
    """The one message of a failed run: a line of its own, the last, that holds every word."""
    everything = result.stdout + result.stderr
    assert "Traceback" not in everything, everything
    assert result.status == 2, everything
    lines = [line.rstrip() for line in result.stderr.replace("\r", "\n").splitlines() if line.strip()]
    messages = [line for line in lines if re.match("(dschat [a-z -]+: )?error: ", line)]
    assert len(messages) == 1, result.stderr
    assert lines[-1] == messages[0], "something follows the message:\n" + result.stderr
    for word in words:
        assert word in messages[0], f"{word!r} is not in: {messages[0]}"
    return messages[0]


def rows_of(folder: Path, phase: int) -> list[dict[str, Any]]:
    """The held-out rows that belong to a step."""
    from dschat.data.splits import split_indices

    name, split = ("comparisons", SPLIT) if phase else ("demonstrations", "1,0,0")
    rows = read_jsonl(folder / "data" / name / "validation.jsonl")
    return [rows[i] for i in split_indices(len(rows), split, phase)]


def prompt_of(row: dict[str, Any]) -> str:
    """The prompt of a row of the corpus."""
    return f"POST\nSubreddit: r/{row['info']['subreddit']}\n{row['info']['post']}\nTL;DR: "
