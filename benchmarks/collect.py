"""Put the last table of every benchmark into `benchmarks/README.md`. This measures nothing itself."""

from __future__ import annotations

from pathlib import Path

HERE = Path(__file__).parent
HEAD = """# Benchmarks

There is one script per claim, and other programs are measured in the same run. The tables show medians and ratios. Each
script writes its last table into `results/`; `python benchmarks/collect.py` copies them into this page. The tables come
from a virtual machine with 2 cores. If other programs ran at the same time, the table says so. Look at ratios, not at
absolute times.

"""


def page() -> str:
    """The text of the page."""
    parts = []
    for table in sorted((HERE / "results").glob("*.md")):
        text = table.read_text(encoding="utf-8").strip()
        if not text.startswith("# "):
            text = f"# {table.stem.replace('_', ' ').capitalize()}\n\n{text}"
        script = HERE / f"{table.stem}.py"
        shifted = "\n".join(f"#{line}" if line.startswith("#") else line for line in text.splitlines())
        parts.append(shifted + (f"\n\n`python benchmarks/{script.name}`\n" if script.exists() else "\n"))
    return HEAD + "\n".join(parts)


if __name__ == "__main__":
    (HERE / "README.md").write_text(page(), encoding="utf-8", newline="\n")
