# SPDX-License-Identifier: Apache-2.0
"""DPO's main: what its own flags do, what it refuses, and what becomes of the log-probs that it keeps."""

from safetensors import safe_open
from safetensors.torch import load_file

from cli_runs import evaluation_rows, untimed


def reference_of(folder):
    """Each file's numbers and what they depend on."""
    found = {}
    for file in (folder / "reference").iterdir():
        with safe_open(file, "pt") as content:
            found[file.name] = content.get_tensor("logprobs").tolist(), content.metadata()
    return found


def test_a_run_goes_on_with_its_reference(run, dpo_flags, tmp_path):
    out = tmp_path / "out"
    flags = dpo_flags | {"save_steps": 2, "save_total_limit": 0}
    run("dpo", flags).expect(0)
    old, weights = reference_of(out), load_file(out / "model.safetensors")
    last = evaluation_rows(out)[-1]
    screen = run("dpo", flags | {"resume_from_checkpoint": out / "checkpoints" / "step-2"}).expect(0).stderr
    assert "going on from" in screen and "reference:" not in screen, "it is computed anew"
    assert reference_of(out) == old
    assert all(bool((x == weights[name]).all()) for name, x in load_file(out / "model.safetensors").items())
    again = evaluation_rows(out)[-1]
    assert untimed(again) == untimed(last)
