# SPDX-License-Identifier: Apache-2.0
"""The model card, README.md in a saved model's folder: metadata for the hub, an example, settings and metrics."""

import logging
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from dschat.base.atomic import write_file
from dschat.base.steps import STEPS
from dschat.models.adapters import adapter_alone
from dschat.run.metrics import EVALUATION, ROWS, STANDARD_ERROR, after
from dschat.run.record import RunRecord

logger = logging.getLogger(__name__)

HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")  # owner/name, or the name of an early model such as gpt2
SNAPSHOT = "models--"  # begins the name of a model's folder in the hub's cache
CARD = """\
---
{metadata}
---

# {name}: {role}

{title} with [MA-RLHF](https://arxiv.org/abs/2410.02743), started from `{base}`.

## Use

```python
{example}
```

## Data

{data}
## Settings

{settings}
Other flags have the defaults of ma-rlhf {version}.

## Metrics

On {rows}held-out rows, {after}{error_note}:

{metrics}
## Made with

{packages}.
"""
POLICY_EXAMPLE = """\
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained({path!r})
model = AutoModelForCausalLM.from_pretrained({path!r})
"""
ANSWER = """\
inputs = {inputs}
response = model.generate(**inputs, max_new_tokens=64)
print(tokenizer.decode(response[0], skip_special_tokens=True))"""
CHAT_INPUTS = """\
tokenizer.apply_chat_template(
    [{"role": "user", "content": "Hello!"}], add_generation_prompt=True, return_dict=True, return_tensors="pt"
)"""
TEXT_INPUTS = 'tokenizer("Hello!", return_tensors="pt")'
SCALAR_EXAMPLE = """\
from transformers import AutoModelForSequenceClassification, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained({path!r})
model = AutoModelForSequenceClassification.from_pretrained({path!r})
"""
ADAPTER_EXAMPLE = """\
from peft import AutoPeftModelFor{kind}
from transformers import AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained({path!r})
model = AutoPeftModelFor{kind}.from_pretrained({adapter!r}{options})  # puts the adapter on its base
"""
ADAPTER_ON_ADAPTER = """\
# The base is an adapter itself, which peft would leave out without a word: open this folder with dschat, or train
# without --no_merge_lora."""
ADAPTER_OPTIONS = ", num_labels=1, pad_token_id=tokenizer.pad_token_id"  # the base's pad token may be another
VALUES = """\
inputs = tokenizer("prompt and response", return_tensors="pt")
print(model(**inputs).logits)  # the number at the last token, which must be the one that ends a response"""


@dataclass(frozen=True)
class CardModel:
    """The model that a card describes."""

    name: str
    role: str  # policy, policy (moving average), reward model or critic
    base: str  # the model it was trained from: folder or hub id
    path: str  # argument of `from_pretrained`: a folder, or the repository that the run pushes to
    has_template: bool = False  # whether its tokenizer has a chat template
    is_adapter: bool = False  # saved as a LoRA adapter alone (--no_merge_lora)
    example: str = ""  # of a reward model: lines that score a text; empty if its trained score is not known

    @property
    def is_policy(self) -> bool:
        """Whether it generates text; otherwise it returns a number."""
        return self.role.startswith("policy")


def write_model_card(folder: Path, model: CardModel, settings: Mapping[str, object], record: RunRecord) -> None:
    """Writes ``folder/README.md``: data, settings and metrics of the model saved there, and how to use it.

    `settings` are the flags with which the run differs from the defaults, by name.
    """
    sources = cast("list[Mapping[str, object]]", record.data.get("sources", []))
    source_line = "`{name}`: {train} training and {eval} held-out rows in this step's share"
    metrics, rows = _metric_lines(record.metrics)
    card = CARD.format(
        metadata=_metadata(model, sources),
        name=model.name,
        role=model.role,
        base=model.base,
        title=STEPS[record.step].title or f"{_algorithm(settings)} (step 3)",
        example=_example(model),
        data=_listed(source_line.format_map(source) for source in sources),
        settings=_listed(f"`--{flag}`: {value}" for flag, value in settings.items()),
        version=record.packages["ma-rlhf"],
        rows=rows,
        after=after(record.metrics_update),
        error_note=", ± one standard error" if any("±" in line for line in metrics) else "",
        metrics=_listed(metrics),
        packages=", ".join(f"{package} {version}" for package, version in record.packages.items()),
    )
    write_file(folder / "README.md", card)


def _algorithm(settings: Mapping[str, object]) -> str:
    """What step 3 trained with, by its settings."""
    from dschat.settings.ppo_loss import AdvantageFlags

    estimator = AdvantageFlags(advantage_estimator=str(settings.get("advantage_estimator", "gae"))).needs
    is_token_level = settings.get("ngram") == 1 and "termination_condition" not in settings
    return estimator.title.replace(" with macro actions", " on tokens") if is_token_level else estimator.title


def hub_base(base: str) -> str | None:
    """The hub id of the model that a model was trained from, possibly from the card in its folder; None if unknown.

    The hub refuses metadata whose `base_model` is a folder's path.
    """
    folder = Path(base)
    if not folder.exists():
        return base if HUB_ID.fullmatch(base) else None
    for part in folder.resolve().parts:  # a snapshot in the hub's cache: models--owner--name
        if part.startswith(SNAPSHOT):
            return part.removeprefix(SNAPSHOT).replace("--", "/")
    named = _base_card(base).get("base_model")
    if isinstance(named, list) and len(named) == 1:  # as many cards of the hub write it
        named = named[0]
    return named if isinstance(named, str) and HUB_ID.fullmatch(named) else None


def base_licence(base: str) -> str | None:
    """The licence that the card in a base model's folder names, which also binds what is trained from it."""
    licence = _base_card(base).get("license")
    return licence if isinstance(licence, str) else None


def _base_card(base: str) -> Mapping[str, object]:
    """Metadata of the card in a model's folder; {} if there is none, or the card cannot be read.

    Anybody may have written the card, so its metadata may be no YAML, no mapping or no UTF-8.
    """
    from huggingface_hub import ModelCard

    card = Path(base) / "README.md"
    if not card.is_file():
        return {}
    try:
        metadata: dict[str, object] = ModelCard.load(card, ignore_metadata_errors=True).data.to_dict()
    except Exception as error:
        reason = " ".join(str(error).split())
        logger.warning("%s cannot be read, so base model and licence stay unknown: %s", card, reason)
        return {}
    return metadata


def _metadata(model: CardModel, sources: Iterable[Mapping[str, object]]) -> str:
    """The YAML header."""
    from huggingface_hub import ModelCardData

    hubs = []
    for source in sources:
        if isinstance(source.get("hub"), dict):
            hubs.append(source["hub"])
    datasets = [str(hub["id"]) for hub in cast("list[dict[str, object]]", hubs)]
    base = hub_base(model.base)
    data = ModelCardData(
        base_model=base,
        base_model_relation=("adapter" if model.is_adapter else "finetune") if base else None,
        datasets=list(dict.fromkeys(datasets)) or None,
        license=base_licence(model.base),
        library_name="peft" if model.is_adapter else "transformers",
        pipeline_tag="text-generation" if model.is_policy else "text-classification",
        tags=["ma-rlhf", "rlhf"],
    )
    return str(data.to_yaml())


def _example(model: CardModel) -> str:
    """Python code that opens the model and uses it once."""
    if model.is_adapter and adapter_alone(model.base) is not None:
        return ADAPTER_ON_ADAPTER
    if model.is_adapter:
        kind = "CausalLM" if model.is_policy else "SequenceClassification"
        options = "" if model.is_policy else ADAPTER_OPTIONS
        opened = ADAPTER_EXAMPLE.format(kind=kind, path=model.path, adapter=f"{model.path}/adapter", options=options)
    else:
        opened = (POLICY_EXAMPLE if model.is_policy else SCALAR_EXAMPLE).format(path=model.path)
    if model.is_policy:
        return opened + ANSWER.format(inputs=CHAT_INPUTS if model.has_template else TEXT_INPUTS)
    return opened + (model.example or VALUES)


def _metric_lines(metrics: Mapping[str, float]) -> tuple[list[str], str]:
    """Lines with metrics and standard errors; and the number of held-out rows and a space, if it is recorded."""
    lines: list[str] = []
    for name, value in metrics.items():
        if name.endswith(STANDARD_ERROR) or name == EVALUATION + ROWS:
            continue
        error = metrics.get(name + STANDARD_ERROR)
        lines.append(f"{name}: {value:.4g}{'' if error is None else f' ± {error:.2g}'}")
    rows = metrics.get(EVALUATION + ROWS)
    return lines, "" if rows is None else f"{rows:.0f} "


def _listed(items: Iterable[str]) -> str:
    return "".join(f"- {item}\n" for item in items)
