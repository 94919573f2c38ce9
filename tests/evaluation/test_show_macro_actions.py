# SPDX-License-Identifier: Apache-2.0
"""`dschat macro-actions`: in the terminal and as a page."""

import re

import pytest
import torch

from cli_runs import write_jsonl
from dschat.cli import main
from dschat.evaluation.macro_actions import MacroToken, macro_text
from dschat.evaluation.panel_options import MacroActionsOptions
from dschat.models.tiny import train_tokenizer
from dschat.settings.flags import flags_of
from dschat.settings.ppo import PPOConfig
from factories import TEXTS, hf_logprobs, make_causal_lm, save_folder

TEXT = "the quick brown fox. a cat sat on a mat"
NASTY = "<script>alert(1)</script> \x1b[31mred & 'so'"


def make_tokenizer():
    """One that knows every byte."""
    return train_tokenizer(TEXTS, 300)


def make_model():
    return make_causal_lm(seed=3, vocab_size=300)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_folder(tmp_path_factory.mktemp("show") / "model", make_model(), make_tokenizer())


def shown(capsys, *words):
    status = main(["macro-actions", *map(str, words)])
    return status, capsys.readouterr()


def panels(output):
    """title → list of macro actions as text, from the output without colours (the last bar ends the last one)."""
    found = re.findall(r"^(.+): (\d+) macro actions, ([\d.]+) tokens each\n(.*?)\|$", output, re.MULTILINE)
    return {title: text.split("|") for title, _, _, text in found}


def test_every_condition_cuts_the_same_text(model, capsys):
    conditions = ["fixed", "randomized", "ppl", "parsing", "sentence", "line"]
    flags = ["--termination_condition", *conditions, "--ngram", "1", "5", "inf", "--parser", "chunker"]
    status, output = shown(capsys, "--model", model, "--text", TEXT, *flags)
    assert status == 0
    found = panels(output.out)
    titles = ["fixed, n = 1", "fixed, n = 5", "fixed, n = inf", "randomized", "perplexity, chunk"]
    assert list(found) == [*titles, "chunker, cutoff 5", "sentence", "line"]
    assert all("".join(parts) == TEXT + "<eos>" for parts in found.values())
    num_tokens = len(make_tokenizer().tokenize(TEXT)) + 1
    assert len(found["fixed, n = 1"]) == num_tokens and found["fixed, n = inf"] == [TEXT + "<eos>"]
    assert len(found["fixed, n = 5"]) == -(-num_tokens // 5)
    assert found["chunker, cutoff 5"][-1] == "<eos>"


def test_perplexity_is_that_of_the_model(model, capsys):
    """Every token whose surprise exceeds the one before it begins a macro action."""
    flags = ["--termination_condition", "ppl", "--ppl_mode", "token", "--prompt", "over the", "--temperature", "0.7"]
    _, output = shown(capsys, "--model", model, "--text", TEXT, *flags)
    tokenizer = make_tokenizer()
    response = [*tokenizer.encode(TEXT, add_special_tokens=False), tokenizer.eos_token_id]
    prompt = [tokenizer.bos_token_id, *tokenizer.encode("over the", add_special_tokens=False)]
    surprise = -hf_logprobs(make_model(), (prompt, response), temperature=0.7)[0]
    starts = [0, *(1 + (surprise[1:] > surprise[:-1]).nonzero().flatten()).tolist(), len(response)]
    expected = [tokenizer.decode(response[a:b]) for a, b in zip(starts[:-1], starts[1:], strict=True)]
    assert panels(output.out)["perplexity, token"] == expected
    assert len(expected) > 3 and torch.isfinite(surprise).all()


def test_rows_of_a_file_and_a_page_without_live_text(model, tmp_path, capsys):
    rows = [{"prompt": "<b>over</b>", "response": NASTY, "reward": 1.0}, {"prompt": "p", "response": "a cat"}]
    file, page = write_jsonl(tmp_path / "responses.jsonl", rows), tmp_path / "deep" / "page.html"
    status, output = shown(capsys, "--model", model, "--jsonl", file, "--html", page, "--ngram", "2", "4")
    assert status == 0 and "response 2 of 2" in output.out and "\x1b" not in output.out
    html = page.read_text(encoding="utf-8")
    assert "<script" not in html and "<b>" not in html and "\x1b" not in html and "http" not in html
    assert html.count('class="ma-panel"') == 4 and "&lt;b&gt;over&lt;/b&gt;" in html
    _, output = shown(capsys, "--model", model, "--jsonl", file, "--limit", "1")
    assert "response 1 of 1" in output.out


def test_a_row_of_messages_is_read_as_the_model_read_it(model, tmp_path, capsys):
    """With the chat template's prompt, while the page shows the text; a cut response gets no EOS."""
    row = {"prompt": "over the lazy", "response": TEXT, "finished": False}
    messages = {"prompt_messages": [{"role": "user", "content": "a cat"}]}
    found = []
    for name, columns in (("plain", {}), ("messages", messages)):
        file, page = write_jsonl(tmp_path / f"{name}.jsonl", [row | columns]), tmp_path / f"{name}.html"
        flags = ["--termination_condition", "ppl", "--ppl_mode", "token", "--html", page]
        _, output = shown(capsys, "--model", model, "--jsonl", file, *flags)
        found.append(panels(output.out)["perplexity, token"])
    assert found[0] == found[1] and "".join(found[0]) == TEXT
    assert "a cat</" in page.read_text("utf-8") and "over the lazy" not in page.read_text("utf-8")


def test_the_flags_of_a_condition_have_the_defaults_of_step_3():
    args = MacroActionsOptions(model="m", text=["a"]).flat()
    shared = args.keys() & flags_of(PPOConfig).keys()
    assert len(shared) == 14
    for name in shared:
        default = flags_of(PPOConfig)[name].default
        assert args[name] in (default, [default]), name


def test_colours():
    tokens = [MacroToken("a", 0), MacroToken("b\nc", 0), MacroToken("\x1b]0;x\x07", 1), MacroToken("\u202e", 1)]
    assert macro_text(tokens, colour=False) == "ab↵\nc|␛]0;x␇\ufffd|"
    painted = macro_text(tokens, colour=True)
    assert re.sub(r"\x1b\[[\d;]*m", "", painted) == "ab↵\nc␛]0;x␇\ufffd"
    assert painted.count("\x1b[0m") == 3, "each line is painted by itself"
    assert len(set(re.findall(r"48;5;(\d+)m", painted))) == 2


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--text a --termination_condition words", ["--termination_condition words", "module.py:function"]),
        ("--text a --termination_condition parsing --parser chunker x --parser_model m", ["--parser_model", "2 par"]),
        ("--jsonl none.jsonl --prompt p", ["--prompt belongs to --text"]),
        ("--text a --limit 1", ["--limit belongs to --jsonl"]),
    ],
)
def test_bad_flags(flags, words, model, capsys, caplog, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    status, output = shown(capsys, "--model", model, *flags.split())
    assert status == 2 and all(word in caplog.text for word in words), caplog.text
    assert not output.out
