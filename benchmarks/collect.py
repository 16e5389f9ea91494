"""Put one table for each claim, as measured last, into `benchmarks/README.md`. This measures nothing itself."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
HEAD = """# Benchmarks

One script for each claim; other programs are measured in the same run. Each writes all that it measured, with how and
on what, into `results/`, and `python benchmarks/collect.py` puts the tables of the claims here. The machine had 2 cores
and, where a table's page says so, other work: look at ratios, not at absolute times.
"""


@dataclass(frozen=True)
class Claim:
    """The part of a result that shows a claim: a table and columns by their numbers, and the rows that match."""

    text: str
    table: int = 0
    rows: str = ""
    columns: tuple[int, ...] = ()


CLAIMS = {
    "epochs": Claim("Every image is trained once in an epoch", 0, r"^\| 41 \| (1 \| 8|2 \| 2)"),
    "lost_time": Claim(
        "GPUs wait less for one another (predicted)", 0,
        r"^\| (100 photos|1,000 photos|2,000 clips, Wan|1,000,000 photos) \| \d+ \| \S+ \| (4|8) \|",
        (0, 2, 3, 4, 5, 6),
    ),
    "caching": Claim("Latents are cached sooner"),
    "precompute": Claim("`precompute` beside sd-scripts' tool", columns=(0, 1, 2, 4, 6)),
    "gpu": Claim("The same on a GPU", 1, columns=(0, 1, 2, 3, 5)),
    "latents": Claim("Reading latents", columns=(0, 1, 2, 4, 5, 6)),
    "npz_writing": Claim("What whole files cost"),
    "text_outputs": Claim("Outputs of text encoders in shards", columns=(0, 1, 2, 3, 7, 8)),
    "remote_store": Claim("Stores in object storage"),
    "local_order": Claim("Shards are downloaded once", 1, r"\| 64 \| \d \| (1|8) \|"),
    "ray_engine": Claim("Ray is as fast as the local engine"),
    "scan": Claim("Sizes are read faster", 0, columns=(0, 1, 2)),
    "placement": Claim("Images are placed faster", 0, r"1,000,000", (0, 2, 3, 4, 5)),
    "rules": Claim("Other programs' rules", 0, r"(?<!no peer) \|$", (0, 1, 3, 4)),
    "planning": Claim("Epochs are planned faster", 0, r"^\| 1,000,000 ", (1, 2, 3, 4, 5)),
    "scale": Claim("100 million images are planned", columns=(0, 1, 2, 3, 4)),
    "dataset_memory": Claim("A dataset takes less memory"),
    "pixels": Claim("Pixels of an item take less time", 0, r"3\.8 MP"),
    "tokens": Claim("Crops of rules by tokens", 0, r"^\| 100,000 ", (1, 2, 3, 4, 6, 7)),
    "startup": Claim("A training starts sooner", columns=(0, 1, 2, 3, 4, 5)),
    "activated_start": Claim("What an activated environment adds to a start"),
    "cli_start": Claim("A command starts quickly", 0, r"`(--help|--version|plan configs/demo\.toml)`"),
    "explorer": Claim("The explorer with 10,000 files", columns=(0, 1, 3, 4)),
}  # fmt: skip


def page() -> str:
    """The text of the page."""
    parts = [HEAD]
    for name, claim in CLAIMS.items():
        parts += [f"## {claim.text}\n", *_shown((HERE / "results" / f"{name}.md").read_text(encoding="utf-8"), claim)]
        parts.append(f"\n[All of it](results/{name}.md), by `python benchmarks/{name}.py`.\n")
    return "\n".join(parts)


def _shown(text: str, claim: Claim) -> list[str]:
    """The lines of the claim's table."""
    lines = re.findall(r"(?:^\|.*\n?)+", text, re.MULTILINE)[claim.table].splitlines()
    head, rows = lines[:2], [line for line in lines[2:] if re.search(claim.rows, line)]
    cells = [[cell.strip() for cell in line.strip("|").split(" |")] for line in (head[0], *rows)]
    kept = [[line[i] for i in claim.columns or range(len(line))] for line in cells]
    first, *others = ["| " + " | ".join(line) + " |" for line in kept]
    return [first, "|" + "---|" * len(kept[0]), *others]


if __name__ == "__main__":
    (HERE / "README.md").write_text(page(), encoding="utf-8", newline="\n")
