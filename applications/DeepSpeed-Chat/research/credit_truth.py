# SPDX-License-Identifier: Apache-2.0
"""How close do advantages come to the truth? Each credit's advantages against values measured by completions.

A policy is trained by token-level PPO, with each critic of CRITICS. Then it samples responses. From the state before
each piece of five tokens K completions are sampled, whose mean score is the value of the state; a piece is worth the
value after it minus the value before it. The same responses with the critic's values give the advantages of each
credit, and these are correlated with what the pieces are worth.

Finished runs are kept: the same command continues where it was stopped.
"""

import argparse
import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import torch
from torch import Tensor

import dschat
from critic_tables import estimate_text
from dschat.base.atomic import write_file
from dschat.data.examples import PromptExample, prompt_examples
from dschat.models.classifiers import load_scalar
from dschat.models.scalar import ScalarModel
from dschat.rollouts.continuous import sample
from dschat.rollouts.sampling import Sampling, row_seed
from learning import origin, run_all
from macro_actions.conditions import fixed
from macro_actions.estimators import gae_batch
from macro_actions.segments import pool_values, segment
from macro_actions.settings import EstimatorSettings
from macro_actions.types import MacroActions, Rollout, Trajectory
from run_trial import make_config
from starts import SLOTS, Policy, SFTModel, Starts, load_policy
from tables import markdown, write_sections
from tasks import TASKS, LearningTask, gold_scores
from trials import Trial, Value

TASK = "style-64"
UPDATES = (20, 100)  # of the policy, before it is measured
PIECE = 5  # tokens
RESPONSES = 64
COMPLETIONS = 32  # from the state before each piece
# Critic → what it starts from (see `Trial`), and flags of step 3.
CRITICS: dict[str, tuple[str, dict[str, Value]]] = {
    "from the SFT model, 1 update": ("fresh", {}),
    "from the SFT model, 16 updates": ("fresh", {"critic_minibatches": 4, "critic_epochs": 4}),
    "trained beforehand, 1 update": ("regressed", {}),
}
# Credit → tokens of a macro action, and settings of GAE.
CREDITS = {
    "λ .95": (1, EstimatorSettings(lam=0.95)),
    "λ .99": (1, EstimatorSettings(lam=0.99)),
    "λ 1": (1, EstimatorSettings(lam=1.0)),
    "n = 5, first": (PIECE, EstimatorSettings(lam=0.95, value_function="first")),
    "n = 5, equal": (PIECE, EstimatorSettings(lam=0.95, value_function="equal")),
}


def main() -> None:
    """Makes the runs that are not finished, and writes the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output_dir", type=Path, default=Path("runs/credit-truth"), help="folder of all results")
    parser.add_argument("--seeds", type=int, default=4, help="how many seeds: 0, 1, …")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, each on one core")
    parser.add_argument("--markdown", type=Path, help="document whose table is replaced: docs/results-tables.md")
    options = parser.parse_args()

    trials = {}
    for updates in UPDATES:
        for name, (start, flags) in CRITICS.items():
            for seed in range(options.seeds):
                trial = Trial(TASK, seed, start, updates=updates, flags={"ngram": 1, **flags})
                trials[updates, name, seed] = trial
    run_all(list(trials.values()), options.output_dir, options.jobs, train_and_correlate)

    rows = []
    for (updates, critic, _), trial in trials.items():
        numbers = json.loads(trial.file(options.output_dir).read_text(encoding="utf-8"))
        rows.append({"updates": updates, "critic": critic, **numbers})
    table = correlation_table(pd.DataFrame(rows))
    print(table)
    write_file(options.output_dir / "tables.md", f"{table}\n")
    if options.markdown is not None:
        write_sections(options.markdown, {"learning advantages and the truth": f"{origin()}\n\n{table}"})


def train_and_correlate(trial: Trial, folder: Path) -> None:
    """Trains the run of a trial, and writes the correlations of its policy and critic."""
    task = TASKS[trial.task]
    starts = Starts(folder / "starts")
    output = folder / "runs" / trial.key
    dschat.train(make_config(trial, task, starts, output))

    policy = load_policy(str(output / "actor"))
    critic = ScalarModel(load_scalar(str(output / "critic"), "critic", torch.float32, policy.tokenizer))
    run = TrainedRun(task, policy, critic, starts.sft(task, trial.seed), trial.seed)
    file = trial.file(folder)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_file(file, json.dumps(correlations(run)))
    shutil.rmtree(output)


@dataclass(frozen=True)
class TrainedRun:
    """What a run has trained, and what its responses are scored with."""

    task: LearningTask
    policy: Policy
    critic: ScalarModel
    start: SFTModel
    seed: int

    def sample(self, contexts: Sequence[Sequence[int]], seeds: Sequence[int], limits: Sequence[int]) -> Rollout:
        """One continuation of each context at temperature 1, of as many tokens as its limit: no token ends it."""
        tokenizer = self.policy.tokenizer
        sampling = Sampling(self.task.length, (), tokenizer.pad_token_id, tokenizer.bos_token_id)
        return sample(self.policy.model, contexts, sampling, seeds, SLOTS, limits=limits).rollout

    def scores(self, prompts: Sequence[str], responses: Sequence[list[int]]) -> Tensor:
        """Scores of B responses as the run was trained on them, (B,)."""
        texts = [str(self.policy.tokenizer.decode(ids)) for ids in responses]
        return (gold_scores(self.task, prompts, texts) - self.start.mean) / self.start.spread


@torch.no_grad()
def correlations(run: TrainedRun) -> dict[str, float]:
    """Pearson correlation of each credit's advantages with the worth of the pieces, over the pieces of all responses.

    Returns:
        The correlation of each credit of CREDITS, a piece's advantage being the mean over its tokens. ``values``: the
        correlation of the critic's values of the states before pieces with the measured values. ``reliability``: the
        correlation of the worth with that of as many other completions; noise multiplies all others by its root.
    """
    rows = run.task.rows(RESPONSES, run.seed, "credit")
    prompts, _ = prompt_examples(run.task.parse(rows), run.policy.tokenizer, run.task.max_prompt)
    seeds = [row_seed(run.seed, 0, prompt.index) for prompt in prompts]
    rollout = run.sample([prompt.prompt_ids for prompt in prompts], seeds, [run.task.length] * len(prompts))
    trajectory = scored_trajectory(run, prompts, rollout)
    mask = rollout.response_mask
    pieces = segment(fixed(mask, PIECE), mask)

    # Truth.
    completed = completion_scores(run, prompts, rollout, pieces)
    values = completed.mean(2)
    worth = piece_worth(values, trajectory.scores)
    first_half, second_half = completed.unflatten(2, (2, -1)).mean(3).unbind(2)
    agreement = pearson(piece_worth(first_half, trajectory.scores), piece_worth(second_half, trajectory.scores))

    # Estimates.
    assert trajectory.values is not None
    numbers = {
        "values": pearson(pool_values(trajectory.values, pieces, "first"), values),
        "reliability": spearman_brown(agreement),
    }
    for name, (length, settings) in CREDITS.items():
        macro = segment(fixed(mask, length), mask)
        advantages = gae_batch(trajectory, macro, settings).advantages
        numbers[name] = pearson(pool_values(advantages, pieces), worth)
    return numbers


def scored_trajectory(run: TrainedRun, prompts: Sequence[PromptExample], rollout: Rollout) -> Trajectory:
    """The rollout with its scores and the critic's values, and without a KL penalty."""
    scores = run.scores([prompt.prompt_text for prompt in prompts], rollout.response_rows())
    before_first_token = rollout.prompt_width - 1
    values = run.critic(rollout.input_ids, rollout.attention_mask)[:, before_first_token:-1]
    no_penalty = torch.zeros_like(values)
    return Trajectory(rollout, no_penalty, no_penalty, values, scores)


def completion_scores(
    run: TrainedRun, prompts: Sequence[PromptExample], rollout: Rollout, pieces: MacroActions
) -> Tensor:
    """Scores of K completions from the state before each of the M pieces of B responses, (B, M, K)."""
    starts = (pieces.lengths.cumsum(1) - pieces.lengths)[0].tolist()
    prompt_texts = []
    contexts = []
    prefixes = []
    seeds = []
    limits = []
    for prompt, response in zip(prompts, rollout.response_rows(), strict=True):
        for start in starts:
            for number in range(COMPLETIONS):
                prompt_texts.append(prompt.prompt_text)
                contexts.append([*prompt.prompt_ids, *response[:start]])
                prefixes.append(response[:start])
                seeds.append(row_seed(run.seed, 1, prompt.index, start, number))
                limits.append(run.task.length - start)
    completions = run.sample(contexts, seeds, limits).response_rows()
    responses = [[*prefix, *ids] for prefix, ids in zip(prefixes, completions, strict=True)]
    return run.scores(prompt_texts, responses).view(len(prompts), len(starts), COMPLETIONS)


def piece_worth(values: Tensor, scores: Tensor) -> Tensor:
    """The value after each piece minus the value before it, (B, M). After the last piece it is the score.

    Example: values .5 .2 and a score of 1 give −.3 .8.

    Args:
        values: shape ``(B, M)``, of the states before pieces.
        scores: shape ``(B,)``.
    """
    return torch.cat([values[:, 1:], scores[:, None]], dim=1) - values


def pearson(first: Tensor, second: Tensor) -> float:
    """Correlation of two tensors of the same shape; NaN if one of them is constant."""
    return float(torch.corrcoef(torch.stack([first.flatten(), second.flatten()]))[0, 1])


def spearman_brown(agreement: float) -> float:
    """Correlation of means of all completions, from that of means of halves. Example: .5 gives 2/3."""
    return 2 * agreement / (1 + agreement)


def correlation_table(runs: pd.DataFrame) -> str:
    """A row for each length of the run and each critic: means over seeds ± standard error."""
    rows = []
    for (updates, critic), seeds in runs.groupby(["updates", "critic"], sort=False):
        row = {"updates": str(updates), "critic": str(critic), "seeds": str(len(seeds))}
        row["reliability"] = f"{seeds['reliability'].mean():.2f}"
        row["values"] = estimate_text(seeds["values"], 2)
        for credit in CREDITS:
            row[credit] = estimate_text(seeds[credit], 2)
        rows.append(row)
    return markdown(pd.DataFrame(rows))


if __name__ == "__main__":
    main()
