"""Runs the benchmarks one after another, and says the figures that the README quotes.

    python benchmarks/run.py --out DIR [--only NAME,...]      # on any machine
    python benchmarks/run.py --out DIR --gpu [--only NAME,...]   # the ones that need a GPU

Each runs in a process of its own and writes DIR/<name>.json (with --gpu, DIR/<name>-gpu.json):
its figures, date, versions, machine and command. DIR/README-figures.md is the table of the
figures of every file that is there. Exits 1 when one failed; the others run all the same.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# The repository is no installed package; and `discovery` must be the package, not a benchmark.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import common

HERE = Path(__file__).resolve().parent
# By name: the script and its options.
ON_CPU = {
    name: [name] for name in ("store", "capture", "zones", "discovery", "behaviours", "classifier")
}
ON_CPU["capture"] += ["--device", "cpu"]
ON_CPU |= {"nights": ["nights"], "interruptions": ["interruptions"]}
# Their rows are kept there: made anew they would take longer than what is measured.
MEMORY = ["memory", "--folder", "build/benchmarks"]
ON_CPU["memory-500k"] = [*MEMORY, "--rows", "500000", "--store", "sqlite", "--limit", "4"]
ON_CPU["memory-5m"] = [*MEMORY, "--rows", "5000000", "--store", "parquet", "--limit", "8"]
ON_GPU = {
    "capture": ["capture", "--device", "cuda", "--size", "small", "--dtype", "float32"],
    "capture-8b": ["capture", "--device", "cuda", "--size", "8b", "--dtype", "bfloat16"],
}
# Weights of the 8b model, its cache, and the attention that the peer asks for.
MEMORY_8B_GIB = 40
LIBRARIES = (*common.LIBRARIES, "dask", "tokenizers", "torch", "triton", "transformers")
Figure = tuple[str, str]


def gpu_memory_gib() -> float:
    """Free memory of the GPU; 0 where there is none."""
    try:
        import torch
    except ImportError:
        return 0.0
    return torch.cuda.mem_get_info()[0] / 2**30 if torch.cuda.is_available() else 0.0


def run(arguments: list[str], path: Path) -> bool:
    """Run one benchmark and complete its file; False where it failed."""
    script, *options = arguments
    command = ["benchmarks/" + script + ".py", *options]
    print(f"== python {' '.join(command)}", flush=True)
    path.unlink(missing_ok=True)
    done = subprocess.run(
        [sys.executable, str(HERE / f"{script}.py"), *options, "--json", str(path)], check=False
    )
    if path.exists():
        figures = json.loads(path.read_text(encoding="utf-8"))
        # The options of a benchmark are in its command; where its file lies is nobody's business.
        figures.get("about", {}).pop("arguments", None)
        told = {**common.about(LIBRARIES), **figures}
        told["command"] = " ".join(["python", *command])
        told["passed"] = done.returncode == 0
        path.write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")
    if done.returncode:
        print(f"== {script} failed with exit code {done.returncode}", flush=True)
    return done.returncode == 0


def of_store(found: dict[str, Any]) -> Iterator[Figure]:
    rates = found["rows_per_second"]
    for name, rate in rates["sqlite"].items():
        peer = rates["text key"].get(name)
        told = f" ({rate / peer:.1f}x a text key)" if peer else ""
        yield f"{name}, rows/s, SQLite", f"{rate:,.0f}{told}"
        yield f"{name}, rows/s, Parquet", f"{rates['parquet'][name]:,.0f}"


def of_capture(found: dict[str, Any]) -> Iterator[Figure]:
    for way, row in found["results"].items():
        yield (
            f"{way}: prompt, decode",
            f"{row['prefill_times_off']:.2f}x, {row['decode_times_off']:.2f}x the time without",
        )


def of_zones(found: dict[str, Any]) -> Iterator[Figure]:
    speed = found["speed"]
    yield (
        "vectors to zones, one core",
        f"{speed['rows_per_second']:,.0f}/s ({speed['ratio']:.0f}x a plain loop)",
    )
    for least, table in found.get("auc", {}).items():
        yield f"ripple AUC, {least}, in octaves", f"{table['ripple']['balanced']['mean']:.3f}"


def of_discovery(found: dict[str, Any]) -> Iterator[Figure]:
    runs = found["job"]["seeds"].values()
    rows = found["job"]["rows"]
    yield f"ARI with the truth, {rows:,} rows", f"{min(r['ari'] for r in runs):.3f}"
    if between := found["job"]["ari_between_seeds"]:
        yield "ARI between seeds", f"{min(between):.3f}"
    yield "trustworthiness", f"{min(r['trustworthiness'] for r in runs):.3f}"
    yield f"seconds, {rows:,} rows", f"{max(r['seconds'] for r in runs):.0f}"
    ours, peer = next(iter(runs)), found["plain_recipe"]
    yield (
        f"job and plain recipe, {rows:,} rows",
        f"ARI {ours['ari']:.3f} and {peer['ari']:.3f}, trustworthiness "
        f"{ours['trustworthiness']:.3f} and {peer['trustworthiness']:.3f}, "
        f"{ours['seconds']:.0f} s and {peer['seconds']:.0f} s "
        f"({peer['seconds'] / ours['seconds']:.1f}x)",
    )
    for space, cells in found["ablation"].items():
        told = f"ARI {cells['planted']['ari']:.3f}"
        if "sample" in cells:
            told += f"; sample: {cells['sample']['log2_position']['eta_squared']:.1%} of position"
        yield f"from {space}", told


def of_behaviours(found: dict[str, Any]) -> Iterator[Figure]:
    for name in ("job", "plain_recipe"):
        if name not in found:
            continue
        one, said = found[name], name.replace("_", " ")
        yield f"{said}: clusters, noise", f"{one['clusters']}, {one['noise_share']:.1%}"
        yield f"{said}: of log2(position)", f"{one['log2_position']['eta_squared']:.1%}"
        for word, cells in one["mutual_information"].items():
            yield (
                f"{said}: AMI with {word} in octaves (chance)",
                f"{cells['within']:.3f} ({cells['within_by_chance']:.3f})",
            )


def of_nights(found: dict[str, Any]) -> Iterator[Figure]:
    total, rows = found["total"], found["rows"]
    pairs, series = found["two_nights"], found["fortnight"]
    yield (
        f"{len(pairs)} pairs of nights of {rows:,} rows: right ids and events",
        f"{sum(p['right'] for p in pairs.values())} of {sum(p['judged'] for p in pairs.values())} "
        f"(nearest centroid {sum(p['peer_right'] for p in pairs.values())})",
    )
    yield (
        f"{len(series['runs'])} nights of drift: right",
        f"{series['right']} of {series['judged']} (nearest centroid {series['peer_right']})",
    )
    yield "behaviours that were not one cluster", str(total["left_out"])


def of_interruptions(found: dict[str, Any]) -> Iterator[Figure]:
    yield (
        f"{found['times']} runs stopped or paused at random moments: same artifacts",
        f"{found['stopped']} resumed, {found['paused']} paused",
    )
    yield (
        "seconds to finish a stopped run, and to start over",
        f"{found['resumed_seconds']:.1f} and {found['whole_seconds']:.1f}",
    )


def of_memory(found: dict[str, Any]) -> Iterator[Figure]:
    yield (
        f"{found['rows']:,} rows, {found['store']}: peak of all processes",
        f"{found['peak_gb']:.2f} GB of {found['limit_gb']:g}, {found['seconds']:.0f} s, "
        f"ARI {found['answer']['ari']:.3f}",
    )
    if peer := found.get("peer"):
        yield "all rows in one table and PCA", f"{peer['peak_gb']:.2f} GB, {peer['seconds']:.0f} s"


def of_classifier(found: dict[str, Any]) -> Iterator[Figure]:
    ours = found["classifier"]
    for name in ("kd_tree", "plain_recipe"):
        ratio = ours["per_second"] / found[name]["per_second"]
        yield f"fingerprints/s to {name.replace('_', ' ')}", f"{ratio:.1f}x"
    yield "fingerprints/s, one core", f"{ours['per_second']:,.0f}"
    yield "us for one, median (p99)", "{median:.0f} ({p99:.0f})".format(**ours["microseconds"])
    yield "agreement with held-out rows", f"{found['agreement']:.1%}"


FIGURES: dict[str, Callable[[dict[str, Any]], Iterator[Figure]]] = {
    "store": of_store,
    "capture": of_capture,
    "zones": of_zones,
    "discovery": of_discovery,
    "behaviours": of_behaviours,
    "classifier": of_classifier,
    "nights": of_nights,
    "interruptions": of_interruptions,
    "memory": of_memory,
}


def figures_table(folder: Path) -> str:
    """The figures of every file in the folder, as Markdown."""
    lines = ["# Figures", "", "Written by `python benchmarks/run.py --out DIR`."]
    for path in sorted(folder.glob("*.json")):
        found = json.loads(path.read_text(encoding="utf-8"))
        source = path.stem.removesuffix("-gpu").partition("-")[0]
        if source not in FIGURES or "command" not in found:
            continue
        machine = found["machine"]
        device = found.get("about", {}).get("device", "") if path.stem.endswith("-gpu") else ""
        lines += [
            "",
            f"## {path.stem}{'' if found['passed'] else ' (failed)'}",
            "",
            f"`{found['command']}`, {found['date']}, {machine['cpu']}, {machine['cores']} cores, "
            f"{machine['memory_gib']} GiB{', ' + device if device else ''}",
            "",
            "| figure | value |",
            "|---|---|",
            *(f"| {name} | {value} |" for name, value in FIGURES[source](found)),
        ]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True, help="folder of the figures")
    parser.add_argument("--gpu", action="store_true", help="the benchmarks that need a GPU")
    parser.add_argument("--only", help="names, with commas between them")
    options = parser.parse_args()
    chosen = dict(ON_GPU if options.gpu else ON_CPU)
    names = options.only.split(",") if options.only else list(chosen)
    if unknown := sorted(set(names) - set(chosen)):
        parser.error(f"unknown benchmark {unknown[0]!r}: use {', '.join(chosen)}")
    if options.gpu:
        free = gpu_memory_gib()
        if not free:
            parser.error("--gpu needs a GPU that torch can use")
        if "capture-8b" in names and free < MEMORY_8B_GIB:
            print(f"capture-8b: left out, {free:.0f} GiB are free and it takes {MEMORY_8B_GIB}")
            names.remove("capture-8b")
    options.out.mkdir(parents=True, exist_ok=True)
    ending = "-gpu.json" if options.gpu else ".json"
    good = [run(chosen[name], options.out / f"{name}{ending}") for name in names]
    table = figures_table(options.out)
    (options.out / "README-figures.md").write_text(table, encoding="utf-8")
    print(table)
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
