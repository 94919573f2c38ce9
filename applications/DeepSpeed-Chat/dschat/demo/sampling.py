# SPDX-License-Identifier: Apache-2.0
"""How a demo samples: as the flags say, or else as the run that trained the model did, or as the model's files say."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from transformers import GenerationConfig

from dschat.base.jsonl import read_object
from dschat.demo.options import DemoFlags
from dschat.evaluation.training_runs import FLAGS_FILE, run_of


@dataclass(frozen=True)
class SamplingChoice:
    """Sampling settings of answers; see the flags."""

    temperature: float = 0.8  # 0 = greedy
    top_k: int = 50  # 0 = all
    top_p: float = 1.0
    max_new_tokens: int = 128

    def arguments(self, room: int) -> dict[str, Any]:
        """Arguments of transformers' `generate`.

        Args:
            room: tokens for which the model still has positions.
        """
        arguments: dict[str, Any] = {"max_new_tokens": min(self.max_new_tokens, room), "do_sample": False}
        if self.temperature > 0:
            arguments |= {"do_sample": True, "temperature": self.temperature, "top_k": self.top_k, "top_p": self.top_p}
        return arguments


def choose_sampling(flags: DemoFlags, path: str) -> SamplingChoice:
    """The settings for a model at a path."""
    names = [field.name for field in fields(SamplingChoice)]
    set_by_flags = {name: getattr(flags, name) for name in names if getattr(flags, name) is not None}
    return SamplingChoice(**(_saved_sampling(path, names) | set_by_flags))


def _saved_sampling(path: str, names: list[str]) -> dict[str, Any]:
    """What the run's flags say, or else the model's generation config."""
    folder = Path(path)
    run = run_of(folder) if folder.is_dir() else None
    if run is not None:
        values = read_object(run / FLAGS_FILE)
        values["max_new_tokens"] = values.get("max_answer_seq_len")
        saved = {name: values[name] for name in names if values.get(name) is not None}
        if saved:
            return saved
    try:
        config = GenerationConfig.from_pretrained(path).to_diff_dict()
    except (OSError, ValueError):  # no such file, or transformers refuses its values
        return {}
    if config.get("do_sample") is False:
        config["temperature"] = 0.0
    return {name: config[name] for name in names if config.get(name) is not None}
