# SPDX-License-Identifier: Apache-2.0
"""The demo's page in a real browser."""

import importlib.util
import shutil
import signal
import sys
import time

import pytest

from cli_runs import message_of, run_command
from demo_browser import Server, box, bubbles, captions, opened, say, status
from demo_cases import as_run, save_endless, save_reward, save_taught

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next(filter(None, map(shutil.which, BROWSERS)), None)
MISSING = [name for name in ("gradio", "playwright") if importlib.util.find_spec(name) is None]
needs_browser = pytest.mark.skipif(
    bool(MISSING) or CHROMIUM is None,
    reason=f"the demo's page needs {', '.join(MISSING) or 'one of ' + ', '.join(BROWSERS)}, not found here",
)
pytestmark = pytest.mark.xdist_group("browser")

NASTY = "<img src=x onerror=window.obeyed=1> **b** ${window.obeyed=2} \x1b[1m"
SHOWN = NASTY.replace("\x1b", "\\x1b")


@pytest.fixture(scope="module")
def chromium():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run whose last model answers with markup, whose model before writes without end, and a reward model."""
    run = as_run(tmp_path_factory.mktemp("page") / "run", max_answer_seq_len=4000, temperature=1.0, top_k=7)
    save_taught(run, f" {NASTY}", steps=200)
    save_endless(run / "models" / "step-5")
    save_reward(run / "critic")
    return run


@pytest.fixture(scope="module")
def server(run, tmp_path_factory):
    server = Server(tmp_path_factory.mktemp("one"), "chat", "--temperature", 0)
    yield server
    server.kill()


def load(page, run, checkpoint, side="model"):
    """Types a run's folder, chooses a checkpoint and loads it."""
    box(page, f"{side}-run").fill(str(run))
    page.locator(f"#demo-{side}-find").click()
    status(page, "3 models found|2 models found", side)
    page.locator(f"#demo-{side}-checkpoint input").click()
    page.get_by_role("option", name=checkpoint).click()
    page.locator(f"#demo-{side}-load").click()
    status(page, rf"Loaded {run}.*0\.\d+ million parameters, on cpu, fp32, in [\d.]+ s", side)


@needs_browser
def test_load_chat_stop_and_another_checkpoint(server, chromium, run):
    with opened(chromium, server.address) as page:
        status(page, "No model is loaded")
        say(page, "how are you?")
        page.locator("#demo-note", has_text="no model is loaded").wait_for()
        assert box(page, "message").input_value() == "how are you?"
        box(page, "model-run").fill("/nowhere")
        box(page, "model-run").press("Enter")
        status(page, "/nowhere: no such folder")

        load(page, run, "models/step-5")
        page.locator("#demo-own").click()
        page.locator("#demo-source", has_text="train_config.json").wait_for()
        assert box(page, "top-k").input_value() == "7" and box(page, "max-new-tokens").input_value() == "4000"
        say(page, "how are you?")
        page.wait_for_function(
            "() => document.querySelectorAll('#demo-chat-0 .message-content')[1]?.innerText.length > 40"
        )
        assert page.locator("#demo-submit").is_disabled() and page.locator("#demo-clear").is_disabled()
        box(page, "message").fill("typed meanwhile")
        box(page, "message").press("Enter")  # during an answer nothing is sent
        page.wait_for_timeout(500)
        assert page.locator("#demo-chat-0 .message-content").count() == 2
        assert page.locator("#demo-submit").is_disabled() and box(page, "message").input_value() == "typed meanwhile"
        start = time.monotonic()
        page.locator("#demo-stop").click()
        (caption,) = captions(page, 1)
        assert caption.endswith("stopped") and time.monotonic() - start < 20
        assert box(page, "message").input_value() == "typed meanwhile"

        load(page, run, "final model")  # the conversation stays
        page.locator("#demo-clear").click()
        page.wait_for_function("() => document.querySelectorAll('#demo-chat-0 .message-content').length === 0")
        box(page, "message").fill("how are you?")
        box(page, "message").press("Enter")
        (caption,) = captions(page, 1)
        assert caption.endswith("ended") and bubbles(page) == ["how are you?", SHOWN]
        page.locator("#demo-draw input").click()
        page.locator(".ma-text", has_text="onerror").wait_for()
        assert page.locator("#demo-chat-0 img").count() == 0 and page.evaluate("window.obeyed") is None
        assert "macro actions" in page.locator(".demo-caption").inner_text()


@needs_browser
def test_a_message_is_text_and_a_reload_begins_anew(server, chromium, run):
    with opened(chromium, server.address) as page:
        load(page, run, "final model")
        page.locator("#demo-example").click()
        page.wait_for_function("() => document.querySelector('#demo-message textarea, #demo-message input').value")
        box(page, "max-new-tokens").fill("3")
        say(page, NASTY)
        captions(page, 1)
        assert bubbles(page)[0] == SHOWN and page.evaluate("window.obeyed") is None
        page.reload()
        page.locator("#demo-submit").wait_for()
        assert bubbles(page) == []
        box(page, "max-new-tokens").fill("")
        say(page, "hm")
        page.locator("#demo-note", has_text="is empty").wait_for()


@needs_browser
@pytest.mark.slow
def test_two_models_side_by_side_with_scores_and_macro_actions(chromium, run, tmp_path):
    flags = ["--model", run, "--other", run / "models" / "step-5", "--reward_model", run / "critic", "--ngram", 4]
    server = Server(tmp_path, "chat", *flags, "--temperature", 0, "--max_new_tokens", 90)
    try:
        with opened(chromium, server.address) as page:
            status(page, "Loaded")
            status(page, "step-5", "other")
            say(page, "how are you?")
            first, second = captions(page, 2)
            assert first.startswith("score ") and "ended" in first
            assert second.startswith("score ") and "90 tokens" in second and "23 macro actions" in second
            texts = [page.locator(f"#demo-chat-{side} .ma-text").inner_text() for side in (0, 1)]
            assert texts[0].strip().startswith("<img")
            assert page.locator("#demo-chat-1 .ma").count() == 23 and page.evaluate("window.obeyed") is None
            boxes = [page.locator(f"#demo-chat-{side}").bounding_box() for side in (0, 1)]
            assert boxes[0]["x"] + boxes[0]["width"] <= boxes[1]["x"] and boxes[0]["y"] == boxes[1]["y"]
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(60) == 0 and "Traceback" not in server.log.read_text()
    finally:
        server.kill()


@needs_browser
@pytest.mark.slow
def test_a_browser_that_leaves_frees_the_models(server, chromium, run):
    with opened(chromium, server.address) as page:
        load(page, run, "models/step-5")
        box(page, "max-new-tokens").fill("4000")
        say(page, "how are you?")
        page.wait_for_function(
            "() => document.querySelectorAll('#demo-chat-0 .message-content')[1]?.innerText.length > 40"
        )
    with opened(chromium, server.address) as page:
        box(page, "max-new-tokens").fill("5")
        start = time.monotonic()
        say(page, "how are you?")
        captions(page, 1)
        assert time.monotonic() - start < 30


@needs_browser
@pytest.mark.slow
def test_summaries(chromium, tmp_path):
    model = save_taught(tmp_path / "model", "cat sits", prompt="POST\nSubreddit: r/cats\nMy cat sat.\nTL;DR: ")
    server = Server(tmp_path, "summary", "--model", model, "--temperature", 0)
    try:
        with opened(chromium, server.address) as page:
            page.locator("#demo-submit").click()
            page.locator("#demo-note", has_text="the post is empty").wait_for()
            page.locator("#demo-example").click()
            page.wait_for_function("() => document.querySelector('#demo-post textarea').value.length > 100")
            page.locator("#demo-clear").click()
            page.wait_for_function("() => !document.querySelector('#demo-post textarea').value")
            box(page, "subreddit").fill("cats")
            box(page, "post").fill("My cat sat.")
            page.locator("#demo-submit").click()
            captions(page, 1)
            assert page.locator("#demo-summary-0 .demo-text").inner_text() == "cat sits"
    finally:
        server.kill()


@pytest.mark.slow
def test_a_model_or_an_address_that_cannot_be_used_is_named(tmp_path):
    words = [sys.executable, "-m", "dschat", "demo", "chat"]
    message_of(run_command([*words, "--model", tmp_path / "away"]), "away: no such folder")
    message_of(run_command([*words, "--port", "70000"]), "--port 70000 is out of range", "from 0 to 65535")
    message_of(run_command([*words, "--host", "300.1.2.3"]), "--host 300.1.2.3: cannot")
