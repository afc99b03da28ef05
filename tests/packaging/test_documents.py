"""What the documents tell people to type exists, and their links lead somewhere."""

import re

import pytest

from tests.packaging.repository import REPOSITORY, repository_files

DOCUMENTS = repository_files("*.md")
MAKE_COMMAND = re.compile(r"(?:^|`|\$ )make ((?:[a-z][a-z-]*)(?: [a-z][a-z-]*)*)", re.MULTILINE)
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
PROMISED = {
    "help",
    "venv",
    "demo",
    "serve",
    "test",
    "test-fast",
    "lint",
    "format",
    "proto",
    "bench",
    "lock",
    "clean",
}


def make_targets() -> set[str]:
    """Return the targets that the Makefile declares for people."""
    text = (REPOSITORY / "Makefile").read_text(encoding="utf-8")
    (phony,) = re.findall(r"^\.PHONY: (.*)$", text, re.MULTILINE)
    return set(phony.split())


def test_the_promised_targets_exist_and_are_explained() -> None:
    assert make_targets() >= PROMISED
    text = (REPOSITORY / "Makefile").read_text(encoding="utf-8")
    explained = set(re.findall(r"^\t@echo '  make ([a-z-]+)", text, re.MULTILINE))
    assert explained == make_targets() - {"help"}


@pytest.mark.parametrize("document", DOCUMENTS)
def test_make_commands_in_a_document_exist(document: str) -> None:
    text = (REPOSITORY / document).read_text(encoding="utf-8")
    named = {word for match in MAKE_COMMAND.findall(text) for word in match.split()[:1]}
    assert named - make_targets() == set()


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_between_documents_lead_somewhere(document: str) -> None:
    path = REPOSITORY / document
    targets = [link for link in LINK.findall(path.read_text(encoding="utf-8")) if "://" not in link]
    assert [target for target in targets if not (path.parent / target).exists()] == []


def test_the_readme_shows_the_two_commands() -> None:
    named = MAKE_COMMAND.findall((REPOSITORY / "README.md").read_text(encoding="utf-8"))
    assert {"demo", "test"} <= set(named)


def test_every_test_that_the_cases_name_exists() -> None:
    """docs/cases.md names a file in backticks, and pieces of its tests' names in brackets behind it."""
    text = (REPOSITORY / "docs" / "cases.md").read_text(encoding="utf-8")
    named = re.findall(r"`((?:\w+/)+test_\w+\.py)`(?: \(([^)]*)\))?", text)
    assert len(named) > 30
    missing = []
    for file, inside in named:
        path = REPOSITORY / "tests" / file
        source = path.read_text(encoding="utf-8") if path.exists() else ""
        pieces = ["def ", *re.findall(r"`(\w+)`", inside)]
        missing += [f"{file}: {piece}" for piece in pieces if piece not in source]
    assert missing == []
