# SPDX-License-Identifier: Apache-2.0
"""Step 3: PPO with macro actions. `python main.py --help` lists the flags."""

import sys
from pathlib import Path

from dschat.config.ppo import PPOConfig
from dschat.main import run_main
from dschat.run.output import Stage


def train(config: PPOConfig, stage: Stage) -> None:
    """Builds the run from its flags and trains."""
    from dschat.builders import build_ppo_models, load_ppo_tokenizer
    from dschat.conditions.termination import Segmenter
    from dschat.data.examples import prompt_examples
    from dschat.data.shares import load_share
    from dschat.rollouts.sampling import Sampling
    from dschat.trainers.ppo.evaluation import Evaluation
    from dschat.trainers.ppo.moving_average import MovingAverage
    from dschat.trainers.ppo.trainer import PPOTrainer, total_updates

    tokenizer = load_ppo_tokenizer(config)
    sampling = Sampling.from_config(config, tokenizer)
    segmenter = Segmenter(config, tokenizer)
    stage.record.parser = segmenter.parser
    share = load_share(config)
    prompts, dropped = prompt_examples(share.train, tokenizer, config.max_prompt_seq_len)
    held_out, dropped_eval = prompt_examples(share.eval, tokenizer, config.max_prompt_seq_len, held_out=True)
    stage.describe_data(share, train=dropped, eval=dropped_eval)
    updates = total_updates(len(prompts), config, stage.plan)
    stage.announce(updates, len(prompts))
    models = build_ppo_models(config, stage.plan, tokenizer, updates)
    actor_base = config.actor_model_name_or_path
    critic_base = config.critic_model_name_or_path or actor_base

    average = MovingAverage(models.actor) if config.enable_ema else None

    def save(folder: Path) -> None:
        stage.save_model(models.actor, tokenizer, "policy", actor_base, folder / "actor")
        if average is not None:
            ema = folder / "actor_ema"
            stage.save_model(models.actor, tokenizer, "policy (moving average)", actor_base, ema, average.state_dict())
        stage.save_model(models.critic, tokenizer, "critic", critic_base, folder / "critic")

    evaluate = Evaluation(held_out, config.per_device_eval_batch_size, config.eval_iters, config.print_answers)
    PPOTrainer(models, prompts, tokenizer, sampling, segmenter, config, stage, evaluate, save, average).fit()


if __name__ == "__main__":
    sys.exit(run_main("ppo", PPOConfig, train))
