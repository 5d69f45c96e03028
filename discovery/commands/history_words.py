"""What `discovery.runs.history` finds, as lines for the terminal."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from discovery.describe.ranges import joined
from discovery.runs.folder import run_order

BARS = "▁▂▃▄▅▆▇█"
UNKNOWN = "·"
# The figures of a run's quality that are worth comparing.
SHOWN_QUALITY = {
    "noise_share": "noise",
    "trustworthiness": "trustworthiness",
    "neighbor_recall": "neighbours kept",
    "classifier_agreement": "classifier agreement",
}


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


def ids(clusters: Iterable[int]) -> str:
    """Cluster ids as a list in a sentence: 1, 2 and 3."""
    return joined([str(cluster) for cluster in clusters]) or "none"


def diff_in_words(found: dict[str, Any]) -> list[str]:
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
            f"{'is' if len(gone) == 1 else 'are'} deleted ({', '.join(gone)}): "
            "compared by cluster ids and the history that the later run keeps"
        )
    lines += map(_change, changed)
    lines += [
        f'{one["cluster_id"]} is called "{one["label"]}" now; it was "{one["label_then"]}"'
        for one in same
        if one["label"] != one["label_then"]
    ]
    if not changed:
        lines.append("no cluster was born, died, split or merged")

    def moved(pair: dict[str, float | None]) -> float:
        return abs((pair["now"] or 0.0) - (pair["then"] or 0.0))

    def both(pair: dict[str, float | None]) -> str:
        return f"{percent(pair['then'])} -> {percent(pair['now'])}"

    zones = sorted(found["zones"].items(), key=lambda item: -moved(item[1]))
    lines.append("zones: " + ", ".join(f"{name} {both(shares)}" for name, shares in zones))
    quality = found["quality"]
    shown = [f"{word} {both(quality[name])}" for name, word in SHOWN_QUALITY.items()
             if name in quality]  # fmt: skip
    then, now = ("passed" if quality["gate_passed"][at] else "failed" for at in ("then", "now"))
    return [*lines, f"quality: {', '.join(shown)}; gate {then} -> {now}"]


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


def kept_in_lines(kept: list[dict[str, Any]]) -> list[str]:
    """A table of the clusters that kept their id, by falling change."""
    rows = [
        (one["cluster_id"], percent(one["share_then"]), percent(one["share"]), one["label"])
        for one in kept
    ]
    table = [("id", "then", "now", "kept cluster"), *rows] if rows else []
    return [f"{id_:>6}  {then:>6}  {now:>6}  {label}" for id_, then, now, label in table]


def story_in_words(found: dict[str, Any]) -> list[str]:
    """The lines on what `story` found, in the order in which it happened."""
    born, ended, labels = found["born"], found["ended"], found["labels"]
    begun = f"split off from {ids(born['parents'])}" if born["parents"] else "born"
    happened = [(born["run_id"], begun)]
    happened += [(e["run_id"], f"took in {ids(e['cluster_ids'])}") for e in found["absorbed"]]
    happened += [(e["run_id"], f"{ids(e['cluster_ids'])} came off") for e in found["came_off"]]
    if ended:
        fate = f"went into {ids(ended['into'])}" if ended["into"] else "died"
        happened.append((ended["run_id"], fate))
    happened.sort(key=lambda at_and_what: run_order(at_and_what[0]))
    if not ended:
        happened.append((found["run_id"], "alive"))
    label = f' "{labels[-1]["label"]}"' if labels else ""
    lines = [f"cluster {found['cluster_id']}{label}"]
    lines += [f"{run_id}  {what}" for run_id, what in happened]
    shares = [run["share"] for run in found["nights"]]
    known = [share for share in shares if share is not None]
    reach = f"  {percent(known[0])} -> {percent(known[-1])} of the rows" if known else ""
    lines.append(f"{plural(len(shares), 'run')}: {sparkline(shares)}{reach}")
    if len(labels) > 1:
        called = (f'"{one["label"]}" from {one["since"]}' for one in labels)
        lines.append(f"called {', '.join(called)}")
    if gone := found["deleted_runs"]:
        lines.append(
            f"deleted since: {plural(len(gone), 'run')} of these ({', '.join(gone)}), "
            "and there may have been more"
        )
    return lines


def sparkline(shares: list[float | None]) -> str:
    """Shares as bars, the largest at full height; a dot where one is unknown."""
    most = max((share for share in shares if share is not None), default=0.0) or 1.0
    heights = (None if s is None else min(7, int(s / most * len(BARS))) for s in shares)
    return "".join(UNKNOWN if height is None else BARS[height] for height in heights)
