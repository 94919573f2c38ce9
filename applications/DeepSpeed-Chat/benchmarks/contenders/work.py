# SPDX-License-Identifier: Apache-2.0
"""The work that every contender does: models, tokenizer and prompts as files. Imports transformers but not dschat.

The models are random Gemmas. How long responses are is built into the actor, so that no contender needs a setting for
it. One channel of the residual stream holds the same number at every position, because no layer writes to it. The
embedding of EOS, which is also its row of the output head, reads that channel alone, so that EOS has nearly the same
probability at every position: zero if all responses have the full length, or the one that gives the requested mean
length. The pad token is never sampled.
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

# Token ids.
PAD = 0
EOS = 1
FIRST_WORD = 2

CHANNEL = 0  # channel of the residual stream that no layer writes to
CONSTANT = 0.1  # what the embeddings of words hold in that channel
NEVER = -8.0  # embedding in that channel which makes a token impossible: a logit of about -40
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Size:
    """Sizes of a Gemma, named as in its config."""

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
    """A PPO iteration, which is repeated on the same prompts."""

    size: Size
    batch: int  # prompts per rollout
    micro_batch: int
    shortest_prompt: int  # tokens; prompt lengths are evenly spaced between the shortest and the longest
    longest_prompt: int
    longest_response: int  # tokens
    mean_response: float | None = None  # tokens; None: every response has the full length
    updates: int = 1  # optimiser updates per rollout, each on an equal part of it
    dtype: str = "fp32"

    @property
    def update_prompts(self) -> int:
        """Prompts per optimiser update."""
        return self.batch // self.updates

    def prompt_lengths(self) -> list[int]:
        """Tokens of each prompt, in random order."""
        step = (self.longest_prompt - self.shortest_prompt) / max(1, self.batch - 1)
        lengths = [round(self.shortest_prompt + i * step) for i in range(self.batch)]
        random.Random(0).shuffle(lengths)
        return lengths


def make_files(work: IterationWork, folder: Path) -> None:
    """Writes the prompts, and the models unless they exist.

    The files are prompts.txt for all contenders, prompts/ with rows for dschat, and the models actor/ and reward/,
    each with the tokenizer.
    """
    # Models.
    transformers.utils.logging.disable_progress_bar()
    device = "cuda" if work.size.hidden_size >= 1024 and torch.cuda.is_available() else "cpu"
    for name, make in (("actor", make_actor), ("reward", make_reward_model)):
        if (folder / name / "tokenizer.json").exists():  # written last
            continue
        with torch.device(device):
            make(work).save_pretrained(folder / name)
        make_tokenizer(work.size.vocab_size).save_pretrained(folder / name)

    # Prompts.
    prompts = []
    for row in prompt_ids(work):
        words = [f"w{i}" for i in row]
        prompts.append(" ".join(words))
    (folder / "prompts.txt").write_text("\n".join(prompts) + "\n", encoding="utf-8")
    rows = [json.dumps({"prompt": text}) + "\n" for text in prompts]
    (folder / "prompts").mkdir(exist_ok=True)
    (folder / "prompts" / "train.jsonl").write_text("".join(rows), encoding="utf-8")
    # A validation row, so that dschat holds out none of the others.
    (folder / "prompts" / "valid.jsonl").write_text(rows[0], encoding="utf-8")


def make_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """A tokenizer whose words w2, w3, … have the ids 2, 3, …; 0 is padding and 1 is EOS."""
    words = ["<pad>", "<eos>", *(f"w{i}" for i in range(FIRST_WORD, vocab_size))]
    return word_tokenizer(words, f"w{FIRST_WORD}", pad_token="<pad>", eos_token="<eos>", padding_side="left")


def word_tokenizer(words: Sequence[str], unknown: str, **settings: str) -> PreTrainedTokenizerFast:
    """A tokenizer that splits at white space.

    Args:
        words: the vocabulary in the order of the ids.
        unknown: the word that stands for all others.
        settings: special tokens and padding, see `PreTrainedTokenizerFast`.
    """
    vocabulary = {word: i for i, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=unknown))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **settings)


def prompt_ids(work: IterationWork) -> list[list[int]]:
    """Ids of the prompts: random words, with the lengths of `IterationWork.prompt_lengths`."""
    generator = torch.Generator().manual_seed(0)
    prompts: list[list[int]] = []
    for length in work.prompt_lengths():
        ids = torch.randint(FIRST_WORD, work.size.vocab_size, (length,), generator=generator)
        prompts.append(ids.tolist())
    return prompts


def make_actor(work: IterationWork) -> GemmaForCausalLM:
    """A random causal LM whose responses have the lengths that the work asks for."""
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
        max_position_embeddings=work.longest_prompt + work.longest_response,
        pad_token_id=PAD,
        eos_token_id=EOS,
        bos_token_id=None,
        tie_word_embeddings=True,
    )


@torch.no_grad()
def _end_weight(model: GemmaForCausalLM, work: IterationWork, mean: float) -> float:
    """The embedding of EOS that gives a mean response length, with responses cut at the maximum counted as such.

    It is computed on random tokens in place of sampled ones: a random model samples nearly uniformly.

    Args:
        model: the actor, in which EOS is still impossible.
        work: sizes, prompt and response lengths.
        mean: mean response length in tokens, more than 1 and less than `longest_response`.
    """
    from scipy.optimize import brentq

    ids = torch.randint(FIRST_WORD, work.size.vocab_size, (8, work.longest_prompt + work.longest_response))
    states = model.model(ids.to(model.device)).last_hidden_state[:, work.longest_prompt - 1 : -1]
    # Log of the summed exponentials of all logits but that of EOS, whose logit is very negative so far: (B, R).
    others = torch.stack([model.lm_head(row).float().logsumexp(-1) for row in states])
    channel = states[..., CHANNEL].float()

    def excess_length(weight: float) -> float:
        """Expected response length with this embedding, minus the requested one."""
        end_probability = torch.sigmoid(weight * channel - others).double()
        reaches_next = torch.cumprod(1 - end_probability, dim=1)[:, :-1]  # (B, R − 1): probability of a further token
        return 1 + float(reaches_next.sum(1).mean()) - mean

    return float(brentq(excess_length, NEVER, 100.0))
