"""The docs keep their word: links and test names exist, settings.md is fresh, examples run and print what stands below them."""

from __future__ import annotations

import importlib.util
import re
import shlex
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest
from conftest import REPO

from enginepool import cli

PAGES = [REPO / "README.md", *sorted((REPO / "docs").glob("*.md"))]
NEEDS_VLLM = "<!-- needs vllm -->"
FENCE = re.compile(
    r"^(?P<mark><!-- needs vllm -->\n\n?)?```(?P<language>\w+)\n(?P<text>.*?)^```$(?:\n\n```text\n(?P<printed>.*?)^```$)?", re.M | re.S
)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
TEST_NAME = re.compile(r"\btest_\w+\b(?!\.py)")
MACHINE_PATH = re.compile(r"(?<![\w.~$}-])/(?:work|root)(?=[/\s\"'`),.:]|$)")
INDEX_URL = re.compile(r"https?://[^\s)>\"'`]*(?:/simple|/whl|pypi)|--(?:extra-)?index-url")
TEXT_SUFFIXES = {".md", ".py", ".toml", ".ini", ".txt", ".yml", ".yaml", ".cfg", ".sh"}
TEXT_FOLDERS = ("enginepool", "tests", "bench", "docs", ".ci")


class Block(NamedTuple):
    """One fenced block of a page."""

    page: Path
    line: int
    language: str
    text: str
    printed: str | None
    needs_vllm: bool

    @property
    def name(self) -> str:
        """Where it stands, for test ids and tracebacks."""
        return f"{self.page.name}:{self.line}"


def _blocks(page: Path) -> list[Block]:
    content = page.read_text(encoding="utf-8")
    return [
        Block(
            page,
            content.count("\n", 0, match.start("language")) + 1,
            match["language"],
            match["text"],
            match["printed"],
            bool(match["mark"]),
        )
        for match in FENCE.finditer(content)
    ]


def _prose(page: Path) -> str:
    return FENCE.sub("", page.read_text(encoding="utf-8"))


def _anchors(page: Path) -> set[str]:
    """Headings as GitHub turns them into anchors."""
    heads = re.findall(r"^#+ (.+)$", _prose(page), re.M)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def _test_names(path: Path) -> set[str]:
    return set(re.findall(r"^def (test_\w+)", path.read_text(encoding="utf-8"), re.M))


def _text_files() -> list[Path]:
    inside = [path for folder in TEXT_FOLDERS for path in (REPO / folder).rglob("*")]
    files = [
        path for path in [*REPO.iterdir(), *inside] if path.is_file() and "__pycache__" not in path.parts and "results" not in path.parts
    ]
    return [path for path in files if path.suffix in TEXT_SUFFIXES or path.name in ("Makefile", "run")]


def _run(block: Block, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(block.text, block.name, "exec"), {"__name__": "__main__"})
    if block.printed is not None:
        assert capsys.readouterr().out == block.printed


def _generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_generate", REPO / "docs" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


BLOCKS = [block for page in PAGES for block in _blocks(page)]
PYTHON = [block for block in BLOCKS if block.language == "python"]
RUNNABLE = [block for block in PYTHON if not block.needs_vllm]
ON_VLLM = [block for block in PYTHON if block.needs_vllm]
COMMANDS = [
    (block, line) for block in BLOCKS if block.language == "sh" for line in block.text.splitlines() if line.startswith("enginepool ")
]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    dead = []
    for target in LINK.findall(_prose(page)):
        if target.startswith(("https://", "http://")):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists() or (anchor and anchor not in _anchors(file)):
            dead.append(target)
    assert dead == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_names_of_tests_exist(page: Path) -> None:
    known = {path.stem for path in (REPO / "tests").glob("test_*.py")}.union(*map(_test_names, (REPO / "tests").glob("test_*.py")))
    assert set(TEST_NAME.findall(page.read_text(encoding="utf-8"))) - known == set()


def test_named_tests_stand_in_the_linked_file() -> None:
    wrong = []
    for page in PAGES:
        for name, target in re.findall(r"\[`?(test_\w+)`?\]\(([^)\s#]+)\)", _prose(page)):
            file = (page.parent / target).resolve()
            if not file.exists() or name not in _test_names(file) | {file.stem}:
                wrong.append(f"{page.name}: {name} in {target}")
    assert wrong == []


def test_settings_page_is_fresh() -> None:
    generator = _generator()
    assert generator.TARGET.read_text(encoding="utf-8") == generator.render()
    assert generator.main(["--check"]) == 0


def test_every_page_is_linked_from_the_readme() -> None:
    linked = {target.partition("#")[0] for target in LINK.findall(_prose(PAGES[0]))}
    assert {f"docs/{page.name}" for page in PAGES[1:]} - linked == set()


@pytest.mark.parametrize("block", PYTHON, ids=lambda block: block.name)
def test_python_example_compiles(block: Block) -> None:
    compile(block.text, block.name, "exec")


@pytest.mark.usefixtures("fresh_run_dir")
@pytest.mark.parametrize("block", RUNNABLE, ids=lambda block: block.name)
def test_python_example_runs_and_prints_what_it_says(block: Block, capsys: pytest.CaptureFixture[str]) -> None:
    _run(block, capsys)


@pytest.mark.vllm
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("fresh_run_dir")
@pytest.mark.parametrize("block", ON_VLLM, ids=lambda block: block.name)
def test_vllm_example_runs_and_prints_what_it_says(
    block: Block, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB for all workers: touching the default share takes longer than the rest
    _run(block, capsys)


def test_vllm_examples_need_no_hub_and_are_few() -> None:
    """Each starts a pool of its own on the embedded model, so that it is run as it stands; that takes its time."""
    assert [block.name for block in ON_VLLM if re.search(r"Pool\(\s*[\"']", block.text)] == []
    assert len(ON_VLLM) <= 10


@pytest.mark.parametrize(("block", "line"), COMMANDS, ids=[f"{block.name}-{line.split()[1]}" for block, line in COMMANDS])
def test_command_line_is_understood(block: Block, line: str) -> None:
    ours, _ = cli._split(shlex.split(line, comments=True)[1:])
    cli._build_parser(ours[0]).parse_args(ours)


def test_examples_are_there() -> None:
    assert len(RUNNABLE) >= 8
    assert len(COMMANDS) >= 5


def test_text_files_name_no_machine_and_no_index() -> None:
    found = []
    for path in _text_files():
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if MACHINE_PATH.search(line) or INDEX_URL.search(line):
                found.append(f"{path.relative_to(REPO)}:{number}: {line.strip()}")
    assert found == []


@pytest.mark.parametrize(
    ("line", "is_found"),
    [
        ("see " + "/" + "root/.cache", True),
        ("cd " + "/" + "work", True),
        ("docs" + "/" + "work/x", False),
        ("pip install --" + "index-url x", True),
        ("https://" + "example.org/simple", True),
        ("https://docs.vllm.ai/en/latest/", False),
    ],
)
def test_pattern_finds_machines_and_indexes_only(line: str, is_found: bool) -> None:
    assert bool(MACHINE_PATH.search(line) or INDEX_URL.search(line)) is is_found


def test_every_row_of_what_happens_links_to_a_test() -> None:
    rows = [line for line in (REPO / "docs" / "behavior.md").read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    unshown = [row for row in rows if not row.startswith(("| when |", "| --- |")) and "[`test_" not in row]
    assert len(rows) > 100
    assert unshown == []
