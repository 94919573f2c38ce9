# SPDX-License-Identifier: Apache-2.0
"""The floor: what any PPO on these models must compute, in plain transformers and PyTorch, and nothing else.

One batched ``generate``; forwards of reference and reward model; forwards and backwards of actor and critic, and
AdamW. Micro-batches are rows in the order of the prompts, as wide as the whole rollout. Log-probs are a log_softmax of
full logits. Optionally the scoring passes of actor and critic that several updates per rollout need.
"""

from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoTokenizer, GemmaForCausalLM, GemmaForSequenceClassification

from contenders.process import Job, read_job
from contenders.work import DTYPES, EOS, PAD, Work

KL_COEF, LEARNING_RATE = 0.05, 1e-6


class Models:
    """The four models and two optimisers."""

    def __init__(self, files: Path, work: Work) -> None:
        self.device, dtype = torch.device("cuda" if torch.cuda.is_available() else "cpu"), DTYPES[work.dtype]
        self.actor, self.reference = (
            GemmaForCausalLM.from_pretrained(files / "actor", dtype=dtype).to(self.device) for _ in range(2)
        )
        self.critic, self.reward = (
            GemmaForSequenceClassification.from_pretrained(files / "reward", dtype=dtype).to(self.device)
            for _ in range(2)
        )
        self.reference.eval(), self.reward.eval()
        self.optimizers = [torch.optim.AdamW(m.parameters(), lr=LEARNING_RATE) for m in (self.actor, self.critic)]


def main() -> None:
    """Serves iterations."""
    job, meter = read_job()
    models = Models(Path(job.files), job.work)
    prompts = _prompts(job).to(models.device)
    while True:
        meter.begin()
        ids = models.actor.generate(
            input_ids=prompts,
            attention_mask=(prompts != PAD).long(),
            max_new_tokens=job.work.response,
            do_sample=True,
            top_k=0,
            top_p=1.0,
            pad_token_id=PAD,
            eos_token_id=EOS,
        )
        response_mask = ids[:, prompts.shape[1] :] != PAD
        meter.lap("generation")
        rewards, old_logprobs, old_values = score(models, ids, response_mask, job)
        meter.lap("scoring")
        train(models, ids, response_mask, rewards, old_logprobs, old_values, job.work)
        meter.lap("training")
        meter.end(float(response_mask.sum()))


def _prompts(job: Job) -> Tensor:
    """(B, P), padded on the left."""
    tokenizer = AutoTokenizer.from_pretrained(Path(job.files) / "actor", trust_remote_code=False)
    prompts = (Path(job.files) / "prompts.txt").read_text(encoding="utf-8").splitlines()
    return tokenizer(prompts, return_tensors="pt", padding=True)["input_ids"]


@torch.no_grad()
def score(models: Models, ids: Tensor, response_mask: Tensor, job: Job) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Per row, what training needs of the frozen models: reference log-probs (B, R) with the score on the last token;
    and the actor's log-probs and the critic's values (B, R) where the job says so.
    """
    width, rows = response_mask.shape[1], job.work.micro_batch
    rewards, logprobs, values = [], [], []
    for part, mask in zip(ids.split(rows), response_mask.split(rows), strict=True):
        score = models.reward(input_ids=part, attention_mask=(part != PAD).long()).logits[:, 0].float()
        last = torch.zeros_like(mask, dtype=torch.float32)
        last[torch.arange(len(part)), mask.sum(1) - 1] = score
        rewards.append(KL_COEF * response_logprobs(models.reference, part, width) + last)
        if job.scoring:
            logprobs.append(response_logprobs(models.actor, part, width))
            values.append(response_values(models.critic, part, width))
    if not job.scoring:
        return torch.cat(rewards), None, None
    return torch.cat(rewards), torch.cat(logprobs), torch.cat(values)


def train(
    models: Models,
    ids: Tensor,
    response_mask: Tensor,
    rewards: Tensor,
    old_logprobs: Tensor | None,
    old_values: Tensor | None,
    work: Work,
) -> None:
    """The updates of a rollout: PPO's clipped losses with Monte-Carlo returns."""
    width = response_mask.shape[1]
    for update in torch.arange(len(ids), device=ids.device).split(work.update):
        tokens = response_mask[update].sum()
        for rows in update.split(work.micro_batch):
            part, mask = ids[rows], response_mask[rows]
            logprobs = response_logprobs(models.actor, part, width)
            values = response_values(models.critic, part, width)
            before = logprobs.detach() if old_logprobs is None else old_logprobs[rows]
            values_before = values.detach() if old_values is None else old_values[rows]
            token_rewards = (rewards[rows] - KL_COEF * before) * mask
            returns = token_rewards.flip(1).cumsum(1).flip(1)
            advantages = returns - values_before
            ratio = torch.exp(logprobs - before)
            losses = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
            ((losses * mask).sum() / tokens).backward()
            (((values - returns) ** 2 * mask).sum() / tokens).backward()
        for optimizer in models.optimizers:
            optimizer.step()
            optimizer.zero_grad()


def response_logprobs(model: GemmaForCausalLM, ids: Tensor, width: int) -> Tensor:
    """(B, width) float32."""
    logits = model(input_ids=ids, attention_mask=(ids != PAD).long(), use_cache=False).logits[:, -width - 1 : -1]
    return logits.float().log_softmax(-1).gather(-1, ids[:, -width:, None]).squeeze(-1)


def response_values(model: GemmaForSequenceClassification, ids: Tensor, width: int) -> Tensor:
    """(B, width) float32."""
    states = model.model(input_ids=ids, attention_mask=(ids != PAD).long(), use_cache=False).last_hidden_state
    return model.score(states[:, -width - 1 : -1]).squeeze(-1).float()


if __name__ == "__main__":
    main()
