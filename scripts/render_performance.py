"""Render docs/performance.md and its picture from the rows that `make bench` kept in bench/results/.

Each file there is one run on one kind of machine; the newest of each kind is shown. Knows no benchmark by name but
those that it introduces in words: a row of a new one gets a table of its own.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent

Row = dict[str, Any]

# Name of a measurement -> heading, and what the table under it says. In the order of the page.
SECTIONS = {
    "page_transfer": (
        "Pages between two processes",
        "All pages of a prompt of 6,000 tokens of SmolLM2 from one process's pool into another's, with checksums, "
        "staging, the copy into the pool and the acknowledgement, over plain gloo messages of the same size. "
        'A pool where neighbours lie together sends one run per chunk, a much used one sends "single blocks".',
    ),
    "handover_exposed": (
        "What of the hand-over a user waits for",
        "From the push of a prompt's last chunk until the decode worker has placed it, over the time to the first "
        "token; everything before that travels while the prompt is still being read.",
    ),
    "first_token": (
        "A pair beside one worker: time to the first token",
        "The same decode worker, asked in turns through a router with a prefill worker and through one without. "
        "Every prompt is new.",
    ),
    "router": (
        "What the router adds",
        "A request through `Generate`, and the same workers called directly, in turns, one request at a time.",
    ),
    "decode_step": (
        "A decode step",
        "One token for each sequence of the batch, beside transformers in the same run and beside the time it takes "
        "to read weights (and KV) once.",
    ),
    "paged_attention": (
        "Attention alone",
        "All layers' attention of one decode step over the time it takes to read the KV once.",
    ),
    "prefill_token": (
        "Reading a prompt",
        "Per token of a prompt chunk, beside transformers and beside a square matmul of as many operations.",
    ),
    "kv_memory": ("KV memory", "Bytes per token as a running worker describes them, and the arithmetic."),
    "block_key": ("Block keys", "The chained hash that finds a prefix again, per block."),
    "block_life": (
        "Block accounting",
        "Allocating, registering, finding, sharing and freeing a block, without tensors.",
    ),
}
# What differs only between machines, or is shown in a column of its own, is no column.
HIDDEN = {"gb_per_s", "gflops_per_s", "tokens_per_s"}
BAR, GAP, LEFT, WIDTH = 16, 7, 400, 980
MET, MISSED, NO_GOAL, GOAL = "#2a7f62", "#c0392b", "#7f8c8d", "#1b2631"


def read_runs(folder: Path) -> dict[str, list[Row]]:
    """Return the newest run of each kind of host, by file name.

    Args:
        folder: holds files named `<yyyy-mm-dd>-<kind of host>.jsonl`.
    """
    newest: dict[str, Path] = {}
    for path in sorted(folder.glob("*.jsonl")):
        newest[path.stem[11:]] = path
    return {
        path.name: [
            json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()
        ]
        for path in sorted(newest.values(), reverse=True)
    }


def verdict(row: Row) -> str:
    """Return "met", "missed", or "" for a row without a goal. A goal is what the ratio should be at most."""
    if "goal_ratio" not in row:
        return ""
    return "met" if row["ratio"] <= row["goal_ratio"] else "missed"


def render(runs: dict[str, list[Row]], picture: str) -> str:
    """Return the page; `picture` is the path of the first run's plot, from the page."""
    parts = [
        "# Performance",
        "Made by `make performance` from the rows in [bench/results/](../bench/results/), which `make bench` measured; "
        "[bench/README.md](../bench/README.md) says how. Every number has its comparison in the same run on the same "
        "machine; nothing here is a promise for another one. A ratio is measurement over baseline, and a goal is what "
        "it should be at most.",
    ]
    for number, (name, rows) in enumerate(runs.items()):
        parts += [f"## {_host(rows)}", _provenance(name, rows), _summary(rows)]
        if number == 0:
            parts.append(f"![Ratios and their goals]({picture})")
        for section in _sections(rows):
            chosen = [row for row in rows if row["name"] == section]
            heading, text = SECTIONS.get(section, (section.replace("_", " "), ""))
            parts += [f"### {heading}", *([text] if text else []), table(chosen)]
    if not runs:
        parts.append("Nothing is measured yet: run `make bench`.")
    return "\n\n".join(parts) + "\n"


def table(rows: Sequence[Row]) -> str:
    """Return rows of one measurement as a table: what differs, the numbers, the goal and whether it is met."""
    varying = _varying(rows)
    more = [key for key in rows[0] if key.startswith("added_") or key.endswith("gb_per_s")]
    same_baseline = len({row["baseline"] for row in rows}) == 1
    head = [
        *(key.replace("_", " ") for key in varying),
        f"p50, {rows[0]['unit'].split(' ')[0]}",
        "p20 to p80",
        *([] if same_baseline else ["compared with"]),
        "baseline p50",
        "ratio",
        *(key.replace("_", " ") for key in more),
        "goal",
    ]
    lines = [head, ["---"] * len(head)]
    for row in rows:
        goal = f"{row['goal_ratio']:g}: **{verdict(row)}**" if "goal_ratio" in row else ""
        lines.append(
            [
                *(_cell(row["config"].get(key, "")) for key in varying),
                _number(row["p50"]),
                f"{_number(row['p20'])} to {_number(row['p80'])}",
                *([] if same_baseline else [row["baseline"]]),
                _number(row["baseline_p50"]),
                f"{row['ratio']:.3g}",
                *(_cell(row.get(key, "")) for key in more),
                goal,
            ]
        )
    text = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    return f"Compared with: {rows[0]['baseline']}.\n\n{text}" if same_baseline else text


def plot(rows: Iterable[Row]) -> str:
    """Return an SVG: one bar per row with a goal, as long as its ratio over its goal; the line is the goal."""
    chosen = [row for row in rows if "goal_ratio" in row]
    height = 44 + len(chosen) * (BAR + GAP)
    longest = 2.0
    per_unit = (WIDTH - LEFT - 120) / longest
    goal_x = LEFT + per_unit
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        f'<text x="{goal_x:.0f}" y="16" text-anchor="middle" fill="{GOAL}">goal (shorter is better)</text>',
        f'<line x1="{goal_x:.1f}" y1="22" x2="{goal_x:.1f}" y2="{height - 12}" stroke="{GOAL}" '
        'stroke-dasharray="4 3"/>',
    ]
    for number, row in enumerate(chosen):
        y = 26 + number * (BAR + GAP)
        share = row["ratio"] / row["goal_ratio"]
        length = min(share, longest) * per_unit
        color = MET if verdict(row) == "met" else MISSED
        label = f"{row['ratio']:.3g} of {row['goal_ratio']:.3g}" + (" (cut)" if share > longest else "")
        out += [
            f'<text x="{LEFT - 8}" y="{y + 12}" text-anchor="end" fill="{GOAL}">{escape(_label(row, chosen))}</text>',
            f'<rect x="{LEFT}" y="{y}" width="{length:.1f}" height="{BAR}" fill="{color}"/>',
            # With a rim of white: it may stand on the goal's line.
            f'<text x="{LEFT + length + 6:.0f}" y="{y + 12}" fill="{color}" stroke="white" stroke-width="4" '
            f'paint-order="stroke">{label}</text>',
        ]
    out.append("</svg>")
    return "\n".join(out) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the page and its picture; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=REPOSITORY / "bench" / "results")
    parser.add_argument("--page", type=Path, default=REPOSITORY / "docs" / "performance.md")
    given = parser.parse_args(arguments)
    runs = read_runs(given.results)
    picture = given.page.with_suffix(".svg")
    first = next(iter(runs.values()), [])
    given.page.write_text(render(runs, picture.name), encoding="utf-8")
    picture.write_text(plot(first), encoding="utf-8")
    sys.stdout.write(f"{given.page}: {sum(map(len, runs.values()))} rows of {len(runs)} runs\n")
    return 0


def _sections(rows: Sequence[Row]) -> list[str]:
    names = list(dict.fromkeys(row["name"] for row in rows))
    known = [name for name in SECTIONS if name in names]
    return known + [name for name in names if name not in SECTIONS]


def _host(rows: Sequence[Row]) -> str:
    row = rows[0]
    return f"{row.get('cpu', 'unnamed processor')} ({row['device']})"


def _provenance(name: str, rows: Sequence[Row]) -> str:
    def all_of(key: str) -> str:
        return ", ".join(sorted({str(row[key]) for row in rows if row.get(key)}))

    return (
        f"Measured on {all_of('date')}, commit {all_of('commit')}, Python {all_of('python')}, torch {all_of('torch')}: "
        f"[{name}](../bench/results/{name})."
    )


def _summary(rows: Sequence[Row]) -> str:
    verdicts = [verdict(row) for row in rows]
    return f"Goals met: {verdicts.count('met')}; missed: {verdicts.count('missed')}."


def _varying(rows: Sequence[Row]) -> list[str]:
    """Return the settings that tell these rows apart."""
    keys = dict.fromkeys(key for row in rows for key in row["config"] if key not in HIDDEN)
    found = [key for key in keys if len({json.dumps(row["config"].get(key)) for row in rows}) > 1]
    # Bytes follow from the rest; they stay where they are all there is.
    return [key for key in found if not key.endswith("_bytes")] or found


def _label(row: Row, others: Sequence[Row]) -> str:
    alike = [other for other in others if other["name"] == row["name"]]
    setting = ", ".join(
        f"{key.replace('_', ' ')} {_cell(row['config'].get(key, ''))}" for key in _varying(alike)
    )
    return str(row["name"]).replace("_", " ") + (f": {setting}" if setting else "")


def _cell(value: object) -> str:
    return f"{value:,}" if isinstance(value, int | float) and not isinstance(value, bool) else str(value)


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


if __name__ == "__main__":
    sys.exit(main())
