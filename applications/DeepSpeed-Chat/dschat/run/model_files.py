# SPDX-License-Identifier: Apache-2.0
"""The files of a model's folder."""

# Patterns of their names: weights, configs, the tokenizer's files, the model card and the record of the run.
MODEL_FILES = (
    "*.safetensors",
    "*.safetensors.index.json",
    "config.json",
    "generation_config.json",
    "adapter_config.json",
    "adapter_notes.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "chat_template.jinja",
    "README.md",
    "run.json",
)
