# SPDX-License-Identifier: Apache-2.0
"""The work that every contender does: models, tokenizer and prompts as files. Imports transformers but not dschat.

The models are random Gemmas. The actor itself decides how long responses are, so that no contender needs a setting for
it: one residual channel holds the same number at every position, since no layer writes to it, and the embedding of EOS
(which is also its row of the output head) reads that channel alone. EOS then has nearly the same probability at every
position: zero for equal lengths, or the one that gives the requested mean length. The pad token is never sampled.
"""

import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import cast

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    GemmaConfig,
    GemmaForCausalLM,
    GemmaForSequenceClassification,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

PAD = 0  # ids
EOS = 1
FIRST_WORD = 2
CHANNEL = 0  # of the residual stream: the one that no layer writes to
CONSTANT = 0.1  # what it holds, as the embeddings have it
NEVER = -8.0  # an embedding that makes a token impossible: a logit of about -40
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Size:
    """A Gemma, in the words of its config."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int


SIZES = {
    "tiny": Size(64, 16, 1, 2, 2, 8, 32),
    "S": Size(2048, 128, 4, 4, 4, 32, 512),
    "M": Size(32_000, 256, 6, 4, 4, 64, 1024),
    "G": Size(256_000, 2048, 18, 8, 1, 256, 16_384),  # Gemma 2B
}


@dataclass(frozen=True)
class IterationWork:
    """One PPO iteration on the same prompts again and again."""

    size: Size
    batch: int  # prompts of a rollout
    micro_batch: int
    shortest_prompt: int  # tokens; the prompts' lengths lie evenly between the two
    longest_prompt: int
    response: int  # tokens at most
    mean_response: float | None = None  # tokens; None: every response has the full length
    updates: int = 1  # optimiser updates of a rollout, each on an equal part of it
    dtype: str = "fp32"

    @property
    def update(self) -> int:
        """Prompts of an update."""
        return self.batch // self.updates

    def prompt_lengths(self) -> list[int]:
        """Tokens of each prompt, in mixed order."""
        step = (self.longest_prompt - self.shortest_prompt) / max(1, self.batch - 1)
        lengths = [round(self.shortest_prompt + i * step) for i in range(self.batch)]
        random.Random(0).shuffle(lengths)
        return lengths


def make_files(work: IterationWork, folder: Path) -> None:
    """Writes prompts.txt, prompts/ for ours, and unless they are there actor/ and reward/, each with the tokenizer."""
    transformers.utils.logging.disable_progress_bar()
    device = "cuda" if work.size.hidden_size >= 1024 and torch.cuda.is_available() else "cpu"
    for name, make in (("actor", make_actor), ("reward", make_reward_model)):
        if not (folder / name).exists():
            with torch.device(device):
                make(work).save_pretrained(folder / name)
            make_tokenizer(work.size.vocab_size).save_pretrained(folder / name)
    prompts = []
    for row in prompt_ids(work):
        words = [f"w{i}" for i in row]
        prompts.append(" ".join(words))
    (folder / "prompts.txt").write_text("\n".join(prompts) + "\n", encoding="utf-8")
    rows = [json.dumps({"prompt": text}) + "\n" for text in prompts]
    (folder / "prompts").mkdir(exist_ok=True)
    (folder / "prompts" / "train.jsonl").write_text("".join(rows), encoding="utf-8")
    # One row that no contender trains on; ours would set some of the others aside without it.
    (folder / "prompts" / "valid.jsonl").write_text(rows[0], encoding="utf-8")


def make_tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    """Words w2, w3, … are the ids 2, 3, …; 0 pads, 1 ends."""
    words = ["<pad>", "<eos>", *(f"w{i}" for i in range(FIRST_WORD, vocabulary))]
    return word_tokenizer(words, f"w{FIRST_WORD}", pad_token="<pad>", eos_token="<eos>", padding_side="left")


def word_tokenizer(
    words: Sequence[str],
    unknown: str,
    **settings: str,
) -> PreTrainedTokenizerFast:
    """One token for each word between spaces, whose id is its place; others are the unknown one."""
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=unknown))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **settings)


def prompt_ids(work: IterationWork) -> list[list[int]]:
    """Random words, as many as `Work.prompt_lengths` says."""
    chance = torch.Generator().manual_seed(0)
    words = (FIRST_WORD, work.size.vocab_size)
    prompts: list[list[int]] = []
    for length in work.prompt_lengths():
        prompts.append(torch.randint(*words, (length,), generator=chance).tolist())
    return prompts


def make_actor(work: IterationWork) -> GemmaForCausalLM:
    """A random causal LM that ends responses as `work` says."""
    torch.manual_seed(1)
    model: GemmaForCausalLM = GemmaForCausalLM._from_config(_config(work), dtype=DTYPES[work.dtype])
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight[CHANNEL] = 0
            layer.mlp.down_proj.weight[CHANNEL] = 0
        embeddings = model.model.embed_tokens.weight
        embeddings[:, CHANNEL] = CONSTANT
        embeddings[[PAD, EOS]] = 0
        embeddings[[PAD, EOS], CHANNEL] = NEVER
        if work.mean_response is not None:
            embeddings[EOS, CHANNEL] = _end_weight(model, work, work.mean_response)
    return model


def make_reward_model(work: IterationWork) -> PreTrainedModel:
    """A random reward model; the critic starts from it, too."""
    torch.manual_seed(2)
    config = _config(work)
    config.num_labels = 1
    return cast(PreTrainedModel, GemmaForSequenceClassification._from_config(config, dtype=DTYPES[work.dtype]))


def _config(work: IterationWork) -> GemmaConfig:
    return GemmaConfig(
        **asdict(work.size),
        max_position_embeddings=work.longest_prompt + work.response,
        pad_token_id=PAD,
        eos_token_id=EOS,
        bos_token_id=None,
        tie_word_embeddings=True,
    )


@torch.no_grad()
def _end_weight(model: GemmaForCausalLM, work: IterationWork, mean: float) -> float:
    """The embedding of EOS that gives responses of this mean length, those cut at the longest included.

    Responses of random tokens stand for sampled ones: random models draw from nearly even distributions.
    """
    from scipy.optimize import brentq

    ids = torch.randint(
        FIRST_WORD,
        work.size.vocab_size,
        (8, work.longest_prompt + work.response),
    )
    states = model.model(ids.to(model.device)).last_hidden_state[:, work.longest_prompt - 1 : -1]
    others = torch.stack([model.lm_head(row).float().logsumexp(-1) for row in states])  # EOS adds nothing to it yet
    channel = states[..., CHANNEL].float()

    def excess(weight: float) -> float:
        end = torch.sigmoid(weight * channel - others).double()
        reached = torch.cumprod(1 - end, dim=1)[:, :-1]  # (B, R - 1): the token after this one is there
        return 1 + float(reached.sum(1).mean()) - mean

    return float(brentq(excess, 0.0, 100.0))
