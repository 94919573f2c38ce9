# SPDX-License-Identifier: Apache-2.0
"""The demo's page in a real browser."""

import importlib.util
import re
import shutil
import signal
import subprocess
import sys
from contextlib import contextmanager

import pytest

from cli_runs import environment, message_of, run_command
from demo_cases import save_endless, save_reward, save_taught

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next(filter(None, map(shutil.which, BROWSERS)), None)
MISSING = [name for name in ("gradio", "playwright") if importlib.util.find_spec(name) is None]
needs_browser = pytest.mark.skipif(
    bool(MISSING) or CHROMIUM is None,
    reason=f"the demo's page needs {', '.join(MISSING) or 'one of ' + ', '.join(BROWSERS)}, not found here",
)
pytestmark = pytest.mark.xdist_group("browser")

NASTY = "<img src=x onerror=window.obeyed=1> **b** ${window.obeyed=2} \x1b[1m"
SHOWN = NASTY.replace("\x1b", "␛")
MESSAGE = "#demo-message textarea, #demo-message input"


@contextmanager
def serving(folder, *words):
    """The process that serves a page, and its address."""
    log = folder / "log.txt"
    command = [sys.executable, "-m", "dschat", "demo", *map(str, words), "--device", "cpu", "--temperature", "0"]
    with open(log, "w") as errors:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment(PYTHONWARNINGS=None)
        )
    try:
        line = process.stdout.readline()
        found = re.match(r"Open (http://127\.0\.0\.1:\d+/) in a browser on this machine", line)
        assert found, line + log.read_text()
        yield found[1]
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0 and "Traceback" not in log.read_text()
    finally:
        process.kill()
        process.communicate()


@contextmanager
def opened(chromium, address):
    """A fresh browser profile on the page; nothing on it may fail, and it may ask no other host."""
    context = chromium.new_context(viewport={"width": 1280, "height": 900})
    context.set_default_timeout(60_000)
    page = context.new_page()
    errors, hosts = [], set()
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("request", lambda request: hosts.add(request.url.split("/")[2]) if "://" in request.url else None)
    page.goto(address)
    page.locator(MESSAGE).first.wait_for()
    try:
        yield page
        assert errors == [] and hosts == {address.split("/")[2]}
    finally:
        context.close()


def say(page, message):
    """Sends a message."""
    page.locator(MESSAGE).first.fill(message)
    page.locator("#demo-message .submit-button").click()


@pytest.fixture(scope="module")
def chromium():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    save_taught(folder / "ends", f" {NASTY}")
    save_endless(folder / "endless")
    save_reward(folder / "reward")
    return folder


@needs_browser
@pytest.mark.slow
def test_two_models_side_by_side_with_scores_and_macro_actions(chromium, models, tmp_path):
    flags = ["--other", models / "endless", "--reward_model", models / "reward", "--ngram", 4, "--max_new_tokens", 90]
    with serving(tmp_path, "chat", "--model", models / "ends", *flags) as address, opened(chromium, address) as page:
        say(page, "how are you?")
        page.wait_for_function("() => document.querySelectorAll('.demo-caption').length === 2")
        first, second = page.locator(".demo-caption").all_inner_texts()
        assert first.startswith("score ") and first.endswith("ended")
        assert second.startswith("score ") and "90 tokens, 23 macro actions" in second
        sides = page.locator(".demo-side")
        assert sides.nth(0).locator(".ma-text").inner_text().strip() == f"{SHOWN}<eos>"
        assert sides.nth(1).locator(".ma").count() == 23 and page.evaluate("window.obeyed") is None
        boxes = [sides.nth(side).bounding_box() for side in (0, 1)]
        assert boxes[0]["x"] + boxes[0]["width"] <= boxes[1]["x"] and boxes[0]["y"] == boxes[1]["y"]
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        page.wait_for_timeout(500)
        say(page, "no " * 9000)
        page.locator(".demo-failed", has_text="the model reads").wait_for()


@needs_browser
@pytest.mark.slow
def test_stop_ends_an_answer_and_the_next_one_can_begin(chromium, models, tmp_path):
    flags = ["--model", models / "endless", "--max_new_tokens", 4000]
    with serving(tmp_path, "chat", *flags) as address, opened(chromium, address) as page:
        say(page, "how are you?")
        page.wait_for_function("() => document.querySelector('.demo-text')?.innerText.length > 40")
        page.locator(".stop-button").click()
        page.locator(".submit-button").wait_for()  # the buttons are back
        page.wait_for_timeout(2000)
        shown = page.locator(".demo-text").inner_text()
        page.get_by_text("Sampling").click()
        page.get_by_label("Max new tokens").first.fill("5")
        say(page, "how are you?")
        page.locator(".demo-caption", has_text="5 tokens").wait_for()
        assert page.locator(".demo-text").first.inner_text() == shown


@needs_browser
@pytest.mark.slow
def test_summaries(chromium, tmp_path):
    model = save_taught(tmp_path / "model", "cat sits", prompt="POST\nSubreddit: r/cats\nMy cat sat.\nTL;DR: ")
    with serving(tmp_path, "summary", "--model", model) as address, opened(chromium, address) as page:
        page.get_by_label("Subreddit").first.fill("cats")
        say(page, "My cat sat.")
        page.locator(".demo-caption").wait_for()
        assert page.locator(".demo-side .ma-text").inner_text().startswith("cat sits")


@pytest.mark.slow
def test_an_address_that_cannot_be_used_is_named(tmp_path):
    words = [sys.executable, "-m", "dschat", "demo", "chat", "--model", str(tmp_path / "away")]
    message_of(run_command([*words, "--host", "300.1.2.3"]), "--host 300.1.2.3: cannot")
