"""The figures of each benchmark's file, in words."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.judge.quoted import of_behaviours
from benchmarks.server_figures import (
    Figure,
    of_answer_bytes,
    of_capture_memory,
    of_page,
    of_page_map,
    of_sidecar,
    of_sidecar_fuzz,
    of_sidecar_under_engine,
    of_stream,
)
from discovery.options import CLUSTERINGS


def of_store(found: dict[str, Any]) -> Iterator[Figure]:
    rates = found["rows_per_second"]
    for name, rate in rates["sqlite"].items():
        peer = rates["text key"].get(name)
        told = f" ({rate / peer:.1f}x a text key)" if peer else ""
        yield f"{name}, rows/s, SQLite", f"{rate:,.0f}{told}"
        yield f"{name}, rows/s, Parquet", f"{rates['parquet'][name]:,.0f}"


def of_records(found: dict[str, Any]) -> Iterator[Figure]:
    for name, rates in found["rows_per_second"].items():
        for what in ("impossible_rows", "conform"):
            ratio = rates[what] / rates["plain loop"]
            yield (
                f"{what}, {name}, one core",
                f"{rates[what]:,.0f} rows/s ({ratio:.0f}x a plain loop)",
            )


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


def of_nights(found: dict[str, Any]) -> Iterator[Figure]:
    total, rows = found["total"], found["rows"]
    pairs, series = found["two_nights"], found["fortnight"]
    yield (
        f"{len(pairs)} pairs of runs of {rows:,} rows: right ids and events",
        f"{sum(p['right'] for p in pairs.values())} of {sum(p['judged'] for p in pairs.values())} "
        f"(nearest centroid {sum(p['peer_right'] for p in pairs.values())})",
    )
    yield (
        f"{len(series['runs'])} runs of drift: right",
        f"{series['right']} of {series['judged']} (nearest centroid {series['peer_right']})",
    )
    yield "behaviours that were not one cluster", str(total["left_out"])


def of_real_nights(found: dict[str, Any]) -> Iterator[Figure]:
    for name in CLUSTERINGS:
        if name in found:
            one = found[name]
            yield (
                f"{name}, {len(one['nights'])} nights: events of tasks, others, missing",
                f"{one['of_tasks']}, {one['other']}, {', '.join(one['missing']) or 'none'}",
            )
            if "by_chance" in one:
                yield (
                    f"{name}: events of tasks that may be chance, others that may be",
                    f"{one['of_tasks_by_chance']}, {one['by_chance']}",
                )
            yield f"{name}: events of the same rows again", str(len(one["same_rows_again"]))


def of_gone_areas(found: dict[str, Any]) -> Iterator[Figure]:
    for each, one in found["each"].items():
        yield (
            f"{each} prompts of each task a run: tasks that rows show, noticed as they stop",
            f"{one['noticed_of_shown']:.0%}",
        )
        yield (
            f"{each} prompts: pairs of runs with an area gone where no task was",
            f"{one['pairs_with_one_gone']} of {one['pairs']}",
        )


def of_interruptions(found: dict[str, Any]) -> Iterator[Figure]:
    yield (
        f"{found['times']} runs stopped or paused at random moments: same artifacts",
        f"{found['stopped']} resumed, {found['paused']} paused",
    )
    yield (
        "seconds to finish a stopped run, and to start over",
        f"{found['resumed_seconds']:.1f} and {found['whole_seconds']:.1f}",
    )


def of_kills(found: dict[str, Any]) -> Iterator[Figure]:
    yield (
        f"{found['kills']} kills (seed {found['seed']}): nothing acknowledged was lost",
        f"{found['seconds']:.0f} s",
    )
    for name, case in found["cases"].items():
        finish = case["seconds_to_finish"]
        took = "" if finish is None else f", {finish:.1f} s to finish what was killed"
        done = ", ".join(f"{times} {what}" for what, times in case["done_when_killed"].items())
        yield (
            f"{name}: {case['kills']} kills, by what was done",
            f"{done}; {case['seconds_alone']:.1f} s left alone{took}",
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


def of_online(found: dict[str, Any]) -> Iterator[Figure]:
    for size, rate in found["rates"].items():
        yield f"rows/s of one core, batches of {size}", f"{rate['cpu']:,.0f}"
    runs = found["streams"].values()
    ceiling = sum(run["ceiling"] for run in runs) / len(runs)
    yield (
        f"{len(runs)} streams that drift: mean ARI, least, ceiling",
        f"{found['ari']:.3f}, {min(run['ari'] for run in runs):.3f}, {ceiling:.3f}",
    )
    once = found["reclustered"]
    yield "a round of re-clustering", f"{once['cpu_seconds']:.1f} CPU s, ARI {once['ari']:.3f}"
    rate, others = found["rates"]["256"]["cpu"], found["peers"]
    for name, peer in others.items():
        if isinstance(peer, dict):
            yield (
                f"river's {name}: rows/s learned, labelled; ARI (ours)",
                f"{peer['learn_per_second']:,.0f} ({rate / peer['learn_per_second']:.0f}x), "
                f"{peer['label_per_second']:,.0f}; {peer['ari']:.3f} ({others['ours']:.3f})",
            )


def of_gpu_discovery(found: dict[str, Any]) -> Iterator[Figure]:
    for size in found["sizes"].values():
        job, rows = size["job"], f"{size['rows']:,} rows"
        yield (
            f"{rows}, folder to verified artifacts",
            f"{job['seconds']:.1f} s, {job['microseconds_a_row']:.1f} us a row, "
            f"{job['fit_rows']:,} fitted, ARI {job['answer']['ari']:.3f}, trustworthiness "
            f"{job['trustworthiness']:.3f}, {job['peak_host_gb']:.1f} GB of the host",
        )
        if "floors" in size:
            floors = sum(floor["seconds"] for floor in size["floors"].values())
            yield f"{rows}, floors of all stages", f"{floors:.1f} s"
        for name in ("sampled_to_250k", "cuml", "cpu", "cpu_all"):
            if peer := size.get(name):
                yield (
                    f"{rows}, {name.replace('_', ' ')}",
                    f"{peer['seconds']:.1f} s ({peer['seconds'] / job['seconds']:.1f}x the time), "
                    f"ARI {peer['answer']['ari']:.3f}, trustworthiness "
                    f"{peer['trustworthiness']:.3f}",
                )
    if sample := found.get("sample"):
        between, seeds = sample["ari_between_engines"], sample["ari_between_cpu_seeds"]
        yield (
            "the sample: ARI between the engines (two CPU seeds)",
            f"{sum(between) / len(between):.3f} ({sum(seeds) / len(seeds):.3f})",
        )


def of_gpu_clustering(found: dict[str, Any]) -> Iterator[Figure]:
    for case in found["cases"]:
        own = case["ways"]["engine"]["seconds"]
        peers = (
            f"{name} {way['seconds']:.2f} s ({way['seconds'] / own:.1f}x, ARI "
            f"{way['ari_with_engine']:.4f})"
            for name, way in case["ways"].items()
            if name != "engine"
        )
        yield (
            f"{case['map']}, {case['rows']:,} points, clusters of {case['min_cluster_size']:,}",
            "; ".join([f"{own:.2f} s", *peers]),
        )


def of_gpu_kills(found: dict[str, Any]) -> Iterator[Figure]:
    for name, run in found["runs"].items():
        seconds = run.get("resumed_seconds", run.get("seconds"))
        told = "" if "ari" not in run else f", ARI {run['ari']:.4f} with the run left alone"
        told += ", the same files" if run.get("same_files") else ""
        yield f"{found['rows']:,} rows, {name}", f"{seconds:.1f} s{told}"


def of_gpu_transports(found: dict[str, Any]) -> Iterator[Figure]:
    for name, run in found["transports"].items():
        over = "TLS of the job's own workers" if name == "own" else name.upper()
        what = f"{found['rows']:,} rows on {found['gpus']} GPUs over {over}"
        yield what, f"{run['seconds']:.1f} s, ARI {run['answer']['ari']:.3f}"
        if killed := run.get("killed"):
            yield (
                f"{what}, killed in the middle",
                f"resumed in {killed['resumed_seconds']:.1f} s, ARI {killed['ari_with_first']:.4f} "
                "with the first run",
            )


def of_sglang_serving(found: dict[str, Any]) -> Iterator[Figure]:
    for batch, kinds in found["batches"].items():
        for kind, case in kinds.items():
            yield f"batch {batch}, {kind}", f"{case['percent']:.2f}% less than without the plug-in"


def of_step_host(found: dict[str, Any]) -> Iterator[Figure]:
    for name, case in found["figures"].items():
        times = case["row_by_row_ms"] / case["ms"]
        yield (
            f"{found['requests']} requests, {name}",
            (f"{case['ms']:.2f} ms a step; entries of each row separately: {times:.1f} times"),
        )
    case = found["recording"]
    times = case["in_threads_us"] / case["other_threads_us"]
    yield (
        f"{found['requests']} requests, other threads of the model's process for records",
        f"{case['other_threads_us']:.0f} us a step; threads that make and store them: {times:.1f} "
        "times",
    )
    yield "the process for records", f"{case['process_us']:.0f} us a step"


def of_engines_agree(found: dict[str, Any]) -> Iterator[Figure]:
    for name in ("needle", "codename"):
        case = found[name]
        yield f"{name}, {case['rows']} rows", f"differ by {case['largest']:.5f} at most"


def of_gpu_server_steps(found: dict[str, Any]) -> Iterator[Figure]:
    for name, case in found["steps"].items():
        exact, server = case["exact"]["us"], case["server"]["us"]
        yield name, f"{server:.1f} us, by the plan of a server; {exact:.1f} us by an exact one"


def of_gpu_latent(found: dict[str, Any]) -> Iterator[Figure]:
    for case in found["cases"]:
        for name, way in case["ways"].items():
            yield f"{case['name']}: {name}", f"{way['us']:.0f} us a layer ({way['share']:.0%})"


def of_real_million(found: dict[str, Any]) -> Iterator[Figure]:
    for name in ("in_a_process", "as_a_process"):
        run = found[name]
        said = f"{run['seconds']:.1f} s, AMI with the task {run['ami_with_task']:.2f}"
        yield f"{run['rows']:,} rows of real attention, {name.replace('_', ' ')}", said


def of_gpu_kernels(found: dict[str, Any]) -> Iterator[Figure]:
    for part in ("headline", "fused"):
        case = found.get(part, {})
        for name, way in case.get("ways", {}).items():
            if "us" in way:
                share = f"{case['floor_us'] / way['us']:.0%} of what a sum reads"
                yield f"{part}: {name}", f"{way['us']:.0f} us a layer ({share})"
    for case in found.get("sweep", []):
        for name, way in case.get("ways", {}).items():
            yield f"{case['name']}: {name}", f"{way['us']:.0f} us a layer ({way['share']:.0%})"
    for variant, asking in found.get("asking", {}).items():
        for count, way in asking["rows"].items():
            yield f"{count} rows ask: {variant}", f"{way['us']:.1f} us a layer"
    for name, plan in found.get("memory", {}).get("plans", {}).items():
        yield f"a plan for 1,048,576 keys: {name}", f"{plan['bytes'] / 1e6:.2f} MB"


def of_kernel_layers(found: dict[str, Any]) -> Iterator[Figure]:
    for case in found["cases"]:
        us = ", ".join(f"{name} {took:.1f}" for name, took in case["us"].items())
        yield f"4 layers, B={case['shape']['batch']}, {case['variant']}, us a step", us


FIGURES: dict[str, Callable[[dict[str, Any]], Iterator[Figure]]] = {
    "sidecar": of_sidecar,
    "store": of_store,
    "records": of_records,
    "capture": of_capture,
    "zones": of_zones,
    "discovery": of_discovery,
    "behaviours": of_behaviours,
    "classifier": of_classifier,
    "nights": of_nights,
    "real_nights": of_real_nights,
    "gone_areas": of_gone_areas,
    "interruptions": of_interruptions,
    "kills": of_kills,
    "memory": of_memory,
    "online": of_online,
    "gpu_discovery": of_gpu_discovery,
    "gpu_clustering": of_gpu_clustering,
    "gpu_kernels": of_gpu_kernels,
    "gpu_latent": of_gpu_latent,
    "real_million": of_real_million,
    "kernel_layers": of_kernel_layers,
    "gpu_server_steps": of_gpu_server_steps,
    "sglang_serving": of_sglang_serving,
    "vllm_serving": of_sglang_serving,
    "engines_agree": of_engines_agree,
    "gpu_kills": of_gpu_kills,
    "gpu_transports": of_gpu_transports,
    "sidecar_fuzz": of_sidecar_fuzz,
    "stream": of_stream,
    "answer_bytes": of_answer_bytes,
    "step_host": of_step_host,
    "capture_memory": of_capture_memory,
    "sidecar_under_engine": of_sidecar_under_engine,
    "page": of_page,
    "page_map": of_page_map,
}


def figures_table(folder: Path) -> str:
    """The figures of every file in the folder, as Markdown."""
    lines = ["# Figures", "", "Written by `python benchmarks/run.py --out DIR`."]
    for path in sorted(folder.glob("*.json")):
        found = json.loads(path.read_text(encoding="utf-8"))
        # By its script: a benchmark may have several files, and a namesake on the GPU.
        script = Path(found["command"].split()[1]).stem if "command" in found else ""
        if script not in FIGURES:
            continue
        machine = found["machine"]
        device = found.get("about", {}).get("device", "") if path.stem.endswith("-gpu") else ""
        device = "; ".join(machine.get("gpus", [])) or device
        lines += [
            "",
            # What has no target neither passes nor fails.
            f"## {path.stem}{'' if found.get('passed', True) else ' (failed)'}",
            "",
            f"`{found['command']}`, {found['date']}, {machine['cpu']}, {machine['cores']} cores, "
            f"{machine['memory_gib']} GiB{', ' + device if device else ''}",
            *(["", found["note"]] if "note" in found else []),
            "",
            "| figure | value |",
            "|---|---|",
            *(f"| {name} | {value} |" for name, value in FIGURES[script](found)),
        ]
    return "\n".join(lines) + "\n"
