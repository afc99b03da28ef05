"""The performance page says what the rows say: goals met or missed, one table per measurement, the newest run."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from tests.packaging.repository import REPOSITORY

SCRIPT = REPOSITORY / "scripts" / "render_performance.py"


def renderer() -> Any:
    spec = importlib.util.spec_from_file_location("render_performance", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def row(name: str, ratio: float, goal: float | None, **config: Any) -> dict[str, Any]:
    return {
        "name": name,
        "unit": "ms per request",
        "p20": ratio * 9,
        "p50": ratio * 10,
        "p80": ratio * 11,
        "baseline": "something known",
        "baseline_p50": 10.0,
        "ratio": ratio,
        **({} if goal is None else {"goal_ratio": goal}),
        "config": {"model": "m", **config},
        "device": "x86_64, 2 cores",
        "cpu": "A <fast> one",
        "python": "3.11.7",
        "torch": "2.13.0",
        "commit": "abc1234",
        "date": "2026-12-01",
    }


def test_tables_goals_and_picture(tmp_path: Path) -> None:
    rows = [
        row("first_token", 1.05, 1.1, prompt_tokens=512),
        row("first_token", 1.25, 1.1, prompt_tokens=2048),
        row("a_new_one", 3.0, None),
    ]
    old, new = (tmp_path / f"2026-1{n}-01-host.jsonl" for n in (1, 2))
    old.write_text(json.dumps(row("of_the_old_run", 1.0, None)) + "\n", encoding="utf-8")
    new.write_text("".join(json.dumps(one) + "\n" for one in rows), encoding="utf-8")
    page = tmp_path / "performance.md"
    command = [sys.executable, str(SCRIPT), "--results", str(tmp_path), "--page", str(page)]
    subprocess.run(command, check=True, timeout=60, capture_output=True)
    text = page.read_text(encoding="utf-8")
    assert "Goals met: 1; missed: 1." in text
    assert "| 512 | 10.5 | 9.45 to 11.55 | 10 | 1.05 | 1.1: **met** |" in text
    assert "| 2,048 | 12.5 | 11.25 to 13.75 | 10 | 1.25 | 1.1: **missed** |" in text
    assert "### a new one" in text and "of_the_old_run" not in text.replace(" ", "_")
    picture = ElementTree.fromstring(page.with_suffix(".svg").read_text(encoding="utf-8"))
    bars = [node for node in picture.iter() if node.tag.endswith("rect")]
    assert len(bars) == 1 + 2, "the ground, and one bar for each goal"


def test_the_page_is_what_the_kept_rows_render_to() -> None:
    module = renderer()
    runs = module.read_runs(REPOSITORY / "bench" / "results")
    page = REPOSITORY / "docs" / "performance.md"
    assert page.read_text(encoding="utf-8") == module.render(runs, "performance.svg"), (
        "run `make performance`"
    )
