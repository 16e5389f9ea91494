"""Which code page a text is in that is not UTF-8.

A code page of one byte a letter decodes nearly anything, so a folder's texts are taken for Western European only where
they can be nothing else: their words are of letters that one of its languages has, mostly among those of ASCII, and
neither a language of Central Europe nor another script gives words too. Of all others it is said how they would read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

WESTERN = "cp1252"
_LETTERS = {  # beside those of ASCII, in lower case, of each language
    WESTERN: (
        "àâæçéèêëîïôœùûüÿ", "äöüßéà", "áéíñóúü", "áàâãçéêíóôõúü", "àèéìîòù", "æøåéäöü", "áéèêëïíóöúüç", "àçéèíïóòúü",
    ),
    "cp1250": ("ąćęłńóśźż", "áčďéěíňóřšťúůýž", "áäčďéíľňóôšťúýž", "áéíóöőúüű", "čćđšž", "ăâîşţ"),
    "cp1254": ("çğıöşüâîû\u0307",),
    "cp1257": ("ąčęėįšųūž", "āčēģīķļņšūž", "äöõüšž"),
}  # fmt: skip
_FIRST_BYTES = {  # of the frequent characters of two bytes
    "gb18030": range(0xB0, 0xD8), "big5": range(0xA4, 0xC7), "cp932": range(0x82, 0x99), "cp949": range(0xB0, 0xC9),
}  # fmt: skip
_ALPHABETS = {
    "cp1251": "\u0400-\u04ff", "koi8-r": "\u0400-\u04ff", "cp1253": "\u0370-\u03ff", "cp1255": "\u05d0-\u05ea",
    "cp1256": "\u0620-\u064a", "cp874": "\u0e01-\u0e5b",
}  # fmt: skip
_SIGNS = frozenset("‘’“”„–—…«»°·•€£¿¡\xa0")
_ALONE = frozenset("àèéòó")
"""Letters that are words."""
_WORD = re.compile(r"[^\W\d_]+")
_THREE = re.compile(r"[^\x00-\x7f]{3}")
_OTHERS = re.compile(r"(?<![A-Za-z0-9])[^\x00-\x7f]+(?![A-Za-z0-9])")
"""What stands beside no letter or figure of ASCII."""
_FULL_WIDTH = re.compile(r"[\u3000-\u3029\uff01-\uff5e]")
_LIKELY, _READINGS, _SHOWN = 0.6, 3, 40


def is_western(texts: Iterable[bytes]) -> bool:
    """Whether the texts of a folder, none of which is UTF-8, can all be Western European and nothing else."""
    rivals = {page: set(range(len(languages))) for page, languages in _LETTERS.items() if page != WESTERN}
    likely, count, differing = dict.fromkeys((*_FIRST_BYTES, *_ALPHABETS), 0.0), 0, set[str]()
    for data in texts:
        if not _languages(data, WESTERN):
            return False
        for page in rivals:
            rivals[page] &= _languages(data, page)
            if data.decode(page, "replace") != data.decode(WESTERN):
                differing.add(page)
        for page in likely:
            likely[page] += _share(data, page)
        count += 1
    return not any(rivals[page] for page in differing) and max(likely.values()) < _LIKELY * max(count, 1)


def readings(data: bytes) -> list[tuple[str, str]]:
    """(code page, how the text begins in it) of the likeliest ones, at most three; none where it fits no page."""
    shares = {page: _share(data, page) for page in (*_FIRST_BYTES, *_ALPHABETS)}
    shares |= {page: float(bool(_languages(data, page))) for page in _LETTERS}
    likely = sorted((page for page in shares if shares[page] >= _LIKELY), key=shares.__getitem__, reverse=True)
    different: dict[str, str] = {}  # of pages that differ in nothing here, the first
    for page in likely:
        text = " ".join(data.decode(page).split())
        first = next((at for at, sign in enumerate(text) if not sign.isascii()), 0)
        different.setdefault(text[max(0, min(first - 10, len(text) - _SHOWN)) :][:_SHOWN], page)
    return [(page, text) for text, page in different.items()][:_READINGS]


def _languages(data: bytes, page: str) -> set[int]:
    """Numbers of the languages in `_LETTERS` that a text can be written in."""
    try:
        text = data.decode(page)
    except UnicodeDecodeError:
        return set()
    words = [word for word in _WORD.findall(text) if not word.isascii()]
    others = {sign for sign in text if not sign.isascii()} - {letter for word in words for letter in word}
    if others - _SIGNS or not all(_is_word(word, page == WESTERN) for word in words):
        return set()
    used = {letter for word in words for letter in word.lower() if not letter.isascii()}
    return {number for number, letters in enumerate(_LETTERS[page]) if used <= set(letters)}


def _is_word(word: str, western: bool) -> bool:
    """Whether a word may be of Europe's Latin letters: all of one case but for the first, some ASCII in its west."""
    if len(word) == 1:
        return word.lower() in _ALONE
    some_ascii = not western or (any(map(str.isascii, word)) and not _THREE.search(word))
    return some_ascii and (word[1:].islower() or word.isupper())


def _share(data: bytes, page: str) -> float:
    """The share of the signs beyond ASCII that are likely, read in a code page of another script."""
    try:
        text = data.decode(page)
    except UnicodeDecodeError:
        return 0.0
    total, runs = sum(not sign.isascii() for sign in text), _OTHERS.findall(text)
    if page in _FIRST_BYTES:
        return sum(_is_frequent(sign, page) for run in runs for sign in run) / max(total, 1)
    words = re.findall(f"[{_ALPHABETS[page]}]+", " ".join(runs))
    sane = sum(len(word) for word in words if word == word.lower() or word[1:].islower() or word.isupper())
    # Some pages have letters at nearly all places, and of two for one alphabet one gives capitals for small letters.
    weight = 0.9 if page not in ("cp1251", "koi8-r") or "".join(words).isupper() else 1.0
    return weight * sane / max(total, 1)


def _is_frequent(sign: str, page: str) -> bool:
    code = sign.encode(page)
    frequent = len(code) == 2 and code[0] in _FIRST_BYTES[page] and (page != "cp949" or code[1] >= 0xA1)
    return frequent or bool(_FULL_WIDTH.match(sign))
