# SPDX-License-Identifier: Apache-2.0
"""Every command of the documents names something that exists, and every flag is known to its program."""

import importlib.util
import re
import shlex
import tempfile
from functools import cache
from pathlib import Path

import pytest

from cli_runs import run_forked
from dschat.cli import COMMANDS
from dschat.reference import page
from dschat.settings.flags import default_of
from dschat.settings.flags import flags_of as flags_of_config
from dschat.settings.parser import FlagParser
from dschat.settings.ppo import PPOConfig

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = sorted(
    path
    for pattern in ("*.md", "docs/*.md", "docs/llms.txt", "applications/**/*.md", "Constituent-Treelib/*.md")
    for path in ROOT.glob(pattern)
)
DOCUMENTS += sorted(ROOT.glob("skills/*/SKILL.md"))
each_document = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```\s*$", re.MULTILINE | re.DOTALL)
OPERATORS = {"&&", "||", "|", ";"}
PYTHONS = {"python", "python3", ".venv/bin/python"}
# Programs that come from elsewhere; their arguments are theirs.
OTHER_PROGRAMS = set(
    "git export hf tensorboard wandb trackio source less head cat xdg-open open mkdir rm find docker".split()
)
TRAINING = ROOT / "applications/DeepSpeed-Chat/training"
SHIM = re.compile(r"main\(\[(.*?), \*sys\.argv")
MAKE_VARIABLE = re.compile(r"[A-Z_]+=")
PLACEHOLDER = re.compile(r"[$*<{]")


class Mistake(Exception):
    """What is wrong with a documented command."""


def blocks(text: str, language: str = "bash") -> list[str]:
    """The fenced blocks of a language."""
    return [body for name, body in FENCE.findall(text) if name == language]


def commands(block: str) -> list[list[str]]:
    """The simple commands of a block in order: continued lines joined, comments gone, split at operators."""
    found: list[list[str]] = []
    for line in block.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars="&|;")
        lexer.whitespace_split = True
        lexer.commenters = "#"
        words: list[str] = []
        for word in lexer:
            if word in OPERATORS:
                found.append(words)
                words = []
            else:
                words.append(word)
        found.append(words)
    return [words for words in found if words]


def check_block(block: str) -> None:
    """Raises Mistake for the first command that could not work from the root of the repository.

    A line that leads into a folder leads there from the root: examples are copied one line at a time.
    """
    for line in re.sub(r"\\\n", " ", block).splitlines():
        folder = ROOT
        for words in commands(line):
            folder = check_command(words, folder)


def check_command(words: list[str], folder: Path) -> Path:
    """Checks one command in a folder; the folder after it."""
    while words and re.fullmatch(r"\w+=.*", words[0]):
        words = words[1:]
    if not words:
        return folder
    program, rest = words[0], words[1:]
    if program == "cd":
        if PLACEHOLDER.search(rest[0]):
            return folder
        if not (folder / rest[0]).is_dir():
            raise Mistake(f"cd {rest[0]}: no such folder")
        return (folder / rest[0]).resolve()
    if program == "make":
        check_make(rest, folder)
    elif program in ("pip", "pip3"):
        check_pip(rest, folder)
    elif program in PYTHONS:
        check_python(rest, folder)
    elif program in ("bash", "sh"):
        check_script(rest, folder)
    elif program == "deepspeed":
        place = next((i for i, word in enumerate(rest) if word.endswith(".py")), None)
        if place is None:
            raise Mistake("deepspeed without a Python file")
        check_python(rest[place:], folder)
    elif program == "dschat":
        check_dschat(rest)
    elif "/" in program and not PLACEHOLDER.search(program):
        if not (folder / program).is_file():
            raise Mistake(f"{program}: no such file")
    elif program not in OTHER_PROGRAMS:
        raise Mistake(f"{program}: add it to OTHER_PROGRAMS if it comes from elsewhere")
    return folder


def check_make(rest: list[str], folder: Path) -> None:
    targets = re.findall(r"^([\w-]+):(?!=)", (folder / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    for word in rest:
        if word not in targets and not MAKE_VARIABLE.match(word):
            raise Mistake(f"make {word}: no such target")


def check_pip(rest: list[str], folder: Path) -> None:
    for flag, value in zip(rest, rest[1:], strict=False):
        if flag in ("-r", "--requirement") and not (folder / value).is_file():
            raise Mistake(f"pip: no file {value}")
        place = folder / value.partition("[")[0]
        if flag in ("-e", "--editable") and not any(
            (place / name).is_file() for name in ("setup.py", "pyproject.toml")
        ):
            raise Mistake(f"pip: nothing to install in {value}")


def check_python(rest: list[str], folder: Path) -> None:
    if rest[:1] == ["-c"]:
        compile(rest[1], "README", "exec")
        return
    if rest[:1] == ["-m"]:
        if importlib.util.find_spec(rest[1]) is None:
            raise Mistake(f"python -m {rest[1]}: no such module")
        return
    if PLACEHOLDER.search(rest[0]):
        return
    if not (folder / rest[0]).is_file():
        raise Mistake(f"python {rest[0]}: no such file")
    check_values(folder / rest[0], rest[1:])


def check_script(rest: list[str], folder: Path) -> None:
    if not (folder / rest[0]).is_file():
        raise Mistake(f"bash {rest[0]}: no such file")
    main = (folder / rest[0]).resolve().parent.parent / "main.py"
    if rest[1:] and main.is_file():
        check_values(main, rest[1:])


def check_dschat(rest: list[str]) -> None:
    """Raises Mistake for a subcommand that there is not, or a flag that it does not know."""
    if rest[0] == "--help":
        return
    name = next((name for name in (" ".join(rest[:2]), rest[0]) if name in COMMANDS), None)
    if name is None:
        raise Mistake(f"dschat {rest[0]}: no such subcommand")
    known = flags_of(name) | (flags_of("ppo") if name == "plan" else set())  # it takes those of the planned run
    for word in rest:
        if word.startswith("--") and spelled(word.partition("=")[0]) not in known:
            raise Mistake(f"dschat {name} knows no {word}")


def check_values(program: Path, words: list[str]) -> None:
    """Raises Mistake for a flag that a program does not know."""
    for word in words:
        if word.startswith("--") and spelled(word.partition("=")[0]) not in known_flags(program.resolve()):
            raise Mistake(f"{program.relative_to(ROOT)} knows no {word}")


def spelled(flag: str) -> str:
    """A flag with underscores."""
    return f"--{flag[2:].replace('-', '_')}"


@cache
def flags_of(command: str) -> set[str]:
    """The flags of a subcommand."""
    parser = FlagParser(COMMANDS[command].flags_class())
    found = {option for action in parser._actions for option in action.option_strings}
    return {spelled(option) for option in found} | {"--config", "--print_config", "--print_schema"}


@cache
def known_flags(program: Path) -> set[str]:
    """Those of the subcommand that a script stands for; of others what `--help` lists."""
    called = SHIM.search(program.read_text(encoding="utf-8"))
    if called:
        return flags_of(" ".join(re.findall(r'"([\w-]+)"', called[1])))
    with tempfile.TemporaryDirectory() as scratch:
        run = run_forked(program, ["--help"], Path(scratch)).expect(0)
    return {spelled(flag) for flag in re.findall(r"(?<![\w-])--[\w-]+(?:\.\w+)?", run.stdout)}


def flags_named(text: str) -> set[str]:
    """Flags in the running text and tables: `--flag` in back quotes, outside of fenced blocks.

    Those of a cluster's own commands are left out.
    """
    spans = re.findall(r"`(?!(?:srun|#SBATCH|docker|torchrun) )([^`\n]+)`", FENCE.sub("", text))
    return {flag for span in spans for flag in re.findall(r"(?<![\w-])--[A-Za-z][\w-]*(?:\.\w+)?", span)}


@each_document
def test_commands(document):
    for block in blocks(document.read_text(encoding="utf-8")):
        check_block(block)


@pytest.mark.xdist_group("help")  # every program is asked for its flags once
@each_document
def test_flags_in_the_text(document):
    named = flags_named(document.read_text(encoding="utf-8"))
    if not named:
        return
    known = set().union(*map(flags_of, COMMANDS))
    folder = ROOT / "applications" / "DeepSpeed-Chat"
    for program in [*folder.glob("benchmarks/*.py"), *folder.glob("research/*.py")]:
        if re.search("ArgumentParser|settings_parser", program.read_text(encoding="utf-8")):
            known |= known_flags(program)
    assert not {flag for flag in named if spelled(flag) not in known}, "no program knows them"


@each_document
def test_links(document):
    text = FENCE.sub("", document.read_text(encoding="utf-8"))
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if not re.match(r"https?:|mailto:", target):
            name, _, anchor = target.partition("#")
            path = (document.parent / name).resolve() if name else document
            assert path.exists(), target
            assert not anchor or anchor in anchors(path.read_text(encoding="utf-8")), target


def anchors(text: str) -> set[str]:
    """Of the headings, as GitHub and mkdocs make them."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@each_document
def test_tests_that_a_document_names_are_there(document):
    """`folder/test_file.py` and `folder/test_file.py::test_name`, below tests/."""
    for path, function in re.findall(
        r"`(?:tests/)?([\w/]*test_[a-z_0-9]+\.py)(?:::(\w+))?", document.read_text("utf-8")
    ):
        file = ROOT / "tests" / path
        assert file.is_file(), f"{document}: {path}"
        assert not function or f"def {function}(" in file.read_text("utf-8"), f"{document}: {path}::{function}"


def test_the_page_of_flags_is_what_the_declarations_make():
    assert (ROOT / "docs" / "flags.md").read_text(encoding="utf-8") == "\n".join(page()) + "\n"


def test_every_page_is_on_the_site():
    """Each page of docs/ stands once in mkdocs.yml's navigation, and nothing else does."""
    named = re.findall(r": ([\w-]+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    pages = {path.name for path in (ROOT / "docs").glob("*.md")}
    assert sorted(named) == sorted(pages)


@pytest.mark.xdist_group("help")
@each_document
def test_settings_files(document):
    """The keys of a settings file that a document shows are flags."""
    for block in blocks(document.read_text(encoding="utf-8"), "yaml"):
        keys = {f"--{key}" for key in re.findall(r"^(\w+):", block, re.MULTILINE)} - {"--extends"}
        assert keys <= flags_of("ppo") | flags_of("sft")


@each_document
def test_python_blocks_compile(document):
    for block in blocks(document.read_text(encoding="utf-8"), "python"):
        compile(block, str(document), "exec")


def test_tables_of_a_flags_values_call_its_default_so():
    """A table headed by a flag has a row for each value; the word default stands in one row, that of the default."""
    checked, known = set(), flags_of_config(PPOConfig).keys()
    for document in DOCUMENTS:
        tables = re.findall(r"^\| `--(\w+)` \|.*\n\|[-|]+\|\n((?:\|.*\n)+)", document.read_text("utf-8"), re.MULTILINE)
        for flag, rows in [table for table in tables if table[0] in known]:
            called = re.findall(r"^\| `([^`]+)`.*\bdefault\b", rows, re.MULTILINE)
            assert called == [default_of(PPOConfig, flag)], f"{document}: --{flag}"
            checked.add((document.name, flag))
    assert len(checked) >= 5


STEP_1 = "applications/DeepSpeed-Chat/training/step1_supervised_finetuning"


@pytest.mark.parametrize(
    "block",
    [
        "make no-such-target",
        "pip install -r absent.txt",
        "python absent.py",
        f"cd {STEP_1} && bash training_scripts/absent.sh",
        f"cd {STEP_1} && bash training_scripts/run_gemma.sh --no_such_flag 1",
        f"python {STEP_1}/main.py --data_path a \\\n    --no_such_flag",
        f"deepspeed --num_gpus 1 {STEP_1}/main.py --no_such_flag",
        "dschat train",
        "dschat data check tldr --kl_ctl 1",
        "unheard-of-program",
    ],
)
def test_the_checker_finds_mistakes(block):
    with pytest.raises(Mistake):
        check_block(block)


def test_the_checker_accepts_what_works():
    check_block(
        "make test  # no-such-target\n"
        'make test PYTEST_ARGS="tests/rl -q"\n'
        "pip install -r requirements.txt\n"
        "cd applications/DeepSpeed-Chat && pip install -e .\n"
        "dschat ppo --config tldr_gemma_2b --num_gpus 8 --kl_ctl 0.03 --print_config\n"
        "dschat demo chat --model a --terminal\n"
        f"cd {STEP_1} && NUM_GPUS=1 bash training_scripts/run_gemma.sh --seed 1 --lr_scheduler_type=cosine\n"
        f"python {STEP_1}/main.py --data_path ${{PROJ_PATH}}/a.jsonl \\\n    --model_name_or_path ${{MODEL}}\n"
    )


def test_the_parser_of_blocks():
    text = "a\n```bash\nfirst 'one word' && second  # comment\nthird \\\n  more\n```\n```python\nx\n```\n"
    assert len(blocks(text)) == 1
    assert commands(blocks(text)[0]) == [["first", "one word"], ["second"], ["third", "more"]]
