"""Files that somebody changed by hand, by accident or on purpose: the same ones for the same seed."""

import io
import json
import random
import struct
import zipfile
from typing import Any

import numpy as np

NESTED = 30_000
VALUES: list[Any] = [
    None, True, False, -1, 0, 1, -5, 2**31, 2**63 - 1, 2**63, 2**64, -(2**63), 10**30, 0.5, 1e308, float("nan"),
    float("inf"), "", "\0", "a", "../..", "/etc", "\ud800", "ä" * 100, [], [[]], {}, {"a": None}, [1, 2, 3], "nested",
]  # fmt: skip


def any_bytes(data: bytes, rng: random.Random) -> bytes:
    """`data` with some bytes flipped, cut off, taken out, doubled, overwritten, or other bytes altogether."""
    if not data:
        return rng.randbytes(20)
    at = rng.randrange(len(data))
    length = min(rng.choice([1, 2, 8, 60, 500]), len(data) - at)
    way = rng.randrange(8)
    if way == 0:
        return data[:at]
    if way == 1:
        return data[:at] + data[at + length :]
    if way == 2:
        return data[:at] + data[at : at + length] * 2 + data[at + length :]
    if way == 3:
        return data[:at] + bytes(length) + data[at + length :]
    if way == 4:
        return data[:at] + b"\xff" * length + data[at + length :]
    if way == 5 and rng.random() < 0.2:
        return rng.choice([b"", b"\0", b"PK\3\4", b"PAR1", b"PAR1PAR1", rng.randbytes(300), b"{" * NESTED])
    changed = bytearray(data)
    for _ in range(rng.choice([1, 1, 3, 20])):
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def any_json(value: Any, rng: random.Random) -> Any:
    """A JSON value with one part, wherever it lies, replaced, taken out or added."""
    if isinstance(value, (dict, list)) and value and rng.random() < 0.75:
        copy: Any = dict(value) if isinstance(value, dict) else list(value)
        key = rng.choice(list(value)) if isinstance(value, dict) else rng.randrange(len(value))
        way = rng.random()
        if way < 0.8:
            copy[key] = any_json(value[key], rng)
        elif way < 0.9:
            del copy[key]
        elif isinstance(copy, dict):
            copy[rng.choice(["a", "version", "\0"])] = rng.choice(VALUES)
        else:
            copy.append(rng.choice(VALUES))
        return copy
    if isinstance(value, (int, float)) and rng.random() < 0.4:
        return rng.choice([value + 1, value - 1, -value, value * 2, value * 2**40, str(value), value + 0.5])
    if isinstance(value, str) and rng.random() < 0.4:
        return rng.choice([value[:-1], value + "x", value.upper(), [value], value + "\0"])
    return rng.choice(VALUES)


def as_json(value: Any) -> bytes:
    """JSON text, in which the value "nested" is a list in a list in a list … and so on."""
    text = json.dumps(value).replace('"nested"', "[" * NESTED + "]" * NESTED)
    return text.encode("ascii")


def any_table(table: Any, rng: random.Random) -> Any:
    """An Arrow table with a column replaced by another type or other values, renamed, or taken out; or other rows."""
    import pyarrow as pa

    at = rng.randrange(len(table.column_names))
    name, n = table.column_names[at], len(table)
    column = table.column(at)
    way = rng.randrange(8)
    if way == 0:
        return table.drop_columns([name])
    if way == 1:
        return table.rename_columns([c if c != name else name + "x" for c in table.column_names])
    if way == 2:
        return rng.choice([table.slice(0, 0), table.slice(0, max(0, n - 1)), pa.concat_tables([table, table])])
    if way == 3:
        broken = pa.array([b"\xff\xfe" * 3] * n, pa.binary())
        text = pa.Array.from_buffers(pa.string(), n, broken.buffers())
        return table.set_column(at, name, text)
    if way == 4:
        return table.set_column(at, name, pa.nulls(n, rng.choice([column.type, pa.null(), pa.string(), pa.int64()])))
    if way == 5:
        lists = [rng.choice([None, [], [1], [None]]) for _ in range(n)]
        return table.set_column(at, name, pa.array(lists, pa.list_(pa.int64())))
    try:
        values = column.to_pylist()
    except UnicodeDecodeError:  # it was changed before
        return table.drop_columns([name])
    if values:
        values[rng.randrange(n)] = rng.choice(
            [None, -1, -5, 0, 1, 7, 2**31 - 1, -(2**31), 2**62, 2**63 - 1, "", "x", "\0", "../..", float("nan"), True]
        )
    for kind in (column.type, None, pa.string(), pa.float64(), pa.int64(), pa.uint64()):
        try:
            return table.set_column(at, name, pa.array(values, kind))
        except (pa.ArrowException, TypeError, ValueError, OverflowError):
            continue
    return table.drop_columns([name])


def npy(header: bytes, data: bytes = b"", version: tuple[int, int] = (1, 0)) -> bytes:
    """An array as `np.save` writes it, with any header."""
    length = struct.pack("<H" if version == (1, 0) else "<I", len(header))
    return b"\x93NUMPY" + bytes(version) + length + header + data


ARRAYS = [
    npy(b"{'descr': '<f4', 'fortran_order': False, 'shape': (4, 1000000, 1000000), }\n"),
    npy(b"{'descr': '<f4', 'fortran_order': False, 'shape': (9223372036854775807, 4), }\n"),
    npy(b"{'descr': '<f4', 'fortran_order': False, 'shape': (-4, 8, 16), }\n", bytes(64)),
    npy(b"{'descr': '<f4', 'fortran_order': False, 'shape': (0,), }\n"),
    npy(b"{'descr': '<f4', 'fortran_order': False, 'shape': (), }\n", bytes(4)),
    npy(b"{'descr': '|O', 'fortran_order': False, 'shape': (2,), }\n", b"\x80\x04."),
    npy(b"{'descr': '<c16', 'fortran_order': False, 'shape': (2,), }\n", bytes(32)),
    npy(b"{'descr': '<U2', 'fortran_order': False, 'shape': (2,), }\n", b"\xff" * 16),
    npy(b"{'descr': '<U2', 'fortran_order': False, 'shape': (4,), }\n", "ab".encode("utf-32-le") * 4),
    npy(b"{'descr': '<M8[s]', 'fortran_order': False, 'shape': (2,), }\n", bytes(16)),
    npy(b"{'descr': [('a', '<f4'), ('b', '<i8')], 'fortran_order': False, 'shape': (2,), }\n", bytes(24)),
    npy(b"{'descr': '<f8', 'fortran_order': False, 'shape': (2,), }\n", struct.pack("<2d", np.nan, np.inf)),
    npy(b"{'descr': '<f8', 'fortran_order': False, 'shape': (4,), }\n", struct.pack("<4d", 1e308, -1, np.nan, 0)),
    npy(b"{'descr': '<i8', 'fortran_order': False, 'shape': (2,), }\n", struct.pack("<2q", -5, 2**62)),
    npy(b"{'descr': '<i8', 'fortran_order': False, 'shape': (2,), }\n", struct.pack("<2q", 0, 0)),
    npy(b"{'descr': '<f4', 'fortran_order': False, 'shape': " + b"(" * 900 + b")" * 900 + b", }\n"),
    npy(b"{'descr': '<f4', 'fortran_order': False, 'shape': (4L, 8L, 16L), }\n", bytes(2048)),
    npy(b"{'descr': '<f4', 'fortran_order': False, 'shape': (4, 8\n"),
    npy(b"{'descr': 'nothing', 'fortran_order': 7, 'shape': None, }\n"),
    npy(b"[1, 2, 3]\n"),
    npy(b"\xff\xfe\0\0\n"),
    npy(b"{'descr': '<f4', 'fortran_order': False, 'shape': (1,), }\n", bytes(4), (3, 0)),
    npy(b"{'descr': '<f4', 'fortran_order': False, 'shape': (1,), }\n", bytes(4), (9, 9)),
    npy(b"1" * 60_000 + b"\n"),
    b"", b"\x93NUMPY", b"no array",
]  # fmt: skip


def any_npz(arrays: dict[str, np.ndarray[Any, Any]], note: str, rng: random.Random) -> bytes:
    """An npz whose members are not what they were: one array, the JSON text in `note`, or what the directory says."""
    members = {}
    for name, array in arrays.items():
        out = io.BytesIO()
        np.save(out, array)
        members[f"{name}.npy"] = out.getvalue()
    victim = rng.choice(list(members))
    way = rng.randrange(10)
    if way < 3:
        members[victim] = rng.choice(ARRAYS)
    elif way == 3:
        members[victim] = any_bytes(members[victim], rng)
    elif way == 4:
        del members[victim]
    elif way < 8:
        known = json.loads(arrays[note].tobytes())
        out = io.BytesIO()
        np.save(out, np.frombuffer(as_json(any_json(known, rng)), dtype=np.uint8))
        members[f"{note}.npy"] = out.getvalue()
    data = _zipped(members, victim if way == 8 else "", rng)
    return _directory_changed(data, rng) if way == 9 else data


def _zipped(members: dict[str, bytes], bomb: str, rng: random.Random) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as file:
        for name, data in members.items():
            if name == bomb:  # 40 MB in 40 kB, of a shape that says as much
                side = 10_000_000
                start = npy(b"{'descr': '<f4', 'fortran_order': False, 'shape': (%d,), }\n" % side)
                file.writestr(name, start + bytes(4 * side), rng.choice([zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2]))
            else:
                file.writestr(name, data, rng.choice([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED]))
    return out.getvalue()


def _directory_changed(data: bytes, rng: random.Random) -> bytes:
    """One field of one entry of a zip's directory (and of the member's own header) changed."""
    starts = [i for i in range(len(data)) if data.startswith(b"PK\1\2", i)]
    at = rng.choice(starts)
    local = struct.unpack_from("<I", data, at + 42)[0]
    changed = bytearray(data)
    field, size, place = rng.choice([
        ("flags", "<H", (8, 6)), ("method", "<H", (10, 8)), ("crc", "<I", (16, 14)), ("packed", "<I", (20, 18)),
        ("length", "<I", (24, 22)), ("name", "<H", (28, 26)), ("extra", "<H", (30, 28)), ("local", "<I", (42, None)),
    ])  # fmt: skip
    value = {"flags": rng.choice([1, 0x41, 0x800, 0x20]), "method": rng.choice([8, 9, 12, 14, 93, 99])}.get(
        field, rng.choice([0, 1, 3, 2**16 - 1, 2**31 - 1, 2**32 - 1])
    )
    value &= 2 ** (8 * struct.calcsize(size)) - 1
    struct.pack_into(size, changed, at + place[0], value)
    if place[1] is not None and rng.random() < 0.7:
        struct.pack_into(size, changed, local + place[1], value)
    return bytes(changed)
