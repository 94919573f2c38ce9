# SPDX-License-Identifier: Apache-2.0
"""The pipeline on a real language model: samples, step 1, step 2, step 3 with and without macro actions, report.

The model answers instructions; a program gives the gold score of each answer (`gold.py`). Demonstrations and
comparisons are chosen from the model's own answers, with noise. The reward model learns from the comparisons, and PPO
trains on the reward model alone, so the gold score shows what its mistakes cost. Every command is finished before the
next one starts; run again with the same flags, the pipeline continues where it stopped.
"""

import os
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import psutil
import torch

from dschat.base.errors import UserError
from dschat.base.jsonl import read_object, write_rows
from dschat.base.kept import Kept
from dschat.evaluation.generate_options import model_name
from dschat.evaluation.runs import build_report
from dschat.quickstart.inputs import SMALL_NOTE, make_folder
from dschat.quickstart.options import QuickstartOptions
from dschat.quickstart.real import gold, package_model
from dschat.quickstart.real.instructions import held_out_instructions, training_instructions
from dschat.quickstart.real.samples import Answers, make_comparisons, make_demonstrations, read_answers
from dschat.quickstart.subcommands import Processes, as_arguments, run_policies, run_step

TEMPERATURE = 0.8  # temperature of all sampling: at 1, answers of so small a model are half nonsense
MAX_PROMPT = 128  # tokens
MADE = ("model", "data", "step1-sft", "step2-reward")  # what a pipeline makes first
RUN_BYTES = 10 * 2**30  # main memory of a run of step 3 with SmolLM2 and 32 rows, when it writes a checkpoint
MIN_ROWS = 20  # demonstrations or comparisons
DATASET = "instructions"  # name of the sampled data set, in the results folder
TIME_ON_A_GPU = "a model of 135 million parameters takes some minutes on a GPU"
TIME_ON_A_CPU = (
    "without a GPU, a small run: about 20 minutes on 2 cores for a model of 135 million parameters. Its five updates"
    " show that every part runs"
)
GOLD_NOTE = (
    "Gold score, 0 to 1: a quarter for naming the topic, a quarter for the number of complete sentences that the"
    " instruction asks for, half for a friendly tone by the VADER lexicon, less repeated word pairs. Held-out"
    " instructions are about topics that no step sees."
)
REWARD_MODEL_NOTE = (
    "Step 3 trains on the reward model alone; the gold score has only chosen the demonstrations and comparisons of"
    " steps 1 and 2."
)


@dataclass(frozen=True)
class RealScale:
    """Numbers of rows and updates."""

    instructions: int  # for training
    held_out: int  # held-out instructions, all of them in each evaluation
    samples: int  # answers of the initial model to each training instruction
    batch: int  # rows of an update in steps 1 and 2
    reward_epochs: int  # passes of step 2 over its comparisons
    micro_batch: int  # rows of a forward pass in training
    rollout: int  # answers of a PPO update
    max_answer: int  # tokens of an answer
    updates: int
    actor_rate: float  # learning rate; Adam moves a weight by about this much in an update
    eval_interval: int
    save_steps: int


# For a GPU: minutes.
FULL = RealScale(
    instructions=1224,
    held_out=252,
    samples=8,
    batch=32,
    reward_epochs=3,
    micro_batch=32,
    rollout=64,
    max_answer=64,
    updates=100,
    actor_rate=2e-5,
    eval_interval=20,
    save_steps=50,
)
# For two cores: shows that every part runs, and learns next to nothing.
SMALL = RealScale(
    instructions=96,
    held_out=24,
    samples=4,
    batch=16,
    reward_epochs=1,
    micro_batch=8,
    rollout=16,
    max_answer=48,
    updates=5,
    actor_rate=4e-5,
    eval_interval=5,
    save_steps=2,
)
# Name of a run of step 3 → its folder and flags. The critic starts from the reward model, as published.
RUNS: Mapping[str, tuple[str, Sequence[str]]] = {
    "PPO": ("step3-ppo", ["--ngram", "1"]),
    "MA-PPO": ("step3-ma-ppo", ["--ngram", "5", "--value_function", "first"]),
}


@dataclass(frozen=True)
class RealModel:
    """Folders and settings of a pipeline."""

    folder: Path
    model: str  # the initial model: a folder or hub id
    scale: RealScale
    seed: int
    processes: Processes

    @property
    def data(self) -> Path:
        """Folder of the data."""
        return self.folder / "data"

    @property
    def sft(self) -> Path:
        """Output folder of step 1."""
        return self.folder / "step1-sft"

    @property
    def reward(self) -> Path:
        """Output folder of step 2."""
        return self.folder / "step2-reward"

    @property
    def common(self) -> list[str]:
        """Flags of every step."""
        flags = {"--seed": self.seed, "--zero_stage": self.processes.zero_stage, "--dtype": training_dtype()}
        return as_arguments(flags)


def run(options: QuickstartOptions) -> str:
    """Makes the data, runs the three steps and writes the report; returns its numbers.

    Raises:
        UserError: the model cannot be opened, the folder was made with other settings, or a command failed.
    """
    start_time = time.perf_counter()
    has_gpu = torch.cuda.is_available()
    is_full = has_gpu and not options.small
    print(f"== {TIME_ON_A_GPU if has_gpu else TIME_ON_A_CPU}", flush=True)
    real = open_pipeline(options, FULL if is_full else SMALL)
    train_first_steps(real)
    steps = {}
    scores = ["--reward_model_name_or_path", str(real.reward)]
    for name, (folder, more) in RUNS.items():
        steps[name] = (real.folder / folder, [*ppo_flags(real, real.reward, scores), *more])
    train_policies(real, steps, options.jobs)
    runs = {name: output for name, (output, _) in steps.items()}
    title = f"PPO and MA-PPO on {options.model}"
    about = [GOLD_NOTE] if is_full else [SMALL_NOTE, GOLD_NOTE]
    summary = build_report(runs, real.folder, title=title, about=about, notes=[REWARD_MODEL_NOTE])
    seconds = time.perf_counter() - start_time
    return f"{summary.without_details().text()}\nreport: {real.folder / 'report.html'} ({seconds:.0f} s in this start)"


def training_dtype() -> str:
    """bf16 on a GPU and on CPUs that multiply matrices in bf16 (AMX), where it is several times faster; else fp32."""
    has_fast_bf16 = torch.cuda.is_available() or torch.cpu._is_amx_tile_supported()
    return "bf16" if has_fast_bf16 else "fp32"


def open_pipeline(options: QuickstartOptions, scale: RealScale) -> RealModel:
    """Writes model and prompts into the folder unless they are there; refuses a folder made with other settings."""
    assert options.model is not None  # without a model, the synthetic reviews run
    folder = options.folder
    make_folder(folder, "model and instructions")
    settings = {
        "model": options.model,
        "small": scale == SMALL,
        "seed": options.seed,
        "num_gpus": options.num_gpus,
        "zero_stage": options.zero_stage,
        "dtype": training_dtype(),
    }
    record = Kept(folder / "pipeline.json", settings | {"scale": asdict(scale)})
    difference = record.difference()
    if difference:
        raise UserError(
            f"{folder}: the pipeline there began with {difference}. Give another --output_dir, or remove the folder."
        )
    is_of_another_run = not record.path.exists() and any((folder / name).exists() for name in MADE)
    if is_of_another_run:
        raise UserError(f"{folder} holds another run. Give another --output_dir, or remove the folder.")
    record.write({})
    model = options.model
    if model == package_model.NAME:
        package_model.write_model(package_model.weights_of_package(), folder / "model")
        model = str(folder / "model")
    cores = os.cpu_count() or 1
    threads = max(1, cores // options.num_gpus)
    processes = Processes(options.num_gpus, options.zero_stage, threads)
    return RealModel(folder, model, scale, options.seed, processes)


def train_first_steps(real: RealModel, with_reward_model: bool = True) -> None:
    """The initial model's answers, step 1 and step 2, each unless it is finished."""
    samples = sample_answers(real)
    write_data(real, samples)
    run_training_step("sft", sft_flags(real), real.sft, real.processes)
    if with_reward_model:
        run_training_step("reward", reward_flags(real), real.reward, real.processes)


def sample_answers(real: RealModel) -> list[Answers]:
    """The initial model's answers to the instructions, with gold scores."""
    scale = real.scale
    prompts = real.data / "prompts"
    rows = [instruction.row() for instruction in training_instructions(scale.instructions, real.seed)]
    write_rows(prompts / "train.jsonl", rows)
    write_rows(prompts / "test.jsonl", rows)  # answers are sampled to held-out rows
    scorer = {"--reward_function": f"{gold.__file__}:gold_scores"}
    return best_of_n(real, real.model, prompts, DATASET, len(rows), scale.samples, scorer)


def best_of_n(
    real: RealModel, model: str, data: Path, dataset: str, prompts: int, samples: int, scorer: Mapping[str, object]
) -> list[Answers]:
    """Scored answers to the held-out rows of a data set, sampled unless they are there.

    Args:
        real: the pipeline.
        model: folder or hub id.
        data: folder of the data set.
        dataset: its name, in the results folder.
        prompts: number of its rows.
        samples: answers to each.
        scorer: flag of what scores them.
    """
    results = real.data / "results" / dataset / "best-of-n" / f"{model_name(model)}.jsonl"
    if not results.exists():
        flags = {
            "--model": model,
            "--data_path": data,
            "--dataset": dataset,
            "--num_samples": prompts,
            **scorer,
            "--best_of": samples,
            "--temperatures": TEMPERATURE,
            "--single_temperatures": TEMPERATURE,
            "--top_k": 0,
            "--max_new_tokens": real.scale.max_answer,
            "--batch_size": real.scale.rollout,
            "--dtype": training_dtype(),
            "--seed": real.seed,
            "--proj_path": real.data,
        }
        run_step("best-of-n", as_arguments(flags), replace(real.processes, count=1))
    return read_answers(results)


def write_data(real: RealModel, samples: Sequence[Answers]) -> None:
    """Writes demonstrations, comparisons and the instructions of step 3, each as train.jsonl and test.jsonl.

    Raises:
        UserError: there are hardly any demonstrations or comparisons.
    """
    held_out = [instruction.row() for instruction in held_out_instructions(real.scale.held_out, real.seed)]
    instructions = [instruction.row() for instruction in training_instructions(real.scale.instructions, real.seed)]
    write_rows(real.data / "instructions" / "train.jsonl", instructions)
    write_rows(real.data / "instructions" / "test.jsonl", held_out)
    sources = {
        "demonstrations": make_demonstrations(samples, real.seed),
        "comparisons": make_comparisons(samples, real.seed),
    }
    for name, rows in sources.items():
        if len(rows) < MIN_ROWS:
            count = sum(len(sample.answers) for sample in samples)
            raise UserError(
                f"--model {real.model}: its {count} answers give only {len(rows)} {name}, because hardly any ends by "
                "itself, or their scores are the same. Give a model that was trained to follow instructions."
            )
        held_out_rows = max(1, len(rows) // 10)
        write_rows(real.data / name / "train.jsonl", rows[held_out_rows:])
        write_rows(real.data / name / "test.jsonl", rows[:held_out_rows])


def sft_flags(real: RealModel) -> list[str]:
    """Step 1 on the demonstrations."""
    flags = supervised_flags(real, real.model, real.sft, real.data / "demonstrations")
    return [*flags, "--learning_rate", "2e-5"]


def reward_flags(real: RealModel) -> list[str]:
    """Step 2 on the comparisons.

    The loss compares the values at every token, so that a critic that starts from this model knows something about
    unfinished answers. One learned factor gives the scores a scale, which a head of zeros does not reach by itself.
    """
    flags = supervised_flags(real, str(real.sft), real.reward, real.data / "comparisons")
    flags += as_arguments({"--num_train_epochs": real.scale.reward_epochs, "--learning_rate": "3e-5"})
    return [*flags, "--reward_loss", "per_sample", "--reward_gain"]


def supervised_flags(real: RealModel, model: str, output: Path, data: Path) -> list[str]:
    """What steps 1 and 2 have in common."""
    scale = real.scale
    micro_batch = min(scale.micro_batch, real.processes.share(scale.batch))
    flags = {
        "--data_path": data,
        "--model_name_or_path": model,
        "--output_dir": output,
        "--max_seq_len": MAX_PROMPT + scale.max_answer,
        "--per_device_train_batch_size": micro_batch,
        "--per_device_eval_batch_size": micro_batch,
        "--global_batch_size": scale.batch,
        "--warmup_ratio": 0.1,
        "--save_steps": scale.save_steps,
        "--save_total_limit": 1,
    }
    return [*as_arguments(flags), *real.common]


def ppo_flags(real: RealModel, critic: Path, scores: Sequence[str]) -> list[str]:
    """Step 3; all runs start from the same models and see the same instructions.

    Args:
        real: the pipeline.
        critic: the model that the critic starts from. It has more to learn than the actor.
        scores: flags of what scores the answers.
    """
    scale = real.scale
    flags = {
        "--data_path": real.data / "instructions",
        "--actor_model_name_or_path": real.sft,
        "--metric_function": f"{gold.__file__}:gold_scores",
        "--temperature": TEMPERATURE,
        "--per_device_generation_batch_size": real.processes.share(scale.rollout),
        "--per_device_training_batch_size": min(scale.micro_batch, real.processes.share(scale.rollout)),
        "--global_batch_size": scale.rollout,
        "--per_device_eval_batch_size": scale.rollout,
        "--max_steps": scale.updates,
        "--eval_interval": scale.eval_interval,
        "--eval_prompts": scale.held_out,
        "--save_steps": scale.save_steps,
        "--save_total_limit": 1,
        "--max_prompt_seq_len": MAX_PROMPT,
        "--max_answer_seq_len": scale.max_answer,
        "--actor_learning_rate": scale.actor_rate,
        "--critic_model_name_or_path": critic,
        "--critic_learning_rate": 2 * scale.actor_rate,
        "--lr_scheduler_type": "constant_with_warmup",
        "--num_warmup_steps": 2,
        "--kl_ctl": 0.05,
        "--missing_eos_penalty": 1,
    }
    return [*as_arguments(flags), *scores, "--normalize_scores", "--whiten_advantages", *real.common]


def train_policies(real: RealModel, steps: Mapping[str, tuple[Path, Sequence[str]]], at_once: int) -> None:
    """Runs of step 3 that are not finished: several at a time, or one after another if each is several processes.

    Args:
        real: the pipeline.
        steps: name of a run → its output folder and flags.
        at_once: runs at a time, where each is one process.
    """
    unfinished = []
    for output, flags in steps.values():
        if not is_finished(output):
            unfinished.append((output, [*flags, "--output_dir", str(output), *resume_flags(output)]))
        else:
            remove_checkpoints(output)
    if not unfinished:
        return
    try:
        # The number of threads must not depend on how many runs are left: a resumed run would round differently.
        threads = max(1, real.processes.threads // min(at_once, len(steps)))
        at_once = min(at_once, runs_that_fit(), len(unfinished))
        run_policies([flags for _, flags in unfinished], at_once, real.processes, threads)
    finally:
        for output, _ in unfinished:
            if is_finished(output):
                remove_checkpoints(output)


def runs_that_fit() -> int:
    """Runs of step 3 that fit into a CPU's free memory at a time, by what one of SmolLM2 takes; at least one."""
    if torch.cuda.is_available():
        return sys.maxsize
    return max(1, psutil.virtual_memory().available // RUN_BYTES)


def run_training_step(name: str, flags: Sequence[str], output: Path, processes: Processes) -> None:
    """A training step, unless it is finished; one that was interrupted continues from its last checkpoint."""
    if is_finished(output):
        remove_checkpoints(output)
        return
    run_step(name, [*flags, *resume_flags(output)], processes)
    remove_checkpoints(output)


def is_finished(output: Path) -> bool:
    """Whether the training step with this output folder came to its end."""
    return read_object(output / "run.json").get("finished") is True


def resume_flags(output: Path) -> list[str]:
    """Flags by which a training step that was begun continues."""
    return ["--resume_from_checkpoint", "latest"] if (output / "run.json").exists() else []


def remove_checkpoints(output: Path) -> None:
    """Removes what only an interrupted run needs: several GB for each run of step 3."""
    shutil.rmtree(output / "checkpoints", ignore_errors=True)
