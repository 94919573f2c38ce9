# SPDX-License-Identifier: Apache-2.0
"""Models go to the hub when they are told to, whole, without secrets; what fails is said. A stand-in takes them."""

import json
import sys

import pytest

from cli_runs import run_command
from dschat.base.errors import UserError
from dschat.run.hub import files_of, push, push_after_training, push_problem, refuse_secrets, run_push
from dschat.settings.commands import PushOptions
from dschat.settings.rules import check_repository
from fake_hub_for_uploads import READER, TOKEN, Repository, upload_server

PLAIN = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "README.md", "run.json")


def write(folder, *names):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"content of {name}")


@pytest.fixture
def run(tmp_path):
    """Step 3's output, with what must stay here."""
    folder = tmp_path / "ppo"
    write(folder, *(f"actor/{name}" for name in PLAIN), *(f"critic/{name}" for name in PLAIN))
    write(folder, "metrics.jsonl", "train_config.json", "run.json", "curves.png", "notes.txt", ".env")
    write(folder, "checkpoints/step-4/actor/model.safetensors", "samples/update-000004.jsonl", "wandb/run/x.wandb")
    write(folder, *(f"models/step-4/actor/{name}" for name in PLAIN), "actor/.git/config", "actor/optimizer.pt")
    return folder


def test_the_policy_of_step_3_with_the_records_of_its_run(run):
    expected = sorted([*PLAIN, "metrics.jsonl", "train_config.json"])
    for folder, model in ((run, "actor"), (run / "actor", "actor"), (run / "critic", "critic")):
        files = dict(files_of(folder))
        assert sorted(files) == expected
        assert files["model.safetensors"] == run / model / "model.safetensors"
        assert files["metrics.jsonl"] == run / "metrics.jsonl"
    kept = dict(files_of(run / "models" / "step-4"))
    assert sorted(kept) == expected and kept["run.json"] == run / "models/step-4/actor/run.json"


def test_final_models_of_a_run_that_goes_on_are_not_pushed(run):
    (run / "run.json").write_text('{"finished": false}')
    for folder in (run, run / "actor"):
        with pytest.raises(UserError, match="the run is not finished, .* or push one of .*models"):
            list(files_of(folder))
    assert list(files_of(run / "models" / "step-4"))


def test_a_dry_run_lists_files_without_a_token_or_a_network(run, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.delenv("HF_TOKEN", raising=False)
    said = run_push(PushOptions(folder=run, repository="owner/name", dry_run=True))
    *lines, last = said.splitlines()
    assert [line.split()[-1] for line in lines] == [name for name, _ in files_of(run)]
    assert last.endswith("to owner/name; nothing was")
    *sizes, total = (int(line.split()[0].replace(",", "")) for line in said.splitlines())
    assert total == sum(sizes) > 0
    write(run, "actor/chat_template.jinja")
    (run / "actor" / "chat_template.jinja").write_text("hf_" + "a" * 34)
    with pytest.raises(UserError, match="holds what looks like a secret"):
        run_push(PushOptions(folder=run, repository="owner/name", dry_run=True))


def test_a_folder_with_an_adapter_or_nothing(tmp_path):
    write(tmp_path / "lora", "README.md", "tokenizer.json", "adapter/adapter_model.safetensors")
    write(tmp_path / "lora", "adapter/adapter_config.json", "adapter/adapter_notes.json")
    assert {"adapter/adapter_model.safetensors", "adapter/adapter_notes.json"} <= set(
        dict(files_of(tmp_path / "lora"))
    )
    with pytest.raises(UserError, match="there is no model here"):
        dict(files_of(tmp_path))


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("--token hf_" + "a" * 34, "hf_aaa"),
        ("key sk-" + "b" * 24, "sk-bbb"),
        ("https://me:password@host/data", "://me:"),
        ("http://host/score?token=abcdef12", "?token"),
        ("the word of the variable", "secret,"),
    ],
)
def test_secrets_stay_here(run, monkeypatch, text, shown):
    monkeypatch.setenv("MY_API_KEY", "the word of the variable")
    refuse_secrets(dict(files_of(run)))
    (run / "actor" / "run.json").write_text(json.dumps({"command": [text]}))
    with pytest.raises(UserError, match="run.json: holds what looks like a secret") as error:
        refuse_secrets(dict(files_of(run)))
    assert shown in str(error.value) and text not in str(error.value)


def test_weights_of_an_earlier_push_do_not_stay(run, reach):
    """Of a model in one file, when the new one lies in two; other files stay."""
    names = ("model.safetensors", "adapter/adapter_model.safetensors", "chat_template.jinja", "tokenizer.model")
    names += ("notes.md", "x.safetensors.md", "README.md", "data/config.json")
    repositories = {"me/model": Repository(True, dict.fromkeys(names, b""))}
    for number in (1, 2):
        write(run, f"actor/model-0000{number}-of-00002.safetensors")
    write(run, "actor/model.safetensors.index.json")
    (run / "actor" / "model.safetensors").unlink()
    with upload_server(repositories) as address:
        reach(address)
        push(run, "me/model")
        with pytest.raises(UserError, match="me/model is private on the hub: drop --public"):
            push(run, "me/model", public=True)
    kept = set(repositories["me/model"].files)
    assert {"notes.md", "x.safetensors.md", "model-00002-of-00002.safetensors", "model.safetensors.index.json"} <= kept
    assert {"README.md", "data/config.json"} <= kept
    assert not kept & {"model.safetensors", "adapter/adapter_model.safetensors"}
    assert not kept & {"chat_template.jinja", "tokenizer.model"}


@pytest.fixture
def reach(monkeypatch, tmp_path):
    """Lets this process's client speak to an address with a token."""

    def set_to(address, token=TOKEN):
        for name, value in (("ENDPOINT", address), ("HF_HUB_DISABLE_XET", True), ("HF_HUB_OFFLINE", False)):
            monkeypatch.setattr(f"huggingface_hub.constants.{name}", value)
        monkeypatch.setenv("HF_TOKEN", token)

    return set_to


def test_the_command(run):
    """As it is typed; the repository is private."""
    repositories = {}
    variables = {"HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": None, "HF_TOKEN": TOKEN, "HF_HOME": str(run / "home")}
    command = [sys.executable, "-m", "dschat", "push", run, "me/model"]
    with upload_server(repositories) as address:
        done = run_command(command, HF_ENDPOINT=address, **variables).expect(0)
    assert f"uploaded to {address}/me/model" in done.stdout
    repository = repositories["me/model"]
    assert repository.private and repository.messages == ["Upload model"]
    assert sorted(repository.files) == sorted([*PLAIN, "metrics.jsonl", "train_config.json"])
    assert repository.files["model.safetensors"] == b"content of actor/model.safetensors"


def test_what_the_hub_refuses(run, reach, caplog):
    repositories = {"me/open": Repository(private=False)}
    with upload_server(repositories) as address:
        reach(address, "hf_wrong")
        with pytest.raises(UserError, match="the hub does not know the token. Run hf auth login"):
            push(run, "me/model")
        reach(address, READER)
        with pytest.raises(UserError, match="the token may not write there"):
            push(run, "me/model")
        assert list(repositories) == ["me/open"]
        reach(address)
        with pytest.raises(UserError, match="me/open is public on the hub: give --public"):
            push(run, "me/open")
        assert repositories["me/open"].files == {}
        push(run, "me/open", public=True)
        push(run, "me/new", public=True)
        assert "config.json" in repositories["me/open"].files and not repositories["me/new"].private


def test_a_push_that_fails_after_training_says_where_the_models_are(run, reach, caplog):
    reach("http://127.0.0.1:9")
    push_after_training(str(run), "me/model")
    (record,) = (record for record in caplog.records if record.levelname == "ERROR")
    message = record.getMessage()
    assert "the hub cannot be reached" in message and f"models are saved in {run}" in message
    assert f"dschat push {run} me/model" in message


def test_without_a_network_or_a_token(run, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE is set" in (push_problem("--push_to_hub") or "")
    with pytest.raises(UserError, match="me/model: HF_HUB_OFFLINE is set"):
        push(run, "me/model")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    assert "hf auth login" in (push_problem("--push_to_hub") or "")
    monkeypatch.setattr("huggingface_hub.get_token", lambda: "hf_x")
    assert push_problem("--push_to_hub") is None


@pytest.mark.parametrize("name", ["model", "../model", "me/a/model"])
def test_what_is_no_name_of_a_repository(name):
    with pytest.raises(UserError, match=f"--repository {name}: give the repository as owner/name"):
        check_repository("--repository", name)
    check_repository("--repository", "me-2/my_model.v1-final")
