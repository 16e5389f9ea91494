"""NovelAI's `{id: (width, height)}` pickle, without running what is in it.

A pickle is a program; reading a stranger's with `pickle.load` runs it. Even one that may call nothing can take for
ever: a hundred bytes put a pair into a pair thirty times over, and to make a key of it Python walks all 2^30 of them.
So the few instructions that a mapping of sizes needs are followed here, and every other one is refused, with its name.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NoReturn

from kohya_bucket.errors import KohyaBucketError
from kohya_bucket.texts import read_regular

__all__ = ["load_size_pickle"]

_MARK = object()
_MAX_DIGITS = 20
_INTS = {0x4B: 1, 0x4D: 2, 0x4A: 4}  # BININT1, BININT2, BININT: the bytes of each
# Three of them, TUPLE2 and MEMOIZE: an image and its size. Step by step a table takes 1.6 times as long to read.
_image = re.compile(rb"(K.|M..|J....)(K.|M..|J....)(K.|M..|J....)\x86\x94", re.DOTALL).match
_LONGS = {0x8A: 1, 0x8B: 4}  # LONG1, LONG4: the bytes of their length
_STRINGS = {0x8C: 1, 0x58: 4, 0x8D: 8, 0x55: 1, 0x54: 4}  # SHORT_BINUNICODE, BINUNICODE, BINUNICODE8, two of Python 2
_TUPLES = {0x29: 0, 0x85: 1, 0x86: 2, 0x87: 3}
_PUT, _GET = {0x71: 1, 0x72: 4}, {0x68: 1, 0x6A: 4}
_HELD = {
    "]": "list", "l": "list", "F": "float", "G": "float", "N": "None", "\x88": "bool", "\x89": "bool", "B": "bytes",
    "C": "bytes", "\x8e": "bytes", "\x96": "bytearray", "\x8f": "set",
}  # fmt: skip


def load_size_pickle(path: str | Path) -> dict[Any, Any]:
    """The mapping in a pickle made of one dict, tuples without tuples in them, ints and strings only.

    Raises:
        KohyaBucketError: it holds, or asks for, anything else; names it. Or it is damaged, or no regular file.
    """
    try:
        data = _Program(read_regular(path), str(path)).run()
    except KohyaBucketError:
        raise
    except (LookupError, ValueError, TypeError) as error:
        raise KohyaBucketError(f"{path} is damaged or no pickle: {type(error).__name__}: {error}") from None
    if type(data) is not dict:
        raise KohyaBucketError(f"{path} holds a {type(data).__name__}, but must be a dict of id: (width, height)")
    return data


class _Program:
    """The instructions of a pickle. What they do is said in the standard library's `pickletools`."""

    def __init__(self, data: bytes, name: str) -> None:
        self._data, self._name, self._at = data, name, 0
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def run(self) -> Any:
        data, stack, memo, integer = self._data, self._stack, self._memo, int.from_bytes
        while (code := data[self._at]) != 0x2E:  # STOP
            if image := _image(data, self._at):
                key, *sides = image.groups()
                width, height = (integer(side[1:], "little", signed=len(side) == 5) for side in sides)
                stack.append(integer(key[1:], "little", signed=len(key) == 5))
                stack.append((width, height))
                memo[len(memo)] = stack[-1]
                self._at = image.end()
            else:
                self._at += 1
                self._step(code)
        return stack.pop()

    def _step(self, code: int) -> None:
        stack = self._stack
        if code in _INTS:
            stack.append(int.from_bytes(self._take(_INTS[code]), "little", signed=_INTS[code] == 4))
        elif code in _TUPLES:
            self._tuple(len(stack) - _TUPLES[code])
        elif code == 0x94:  # MEMOIZE
            self._memo[len(self._memo)] = stack[-1]
        elif code in _PUT:
            self._memo[self._number(_PUT[code])] = stack[-1]
        elif code in _GET:
            stack.append(self._memo[self._number(_GET[code])])
        elif code in _LONGS:
            stack.append(self._long(self._number(_LONGS[code])))
        elif code in _STRINGS:
            stack.append(self._take(self._number(_STRINGS[code])).decode("utf-8", "surrogatepass"))
        elif code in (0x80, 0x95):  # PROTO, FRAME
            self._take(1 if code == 0x80 else 8)
        else:
            self._in_text(chr(code))

    def _in_text(self, code: str) -> None:
        stack = self._stack
        if code == "}":
            stack.append({})
        elif code == "(":
            stack.append(_MARK)
        elif code == "s":
            self._fill(len(stack) - 2)
        elif code == "u":
            self._fill(self._mark())
        elif code == "d":
            start = self._mark()
            stack.insert(start, {})
            self._fill(start + 1)
        elif code == "t":
            self._tuple(self._mark())
        elif code in "pg":
            number = int(self._line(_MAX_DIGITS))
            if code == "p":
                self._memo[number] = stack[-1]
            else:
                stack.append(self._memo[number])
        elif code == "V":
            stack.append(self._line().decode("raw-unicode-escape"))
        elif code == "S":
            stack.append(self._line()[1:-1].decode("ascii"))
        elif code in "IL":
            line = self._line(_MAX_DIGITS)
            if line in (b"00", b"01"):
                self._refuse("holds a bool")
            stack.append(int(line.removesuffix(b"L")))
        else:
            self._refuse(self._asked(code))

    def _asked(self, code: str) -> str:
        """What an instruction that is refused would bring."""
        if code == "c":
            return f"asks for {self._line().decode()}.{self._line().decode()}"
        if code == "\x93":
            return f"asks for {self._stack[-2]}.{self._stack[-1]}"
        if code in "PQ":
            return "asks for a persistent object"
        if code in _HELD:
            return f"holds a {_HELD[code]}"
        import pickletools

        name = next((known.name for known in pickletools.opcodes if known.code == code), None)
        if name is None:
            raise ValueError(f"no instruction begins with the byte {ord(code):#04x}")
        return f"asks for {name}"

    def _refuse(self, what: str) -> NoReturn:
        raise KohyaBucketError(
            f"{self._name} {what}, but must be a dict of id: (width, height), of tuples, ints and strings only: "
            "refused, nothing was run. Write the table as CSV or JSON instead"
        )

    def _tuple(self, start: int) -> None:
        if start < 0:
            raise IndexError("the stack is empty")
        parts = tuple(self._stack[start:])
        for part in parts:
            if type(part) not in (int, str):
                self._refuse(f"holds a {type(part).__name__} in a tuple, where sides are whole numbers")
        self._stack[start:] = [parts]

    def _fill(self, start: int) -> None:
        pairs = self._stack[start:]
        del self._stack[start:]
        target = self._stack[-1]
        if type(target) is not dict or len(pairs) % 2:
            raise ValueError("no pairs for a dict")
        for part in pairs:
            if type(part) not in (int, str, tuple):
                self._refuse(f"holds a {type(part).__name__} in a dict")
        target.update(zip(pairs[::2], pairs[1::2], strict=True))

    def _mark(self) -> int:
        """Where what follows the last mark begins, once the mark is taken out."""
        start = next(i for i in range(len(self._stack) - 1, -2, -1) if i < 0 or self._stack[i] is _MARK)
        if start < 0:
            raise IndexError("no mark on the stack")
        del self._stack[start]
        return start

    def _number(self, length: int) -> int:
        return int.from_bytes(self._take(length), "little")

    def _long(self, length: int) -> int:
        if length > _MAX_DIGITS:
            raise ValueError(f"a number of {length} bytes")
        return int.from_bytes(self._take(length), "little", signed=True)

    def _take(self, length: int) -> bytes:
        start = self._at
        self._at += length
        if self._at > len(self._data):
            raise IndexError("it ends too early")
        return self._data[start : self._at]

    def _line(self, limit: int = 1 << 16) -> bytes:
        line, end, _ = self._data[self._at : self._at + limit].partition(b"\n")
        if not end:
            raise ValueError("a line without an end")
        self._at += len(line) + 1
        return line
