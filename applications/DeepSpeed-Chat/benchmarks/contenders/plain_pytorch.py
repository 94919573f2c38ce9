# SPDX-License-Identifier: Apache-2.0
"""An iteration of PPO in plain PyTorch and transformers: only what any PPO on these models must compute.

One batched ``generate``; forwards of reference and reward model; forwards and backwards of actor and critic, and
AdamW. Micro-batches are rows in the order of the prompts, as wide as the whole rollout. Log-probs are a log_softmax of
full logits. Optionally the scoring passes of actor and critic that several updates per rollout need.
"""

from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoTokenizer, GemmaForCausalLM, GemmaForSequenceClassification, GenerationConfig

from contenders.process import ContenderJob, read_job
from contenders.work import DTYPES, EOS, PAD, IterationWork

KL_COEF = 0.05
LEARNING_RATE = 1e-6
# Rewards (B, R): the reference's part of the KL penalty, with the score on the last token; log-probs and values (B, R)
# of actor and critic, if they were computed.
Scored = tuple[Tensor, Tensor | None, Tensor | None]


class Models:
    """The four models and two optimisers."""

    def __init__(self, files: Path, work: IterationWork, device: torch.device) -> None:
        dtype = DTYPES[work.dtype]
        load_policy = partial(GemmaForCausalLM.from_pretrained, dtype=dtype, trust_remote_code=False)
        load_scalar = partial(GemmaForSequenceClassification.from_pretrained, dtype=dtype, trust_remote_code=False)
        self.actor = load_policy(files / "actor")
        self.reference = load_policy(files / "actor")
        self.critic = load_scalar(files / "reward")
        self.reward = load_scalar(files / "reward")
        for model in (self.actor, self.reference, self.critic, self.reward):
            nn.Module.to(model, device)
        self.optimizers = []
        for trained in (self.actor, self.critic):
            self.optimizers.append(torch.optim.AdamW(trained.parameters(), lr=LEARNING_RATE))


def main() -> None:
    """Runs iterations whenever the meter is asked for one."""
    job, meter = read_job()
    files = Path(job.files)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    models = Models(files, job.work, device)
    tokenizer = AutoTokenizer.from_pretrained(files / "actor", trust_remote_code=False)
    texts = (files / "prompts.txt").read_text(encoding="utf-8").splitlines()
    prompts = tokenizer(texts, return_tensors="pt", padding=True)["input_ids"].to(device)  # (B, P), padded on the left
    sampling = GenerationConfig(
        max_new_tokens=job.work.longest_response,
        do_sample=True,
        top_k=0,
        top_p=1.0,
        pad_token_id=PAD,
        eos_token_id=EOS,
    )
    prompt_mask = (prompts != PAD).long()
    while True:
        meter.begin()
        ids: Tensor = models.actor.generate(  # type: ignore[misc, assignment]
            prompts, attention_mask=prompt_mask, generation_config=sampling
        )
        response_mask = ids[:, prompts.shape[1] :] != PAD
        meter.lap("generation")
        scored = score(models, ids, response_mask, job)
        meter.lap("scoring")
        train(models, ids, response_mask, scored, job.work)
        meter.lap("training")
        meter.end(float(response_mask.sum()))


@torch.no_grad()
def score(models: Models, ids: Tensor, response_mask: Tensor, job: ContenderJob) -> Scored:
    """Passes of the frozen models, and with `job.scoring` also of actor and critic."""
    width = response_mask.shape[1]
    rows = job.work.micro_batch
    rewards = []
    logprobs = []
    values = []
    for part, mask in zip(ids.split(rows), response_mask.split(rows), strict=True):
        last = torch.zeros_like(mask, dtype=torch.float32)
        scores = models.reward(input_ids=part, attention_mask=(part != PAD).long()).logits[:, 0].float()
        last[torch.arange(len(part)), mask.sum(1) - 1] = scores
        rewards.append(KL_COEF * response_logprobs(models.reference, part, width) + last)
        if job.scoring:
            logprobs.append(response_logprobs(models.actor, part, width))
            values.append(response_values(models.critic, part, width))
    return torch.cat(rewards), torch.cat(logprobs) if logprobs else None, torch.cat(values) if values else None


def train(models: Models, ids: Tensor, response_mask: Tensor, scored: Scored, work: IterationWork) -> None:
    """The updates of a rollout: PPO's clipped losses with Monte-Carlo returns."""
    width = response_mask.shape[1]
    rewards, old_logprobs, old_values = scored
    for update in torch.arange(len(ids), device=ids.device).split(work.update_prompts):
        tokens = response_mask[update].sum()
        for rows in update.split(work.micro_batch):
            part = ids[rows]
            mask = response_mask[rows]
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
    output = model(input_ids=ids, attention_mask=(ids != PAD).long(), use_cache=False)
    logits: Tensor = output.logits[:, -width - 1 : -1]
    return logits.float().log_softmax(-1).gather(-1, ids[:, -width:, None]).squeeze(-1)


def response_values(model: GemmaForSequenceClassification, ids: Tensor, width: int) -> Tensor:
    """(B, width) float32."""
    states = model.model(input_ids=ids, attention_mask=(ids != PAD).long(), use_cache=False).last_hidden_state
    values: Tensor = model.score(states[:, -width - 1 : -1])
    return values.squeeze(-1).float()


if __name__ == "__main__":
    main()
