# SPDX-License-Identifier: Apache-2.0
"""link-grammar, where it is installed; and its backend with a process that hangs, dies and talks nonsense."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from constituent_treelib import link_grammar
from constituent_treelib.link_grammar import MAX_WORDS, LinkGrammarBackend, WorkerProcess, WorkerStartError, read_tree
from constituent_treelib.parsing import parse_texts
from constituent_treelib.trees import Tree, TreelibError
from treelib_cases import SALAD, check_partition, check_trees

# Answers with the words between blanks under one root; writes down what it is asked.
STUB = """
import json, os, sys, time
print(json.dumps({"version": "stub"}), flush=True)
for line in sys.stdin:
    text = json.loads(line)
    with open(sys.argv[1], "a") as asked:
        asked.write(line)
    if "hang" in text:
        time.sleep(60)
    if "die" in text:
        os.abort()
    if "leave" in text:
        sys.exit()
    if "half" in text:
        print('{"words": [', end="", flush=True)
        time.sleep(60)
    words, place = [], 0
    for word in text.split():
        start = text.index(word, place)
        place = start + len(word)
        words.append([start, place])
    answer = {"words": words, "tree": "(S " + " ".join(text.split()) + ")"}
    answer = {"none": None, "list": [1], "number": 5, "odd": {"words": [["a", 1]], "tree": "(S a)"}}.get(text, answer)
    print("what?" if text == "garbage" else json.dumps(answer), flush=True)
"""


@pytest.fixture(scope="module")
def backend():
    try:
        made = LinkGrammarBackend(timeout=20.0)
    except TreelibError as error:
        pytest.skip(f"link-grammar: {error}")
    yield made
    made.close()


def test_a_sentence(backend):
    text = "The quick fox jumped over the lazy dog."
    (tree,) = backend.parse([text])
    assert [text[leaf.start : leaf.end] for leaf in tree.leaves()] == text.replace(".", " .").split()
    phrases = {(node.label, text[node.start : node.end]) for node in tree.nodes() if node.children}
    assert {("NP", "The quick fox"), ("PP", "over the lazy dog"), ("VP", "jumped over the lazy dog")} <= phrases


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "He said \"don't (ever) do that [please]\", didn't he?",
            "He said \" don't ( ever ) do that [ please ] \" , didn't he ?",
        ),
        ("The café is nice, and the 😀 naïve 日本語 too.", "The café is nice , and the 😀 naïve 日本語 too ."),
    ],
)
def test_positions_are_characters(text, words, backend):
    (tree,) = backend.parse([text])
    assert [text[leaf.start : leaf.end] for leaf in tree.leaves()] == words.split()


def test_salad_and_one_second(backend):
    """A grammar takes its time for words without one; the run goes on."""
    quick = LinkGrammarBackend(timeout=1.0)
    texts = [SALAD, "The dog ran. " + SALAD[:130] + ". The dog ran.", "", "\0"]
    trees, counts = parse_texts(texts, quick)
    quick.close()
    assert counts.sentences == counts.parsed + counts.fell_back == 5
    for found, text in zip(trees, texts, strict=True):
        check_trees(found, text)
        check_partition(found, text)


def test_a_call_has_a_limited_time(monkeypatch, caplog):
    """Of ten sentences that each take a tenth of a second, those within 0.35 s are asked."""
    program = (
        "import json, sys, time\nprint(json.dumps({'version': '1'}), flush=True)\n"
        "for line in sys.stdin:\n    time.sleep(0.1); print('null', flush=True)\n"
    )
    monkeypatch.setattr(link_grammar, "CALL_SECONDS", 0.35)
    monkeypatch.setattr(link_grammar, "SENTENCE_SECONDS", 0.0)
    slow = LinkGrammarBackend(command=[sys.executable, "-c", program])
    assert slow.parse(["The dog ran."] * 10) == [None] * 10
    slow.close()
    assert "link-grammar is out of time" in caplog.text and "of 10 sentences are left" in caplog.text


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_for_the_whole_run_leaves_it_to_its_work(sent, backend):
    """A launcher sends it to every process, and the one that asks still wants its answer."""
    backend.parse(["The dog ran."])
    before = backend._worker.pid
    os.kill(before, sent)
    assert backend.parse(["The dog ran."])[0] is not None and backend._worker.pid == before


def test_a_language_without_a_dictionary(backend):
    with pytest.raises(TreelibError, match="no dictionary of the language 'xx'.*apt-get install"):
        LinkGrammarBackend("xx")


@pytest.fixture
def asked(tmp_path):
    """The file of what the worker was asked."""
    return tmp_path / "asked"


@pytest.fixture
def command(tmp_path, asked):
    path = tmp_path / "stub.py"
    path.write_text(STUB)
    return [sys.executable, "-S", str(path), str(asked)]


@pytest.fixture
def stub(command):
    made = LinkGrammarBackend(timeout=2.0, command=command)
    yield made
    made.close()


def is_alive(pid):
    """Whether a process runs; one that has ended and waits for its parent does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_for_end(pid):
    for _ in range(200):
        if not is_alive(pid):
            return True
        time.sleep(0.02)
    return False


def labels(backend, units):
    return [tree.label if tree else None for tree in backend.parse(units)]


def test_trees(stub):
    text = "a fox ran"
    assert stub.parse([text]) == [Tree("S", 0, 9, (Tree("", 0, 1), Tree("", 2, 5), Tree("", 6, 9)))]
    assert (stub.name, stub.version, stub.unit) == ("link-grammar", "stub", "sentence")


@pytest.mark.parametrize("bad", ["hang", "die", "leave", "half", "garbage", "list", "number", "odd", "none"])
def test_one_bad_sentence_costs_itself_only(stub, bad):
    assert labels(stub, ["a b", bad, "c d", bad, "e"]) == ["S", None, "S", None, "S"]


def test_a_sentence_that_takes_too_long_leaves_the_run_alive(stub):
    start = time.monotonic()
    trees, counts = parse_texts(["One fox. It can hang. Two dogs."], stub)
    assert time.monotonic() - start < 30  # the worker would sleep 60
    assert (counts.parsed, counts.fell_back, dict(counts.reasons)) == (2, 1, {"not parsed": 1})
    assert [tree.bracket_string("One fox. It can hang. Two dogs.") for tree in trees[0]] == [
        "(S One fox.)",
        "(S (CLAUSE (CHUNK It) (CHUNK can hang) .))",
        "(S Two dogs.)",
    ]


@pytest.mark.parametrize("end", ["hang", "kill", "close"])
def test_a_process_that_ended_is_started_again(stub, end):
    before = stub._worker.pid
    if end == "hang":
        stub.parse(["hang"])
    elif end == "close":
        stub.close()
    else:
        os.kill(before, signal.SIGKILL)
    assert wait_for_end(before)
    assert labels(stub, ["a", "b c"])[1] == "S" and stub._worker.pid != before


def test_the_process_ends_with_the_backend(command):
    backend = LinkGrammarBackend(command=command)
    pid = backend._worker.pid
    assert is_alive(pid)
    del backend
    assert wait_for_end(pid)


@pytest.mark.parametrize("end", ["pass", "raise SystemExit(3)", "os._exit(0)", "os.kill(os.getpid(), signal.SIGKILL)"])
def test_the_process_ends_with_the_interpreter(command, end):
    program = (
        "import os, signal\nfrom constituent_treelib.link_grammar import LinkGrammarBackend\n"
        f"backend = LinkGrammarBackend(command={command!r})\nprint(backend._worker.pid, flush=True)\n{end}\n"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert run.stderr == ""
    assert wait_for_end(int(run.stdout))


def test_a_fork_has_a_process_of_its_own(stub):
    before = stub._worker.pid
    try:
        child = os.fork()
    except OSError as error:
        pytest.skip(f"this process has grown too large to be copied: {error}")
    if child == 0:
        status = 1
        try:
            own = stub._worker.pid is None and labels(stub, ["a"]) == ["S"] and stub._worker.pid != before
            stub.close()
            status = 0 if own else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert is_alive(before)
    assert labels(stub, ["a"]) == ["S"]
    assert stub._worker.pid == before


def test_what_is_never_sent(stub, asked):
    units = ["", " ", "\n", "\0", "\0a b", "a\0b", "\ud800", "w " * (MAX_WORDS + 1), "x" * 2000, "字" * 36]
    assert labels(stub, units) == [None] * len(units)
    assert not asked.exists()
    assert labels(stub, ["w " * MAX_WORDS]) == ["S"]


def test_it_cannot_be_started_any_more(stub, caplog):
    """The rest of the call is not parsed; the next call tries again."""
    command = stub._worker._command
    stub._worker._command = ["/does/not/exist"]
    assert labels(stub, ["a", "die", "b", "c"]) == ["S", None, None, None]
    assert "does not run any more" in caplog.text
    stub._worker._command = command
    assert labels(stub, ["a"]) == ["S"]


NO_LIBRARY = """import json; print(json.dumps({"error": "no library"}))"""


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"command": ["/does/not/exist"]}, "link-grammar does not run: its process could not be started"),
        ({"command": [sys.executable, "-c", NO_LIBRARY]}, r"\(no library\): apt-get install .*the backend chunker"),
        *(({"timeout": seconds}, "more than 0 seconds") for seconds in (0, -1, float("nan"))),
    ],
)
def test_what_cannot_run_is_refused(options, said):
    with pytest.raises(TreelibError, match=said):
        LinkGrammarBackend(**options)


def test_a_process_that_says_nothing(monkeypatch):
    monkeypatch.setattr("constituent_treelib.link_grammar.START_SECONDS", 0.2)
    with pytest.raises(WorkerStartError, match="did not start: TimeoutError"):
        WorkerProcess([sys.executable, "-c", "import time; time.sleep(60)"], 1).start()


def test_any_json(tmp_path):
    echo = "import sys\nprint(1, flush=True)\nfor line in sys.stdin: print(line, end='', flush=True)"
    worker = WorkerProcess([sys.executable, "-c", echo], 5)
    for value in ("é日😀\n\u2028", "x" * 300_000, [1, {"a": None}]):
        assert worker.ask(value) == value
    worker.close()


@pytest.mark.parametrize(
    ("brackets", "words", "expected"),
    [
        ("(S (NP the fox.n) ran.v-d .)", 4, "(S (NP w (n w)) (v-d w) w)"),
        ("(S a)(S b)", 2, "(S (S w) (S w))"),
        ("(S (NP ) a)", 1, "(S w)"),
        ("(S {(} b [c])", 3, None),
        ("(S {{} b {}})", 3, "(S w w w)"),
        ("(S a b)", 3, None),
        ("(S a b c)", 2, None),
        ("(S a (NP b)", 2, None),
        ("S a)", 2, None),
        ("", 0, None),
        ("()", 0, None),
    ],
)
def test_brackets_to_trees(brackets, words, expected):
    text = "w " * words
    tree = read_tree(brackets, [(2 * place, 2 * place + 1) for place in range(words)])
    assert (tree.bracket_string(text) if tree else None) == expected


def test_words_that_overlap():
    assert read_tree("(S a b)", [(0, 2), (1, 3)]) is None
