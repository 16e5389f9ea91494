"""Every link of a built site leads to a file and a place in it, and no page asks another server for anything.

    python .ci/check_site.py SITE

Links to other sites are listed with --outside, for a program that follows them.
"""

from __future__ import annotations

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag, urlparse


class Page(HTMLParser):
    """What one page links to, loads by itself, and which places it has."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.places: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Collect one tag's addresses and names."""
        given = {name: value for name, value in attrs if value}
        self.places |= {given[name] for name in ("id", "name") if name in given}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        elif tag == "link" and "href" in given:
            kept = given.get("rel", "") not in ("canonical", "alternate")
            (self.loads if kept else self.links).append(given["href"])
        self.loads += [given[name] for name in ("src", "srcset", "poster", "data") if name in given and tag != "a"]


def main(site: Path) -> list[str]:
    """What is wrong, a line each."""
    pages = {}
    for path in sorted(site.rglob("*.html")):
        pages[path] = Page()
        pages[path].feed(path.read_text(encoding="utf-8"))
    wrong = []
    for path, page in pages.items():
        here = path.relative_to(site).as_posix()
        for link in [*page.links, *page.loads]:
            address, place = urldefrag(link)
            parts = urlparse(address)
            if parts.scheme or parts.netloc:
                if link in page.loads and parts.scheme != "data":
                    wrong.append(f"{here} loads {link}")
                continue
            if address.startswith("/"):
                continue  # of the page for what is not found, by the server's root
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            if not target.is_file():
                wrong.append(f"{here} links to {link}, which is not there")
            elif place and target in pages and unquote(place) not in pages[target].places:
                wrong.append(f"{here} links to {link}, which has no such place")
    return wrong


if __name__ == "__main__":
    folder = Path(sys.argv[-1]).resolve()
    if "--outside" in sys.argv:
        found: set[str] = set()
        for file in folder.rglob("*.html"):
            one = Page()
            one.feed(file.read_text(encoding="utf-8"))
            found |= {link for link in one.links if urlparse(link).scheme in ("http", "https")}
        print("\n".join(sorted(found)))
    else:
        bad = main(folder)
        print("\n".join(bad))
        sys.exit(bool(bad))
