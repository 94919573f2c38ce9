# SPDX-License-Identifier: Apache-2.0
"""Chat templates of the usual kinds, a tokenizer with their tokens, and dialogues."""

from typing import Any

from tokenizers import AddedToken

from factories import make_tokenizer

# Each written out for this project in the form that the family uses; the token that ends a reply, and what follows it.
TEMPLATES = {
    "llama-3": (
        "{{ bos_token }}{% for m in messages %}<|header|>{{ m.role }}<|/header|>\n\n{{ m.content | trim }}<|eot|>"
        "{% endfor %}{% if add_generation_prompt %}<|header|>assistant<|/header|>\n\n{% endif %}",
        "<|eot|>",
    ),
    "chatml": (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
        "<|im_end|>",
    ),
    "gemma": (
        "{{ bos_token }}{% for m in messages %}<|im_start|>{{ 'model' if m.role == 'assistant' else m.role }}\n"
        "{{ m.content | trim }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>model\n{% endif %}",
        "<|im_end|>",
    ),
    "mistral": (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[u]{{ m.content }}[/u]{% else %}"
        "{{ m.content }}{{ eos_token }}{% endif %}{% endfor %}",
        "<eos>",
    ),
    "llama-2": (
        "{% for m in messages %}{% if m.role == 'user' %}{{ bos_token }}[u] {{ m.content }} [/u]{% else %}"
        " {{ m.content }} {{ eos_token }}{% endif %}{% endfor %}",
        "<eos>",
    ),
    "zephyr": (
        "{% for m in messages %}<|im_start|>{{ m.role }}{{ '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant{% endif %}",
        "<|im_end|>",
    ),
    "plain": (
        "{% for m in messages %}\n\n{{ 'Human' if m.role == 'user' else 'Assistant' }}: {{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}\n\nAssistant: {% endif %}",
        "<eos>",
    ),
}
TOKENS = ("<|header|>", "<|/header|>", "<|eot|>", "<|im_start|>", "<|im_end|>")
TEXT = "\n\nHuman: Assistant: model user assistant [u] [/u] Question? abcdefghijklmnopqrstuvwxyz. 0123456789 "


def chat_tokenizer(template: str = "chatml") -> Any:
    """A tokenizer with the template of that name."""
    tokenizer = make_tokenizer(160, texts=(TEXT, TEXT.upper()))
    tokenizer.add_tokens([AddedToken(token, special=True) for token in TOKENS])
    tokenizer.chat_template = TEMPLATES[template][0]
    return tokenizer


def dialogue(*texts: str) -> list[dict[str, str]]:
    """Messages in turn, the user's first."""
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


def user(text: str) -> dict[str, str]:
    """A message of the user."""
    return {"role": "user", "content": text}


def bot(text: str) -> dict[str, str]:
    """A message of the assistant."""
    return {"role": "assistant", "content": text}
