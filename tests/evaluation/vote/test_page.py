# SPDX-License-Identifier: Apache-2.0
"""The human page in a real browser: one server, one headless Chromium, a rater of her own for every test."""

import importlib.util
import shutil
import signal
import socket
import subprocess
import threading
import urllib.request

import psutil
import pytest

from cli_runs import environment, message_of, run_command
from vote_browser import PAUSE, Server, at, click, comment_box, opened, press
from vote_runs import MODELS, command, places, votes, write_responses

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next(filter(None, map(shutil.which, BROWSERS)), None)
MISSING = [name for name in ("gradio", "playwright") if importlib.util.find_spec(name) is None]
pytestmark = pytest.mark.xdist_group("browser")

COUNT = 5
MARKUP = (
    "<script>window.obeyed = 1</script><img src=x onerror='window.obeyed = 2'>\n\n# title\n**bold** "
    "[link](http://example.com/) `code` $x^2$ ${window.obeyed = 3} {{value}} {{{value}}} @children &amp; \\n"
    "</pre><svg onload=window.obeyed=4> javascript:window.obeyed=5"
)
HIDDEN = "a\x1b[31mb\u202ec"


@pytest.fixture(scope="module")
def trapped():
    """A port, and what connected to it."""
    listener = socket.create_server(("127.0.0.1", 0))
    calls = []

    def listen():
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            connection.settimeout(5)
            calls.append(connection.recv(200))
            connection.close()

    threading.Thread(target=listen, daemon=True).start()
    yield listener.getsockname()[1], calls
    listener.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory, trapped):
    if MISSING or CHROMIUM is None:
        pytest.skip(f"the human page needs {', '.join(MISSING) or 'one of ' + ', '.join(BROWSERS)}, not found here")
    folder = tmp_path_factory.mktemp("page")
    write_responses(folder, COUNT, good2=MARKUP, bad2=HIDDEN)
    server = Server(folder, trapped[0])
    yield server
    server.kill()


@pytest.fixture(scope="module")
def chromium():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


def of(server, rater):
    """The votes of one rater."""
    return [row for row in votes(server.folder) if row["rater"] == rater]


@pytest.mark.slow
def test_votes_by_click_and_key_with_progress_undo_and_comment(server, chromium):
    from playwright.sync_api import expect

    with opened(chromium, server.address, "Anna") as page:
        seen = [at(page, "1 of 5")]
        seen.append(click(page, "1", "2 of 5"))
        seen.append(press(page, "2", "3 of 5"))
        comment_box(page).fill("1 or 2? Hard")
        comment_box(page).press("4")  # is text here, no vote
        assert page.locator(".human-place").inner_text() == "3 of 5"
        comment_box(page).press("Escape")
        press(page, "3", "4 of 5")
        expect(comment_box(page)).to_have_value("")
        press(page, "u", "3 of 5")
        expect(comment_box(page)).to_have_value("1 or 2? Hard4")
        assert "Taken back" in page.locator(".human-note").inner_text()
        assert len(of(server, "Anna")) == 2
        seen.append(press(page, "3", "4 of 5"))
        expect(page.locator(".human-note:visible")).to_have_count(0)
        seen.append(click(page, "4", "5 of 5"))
        assert page.locator("progress").get_attribute("value") == "4"
        press(page, "1", "5 of 5")
        page.get_by_text("All 5 done").wait_for()
        rows = of(server, "Anna")
        assert len(rows) == 5 and page.locator(".human-item:visible").count() == 0
        assert [item[0] for item in seen] == [f"prompt {i}" for i in range(5)]
        assert [tuple(item[1:]) for item in seen[:2]] == [places(row) for row in rows[:2]]
        assert rows[0]["verdict"] == rows[0]["first"]
        assert {rows[1]["verdict"], rows[1]["first"]} == {"A", "B"}
        assert [row["verdict"] for row in rows[2:4]] == ["tie", "skip"]
        assert [row["comment"] for row in rows] == ["", "", "1 or 2? Hard4", "", ""]
        assert {row["dataset"] for row in rows} == {"summarize"}
        press(page, "u", "5 of 5")  # the end, too, can be taken back
        page.locator(".human-item").wait_for()
        assert len(of(server, "Anna")) == 4


@pytest.mark.slow
def test_model_text_is_shown_as_text_and_nothing_in_it_runs(server, chromium):
    with opened(chromium, server.address, "Markus") as page:
        press(page, "1", "2 of 5")
        item = press(page, "1", "3 of 5")
        assert sorted(item[1:]) == sorted([MARKUP, "a\\x1b[31mb\\u202ec"])
        page.wait_for_timeout(200)
        assert page.evaluate("window.obeyed") is None
        inside = page.locator(".human-item").locator("script, img, svg, a, b, strong, em, code, h1, .katex")
        assert inside.count() == 0
        assert page.locator(".human-item").count() == 1 and page.locator(".human-item pre").count() == 3


@pytest.mark.slow
def test_a_double_click_and_a_key_held_down_vote_once(server, chromium):
    with opened(chromium, server.address, "Dora") as page:
        page.evaluate("performance.now = () => 1000")
        page.locator(".human-key-3:visible").dblclick()
        at(page, "2 of 5")
        page.keyboard.press("3")  # on the next item, but in the same instant
        page.evaluate("performance.now = () => 1301")
        page.keyboard.down("4")
        at(page, "3 of 5")
        page.evaluate("performance.now = () => 2000")
        page.keyboard.down("4")  # as the keyboard repeats it
        page.keyboard.up("4")
        page.wait_for_timeout(PAUSE)
        assert at(page, "3 of 5")[0] == "prompt 2"
        assert [row["verdict"] for row in of(server, "Dora")] == ["tie", "skip"]


@pytest.mark.slow
def test_the_page_asks_no_other_host_and_names_no_model(server, chromium, trapped):
    asked, answers = [], []
    with opened(chromium, server.address) as page:
        page.on("request", lambda request: asked.append(request.url))
        page.reload()
        page.locator("#human-name input, #human-name textarea").fill("Nora")
        page.locator("#human-start").click()
        at(page, "1 of 5")
        with page.expect_response(lambda response: response.request.method == "POST") as answer:
            press(page, "1", "2 of 5")
        answers = [answer.value.text(), page.content()]
    with urllib.request.urlopen(f"{server.address}config") as config:
        answers.append(config.read().decode())
    assert "prompt 1" in answers[0]
    assert not any(model in text for model in MODELS for text in answers)
    assert len(asked) > 10
    outside = [url for url in asked if not url.startswith((server.address, "data:", "blob:"))]
    assert outside == []
    assert trapped[1] == [], "the server called out"
    listening = [c.laddr.ip for c in psutil.Process(server.process.pid).net_connections() if c.status == "LISTEN"]
    assert listening == ["127.0.0.1"]


@pytest.mark.slow
def test_control_c_ends_the_server_with_the_counts_of_every_rater(server):
    """The last test of the server. A terminal may vote into the same file meanwhile."""
    typed = "3\n3\n4\n4\n3\n"
    terminal = command(server.folder, "--dataset", "summarize", "--rater", "Tom")
    subprocess.run(terminal, input=typed, text=True, env=environment(), check=True)
    server.process.send_signal(signal.SIGINT)
    output, _ = server.process.communicate(timeout=60)
    file = server.folder / "votes.jsonl"
    assert server.process.returncode == 0 and server.log.read_text() == ""
    *others, tom = dict.fromkeys(row["rater"] for row in votes(server.folder))
    counts = [f"{name}: {len(of(server, name))} of 5 voted: {file}" for name in others]
    counts.append(f"{tom}: 5 of 5 voted (kestrel better 0, osprey better 0, equal 3, passed 2): {file}")
    assert tom == "Tom" and output.splitlines()[-len(counts) :] == counts


def test_a_port_that_is_taken_is_named(tmp_path):
    write_responses(tmp_path, 1)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        said = run_command(command(tmp_path, "--web", "--port", port))
    message_of(said, f"--port {port}: cannot", "another one")
