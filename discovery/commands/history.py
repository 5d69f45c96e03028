"""`attn runs diff`, `lineage` and `gc`: what changed between runs, the life of a cluster, and
which runs can be deleted."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from capture_kernels.errors import ArtifactError, RunError
from discovery.artifacts.read import Artifacts
from discovery.artifacts.schema import Manifest
from discovery.describe.ranges import joined
from discovery.runs import folder as runs
from discovery.runs import history
from discovery.runs.state import manifests, survey

Output = Annotated[Path, typer.Option("--output", "--output-dir", help="Folder of the runs.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for scripts.")]
RunId = Annotated[str, typer.Argument(help="Run id, or latest.")]

BARS = "▁▂▃▄▅▆▇█"
UNKNOWN = "·"
# What stands for them where output is ASCII.
IN_ASCII = str.maketrans(BARS + UNKNOWN, "12345678?")
# The figures of a run's quality that are worth comparing.
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
    found, says = changes_between(output, first, second)
    if as_json:
        print(json.dumps({**found, "says": says}))
        return
    print(*says, sep="\n")
    if found["kept"]:
        print("    id    then     now  kept cluster")
    for one in found["kept"]:
        shares = f"{percent(one['share_then']):>6}  {percent(one['share']):>6}"
        print(f"{one['cluster_id']:>6}  {shares}  {one['label']}")


def lineage(
    cluster: Annotated[int, typer.Argument(help="Cluster id.")],
    run: Annotated[str, typer.Option(help="Up to this run: its id, or latest.")] = "latest",
    output: Output = Path("discovery_outputs"),
    as_json: AsJson = False,
) -> None:
    """The life of a cluster id: where it came from, its share in each run, how it ended."""
    found, says = story_of(output, cluster, run)
    print(json.dumps({**found, "says": says}) if as_json else legible("\n".join(says)))


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


def changes_between(output: Path, first: str, second: str) -> tuple[dict[str, Any], list[str]]:
    """What changed from one run to another of its lineage (`history.compare`), and the same in
    sentences; the earlier one comes first, whichever is named first.

    Raises:
        ArtifactError: there is no such run, it is damaged, or they are not of one lineage.
    """
    readable, unreadable = runs_in(output)
    given = [manifest_of(output, run, readable, unreadable) for run in (first, second)]
    before, after = sorted(given, key=lambda manifest: runs.run_order(manifest["run_id"]))
    known = history.ancestry(after["run_id"], readable)
    history.check_descent(before, after, known)
    then, now = (own_clusters(output, manifest) for manifest in (before, after))
    found = history.compare(before, after, then, now, known)
    says = [] if before is given[0] else [
        f"{after['run_id']} is the later of the two: this is what changed up to it"
    ]  # fmt: skip
    return found, says + diff_in_words(found, unreadable)


def story_of(output: Path, cluster: int, run: str) -> tuple[dict[str, Any], list[str]]:
    """The life of a cluster id up to a run (`history.story`), and the same in sentences.

    Raises:
        ArtifactError: there is no such run, it is damaged, or its lineage never had the cluster.
    """
    readable, unreadable = runs_in(output)
    manifest = manifest_of(output, run, readable, unreadable)
    known = history.ancestry(manifest["run_id"], readable)
    own = {}
    for run_id in known.runs:
        if run_id in readable:
            try:
                own[run_id] = own_clusters(output, readable[run_id])
            except ArtifactError as error:
                if run_id == manifest["run_id"]:
                    raise
                unreadable[run_id] = str(error)
    known = known._replace(gone=tuple(run_id for run_id in known.runs if run_id not in own))
    seen = history.clusters_by_run(known, readable, own)
    found = history.story(cluster, manifest, known, seen)
    if found is None:
        raise ArtifactError(
            f"no cluster {cluster} in the lineage of run {manifest['run_id']}"
            + elsewhere(cluster, readable, seen[manifest["run_id"]])
        )
    return found, story_in_words(found, unreadable)


def runs_in(output: Path) -> tuple[dict[str, Manifest], dict[str, str]]:
    """By run id the manifests that can be read, and why others cannot."""
    found = survey(output)
    return manifests(found), {run.run_id: run.reason for run in found if run.reason}


def manifest_of(
    output: Path, run: str, readable: dict[str, Manifest], unreadable: dict[str, str]
) -> Manifest:
    """The manifest of a run that the user named; ArtifactError says why there is none."""
    run_id = runs.run_folder(output, run).name
    if run_id not in readable:
        raise ArtifactError(unreadable.get(run_id, f"{output / run_id} holds no finished run"))
    return readable[run_id]


def own_clusters(output: Path, manifest: Manifest) -> dict[int, history.Cluster]:
    """The clusters of a run by id, from its own table.

    Raises:
        ArtifactError: the table is missing or damaged.
    """
    artifacts = Artifacts(output / manifest["run_id"], manifest)
    rows = artifacts.table("clusters", ["cluster_id", "label", "share"]).to_pylist()
    return {row["cluster_id"]: history.Cluster(row["label"], row["share"]) for row in rows}


def elsewhere(cluster: int, readable: dict[str, Manifest], there: history.Clusters) -> str:
    """Where else an id that was not found is known, or which ids are."""
    for run_id in sorted(readable, key=runs.run_order, reverse=True):
        lineage = readable[run_id].get("lineage") or {}
        events = [*lineage.get("events", []), *history.history(readable[run_id])]
        if any(event["cluster_id"] == cluster for event in events):
            return f": it is one of run {run_id}, use --run {run_id}"
    return f": its clusters are {', '.join(map(str, sorted(there))) or 'none'}"


def gone_in_words(gone: list[str], unreadable: Mapping[str, str]) -> str:
    """Runs that are not there any more, each with the reason if it is damaged."""
    return ", ".join(f"{run} ({unreadable[run]})" if run in unreadable else run for run in gone)


def percent(share: float | None) -> str:
    return "?" if share is None else f"{share:.1%}"


def in_bytes(count: int) -> str:
    """1536 -> 1.5 KiB."""
    if count < 1024:
        return f"{count} bytes"
    power = next((p for p in (1, 2) if count < 1024 ** (p + 1)), 3)
    return f"{count / 1024**power:,.1f} {' KMG'[power]}iB"


def plural(count: int, word: str) -> str:
    return f"{count:,} {word}{'s' * (count != 1)}"


def ids(clusters: Iterable[int]) -> str:
    """Cluster ids as a list in a sentence: 1, 2 and 3."""
    return joined([str(cluster) for cluster in clusters]) or "none"


def diff_in_words(found: dict[str, Any], unreadable: Mapping[str, str]) -> list[str]:
    """The lines on what `compare` found: clusters by falling share, then zones and quality."""
    changed = found["merged"] + found["split"] + found["born"] + found["died"]
    changed.sort(key=lambda one: -one.get("share", one.get("share_then")))
    same = found["merged"] + found["kept"]
    count, rows = found["clusters"], found["rows"]
    lines = [
        f"{found['from']} -> {found['to']}: {count['then']} -> {plural(count['now'], 'cluster')}, "
        f"{len(same)} of them the same; {rows['then']:,} -> {plural(rows['now'], 'row')}"
    ]
    if gone := found["deleted_between"]:
        lines.append(
            f"between them {plural(len(gone), 'run')} known of "
            f"{'is' if len(gone) == 1 else 'are'} deleted or damaged: "
            f"{gone_in_words(gone, unreadable)}; compared by cluster ids and the history that "
            "later runs keep"
        )
    lines += map(_change, changed)
    lines += [
        f'{one["cluster_id"]} is called "{one["label"]}" now; it was "{one["label_then"]}"'
        for one in same
        if one["label"] != one["label_then"]
    ]
    if not changed:
        lines.append("no cluster was born, died, split or merged")

    def both(name: str, pair: dict[str, float | None]) -> str:
        return f"{name} {percent(pair['then'])} -> {percent(pair['now'])}"

    zones, quality = found["zones"], found["quality"]
    moved = {name: abs((p["now"] or 0.0) - (p["then"] or 0.0)) for name, p in zones.items()}
    zone_words = [both(name, zones[name]) for name in sorted(zones, key=lambda name: -moved[name])]
    figures = [both(word, quality[n]) for n, word in SHOWN_QUALITY.items() if n in quality]
    then, now = ("passed" if quality["gate_passed"][at] else "failed" for at in ("then", "now"))
    return [
        *lines,
        f"zones: {', '.join(zone_words)}",
        f"quality: {', '.join(figures)}; gate {then} -> {now}",
    ]


def _change(one: dict[str, Any]) -> str:
    """A cluster that `compare` lists as merged, split, born or died."""
    named = f'{one["cluster_id"]} "{one["label"]}"'
    where = f", in run {one.get('run_id')}"
    if "event" in one:
        named += f" ({percent(one['share_then'])})"
        live, into = one["lives_on_in"], one["into"]
        if one["event"] == "died":
            rest = f"; what came off it lives on in {ids(live)}" if live else ""
            return f"died: {named}{where}{rest}"
        rest = f"; it lives on in {ids(live)}" if live else "; nothing of it is left"
        return f"absorbed: {named} went into {ids(into)}{where}{rest if live != into else ''}"
    if "share_then" in one:
        shares = f"{percent(one['share_then'])} -> {percent(one['share'])}"
        return f"merged: {named} took in {ids(one['parents'][1:])}, {shares}"
    named += f" ({percent(one['share'])})"
    through = ids(one["through"]) if one["through"] else ""
    if one["parents"]:
        way = f" through {through}" if through else ""
        return f"split: {named} came off {ids(one['parents'])}{way}{where}"
    # What it came off was born since the earlier run too.
    return f"born: {named}{f', off {through}' if through else ''}{where}"


def story_in_words(found: dict[str, Any], unreadable: Mapping[str, str]) -> list[str]:
    """The lines on what `story` found, in the order in which it happened."""
    born, ended, labels = found["born"], found["ended"], found["labels"]
    begun = {"seen": "first known"}.get(born["event"], "born")
    if born["parents"]:
        begun = f"split off from {ids(born['parents'])}"
    happened = [(born["run_id"], begun)]
    happened += [(e["run_id"], f"took in {ids(e['cluster_ids'])}") for e in found["absorbed"]]
    happened += [(e["run_id"], f"{ids(e['cluster_ids'])} came off") for e in found["came_off"]]
    happened += [
        (e["run_id"], f"lost a part, {percent(e['lost'])} of it") for e in found["thinned"]
    ]
    if ended:
        fate = f"went into {ids(ended['into'])}" if ended["into"] else "died"
        happened.append((ended["run_id"], fate))
    happened.sort(key=lambda at_and_what: runs.run_order(at_and_what[0]))
    if not ended:
        happened.append((found["run_id"], "alive"))
    label = f' "{labels[-1]["label"]}"' if labels else ""
    lines = [f"cluster {found['cluster_id']}{label}"]
    lines += [f"{run_id}  {what}" for run_id, what in happened]
    shares = [run["share"] for run in found["runs"]]
    known = [share for share in shares if share is not None]
    reach = f"  {percent(known[0])} -> {percent(known[-1])} of the rows" if known else ""
    lines.append(f"{plural(len(shares), 'run')}: {sparkline(shares)}{reach}")
    called = [f'"{one["label"]}" from {one["since"]}' for one in labels]
    if len(called) > 1:
        lines.append(f"called {', '.join(called)}")
    if gone := found["deleted_runs"]:
        lines.append(
            f"deleted or damaged since: {plural(len(gone), 'run')} of these "
            f"({gone_in_words(gone, unreadable)}), and there may have been more"
        )
    return lines


def legible(text: str) -> str:
    """A text with digits for bars if standard output has no bars, as in the locale C."""
    try:
        (BARS + UNKNOWN).encode(sys.stdout.encoding)
    except UnicodeEncodeError:
        return text.translate(IN_ASCII)
    return text


def sparkline(shares: list[float | None]) -> str:
    """Shares as bars, the largest at full height; a dot where one is unknown."""
    most = max((share for share in shares if share is not None), default=0.0) or 1.0
    return "".join(
        UNKNOWN if share is None else BARS[min(7, int(share / most * len(BARS)))]
        for share in shares
    )
