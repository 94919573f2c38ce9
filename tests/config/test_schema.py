# SPDX-License-Identifier: Apache-2.0
"""The JSON schema of a step's files: every preset is valid, mistakes are not."""

import json
import re
from typing import Any

import pytest
import yaml

from dschat.cli import COMMANDS, main
from dschat.settings.flags import flags_of
from dschat.settings.presets import PRESETS
from dschat.settings.schema import json_schema
from flag_cases import FAMILIES

FILES = [path for path in sorted(PRESETS.rglob("*.yaml"))]
TYPES = {"string": str, "integer": int, "number": (int, float), "boolean": bool, "null": type(None), "array": list}


def is_valid(value: Any, schema: dict[str, Any]) -> bool:
    """Whether a value fits a schema that has only the keywords that ours have."""
    if "anyOf" in schema:
        return any(is_valid(value, alternative) for alternative in schema["anyOf"])
    if "enum" in schema and not any(value == choice and type(value) is type(choice) for choice in schema["enum"]):
        return False
    if "type" in schema:
        names = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        allowed = [name for name in names if isinstance(value, TYPES[name])]
        if not allowed or (isinstance(value, bool) and "boolean" not in names):
            return False
    if isinstance(value, str) and len(value) < schema.get("minLength", 0):
        return False
    if "pattern" in schema and not (isinstance(value, str) and re.search(schema["pattern"], value)):
        return False
    if isinstance(value, list):
        return all(is_valid(item, schema.get("items", {})) for item in value)
    is_number = isinstance(value, int | float)
    return not (
        (is_number and value < schema.get("minimum", value))
        or (is_number and value > schema.get("maximum", value))
        or ("exclusiveMinimum" in schema and value <= schema["exclusiveMinimum"])
        or ("exclusiveMaximum" in schema and value >= schema["exclusiveMaximum"])
    )


def mistakes(content: dict[str, Any], schema: dict[str, Any]) -> list[str]:
    """Keys of a file that its schema refuses."""
    assert schema["additionalProperties"] is False
    (other_spellings,) = schema["patternProperties"]
    wrong = []
    for key, value in content.items():
        if key == "preset":
            continue
        if key in schema["properties"]:
            is_right = is_valid(value, schema["properties"][key])
        else:
            is_right = re.search(other_spellings, key) is not None
        if not is_right:
            wrong.append(key)
    return wrong


@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.parent.name}-{file.stem}")
def test_every_preset_is_valid(file):
    content = yaml.safe_load(file.read_text(encoding="utf-8"))
    schema = json_schema(FAMILIES[file.parent.name.replace("refuel-online", "online")], "dschat")
    assert mistakes(content, schema) == []


def test_mistakes_are_refused():
    schema = json_schema(COMMANDS["ppo"].flags_class(), "dschat ppo")
    wrong = {
        "learning_rat": 1e-5,
        "seed": "one",
        "num_train_epochs": 0,
        "kl_ctl": -0.1,
        "lam": 1.5,
        "actor_zero_stage": 4,
        "policy_ratio": "tokens",
        "actor_lora_dim": 1.5,
        "ngram_lengths": [2, "three"],
        "whiten_advantages": "perhaps",
        "actor-learning-rat": 1e-5,
        "temperature": "...",
        "output_dir": "",
        "share_base": 2,
    }
    assert mistakes(wrong, schema) == list(wrong)


def test_what_yaml_may_hold_is_accepted():
    schema = json_schema(COMMANDS["ppo"].flags_class(), "dschat ppo")
    text = """
extends: tldr_gemma_2b
seed: ${SEED:-1234}
actor_learning_rate: 1e-5
ngram: inf
kl_ctl: 0
lam_alpha: none
decode_graphs: on
bf16: yes
zero_stage: 3
data_path: [a, b]
reward_function: score.py:f
end_of_conversation_token: 1
dropout: 0.1
output_dir: null
actor-weight-decay: 0.1
--eval_interval: 5
top_p: Inf
critic_zero_stage: "2"
offload: 1
"""
    assert mistakes(yaml.safe_load(text), schema) == []


def test_the_command_prints_it(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["sft", "--print_schema"])
    assert ended.value.code == 0
    schema = json.loads(capsys.readouterr().out)
    flags = flags_of(COMMANDS["sft"].flags_class())
    assert schema["title"] == "dschat sft" and flags.keys() <= schema["properties"].keys()
    assert schema["properties"]["packing"]["default"] is False
    assert schema["properties"]["learning_rate"]["description"] == flags["learning_rate"].help
    assert schema["properties"]["learning_rate"]["default"] == 2e-5
    json.dumps(json_schema(COMMANDS["ppo"].flags_class(), "dschat ppo"), allow_nan=False)
    best_of = json_schema(COMMANDS["best-of-n"].flags_class(), "dschat best-of-n")
    assert json.loads(json.dumps(best_of))["properties"]["best_of"]["default"] == [4, 8, 16, 32]
