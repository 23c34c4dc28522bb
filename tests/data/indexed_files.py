"""Writes ``.bin``/``.idx`` pairs by the format's description, without the code under test."""

import struct

import numpy as np

CODES = {"u1": 1, "i1": 2, "<i2": 3, "<i4": 4, "<i8": 5, "<f8": 6, "<f4": 7, "<u2": 8}


MAGIC = b"MMIDIDX\0\0"


def index_bytes(lengths, dtype="<u2", borders=None, *, magic=MAGIC, version=1, code=None, pointers=None):
    """The bytes of an idx file for sequences of so many ids."""
    borders = list(range(len(lengths) + 1)) if borders is None else borders
    size = np.dtype(dtype).itemsize
    if pointers is None:
        pointers = [sum(lengths[:number]) * size for number in range(len(lengths))]
    code = CODES[dtype] if code is None else code
    return (
        struct.pack("<9sQBQQ", magic, version, code, len(lengths), len(borders))
        + struct.pack(f"<{len(lengths)}i", *lengths)
        + struct.pack(f"<{len(pointers)}q", *pointers)
        + struct.pack(f"<{len(borders)}q", *borders)
    )


def write_pair(prefix, documents, dtype="<u2", **index):
    """Write documents (lists of ids), one sequence each; `index` goes to `index_bytes`."""
    ids = [token for document in documents for token in document]
    prefix.with_name(prefix.name + ".bin").write_bytes(np.array(ids, dtype).tobytes())
    lengths = [len(document) for document in documents]
    prefix.with_name(prefix.name + ".idx").write_bytes(index_bytes(lengths, dtype, **index))
    return prefix
