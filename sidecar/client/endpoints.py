"""The sidecar's endpoints, each written once, as the call that it makes.

A client decides how to make it: `SidecarClient` waits for the answer, `AsyncSidecarClient` gives an
awaitable of it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any, Concatenate, Generic, Literal, ParamSpec, TypeVar, overload
from urllib.parse import quote

import httpx
import msgspec
import pyarrow as pa

from .answers import Added, Batch, Classified, Health, Ready, RunMap, decode_map
from .retries import Call

P = ParamSpec("P")
T = TypeVar("T")
# A fingerprint: 20 numbers, or a record's JSON object.
Fingerprint = Sequence[float] | dict[str, Any]
ARROW = "application/vnd.apache.arrow.stream"


class Waits:
    """A client whose methods wait for the answer."""


class Awaits:
    """A client whose methods give an awaitable of the answer."""


class endpoint(Generic[P, T]):  # noqa: N801 - a decorator
    """A method of both clients from the call that it makes: the one gives its result, the other an
    awaitable of it."""

    def __init__(self, build: Callable[Concatenate[Any, P], Call[T]]) -> None:
        self._build = build
        self.__doc__ = build.__doc__

    @overload
    def __get__(self, client: Waits, owner: object) -> Callable[P, T]: ...
    @overload
    def __get__(self, client: Awaits, owner: object) -> Callable[P, Awaitable[T]]: ...
    @overload
    def __get__(self, client: None, owner: object) -> Callable[Concatenate[Any, P], Call[T]]: ...

    def __get__(self, client: Any, owner: object) -> Any:
        if client is None:  # of the class: for help() and signatures
            return self._build

        def method(*args: P.args, **kwargs: P.kwargs) -> Any:
            return client.call(self._build(client, *args, **kwargs))

        method.__name__, method.__doc__ = self._build.__name__, self.__doc__
        return method


def to(kind: type[T]) -> Callable[[httpx.Response], T]:
    """Decode JSON as this type."""
    decoder = msgspec.json.Decoder(kind)
    return lambda answer: decoder.decode(answer.content)


OBJECT, LIST = to(dict[str, Any]), to(list[Any])


def get(path: str, decode: Callable[[httpx.Response], T], **params: Any) -> Call[T]:
    given = {name: value for name, value in params.items() if value is not None}
    return Call("GET", path, decode, params=given)


def post(
    path: str,
    decode: Callable[[httpx.Response], T],
    body: Any = None,
    *,
    safe: bool = False,
    wait: bool = False,
) -> Call[T]:
    """A POST of JSON, or of a table as an Arrow stream."""
    content, kind = None, "application/json"
    if isinstance(body, pa.Table | pa.RecordBatch):
        content, kind = arrow_stream(body), ARROW
    elif body is not None:
        content = msgspec.json.encode(body)
    return Call("POST", path, decode, safe, {"wait": 1} if wait else {}, content, kind)


def arrow_stream(rows: pa.Table | pa.RecordBatch) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, rows.schema) as writer:
        writer.write(rows)
    return bytes(sink.getvalue())


def quoted(name: str) -> str:
    """A name as one part of a path."""
    return quote(name, safe="")


def run_path(run_id: str) -> str:
    return f"/discovery/runs/{quoted(run_id)}"


def record(fingerprint: Fingerprint) -> dict[str, Any]:
    return fingerprint if isinstance(fingerprint, dict) else {"vector": list(fingerprint)}


class Endpoints:
    """Every endpoint. All raise SidecarError; see `errors` for the kinds."""

    @endpoint
    def health(self) -> Call[Health]:
        """Whether the sidecar is alive. Needs no key."""
        return get("/health", to(Health))

    @endpoint
    def ready(self) -> Call[Ready]:
        """Whether artifacts are loaded and the store takes rows, and what is wrong if not."""
        return replace(get("/ready", to(Ready)), also=frozenset({503}))

    @endpoint
    def version(self) -> Call[dict[str, Any]]:
        """Versions of attn, of the artifacts and of the libraries."""
        return get("/version", OBJECT)

    @endpoint
    def stats(self) -> Call[dict[str, Any]]:
        """Counts of rows, queue, store, and drift."""
        return get("/stats", OBJECT)

    @endpoint
    def drift(self) -> Call[dict[str, Any]]:
        """How far live traffic is from the served run: the `drift` entry of /stats."""
        return get("/stats", lambda answer: field_of(answer, "drift"))

    @endpoint
    def centroids(self) -> Call[dict[str, Any]]:
        """The live clusters."""
        return get("/centroids", OBJECT)

    @endpoint
    def classify_one(self, fingerprint: Fingerprint) -> Call[Classified]:
        """The zone and cluster of a fingerprint."""
        return post("/classify", to(Classified), record(fingerprint), safe=True)

    @endpoint
    def classify(self, fingerprints: Sequence[Fingerprint] | pa.Table) -> Call[Batch]:
        """The zone and cluster of each fingerprint: records, lists of 20 numbers, or a table."""
        return post("/classify", to(Batch), batch_of(fingerprints), safe=True)

    @endpoint
    def predict(self, fingerprint: Fingerprint) -> Call[dict[str, Any]]:
        """The live cluster of a fingerprint, which `centroids` lists."""
        return post("/predict", OBJECT, record(fingerprint), safe=True)

    @endpoint
    def add(self, fingerprint: dict[str, Any], *, wait: bool = False) -> Call[Added]:
        """Insert a record. It has a key, so that inserting it twice changes nothing.

        Args:
            wait: until it is committed; else it is only queued.
        """
        return post("/fingerprint", to(Added), fingerprint, safe=True, wait=wait)

    @endpoint
    def add_many(
        self, rows: Sequence[dict[str, Any]] | pa.Table | pa.RecordBatch, *, wait: bool = False
    ) -> Call[Added]:
        """Insert records, or a table in the record's schema (docs/formats.md).

        Args:
            wait: until they are committed; else they are only queued.
        """
        return post("/fingerprints", to(Added), batch_of(rows), safe=True, wait=wait)

    @endpoint
    def sessions(
        self, *, limit: int | None = None, after: str | None = None
    ) -> Call[dict[str, Any]]:
        """The sessions, newest first, page by page: `after` is `next` of the page before."""
        return get("/sessions", OBJECT, limit=limit, after=after)

    @endpoint
    def session(self, session_id: str) -> Call[dict[str, Any]]:
        """A session, restored from the store if it is an earlier one."""
        return get(f"/sessions/{quoted(session_id)}", OBJECT)

    @endpoint
    def request(
        self,
        request_id: str,
        *,
        offset: int | None = None,
        limit: int | None = None,
        vectors: bool = False,
    ) -> Call[dict[str, Any]]:
        """A request: its zones over the steps, transitions, and rows page by page."""
        path = f"/requests/{quoted(request_id)}"
        shown = 1 if vectors else None
        return get(path, OBJECT, offset=offset, limit=limit, vectors=shown)

    @endpoint
    def compare(self, a: str | dict[str, Any], b: str | dict[str, Any]) -> Call[dict[str, Any]]:
        """How two sides differ: each KIND:ID, or the rows of a trace (docs/http.md)."""
        if isinstance(a, str) and isinstance(b, str):
            return get("/compare", OBJECT, a=a, b=b)
        return post("/compare", OBJECT, {"a": a, "b": b}, safe=True)

    @endpoint
    def discovery_status(self) -> Call[dict[str, Any]]:
        """The served run, the last reload, and the job that is running."""
        return get("/discovery/status", OBJECT)

    @endpoint
    def runs(self, *, limit: int | None = None, before: str | None = None) -> Call[dict[str, Any]]:
        """The runs, newest first, page by page: `before` is `next` of the page before."""
        return get("/discovery/runs", OBJECT, limit=limit, before=before)

    @endpoint
    def run(self, run_id: str) -> Call[dict[str, Any]]:
        """The manifest of a run, or of `latest`."""
        return get(run_path(run_id), OBJECT)

    @endpoint
    def run_clusters(self, run_id: str) -> Call[dict[str, Any]]:
        """The clusters of a run."""
        return get(f"{run_path(run_id)}/clusters", OBJECT)

    @endpoint
    def run_lineage(self, run_id: str) -> Call[dict[str, Any]]:
        """Where the clusters of a run come from."""
        return get(f"{run_path(run_id)}/lineage", OBJECT)

    @endpoint
    def map(self, run_id: str) -> Call[RunMap]:
        """The map of a run as arrays."""
        return get(f"{run_path(run_id)}/map", lambda answer: decode_map(answer.content))

    @endpoint
    def map_about(self, run_id: str) -> Call[dict[str, Any]]:
        """The description of a map: `cluster_ids` and `zones` by the numbers in it, its ranges."""
        return get(f"{run_path(run_id)}/map/meta", OBJECT)

    @endpoint
    def control(self, command: Literal["pause", "resume", "stop"]) -> Call[dict[str, Any]]:
        """Pause, resume or stop the running job. Never tried again."""
        return post("/discovery/control", OBJECT, {"command": command})

    @endpoint
    def recluster(self) -> Call[dict[str, Any]]:
        """Cluster the recent rows anew. Never tried again."""
        return post("/recluster", OBJECT)

    @endpoint
    def reload(self) -> Call[dict[str, Any]]:
        """Look for a new run now. Never tried again."""
        return post("/discovery/reload", OBJECT)

    @endpoint
    def flush(self) -> Call[dict[str, Any]]:
        """Write what is queued to the store now. Never tried again."""
        return post("/storage/flush", OBJECT)


def batch_of(rows: Any) -> Any:
    """A table as it is, else the JSON object of a batch."""
    if isinstance(rows, pa.Table | pa.RecordBatch):
        return rows
    return {"records": [record(row) for row in rows]}


def field_of(answer: httpx.Response, name: str) -> Any:
    """A field of a JSON object; ValueError if it has none."""
    found = OBJECT(answer)
    if name not in found:
        raise ValueError(f"it has no {name}")
    return found[name]
