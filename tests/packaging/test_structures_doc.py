"""docs/structures.md names every module, and every name it mentions exists in the code."""

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOC = (ROOT / "docs" / "structures.md").read_text(encoding="utf-8")
PORTIONS = ("proto", "core", "kernels", "engine", "prefill_worker", "decode_worker", "router", "deploy")


def modules() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=30
    ).stdout.split()
    return [Path(f) for f in listed if f.split("/")[0] in PORTIONS and "/v1/" not in f]


def test_every_module_has_its_line() -> None:
    sections = dict(re.findall(r"^### `([^`]+)/`\n(.*?)(?=^### |\Z)", DOC, flags=re.M | re.S))
    missing = [str(m) for m in modules() if f"- `{m.name}`:" not in sections.get(str(m.parent), "")]
    assert not missing, f"add a line to docs/structures.md for {missing}"


def test_no_line_is_about_a_module_that_is_gone() -> None:
    have = {str(m) for m in modules()}
    for folder, body in re.findall(r"^### `([^`]+)/`\n(.*?)(?=^### |\Z)", DOC, flags=re.M | re.S):
        for name in re.findall(r"^- `([^`]+\.py)`:", body, flags=re.M):
            assert f"{folder}/{name}" in have, f"{folder}/{name} is gone"


def test_names_in_the_walk_exist() -> None:
    """A step that names a function sends its reader to a function."""
    walk = DOC[: DOC.index("## Modules")]
    source = "\n".join((ROOT / m).read_text(encoding="utf-8") for m in modules())
    names = set(re.findall(r"`(?:[A-Z]\w+\.)?(_?[a-z]\w+)`", walk)) | set(
        re.findall(r"`([A-Z]\w+)(?:\.\w+)?`", walk)
    )
    defined = set(re.findall(r"(?:def|class) (\w+)", source))
    wire = (ROOT / "proto/phasor/v1/worker.proto").read_text() + (
        ROOT / "proto/phasor/v1/inference.proto"
    ).read_text()
    unknown = {n for n in names if n not in defined and not re.search(rf"\b{n}\b", wire)}
    assert unknown <= {"finally", "transport"}, unknown
