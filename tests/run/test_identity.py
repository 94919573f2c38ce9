# SPDX-License-Identifier: Apache-2.0
"""What a run that goes on must share with its first part."""

import pytest

from dschat.base.errors import UserError
from dschat.run.identity import check_same_everywhere, differences, identity_of
from dschat.settings.flags import SHARE, flags_on_resume
from dschat.settings.ppo import PPOConfig
from factories import make_causal_lm, ppo_config, save_folder

HUB = {"id": "a/b", "revision": "1" * 40}
SHARES = [*flags_on_resume(PPOConfig, SHARE)]  # a process's share of a batch
DATA = {"sources": [{"name": "a/b", "train": 8, "eval": 2, "hub": HUB}], "sha256": {}}


@pytest.fixture
def identity(tokenizer, tmp_path):
    """identity(data, **flags): of a run."""
    model = save_folder(tmp_path / "model", make_causal_lm(), tokenizer)

    def of(data=DATA, world_size=1, **flags):
        config = ppo_config(tmp_path, **({"actor_model_name_or_path": model, "reward_function": None} | flags))
        return identity_of(config, config.plan_batches(world_size), tokenizer, data)

    return of


def test_another_revision_on_the_hub_is_other_data(identity):
    """Such a set has no file here whose hash could differ."""
    later = {"sources": [DATA["sources"][0] | {"hub": HUB | {"revision": "2" * 40}}], "sha256": {}}
    assert differences(identity(), identity()) == []
    assert differences(identity(), identity(later)) == ["the data has changed (a/b)"]


def test_the_files_of_data_that_changed_are_named(identity):
    """Of two one has another content, one is gone; where files lie does not matter, their order does."""
    source = {"name": "rows", "train": 8, "eval": 2}
    before, now, moved, swapped = (
        identity({"sources": [source], "sha256": files})
        for files in (
            {"d/a.jsonl": "1", "d/b.jsonl": "2", "d/c.jsonl": "3"},
            {"d/a.jsonl": "1", "d/b.jsonl": "4"},
            {"e/x.jsonl": "1", "e/y.jsonl": "2", "e/z.jsonl": "3"},
            {"d/b.jsonl": "2", "d/a.jsonl": "1", "d/c.jsonl": "3"},
        )
    )
    assert differences(before, now) == ["the data has changed (d/b.jsonl, d/c.jsonl)"]
    assert differences(before, moved) == []
    assert differences(before, swapped) == ["the data has changed"]
    many = [identity({"sources": [source], "sha256": {f"{i}": f"{i}{n}" for i in range(9)}}) for n in (1, 2)]
    assert differences(*many) == ["the data has changed (0, 1, 2, 3, 4, 5, 6, 7, …)"]


def test_a_process_s_share_may_differ_with_their_number_but_not_what_they_share(identity):
    """8 prompts on one process are 4 on each of two; 8 on each of two are 16."""
    whole = identity(per_device_training_batch_size=4, gradient_accumulation_steps=2)
    halves = {"per_device_generation_batch_size": 4, "per_device_training_batch_size": 4}
    assert differences(whole, identity(world_size=2, **halves), may_differ=SHARES) == []
    found = differences(whole, identity(world_size=2, per_device_training_batch_size=4), may_differ=SHARES)
    assert found == ["prompts of a rollout was 8, is 16"]
    assert differences(whole, identity(gamma=0.5), may_differ=SHARES)[0].startswith("--gamma was 1.0, is 0.5")


def test_functions_and_addresses_of_scores(identity, tmp_path):
    """A function's file may not change; a server may move, but not come or go."""
    files = [tmp_path / "a.py", tmp_path / "b.py"]
    for file in files:
        file.write_text("f = g = len")
    functions = [f"{files[0]}:f", f"{files[1]}:g"]
    before = identity(reward_function=functions)
    assert differences(before, identity(reward_function=functions)) == []
    files[1].write_text("g = sum")
    assert differences(before, identity(reward_function=functions)) == ["the file of --reward_function has changed"]
    here, there = (identity(reward_url=url, critic_model_name_or_path=None) for url in ("http://a", "http://b"))
    assert differences(here, there) == []
    assert differences(here, identity()) == ['--reward_url was "given", is null']


def test_nodes_with_other_files_or_flags_are_named(identity, monkeypatch):
    """Where files lie is each node's own affair; one process has nobody to differ from."""
    source = {"name": "rows", "train": 8, "eval": 2}
    first, moved, other = (
        identity({"sources": [source], "sha256": files}) for files in ({"d/a": "1"}, {"e/b": "1"}, {"d/a": "2"})
    )
    check_same_everywhere(other)

    def compare(*identities):
        given = [(f"node-{number}", one) for number, one in enumerate(identities)]
        monkeypatch.setattr("dschat.run.identity.gather_objects", lambda own: given)
        check_same_everywhere(identities[0])

    compare(first, moved, first)
    told = r"^rank 2 \(node-2\) and rank 0 \(node-0\) .*: the data \(d/a\)\. Start every node"
    with pytest.raises(UserError, match=told) as caught:
        compare(first, moved, other)
    assert caught.value.on_every_rank
    with pytest.raises(UserError, match=r"rank 1 \(node-1\) .* different things: --seed, the tokenizer\. "):
        compare(first, first | {"--seed": "7", "the tokenizer": "another"})
