# SPDX-License-Identifier: Apache-2.0
"""Which variables hold secrets: one list for the hub, other machines and `dschat env`."""

import json

import pytest

from dschat import remote
from dschat.base.errors import UserError
from dschat.base.secrets import SECRET_NAME, secret_of
from dschat.run import environment, hub

SECRETS = "HF_TOKEN WANDB_APIKEY AWS_SECRET_ACCESS_KEY PGPASSWORD SMTP_PASS NETRC_AUTH https_proxy SLACK_WEBHOOK"
OTHERS = "HF_HOME TOKENIZERS_PARALLELISM GIT_AUTHOR_NAME NO_PROXY OMP_NUM_THREADS COMPASS"


def test_names_of_secrets():
    assert all(SECRET_NAME.search(name) for name in SECRETS.split())
    assert not any(SECRET_NAME.search(name) for name in OTHERS.split())


def test_a_secret_as_a_request_carries_it(monkeypatch):
    """A file's line end is none of it; what no header can hold is refused without being shown."""
    monkeypatch.setenv("REWARD_API_KEY", "secret\n")
    assert secret_of("REWARD_API_KEY") == "secret" and secret_of("NO_SUCH_KEY") == ""
    monkeypatch.setenv("REWARD_API_KEY", "a secret of words")
    assert secret_of("REWARD_API_KEY") == "a secret of words"
    for wrong in ("geheimnüß", "a\nb"):
        monkeypatch.setenv("REWARD_API_KEY", wrong)
        with pytest.raises(UserError, match="^REWARD_API_KEY holds characters that no key has; copy it again.$"):
            secret_of("REWARD_API_KEY")


def test_every_part_reads_the_list(monkeypatch, tmp_path):
    """A name that an earlier list of each of them did not have."""
    for name in ("VLLM_AUTH", "HF_COOKIE", "MA_RLHF_PASSPHRASE"):
        monkeypatch.setenv(name, "a value of 20 letters")
    shown = environment.describe(environment.EnvOptions())
    assert "a value of 20 letters" not in shown
    assert {"VLLM_AUTH", "HF_COOKIE"} <= set(remote.remote_variables({"VLLM_AUTH": "x", "HF_COOKIE": "x"}, {}))
    card = tmp_path / "run.json"
    card.write_text(json.dumps("a value of 20 letters"))
    with pytest.raises(UserError, match=r"run\.json: holds what looks like a secret"):
        hub.refuse_secrets({"run.json": card})
