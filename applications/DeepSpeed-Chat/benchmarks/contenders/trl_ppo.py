# SPDX-License-Identifier: Apache-2.0
"""TRL's PPOTrainer (trl.experimental.ppo) on the same work. Runs in an environment that holds TRL; knows no dschat.

Where the work does not decide, TRL's defaults hold: unsorted micro-batches, fused AdamW, full logits. One setting is
both its generation batch and its scoring batch (`local_rollout_forward_batch_size`): 32 rows, or the whole rollout if
that is smaller.
"""

from pathlib import Path

from datasets import Dataset
from torch import Tensor
from transformers import AutoTokenizer, GemmaForCausalLM, GemmaForSequenceClassification, TrainerCallback
from trl.experimental.ppo import PPOConfig, PPOTrainer, ppo_trainer

from contenders.meter import Meter
from contenders.process import ContenderJob, read_job
from contenders.work import DTYPES, EOS, PAD

ROLLOUT_FORWARD = 32  # rows of a generation or scoring batch


class StepMeter(TrainerCallback):
    """Measures each step of TRL, a rollout with its updates, as an iteration."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self.tokens = 0.0  # tokens of the responses of this iteration
        self.is_training = False

    def on_train_begin(self, *args: object, **kwargs: object) -> None:
        """Begins the first iteration."""
        self._meter.begin()

    def on_step_end(self, *args: object, **kwargs: object) -> None:
        """Ends an iteration, and begins the next."""
        self._meter.lap("training")
        self._meter.end(self.tokens)
        self.is_training = False
        self._meter.begin()


def main() -> None:
    """Trains until the meter ends the process."""
    job, meter = read_job()
    steps = StepMeter(meter)
    trainer = make_trainer(job, steps)
    measure_phases(trainer, meter, steps)
    trainer.train()


def measure_phases(trainer: PPOTrainer, meter: Meter, steps: StepMeter) -> None:
    """Replaces two functions of TRL: generation ends where the first returns, scoring where the second is called."""
    generate = ppo_trainer.batch_generation
    accumulate = trainer.accelerator.accumulate

    def timed_generation(model: object, queries: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
        sequences, logits = generate(model, queries, *args, **kwargs)
        steps.tokens = float((sequences[:, queries.shape[1] :] != PAD).sum())
        meter.lap("generation")
        return sequences, logits

    def timed_accumulate(*args: object) -> object:
        if not steps.is_training:
            meter.lap("scoring")
            steps.is_training = True
        return accumulate(*args)

    ppo_trainer.batch_generation = timed_generation
    trainer.accelerator.accumulate = timed_accumulate


def make_trainer(job: ContenderJob, steps: StepMeter) -> PPOTrainer:
    """TRL's trainer for this work."""
    files = Path(job.files)
    dtype = DTYPES[job.work.dtype]
    tokenizer = AutoTokenizer.from_pretrained(files / "actor", trust_remote_code=False, padding_side="left")
    prompts = (files / "prompts.txt").read_text(encoding="utf-8").splitlines()
    data = Dataset.from_dict({"input_ids": [tokenizer(prompt)["input_ids"] for prompt in prompts]})
    actor = GemmaForCausalLM.from_pretrained(files / "actor", dtype=dtype)
    actor.generation_config.pad_token_id = PAD
    return PPOTrainer(
        args=make_config(job),
        processing_class=tokenizer,
        model=actor,
        ref_model=GemmaForCausalLM.from_pretrained(files / "actor", dtype=dtype),
        reward_model=GemmaForSequenceClassification.from_pretrained(files / "reward", dtype=dtype),
        value_model=GemmaForSequenceClassification.from_pretrained(files / "reward", dtype=dtype),
        train_dataset=data,
        eval_dataset=data,
        callbacks=[steps],
    )


def make_config(job: ContenderJob) -> PPOConfig:
    """TRL's settings for this work.

    Raises:
        ValueError: a rollout has several updates; TRL derives the batch from the numbers of micro-batches.
    """
    work = job.work
    if work.updates != 1:
        raise ValueError("TRL's PPOTrainer makes one update of a rollout here: use updates=1")
    return PPOConfig(
        output_dir=str(Path(job.folder) / "run"),
        per_device_train_batch_size=work.micro_batch,
        gradient_accumulation_steps=work.batch // work.micro_batch,
        num_mini_batches=work.updates,
        num_ppo_epochs=1,
        local_rollout_forward_batch_size=min(ROLLOUT_FORWARD, work.batch),
        response_length=work.longest_response,
        stop_token_id=EOS,
        temperature=1.0,
        learning_rate=1e-6,
        lr_scheduler_type="constant",
        total_episodes=10**6 * work.batch,  # until the meter ends the process
        num_sample_generations=0,
        gradient_checkpointing=False,
        bf16=work.dtype == "bf16",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=work.dtype == "fp32",
    )


if __name__ == "__main__":
    main()
