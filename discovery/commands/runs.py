"""`attn runs list` and `attn runs show`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from discovery.artifacts.read import open_artifacts
from discovery.artifacts.schema import Manifest
from discovery.describe.clusters import what_clusters_are
from discovery.runs import folder as runs
from discovery.runs.state import survey

from . import history
from .history import AsJson, Output

app = typer.Typer(no_args_is_help=True, help="List, inspect, compare and delete runs.")
app.command("diff")(history.diff)
app.command("lineage")(history.lineage)
app.command("gc")(history.gc)


@app.command("list")
def list_runs(output: Output = Path("discovery_outputs"), as_json: AsJson = False) -> None:
    """List all runs, oldest first."""
    latest = runs.latest_id(output)
    rows = []
    found = survey(output)
    for run in found:
        is_latest = run.finished and run.run_id == latest
        row = {"run_id": run.run_id, "state": "latest" if is_latest else run.state}
        if run.reason:
            row["reason"] = run.reason
        if run.finished and run.manifest:
            row |= {name: run.manifest["counts"][name] for name in ("rows", "clusters")}
            row["noise_share"] = run.manifest["quality"]["noise_share"]
            row["model"] = run.manifest["model"]
        rows.append(row)
    if as_json:
        print(json.dumps(rows))
    elif not rows:
        print(f"no runs in {output}")
    else:
        table = Table("run", "state", "rows", "clusters", "noise", "model", box=None)
        for row in rows:
            noise = f"{row['noise_share']:.1%}" if "noise_share" in row else ""
            count = f"{row['rows']:,}" if "rows" in row else ""
            table.add_row(row["run_id"], row["state"], count, str(row.get("clusters", "")), noise,
                          row.get("model", ""))  # fmt: skip
        console().print(table)
        for run in found:
            if run.reason:
                print(f"{run.run_id}: {run.reason}")


@app.command("show")
def show(
    run: Annotated[str, typer.Argument(help="Run id, or latest.")] = "latest",
    output: Output = Path("discovery_outputs"),
    tree: Annotated[
        bool, typer.Option("--tree", help="Clusters below the families that they are of.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show one run: its clusters, zones and quality."""
    artifacts = open_artifacts(runs.run_folder(output, run))
    if as_json:
        clusters = artifacts.table("clusters").to_pylist()
        print(json.dumps({"manifest": artifacts.manifest, "clusters": clusters}))
    else:
        show_run(artifacts.folder, artifacts.manifest, tree)


def show_run(folder: Path, manifest: Manifest, tree: bool = False) -> None:
    """Print a run for a person: clusters by size, zones, and quality.

    Args:
        tree: whether the clusters stand below their families.
    """
    screen = console()
    clusters = open_artifacts(folder).table("clusters").to_pylist()
    # By HDBSCAN, and in runs of earlier versions, stability was not measured.
    figure = "persistence"
    if any(cluster.get("stability") is not None for cluster in clusters):
        figure = "stability"
    table = Table("id", "cluster", "traits", "rows", "share", figure, box=None)
    for family in families(clusters) if tree else [clusters]:
        indent = ""
        if tree and len(family) > 1:
            # A family has no name: its largest cluster says what it is like.
            rows, share = (sum(cluster[name] for cluster in family) for name in ("size", "share"))
            table.add_row(
                "", f"{len(family)} like {family[0]['label']}", "", f"{rows:,}", f"{share:.1%}", ""
            )
            indent = "  "
        for cluster in family:
            table.add_row(
                str(cluster["cluster_id"]), indent + cluster["label"], ", ".join(cluster["traits"]),
                f"{cluster['size']:,}", f"{cluster['share']:.1%}",
                f"{cluster[figure]:.2f}",
            )  # fmt: skip
    screen.print(table)
    if says := what_clusters_are(manifest["stages"]["cluster"]):
        screen.print(says)
    quality = manifest["quality"]
    zones = sorted(manifest["stages"]["zones"]["shares"].items(), key=lambda item: -item[1])
    agreement, between = quality["classifier_agreement"], quality.get("between_share")
    screen.print(
        f"zones: {', '.join(f'{zone} {share:.1%}' for zone, share in zones)}\n"
        f"rows: {manifest['counts']['rows']:,}, noise {quality['noise_share']:.1%}, "
        + (f"between two clusters {between:.1%}, " if between is not None else "")
        + f"trustworthiness {quality['trustworthiness']:.3f}, neighbours kept "
        f"{quality['neighbor_recall']:.1%}"
        + (f", classifier agreement {agreement:.1%}" if agreement is not None else "")
        + f"\n{folder}"
    )


def families(clusters: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """The clusters by family, the largest family first; one without a family is alone."""
    by_family: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for cluster in clusters:
        alone = cluster.get("family") is None
        key = ("alone", cluster["cluster_id"]) if alone else ("family", cluster["family"])
        by_family.setdefault(key, []).append(cluster)
    return sorted(by_family.values(), key=lambda own: -sum(cluster["size"] for cluster in own))


class Screen(Console):
    def on_broken_pipe(self) -> None:
        """Leave it to the command line, which ends quietly; rich would exit with code 1."""
        raise


def console() -> Console:
    """Standard output; 160 columns if it is not a terminal."""
    # No markup: a label may hold a token such as [/INST].
    terminal = sys.stdout is not None and sys.stdout.isatty()
    return Screen(width=None if terminal else 160, markup=False)
