# SPDX-License-Identifier: Apache-2.0
"""TRL's PPOTrainer (trl.experimental.ppo) on the same work. Runs in an environment that holds TRL; knows no dschat.

Its own defaults where the work does not decide: micro-batches as they come, AdamW fused, full logits. Its generation
batch is its scoring batch (`local_rollout_forward_batch_size`): 32 rows, or the whole rollout if that is smaller.
"""

from pathlib import Path

from datasets import Dataset
from torch import Tensor
from transformers import AutoTokenizer, GemmaForCausalLM, GemmaForSequenceClassification, TrainerCallback
from trl.experimental.ppo import PPOConfig, PPOTrainer, ppo_trainer

from contenders.meter import Meter
from contenders.process import ContenderJob, read_job
from contenders.work import DTYPES, EOS, PAD

ROLLOUT_FORWARD = 32  # rows


class StepMeter(TrainerCallback):
    """An iteration goes from one end of a step to the next."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self.tokens = 0.0
        self.training = False

    def on_train_begin(self, *args: object, **kwargs: object) -> None:
        """The first iteration."""
        self._meter.begin()

    def on_step_end(self, *args: object, **kwargs: object) -> None:
        """The end of one, and the beginning of the next."""
        self._meter.lap("training")
        self._meter.end(self.tokens)
        self.training = False
        self._meter.begin()


def main() -> None:
    """Trains until the meter ends the process."""
    job, meter = read_job()
    measure = StepMeter(meter)
    trainer = make_trainer(job, measure)
    generate = ppo_trainer.batch_generation
    accumulate = trainer.accelerator.accumulate

    def timed_generation(model: object, queries: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
        sequences, logits = generate(model, queries, *args, **kwargs)
        measure.tokens = float((sequences[:, queries.shape[1] :] != PAD).sum())
        meter.lap("generation")
        return sequences, logits

    def timed_accumulate(*args: object) -> object:
        if not measure.training:
            meter.lap("scoring")
            measure.training = True
        return accumulate(*args)

    ppo_trainer.batch_generation = timed_generation
    trainer.accelerator.accumulate = timed_accumulate
    trainer.train()


def make_trainer(job: ContenderJob, measure: StepMeter) -> PPOTrainer:
    """TRL's trainer for this work."""
    files = Path(job.files)
    work = job.work
    dtype = DTYPES[work.dtype]
    tokenizer = AutoTokenizer.from_pretrained(files / "actor", trust_remote_code=False, padding_side="left")
    prompts = (files / "prompts.txt").read_text(encoding="utf-8").splitlines()
    data = Dataset.from_dict({"input_ids": [tokenizer(prompt)["input_ids"] for prompt in prompts]})
    actor, reference = (GemmaForCausalLM.from_pretrained(files / "actor", dtype=dtype) for _ in range(2))
    actor.generation_config.pad_token_id = PAD
    critic, reward = (GemmaForSequenceClassification.from_pretrained(files / "reward", dtype=dtype) for _ in range(2))
    config = PPOConfig(
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
        total_episodes=10**6 * work.batch,
        num_sample_generations=0,
        gradient_checkpointing=False,
        bf16=work.dtype == "bf16",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=work.dtype == "fp32",
    )
    models = {"model": actor, "ref_model": reference, "reward_model": reward, "value_model": critic}
    rows = {"train_dataset": data, "eval_dataset": data}
    return PPOTrainer(args=config, processing_class=tokenizer, **models, **rows, callbacks=[measure])


if __name__ == "__main__":
    main()
