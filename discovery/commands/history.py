"""`attn runs diff`, `lineage` and `gc`: what changed between nights, the life of a cluster, and
which runs may go."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from capture_kernels.errors import ArtifactError, RunError
from discovery.artifacts.read import Artifacts, read_manifest
from discovery.artifacts.schema import Manifest, identity_of
from discovery.describe.words import joined
from discovery.runs import folder as runs
from discovery.runs.history import (
    Ancestry,
    Cluster,
    Clusters,
    ancestry,
    clusters_by_run,
    compare,
    history,
    story,
)
from discovery.runs.state import manifests, survey

Output = Annotated[Path, typer.Option("--output", "--output-dir", help="Folder of the runs.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for scripts.")]
RunId = Annotated[str, typer.Argument(help="Run id, or latest.")]

BARS = "▁▂▃▄▅▆▇█"
UNKNOWN = "·"
# Of a run's quality, what a person reads beside another's.
SHOWN_QUALITY = {
    "noise_share": "noise",
    "trustworthiness": "trustworthiness",
    "neighbor_recall": "neighbours kept",
    "classifier_agreement": "classifier agreement",
}


def diff(
    first: RunId, second: RunId, output: Output = Path("discovery_outputs"), as_json: AsJson = False
) -> None:
    """What changed from one run to another of its lineage: clusters, zones, quality."""
    readable = manifests(survey(output))
    given = [finished_run(output, run) for run in (first, second)]
    before, after = sorted(given, key=lambda manifest: runs.run_order(manifest["run_id"]))
    known = ancestry(after["run_id"], readable)
    refuse_strangers(before, after, known)
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
    run: Annotated[str, typer.Option(help="Tell it up to this run: its id, or latest.")] = "latest",
    output: Output = Path("discovery_outputs"),
    as_json: AsJson = False,
) -> None:
    """The life of a cluster id: where it came from, its share over the nights, how it ended."""
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
    keep_last: Annotated[int, typer.Option(min=0, help="Keep so many of the newest runs.")] = 7,
    unfinished: Annotated[
        bool, typer.Option("--unfinished", help="Delete unfinished runs too.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only say what would be deleted.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Delete old runs.

    Kept are: latest, the newest --keep-last, those of --keep, unfinished runs, of each model,
    layout and capture the newest that passed its gate (tomorrow's parent), and the parent of
    every run that is kept.
    """
    from discovery.runs import retention

    if not output.is_dir():
        raise RunError(f"{output} is no folder of runs: choose --output")
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
    count = len(done["deleted"])
    what = f"{count} run{'s' * (count != 1)}"
    print(
        f"{what} would be deleted, {in_bytes(done['bytes'])} freed" if dry_run
        else f"{what} deleted, {in_bytes(done['bytes'])} freed"
    )  # fmt: skip


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


def refuse_strangers(before: Manifest, after: Manifest, known: Ancestry) -> None:
    """Raises ArtifactError unless the later run descends from the earlier."""
    if before["run_id"] in known.runs:
        return
    a, b = (" / ".join(identity_of(manifest).values()) for manifest in (before, after))
    if a != b:
        reason = f"they are of {a} and of {b}"
    elif len(known.runs) == 1:
        reason = f"{after['run_id']} is the first of its lineage"
    else:
        reason = f"{after['run_id']} comes from {', '.join(known.runs[:-1][-3:])}"
    raise ArtifactError(
        f"{before['run_id']} and {after['run_id']} are not of one lineage: {reason}"
    )


def elsewhere(cluster: int, output: Path, readable: dict[str, Manifest], there: Clusters) -> str:
    """Where else an id that was not found is known, or which ids are."""
    for run_id in sorted(readable, key=runs.run_order, reverse=True):
        told = {event["cluster_id"] for event in history(readable[run_id])}
        if cluster in told or cluster in own_clusters(output, readable[run_id]):
            return f": it is one of run {run_id}, use --run {run_id}"
    ids = ", ".join(map(str, sorted(there))) or "none"
    return f": its clusters are {ids}"


def percent(share: float | None) -> str:
    return "?" if share is None else f"{share:.1%}"


def in_bytes(count: int) -> str:
    """1536 -> 1.5 KiB."""
    size, units = float(count), ["KiB", "MiB", "GiB"]
    if size < 1024:
        return f"{count} bytes"
    while (size := size / 1024) >= 1024 and len(units) > 1:
        units.pop(0)
    return f"{size:,.1f} {units[0]}"


def plural(count: int, word: str) -> str:
    return f"{count:,} {word}{'s' * (count != 1)}"


def ids(clusters: list[int]) -> str:
    """Cluster ids as a person lists them: 1, 2 and 3."""
    return joined([str(cluster) for cluster in clusters]) if clusters else "none"


def diff_in_words(found: dict[str, Any]) -> list[str]:
    """What `compare` found, one line a change: those of clusters first, the largest first."""
    changes = [(one["share"], merged_in_words(one)) for one in found["merged"]]
    changes += [(one["share"], fresh_in_words(one)) for one in found["split"] + found["born"]]
    changes += [(one["share_then"], died_in_words(one)) for one in found["died"]]
    renamed = [
        f'{one["cluster_id"]} is called "{one["label"]}" now; it was "{one["label_then"]}"'
        for one in found["merged"] + found["kept"]
        if one["label"] != one["label_then"]
    ]
    count, rows = found["clusters"], found["rows"]
    survived = len(found["kept"]) + len(found["merged"])
    lines = [
        f"{found['from']} -> {found['to']}: {count['then']} -> {plural(count['now'], 'cluster')}, "
        f"{survived} of them the same; {rows['then']:,} -> {plural(rows['now'], 'row')}"
    ]
    if gone := found["deleted_between"]:
        lines.append(
            f"between them {plural(len(gone), 'run')} known of "
            f"{'is' if len(gone) == 1 else 'are'} deleted ({', '.join(gone)}): "
            "told from cluster ids and the history that the later run keeps"
        )
    lines += [line for _, line in sorted(changes, key=lambda change: -change[0])] + renamed
    if not changes:
        lines.append("no cluster was born, died, split or merged")
    zones = sorted(found["zones"].items(), key=lambda item: -_change(item[1]))
    lines.append("zones: " + ", ".join(f"{name} {_both(shares)}" for name, shares in zones))
    quality = found["quality"]
    told = [f"{word} {_both(quality[name])}" for name, word in SHOWN_QUALITY.items()
            if name in quality]  # fmt: skip
    passed = ["passed" if quality["gate_passed"][when] else "failed" for when in ("then", "now")]
    lines.append(f"quality: {', '.join(told)}; gate {passed[0]} -> {passed[1]}")
    return lines


def _change(pair: dict[str, float | None]) -> float:
    return abs((pair["now"] or 0.0) - (pair["then"] or 0.0))


def _both(pair: dict[str, float | None]) -> str:
    return f"{percent(pair['then'])} -> {percent(pair['now'])}"


def merged_in_words(one: dict[str, Any]) -> str:
    return (
        f'merged: {one["cluster_id"]} "{one["label"]}" took in {ids(one["parents"][1:])}, '
        f"{percent(one['share_then'])} -> {percent(one['share'])}"
    )


def fresh_in_words(one: dict[str, Any]) -> str:
    named = f'{one["cluster_id"]} "{one["label"]}" ({percent(one["share"])})'
    where = f", in run {one['run_id']}"
    if not one["parents"]:
        # What it came off was born since the earlier run too.
        return f"born: {named}" + (f", off {ids(one['through'])}" if one["through"] else "") + where
    way = f" through {ids(one['through'])}" if one["through"] else ""
    return f"split: {named} came off {ids(one['parents'])}{way}{where}"


def died_in_words(one: dict[str, Any]) -> str:
    named = f'{one["cluster_id"]} "{one["label"]}" ({percent(one["share_then"])})'
    live = one["lives_on_in"]
    if one["event"] == "absorbed":
        said = f"absorbed: {named} went into {ids(one['into'])}, in run {one['run_id']}"
        if not live:
            return said + "; nothing of it is left"
        return said + (f"; it lives on in {ids(live)}" if live != one["into"] else "")
    said = f"died: {named}, in run {one['run_id']}"
    return said + (f"; what came off it lives on in {ids(live)}" if live else "")


def kept_in_lines(kept: list[dict[str, Any]]) -> list[str]:
    """A table of the clusters that kept their id, those that changed most first."""
    if not kept:
        return []
    lines = [f"{'id':>6}  {'then':>6}  {'now':>6}  kept cluster"]
    return lines + [
        f"{one['cluster_id']:>6}  {percent(one['share_then']):>6}  {percent(one['share']):>6}  "
        f"{one['label']}"
        for one in kept
    ]


def story_in_words(found: dict[str, Any]) -> list[str]:
    """What `story` found, in the order in which it happened."""
    born, nights, ended = found["born"], found["nights"], found["ended"]
    label = f' "{found["labels"][-1]["label"]}"' if found["labels"] else ""
    begun = f"split off from {ids(born['parents'])}" if born["parents"] else "born"
    happened = [(born["run_id"], begun)]
    happened += [(e["run_id"], f"took in {ids(e['cluster_ids'])}") for e in found["absorbed"]]
    happened += [(e["run_id"], f"{ids(e['cluster_ids'])} came off") for e in found["came_off"]]
    if ended:
        fate = f"went into {ids(ended['into'])}" if ended["into"] else "died"
        happened.append((ended["run_id"], fate))
    happened.sort(key=lambda at_and_what: runs.run_order(at_and_what[0]))
    lines = [f"cluster {found['cluster_id']}{label}"]
    lines += [f"{run_id}  {what}" for run_id, what in happened]
    if not ended:
        lines.append(f"{found['run_id']}  alive")
    shares = [night["share"] for night in nights]
    known = [share for share in shares if share is not None]
    reach = f"  {percent(known[0])} -> {percent(known[-1])} of the rows" if known else ""
    lines.append(f"{plural(len(nights), 'night')}: {sparkline(shares)}{reach}")
    if len(found["labels"]) > 1:
        called = (f'"{one["label"]}" from {one["since"]}' for one in found["labels"])
        lines.append(f"called {', '.join(called)}")
    if gone := found["deleted_runs"]:
        lines.append(
            f"deleted since: {plural(len(gone), 'run')} of these nights ({', '.join(gone)}), "
            "and there may have been more"
        )
    return lines


def sparkline(shares: list[float | None]) -> str:
    """Shares as bars, the largest the full height; a dot where one is not known."""
    most = max((share for share in shares if share is not None), default=0.0)
    return "".join(
        UNKNOWN if share is None
        else BARS[min(len(BARS) - 1, int(share / most * len(BARS)))] if most
        else BARS[0]
        for share in shares
    )  # fmt: skip
