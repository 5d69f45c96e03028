"""`attn runs diff`, `lineage` and `gc`: what changed between runs, the life of a cluster, and
which runs can be deleted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from capture_kernels.errors import ArtifactError, RunError
from discovery.artifacts.read import Artifacts, read_manifest
from discovery.artifacts.schema import Manifest
from discovery.runs import folder as runs
from discovery.runs.history import (
    Cluster,
    Clusters,
    ancestry,
    check_descent,
    clusters_by_run,
    compare,
    history,
    story,
)
from discovery.runs.state import manifests, survey

from .history_words import diff_in_words, in_bytes, kept_in_lines, plural, story_in_words

Output = Annotated[Path, typer.Option("--output", "--output-dir", help="Folder of the runs.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for scripts.")]
RunId = Annotated[str, typer.Argument(help="Run id, or latest.")]


def diff(
    first: RunId, second: RunId, output: Output = Path("discovery_outputs"), as_json: AsJson = False
) -> None:
    """What changed from one run to another of its lineage: clusters, zones, quality."""
    readable = manifests(survey(output))
    given = [finished_run(output, run) for run in (first, second)]
    before, after = sorted(given, key=lambda manifest: runs.run_order(manifest["run_id"]))
    known = ancestry(after["run_id"], readable)
    check_descent(before, after, known)
    then, now = (own_clusters(output, manifest) for manifest in (before, after))
    found = compare(before, after, then, now, known)
    says = [] if before is given[0] else [
        f"{after['run_id']} is the later of the two: this is what changed up to it"
    ]  # fmt: skip
    says += diff_in_words(found)
    if as_json:
        print(json.dumps({**found, "says": says}))
    else:
        print("\n".join([*says, *kept_in_lines(found["kept"])]))


def lineage(
    cluster: Annotated[int, typer.Argument(help="Cluster id.")],
    run: Annotated[str, typer.Option(help="Up to this run: its id, or latest.")] = "latest",
    output: Output = Path("discovery_outputs"),
    as_json: AsJson = False,
) -> None:
    """The life of a cluster id: where it came from, its share in each run, how it ended."""
    readable = manifests(survey(output))
    manifest = finished_run(output, run)
    known = ancestry(manifest["run_id"], readable)
    own = {r: own_clusters(output, readable[r]) for r in known.runs if r in readable}
    seen = clusters_by_run(known, readable, own)
    found = story(cluster, manifest, known, seen)
    if found is None:
        raise ArtifactError(
            f"no cluster {cluster} in the lineage of run {manifest['run_id']}"
            + elsewhere(cluster, output, readable, seen[manifest["run_id"]])
        )
    says = story_in_words(found)
    print(json.dumps({**found, "says": says}) if as_json else "\n".join(says))


def gc(
    output: Output = Path("discovery_outputs"),
    keep: Annotated[list[str] | None, typer.Option(help="Keep this run; may be repeated.")] = None,
    keep_last: Annotated[int, typer.Option(min=0, help="Keep this many of the newest runs.")] = 7,
    unfinished: Annotated[
        bool, typer.Option("--unfinished", help="Delete unfinished runs too.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only print what would be deleted.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Delete old runs.

    Kept are: latest, the newest --keep-last, those of --keep, unfinished runs, the newest that
    passed its gate of each model, layout and capture (the next run's parent), and the parent of
    every run that is kept.
    """
    from discovery.runs import retention

    if not output.is_dir():
        raise RunError(f"{output} is not a folder of runs: choose --output")
    named = [runs.run_folder(output, run).name for run in keep or []]
    done = retention.collect(output, named, keep_last, unfinished=unfinished, dry_run=dry_run)
    if as_json:
        print(json.dumps(done))
        return
    for entry in done["kept"]:
        print(f"kept     {entry['run_id']}: {', '.join(entry['because'])}")
    verb = "would go" if dry_run else "deleted"
    for entry in done["deleted"]:
        print(f"{verb:<8} {entry['run_id']}: {in_bytes(entry['bytes'])}")
    would = " would be" if dry_run else ""
    count = plural(len(done["deleted"]), "run")
    print(f"{count}{would} deleted, {in_bytes(done['bytes'])} freed")


def finished_run(output: Path, run: str) -> Manifest:
    return read_manifest(runs.run_folder(output, run))


def own_clusters(output: Path, manifest: Manifest) -> dict[int, Cluster]:
    """The clusters of a run by id, from its own table.

    Raises:
        ArtifactError: the table is missing or damaged.
    """
    artifacts = Artifacts(output / manifest["run_id"], manifest)
    table = artifacts.table("clusters", ["cluster_id", "label", "share"])
    return {row["cluster_id"]: Cluster(row["label"], row["share"]) for row in table.to_pylist()}


def elsewhere(cluster: int, output: Path, readable: dict[str, Manifest], there: Clusters) -> str:
    """Where else an id that was not found is known, or which ids are."""
    for run_id in sorted(readable, key=runs.run_order, reverse=True):
        changed = {event["cluster_id"] for event in history(readable[run_id])}
        if cluster in changed or cluster in own_clusters(output, readable[run_id]):
            return f": it is one of run {run_id}, use --run {run_id}"
    ids = ", ".join(map(str, sorted(there))) or "none"
    return f": its clusters are {ids}"
