# SPDX-License-Identifier: Apache-2.0
"""PPO with macro actions in one file, to be read from top to bottom: torch, transformers and macro_actions.

    python examples/ppo_macro_actions.py HuggingFaceTB/SmolLM2-135M-Instruct

An iteration samples a rollout, scores it, assigns credit over macro actions, and updates actor and critic:

    sample_rollout()  →  assign_credit()  →  update()

Shapes: B responses, P prompt positions, R response positions. Prompts are padded on the left, responses on the right.
The score of a response is 1 if it has TARGET_WORDS words, and falls by 1 / TARGET_WORDS for each that is missing or
too many. The pipeline (`dschat ppo`) computes the same numbers on several GPUs, with checkpoints and checks.
"""

import copy
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from macro_actions import fixed, macro_gae

TARGET_WORDS = 12
PROMPTS = (
    "What is the capital of France?",
    "Why is the sky blue?",
    "Tell me about your favourite season.",
    "How do birds fly?",
    "What should I cook tonight?",
    "Who wrote Hamlet?",
    "How can I sleep better?",
    "What is a black hole?",
)


@dataclass(frozen=True)
class Hyperparameters:
    """Numbers of a run."""

    ngram: int = 5  # tokens of a macro action; 1 is token-level PPO
    gamma: float = 1.0
    lam: float = 0.95  # per macro action
    kl_coef: float = 0.05  # weight of the KL to the reference, in the reward of each token
    cliprange: float = 0.2
    cliprange_value: float = 0.2
    actor_learning_rate: float = 1e-5
    critic_learning_rate: float = 2e-5
    epochs: int = 2  # updates on each rollout
    samples: int = 4  # responses to each prompt
    max_new_tokens: int = 32


@dataclass(frozen=True)
class SampledResponses:
    """Sampled responses, and what the models said of them when they were sampled."""

    ids: Tensor  # (B, P + R), prompt and response
    attention_mask: Tensor  # (B, P + R), True on tokens
    response_mask: Tensor  # (B, R), True up to the end token, which included
    scores: Tensor  # (B,)
    logprobs: Tensor  # (B, R), of the response tokens under the actor
    ref_logprobs: Tensor  # (B, R), under the frozen reference
    values: Tensor  # (B, R), the critic's value of the state before each token


class Critic(nn.Module):
    """A transformer with a value for each token: of the text that ends there."""

    def __init__(self, backbone: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = head  # hidden size → 1

    def forward(self, ids: Tensor, attention_mask: Tensor) -> Tensor:
        """(B, P + R) → values, (B, P + R)."""
        output = self.backbone(input_ids=ids, attention_mask=attention_mask, position_ids=positions_of(attention_mask))
        values: Tensor = self.head(output.last_hidden_state).squeeze(-1)
        return values.float()


def positions_of(attention_mask: Tensor) -> Tensor:
    """Positions that begin with 0 after the padding on the left."""
    return (attention_mask.long().cumsum(1) - 1).clamp(min=0)


def response_logprobs(model: Any, ids: Tensor, attention_mask: Tensor, width: int) -> Tensor:
    """Log-probabilities of the last `width` tokens, (B, R). The logits that predict a token precede it by one."""
    output = model(input_ids=ids, attention_mask=attention_mask, position_ids=positions_of(attention_mask))
    logits = output.logits[:, -width - 1 : -1].float()
    return logits.log_softmax(-1).gather(-1, ids[:, -width:, None]).squeeze(-1)


def response_values(critic: Critic, ids: Tensor, attention_mask: Tensor, width: int) -> Tensor:
    """Values of the states before the last `width` tokens, (B, R)."""
    return critic(ids, attention_mask)[:, -width - 1 : -1]


def score(text: str) -> float:
    """1 for a response of TARGET_WORDS words, less the relative distance from it."""
    return 1 - abs(len(text.split()) - TARGET_WORDS) / TARGET_WORDS


@torch.no_grad()
def sample_rollout(
    actor: Any, reference: Any, critic: Critic, tokenizer: Any, texts: Sequence[str], settings: Hyperparameters
) -> SampledResponses:
    """1. Samples responses to prompts, scores them, and computes log-probabilities and values."""
    prompts = tokenizer(list(texts), padding=True, return_tensors="pt", add_special_tokens=False).to(actor.device)
    ids = actor.generate(
        **prompts,
        do_sample=True,
        top_k=0,
        top_p=1.0,
        max_new_tokens=settings.max_new_tokens,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    width = ids.shape[1] - prompts.input_ids.shape[1]
    responses = ids[:, -width:]

    # A token belongs to the response if no end token comes before it.
    is_end = responses == tokenizer.eos_token_id
    response_mask = is_end.cumsum(1) - is_end.long() == 0
    attention_mask = torch.cat([prompts.attention_mask.bool(), response_mask], 1)
    answers = tokenizer.batch_decode(responses.where(response_mask, tokenizer.pad_token_id), skip_special_tokens=True)
    return SampledResponses(
        ids=ids,
        attention_mask=attention_mask,
        response_mask=response_mask,
        scores=torch.tensor([score(answer) for answer in answers], device=ids.device),
        logprobs=response_logprobs(actor, ids, attention_mask, width),
        ref_logprobs=response_logprobs(reference, ids, attention_mask, width),
        values=response_values(critic, ids, attention_mask, width),
    )


def assign_credit(batch: SampledResponses, settings: Hyperparameters) -> tuple[Tensor, Tensor]:
    """2. Advantages and returns of the tokens, (B, R) each, by GAE over macro actions.

    The rewards of a macro action's tokens are added up, and its value is that of its first token, so that the state
    before the macro action is judged. GAE goes from macro action to macro action: λ is multiplied once for each, and
    not for each token. Every token of a macro action gets its advantage and its return.
    """
    mask = batch.response_mask
    kl = torch.where(mask, batch.logprobs - batch.ref_logprobs, 0.0)
    rewards = -settings.kl_coef * kl
    rows = torch.arange(len(mask), device=mask.device)
    rewards[rows, mask.sum(1) - 1] += batch.scores  # on the last token

    ends = fixed(mask, settings.ngram)  # True on the last token of each macro action
    return macro_gae(batch.values, rewards, ends, mask, settings.gamma, settings.lam, value_function="first")


def policy_loss(new: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, cliprange: float) -> Tensor:
    """PPO's clipped objective, a mean over response tokens."""
    ratio = torch.where(mask, new - old, 0.0).exp()
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - cliprange, 1 + cliprange)
    return torch.maximum(unclipped, clipped)[mask].mean()


def value_loss(new: Tensor, old: Tensor, returns: Tensor, mask: Tensor, cliprange: float) -> Tensor:
    """Half the squared error; values that move further than `cliprange` in an iteration gain nothing by it."""
    clipped = old + (new - old).clamp(-cliprange, cliprange)
    return torch.maximum((new - returns) ** 2, (clipped - returns) ** 2)[mask].mean() / 2


def update(
    actor: Any,
    critic: Critic,
    actor_optimizer: torch.optim.Optimizer,
    critic_optimizer: torch.optim.Optimizer,
    batch: SampledResponses,
    settings: Hyperparameters,
) -> list[tuple[float, float]]:
    """3. Updates actor and critic on a rollout. Returns policy and value loss of each update."""
    advantages, returns = assign_credit(batch, settings)
    mask = batch.response_mask
    losses = []
    for _ in range(settings.epochs):
        new_logprobs = response_logprobs(actor, batch.ids, batch.attention_mask, mask.shape[1])
        actor_loss = policy_loss(new_logprobs, batch.logprobs, advantages, mask, settings.cliprange)
        step(actor, actor_optimizer, actor_loss)

        new_values = response_values(critic, batch.ids, batch.attention_mask, mask.shape[1])
        critic_loss = value_loss(new_values, batch.values, returns, mask, settings.cliprange_value)
        step(critic, critic_optimizer, critic_loss)
        losses.append((actor_loss.item(), critic_loss.item()))
    return losses


def step(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    """One step of an optimiser, with gradients of norm 1 at most."""
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def optimizer_of(model: nn.Module, learning_rate: float) -> torch.optim.Optimizer:
    """The optimiser of actor or critic."""
    return torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0)


def train(model_path: str, iterations: int, settings: Hyperparameters, seed: int = 0) -> list[float]:
    """Trains a model; returns the mean score of each iteration."""
    torch.manual_seed(seed)
    tokenizer = AutoTokenizer.from_pretrained(model_path, padding_side="left", trust_remote_code=False)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    options = {"dtype": torch.float32}
    actor = AutoModelForCausalLM.from_pretrained(model_path, **options, trust_remote_code=False)
    actor.generation_config = GenerationConfig()  # without the model's own temperature and penalties
    reference = copy.deepcopy(actor).requires_grad_(False)
    head = nn.Linear(actor.config.hidden_size, 1, bias=False)
    nn.init.zeros_(head.weight)  # before it has learnt anything, the critic expects a return of 0
    critic = Critic(AutoModel.from_pretrained(model_path, **options, trust_remote_code=False), head)
    for model in (actor, reference, critic):
        model.eval()  # without dropout, so that the first ratio is 1
    actor_optimizer = optimizer_of(actor, settings.actor_learning_rate)
    critic_optimizer = optimizer_of(critic, settings.critic_learning_rate)

    texts = list(PROMPTS)
    if tokenizer.chat_template:
        chats = [[{"role": "user", "content": text}] for text in PROMPTS]
        texts = tokenizer.apply_chat_template(chats, tokenize=False, add_generation_prompt=True)
    history = []
    for iteration in range(iterations):
        batch = sample_rollout(actor, reference, critic, tokenizer, texts * settings.samples, settings)
        losses = update(actor, critic, actor_optimizer, critic_optimizer, batch, settings)
        kl = (batch.logprobs - batch.ref_logprobs)[batch.response_mask].sum() / len(batch.scores)
        history.append(batch.scores.mean().item())
        print(f"{iteration:4} score {history[-1]:6.3f}  KL {kl:6.3f}  value loss {losses[-1][1]:.3f}", flush=True)
    return history


if __name__ == "__main__":
    train(sys.argv[1], iterations=40, settings=Hyperparameters())
