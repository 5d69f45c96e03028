"""Events of a run: the messages of `attn discover --websocket-port` and lines of progress.jsonl.

Each is one JSON object. `Hello`, `Answer` and `Pong` go to one WebSocket client only; all others
are lines of `<run_id>/progress.jsonl` too. `json_schema` gives the JSON Schema of all of them.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

# Version of the messages; it grows when one of them changes its meaning.
PROTOCOL: Literal[1] = 1
# Most points of an EmbeddingSample: enough to draw a map from, in a message of about 30 KB.
SAMPLE_POINTS = 1_000

RunId = Annotated[str, Meta(pattern=r"^\d{4}-\d{2}-\d{2}T\d{2}-\d{2}-\d{2}(-\d+)?$")]
Moment = Annotated[str, Meta(pattern=r"^\d{4}-\d{2}-\d{2}T\d{2}:\d{2}:\d{2}\.\d{3}\+00:00$")]
StageName = Literal[
    "extract", "standardize", "pca", "neighbors", "umap", "cluster", "zones", "lineage", "quality",
    "publish",
]  # fmt: skip
CommandName = Literal["pause", "resume", "stop", "ping"]
LayoutName = Literal["log16", "layered"]
Count = Annotated[int, Meta(ge=0)]
Positive = Annotated[int, Meta(ge=1)]
Share = Annotated[float, Meta(ge=0, le=1)]
Point = Annotated[list[float], Meta(min_length=2, max_length=2)]


class Message(Struct, tag_field="event", forbid_unknown_fields=True, kw_only=True):
    """A JSON object whose `event` names its kind."""


class Event(Message):
    """What happened in a run, at this time (UTC)."""

    run_id: RunId
    at: Moment


class RunStarted(Event, tag="run_started"):
    """A run begins, or one that was stopped continues from its checkpoint (`resumed`).

    engine: the engine and where chunks are computed, in words. rows: of the model in the window.
    outdated: why nothing of the checkpoint is used; only if nothing is. left: unfinished runs that
    --resume auto did not take, and why, in words; only if there are any.
    """

    resumed: bool
    engine: str
    model: str
    layout: LayoutName
    rows: Count
    outdated: str | UnsetType = UNSET
    left: list[str] | UnsetType = UNSET


class StageStarted(Event, tag="stage_started"):
    """Stage `number` (from 1) of `of` begins.

    damaged: files of its checkpoint that are computed again because they were damaged; only if
    there are any.
    """

    stage: StageName
    number: Positive
    of: Positive
    damaged: list[str] | UnsetType = UNSET


class Progress(Event, tag="progress"):
    """Chunks of the running stage are done. At most a few a second are reported; the first and
    the last of a stage always are."""

    stage: StageName
    done: Count
    total: Positive


class StageFinished(Event, tag="stage_finished"):
    """A stage is finished: now, or before the run was stopped (`kept`).

    says: what it found, for a person. seconds: how long it took when it was computed.
    """

    stage: StageName
    number: Positive
    of: Positive
    says: str
    seconds: Annotated[float, Meta(ge=0)]
    kept: bool


class EmbeddingSample(Event, tag="embedding_sample"):
    """Coordinates of some fitted rows; after umap, and after lineage with their clusters.

    of: fitted rows. rows: row numbers in embedding.parquet, ascending, in even steps. points: x and
    y of each. cluster_ids: cluster of each, -1 for noise; null before clusters have ids.
    """

    of: Positive
    rows: Annotated[list[Count], Meta(min_length=1, max_length=SAMPLE_POINTS)]
    points: Annotated[list[Point], Meta(min_length=1, max_length=SAMPLE_POINTS)]
    cluster_ids: Annotated[list[Annotated[int, Meta(ge=-1)]], Meta(max_length=SAMPLE_POINTS)] | None


class ZoneStats(Event, tag="zone_stats"):
    """Share of the rows in each zone."""

    shares: dict[str, Share]


class ClusterFound(Struct, forbid_unknown_fields=True, kw_only=True):
    """A cluster of the fitted rows.

    x, y: median coordinates. event: what happened to it since the parent run. parents: clusters of
    the parent run that it comes from.
    """

    cluster_id: Count
    size: Positive
    share: Share
    x: float
    y: float
    event: Literal["kept", "thinned", "merged", "split", "born"]
    parents: list[Count]


class ClusterGone(Struct, forbid_unknown_fields=True, kw_only=True):
    """A cluster id of the parent run that ended; children: the cluster that absorbed it."""

    cluster_id: Count
    event: Literal["died", "absorbed"]
    children: list[Count]


class ClusterUpdate(Event, tag="cluster_update"):
    """The clusters, by the ids that they keep from run to run.

    Sizes and shares are of the `of` fitted rows; those in the artifacts are of all rows.
    """

    of: Positive
    clusters: list[ClusterFound]
    gone: list[ClusterGone]


class RunPaused(Event, tag="run_paused"):
    """The run waits at a chunk until it is resumed or stopped."""


class RunResumed(Event, tag="run_resumed"):
    """A paused run continues."""


class ListenerFailed(Event, tag="listener_failed"):
    """One that was shown the events, as the terminal is, failed and is shown no more of them."""

    reason: str


class RunInterrupted(Event, tag="run_interrupted"):
    """The run was stopped at a checkpoint. says: how to finish it."""

    reason: str
    says: str


class RunFailed(Event, tag="run_failed"):
    """The run ended by an error."""

    reason: str


class RunFinished(Event, tag="run_finished"):
    """The artifacts are published. peak_memory_gb: of all processes of the job, in 1e9 bytes."""

    clusters: Count
    peak_memory_gb: Annotated[float, Meta(ge=0)]


class Hello(Message, tag="hello"):
    """The first message to every client. What is null is not known before run_started."""

    protocol: Literal[1]
    run_id: RunId | None
    model: str | None
    layout: LayoutName | None
    rows: Count | None
    stages: list[StageName]
    commands: list[CommandName]


class Answer(Message, tag="answer"):
    """The result of a command, to the client that sent it.

    command, id: as they were sent; null if they could not be read. reason: only if not ok.
    """

    command: str | None
    id: str | None
    ok: bool
    reason: str | UnsetType = UNSET


class Pong(Message, tag="pong"):
    """The answer to a ping."""

    id: str | None


class Command(Struct, kw_only=True):
    """What a client may send: one object of at most 4,096 bytes. `id` comes back in the answer."""

    command: CommandName
    id: str | None = None


# The events that end a run.
ENDS = (RunFinished, RunFailed, RunInterrupted)
LOGGED: tuple[type[Message], ...] = tuple(Event.__subclasses__())
TO_ONE_CLIENT: tuple[type[Message], ...] = (Hello, Answer, Pong)
COMMANDS: tuple[CommandName, ...] = CommandName.__args__  # type: ignore[attr-defined]
STAGE_NAMES: tuple[StageName, ...] = StageName.__args__  # type: ignore[attr-defined]


def json_schema() -> dict[str, Any]:
    """JSON Schema of the messages, with that of a command as $defs/Command."""
    kinds = (*LOGGED, *TO_ONE_CLIENT, Command)
    _, definitions = msgspec.json.schema_components(kinds, ref_template="#/$defs/{name}")
    refs = [{"$ref": f"#/$defs/{kind.__name__}"} for kind in (*LOGGED, *TO_ONE_CLIENT)]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Messages of attn discover --websocket-port, and lines of progress.jsonl",
        "oneOf": refs,
        "$defs": definitions,
    }
