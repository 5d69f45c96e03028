"""Named arrays in one `.npz` file that is read by mapping it: what is not touched is not read.

The file is what `np.savez` writes (`np.load` reads it too), with padding where the zip format has
room for it, so that each array lies at a multiple of 64 bytes. Its bytes depend on the arrays
alone.
"""

from __future__ import annotations

import mmap
import struct
import zipfile
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

ALIGNMENT = 64
# A zip member's own header: fixed part, name, extra fields, of which each has a head of 4 bytes.
LOCAL_HEADER, EXTRA_HEAD = 30, 4
# The extra field that zipfile adds for sizes of 64 bits.
ZIP64_EXTRA = 20
# The id of the one that pads. Readers skip fields that they do not know.
PADDING = 0xD935


def write_npz(file: IO[bytes], arrays: dict[str, NDArray[Any]]) -> None:
    """Write arrays of any shape and of dtypes without Python objects to a new file."""
    with zipfile.ZipFile(file, "w") as archive:
        for name, array in arrays.items():
            # Without a date of its own a member gets 1980-01-01.
            member = zipfile.ZipInfo(f"{name}.npy")
            start = file.tell() + LOCAL_HEADER + len(member.filename.encode()) + ZIP64_EXTRA
            padding = -(start + EXTRA_HEAD) % ALIGNMENT
            member.extra = struct.pack("<HH", PADDING, padding) + bytes(padding)
            whole = array if array.flags.forc else np.asarray(array, order="C")
            with archive.open(member, "w", force_zip64=True) as out:
                npy.write_array_header_1_0(out, npy.header_data_from_array_1_0(whole))
                # In the order in which they lie, which the header tells.
                out.write(whole.ravel(order="K").view(np.uint8).data)


def read_npz(path: Path) -> dict[str, NDArray[Any]]:
    """The arrays of a file that `write_npz` wrote. They may be written to; the file is not.

    Raises:
        ValueError: an array of Python objects, which only pickle could read.
    """
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        with zipfile.ZipFile(file) as archive:
            members = archive.infolist()
    arrays = {}
    for member in members:
        at = member.header_offset
        name_bytes, extra_bytes = struct.unpack_from("<HH", mapped, at + LOCAL_HEADER - 4)
        mapped.seek(at + LOCAL_HEADER + name_bytes + extra_bytes)
        npy.read_magic(mapped)
        shape, fortran, dtype = npy.read_array_header_1_0(mapped)
        if dtype.hasobject:
            raise ValueError(f"{path} holds Python objects: parts never need pickle")
        arrays[member.filename.removesuffix(".npy")] = np.ndarray(
            shape, dtype, mapped, mapped.tell(), order="F" if fortran else "C"
        )
    return arrays
