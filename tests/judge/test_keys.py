# SPDX-License-Identifier: Apache-2.0
"""Which key goes to which server: one rule for judges and simulated users."""

import pytest

from dschat.base.chat_servers import OPENAI_URL, Endpoint, EndpointFlags, with_key
from dschat.base.errors import UserError
from dschat.judge.step3 import JUDGE_FLAGS
from dschat.refuel.generate import SERVER as REFUEL_USER
from dschat.turns.simulated_user import SERVER as USER
from fake_judge import judged

KEYS = {"OPENAI_API_KEY": "sk-openai", "JUDGE_API_KEY": "of-judge", "USER_API_KEY": "of-user"}
LOCAL = "http://127.0.0.1:8000/v1"
FOREIGN = "https://models.example/v1"


@pytest.fixture
def keys(monkeypatch):
    """keys(*names): these variables of KEYS are set, the others are not."""

    def choose(*names):
        for name, key in KEYS.items():
            if name in names:
                monkeypatch.setenv(name, key)
            else:
                monkeypatch.delenv(name, raising=False)

    choose()
    return choose


def key_for(url, flags=JUDGE_FLAGS, given=None):
    return with_key(Endpoint("m", url, 1, 1.0, 1, flags=flags), given).key


@pytest.mark.parametrize(
    ("flags", "own"),
    [
        (EndpointFlags(), "JUDGE_API_KEY"),  # dschat judge and judge-turns
        (JUDGE_FLAGS, "JUDGE_API_KEY"),  # --reward_judge
        (USER, "USER_API_KEY"),  # --user_server of step 3
        (REFUEL_USER, "USER_API_KEY"),  # --user_server of dschat refuel-data
    ],
)
def test_each_role_has_a_key_of_its_own(flags, own, keys):
    keys(*KEYS)
    for url in (OPENAI_URL, FOREIGN, LOCAL):
        assert key_for(url, flags) == KEYS[own]
    keys(*KEYS.keys() - {own})
    assert key_for(OPENAI_URL, flags) == "sk-openai"
    assert key_for(LOCAL, flags) == "none"
    with pytest.raises(UserError, match=f"no key for {FOREIGN}: set the environment variable {own}, to any word if"):
        key_for(FOREIGN, flags)


@pytest.mark.parametrize(
    ("url", "is_sent"),
    [
        (OPENAI_URL, True),
        ("https://API.OpenAI.com/v1", True),
        ("https://eu.api.openai.com/v1", True),
        ("http://api.openai.com/v1", False),  # without encryption
        ("https://api.openai.com.example/v1", False),
        ("https://evil-api.openai.com/v1", False),
        ("https://models.example/api.openai.com/v1", False),
    ],
)
def test_the_key_of_openai_goes_to_its_own_hosts_alone(url, is_sent, keys):
    keys("OPENAI_API_KEY")
    if is_sent:
        assert key_for(url) == "sk-openai"
        return
    with pytest.raises(UserError, match="no key for .*OPENAI_API_KEY goes to https://api.openai.com alone"):
        key_for(url)


def test_a_key_given_by_flag_is_sent_where_the_command_says(keys):
    keys(*KEYS)
    for url in (OPENAI_URL, FOREIGN, LOCAL):
        assert key_for(url, given="sk-flag") == "sk-flag"
    assert key_for(FOREIGN, given=" ") == "of-judge"


@pytest.mark.parametrize(
    ("url", "is_warned_of"),
    [("http://10.0.0.5:8000/v1", True), (FOREIGN, False), (LOCAL, False), ("http://0.0.0.0:8000/v1", False)],
)
def test_a_key_without_encryption_is_warned_of(url, is_warned_of, keys, caplog):
    keys("JUDGE_API_KEY")
    assert key_for(url) == "of-judge"
    warning = f"{url} is not encrypted: the key of JUDGE_API_KEY and the texts can be read on the way"
    assert (warning in caplog.text) is is_warned_of and "of-judge" not in caplog.text


def test_what_is_sent(server, tmp_path, keys, monkeypatch):
    """To a server on this machine: no key, and no other variable of OpenAI's own library."""
    keys("OPENAI_API_KEY", "USER_API_KEY")
    monkeypatch.setenv("OPENAI_ORG_ID", "org")
    judged(server, tmp_path)
    assert set(server.keys) == {"Bearer none"}
    assert not {name for headers in server.headers for name in headers if name.lower().startswith("openai")}
