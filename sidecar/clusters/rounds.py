"""What the answering process and the re-clustering process say to each other: MessagePack of plain
numbers, so that neither can make the other run code."""

from __future__ import annotations

import struct
from socket import socket
from typing import Literal

import msgspec
import numpy as np

from capture_kernels.arrays import Floats
from capture_kernels.fingerprint.vector import Layout
from discovery.artifacts.projection import Projection
from discovery.artifacts.prototypes import Borders, Codebook

# A message is its length, then so many bytes.
LENGTH = struct.Struct("<Q")


class Array(msgspec.Struct):
    """A host array: little-endian numbers, row by row."""

    data: bytes
    shape: tuple[int, ...]
    kind: Literal["<f4", "<f8", "<i4", "<u8"]

    @classmethod
    def of(cls, values: np.ndarray) -> Array:
        kinds = {"f4": "<f4", "f8": "<f8", "i4": "<i4", "u8": "<u8"}
        kind = kinds[values.dtype.str[1:]]
        return cls(np.ascontiguousarray(values, kind).tobytes(), values.shape, kind)  # type: ignore[arg-type]

    def array(self) -> np.ndarray:
        return np.frombuffer(self.data, self.kind).reshape(self.shape)


class Space(msgspec.Struct):
    """A `Projection`."""

    mean: Array
    scale: Array
    components: Array
    explained: Array
    power: Array

    @classmethod
    def of(cls, projection: Projection) -> Space:
        return cls(**{name: Array.of(value) for name, value in vars(projection).items()})

    def projection(self) -> Projection:
        return Projection(**{name: getattr(self, name).array() for name in self.__struct_fields__})


class Lines(msgspec.Struct):
    """`Borders`."""

    labels: Array
    weights: Array
    bias: Array

    @classmethod
    def of(cls, borders: Borders) -> Lines:
        return cls(**{name: Array.of(value) for name, value in borders._asdict().items()})

    def borders(self) -> Borders:
        return Borders(*(getattr(self, name).array() for name in self.__struct_fields__))


class Rule(msgspec.Struct):
    """A `Codebook`: by which rows are given to live clusters."""

    space: Space
    layout: int
    prototypes: Array
    labels: Array
    noise_factor: float
    reach: float
    lines: Lines | None

    @classmethod
    def of(cls, codebook: Codebook) -> Rule:
        return cls(
            Space.of(codebook.projection),
            int(codebook.layout),
            Array.of(codebook.prototypes),
            Array.of(codebook.labels),
            codebook.noise_factor,
            codebook.reach,
            None if codebook.borders is None else Lines.of(codebook.borders),
        )

    def codebook(self) -> Codebook:
        return Codebook(
            self.space.projection(),
            Layout(self.layout),
            self.prototypes.array(),
            self.labels.array(),
            self.noise_factor,
            self.reach,
            None if self.lines is None else self.lines.borders(),
        )


class Found(msgspec.Struct):
    """What a round found, for the next one: rule, whose labels are cluster ids; vectors
    float32[m, 20], the clustered rows that it puts to a cluster, and ids int32[m], which; rows: how
    many were clustered, with those in none."""

    rule: Rule
    vectors: Array
    ids: Array
    rows: int


class Task(msgspec.Struct):
    """Rows to cluster: vectors float32[n, 20] of a layout, and hashes of their requests uint64[n].

    space: of the served run; None to fit one. min_cluster_size: None for one by the number of
    rows. previous: of the round before, whose clusters go on; next_id: never given yet.
    """

    vectors: Array
    requests: Array
    layout: int
    engine: str
    seed: int
    min_cluster_size: int | None
    space: Space | None
    previous: Found | None
    next_id: int


class Result(msgspec.Struct, tag="result"):
    """c clusters: found, None without clusters; ids and sizes (rows), largest first; centroids
    float32[c, 20]; next_id; seconds; engine by name."""

    found: Found | None
    ids: list[int]
    sizes: list[int]
    centroids: Array
    next_id: int
    seconds: float
    engine: str


class Failure(msgspec.Struct, tag="failure"):
    """Why a round failed, in a line."""

    reason: str


def send(connection: socket, message: msgspec.Struct) -> None:
    data = msgspec.msgpack.encode(message)
    connection.sendall(LENGTH.pack(len(data)) + data)


def receive(connection: socket) -> bytes:
    """The next message. EOFError: the other end is gone."""
    (length,) = LENGTH.unpack(_exactly(connection, LENGTH.size))
    return _exactly(connection, length)


def _exactly(connection: socket, count: int) -> bytes:
    data = bytearray(count)
    view = memoryview(data)
    while view:
        got = connection.recv_into(view)
        if not got:
            raise EOFError("the other process is gone")
        view = view[got:]
    return bytes(data)


def floats(array: Array) -> Floats:
    """An array of float32, as it was sent."""
    return np.asarray(array.array(), np.float32)
