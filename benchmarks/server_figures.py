"""The figures of the benchmarks of servers: the sidecar, an engine's answers, and the page."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

Figure = tuple[str, str]


def of_sidecar(found: dict[str, Any]) -> Iterator[Figure]:
    for name, load in found.get("classify", {}).items():
        ms = load["milliseconds"]
        reloads = f", {load['reloads']} reloads" if "reloads" in load else ""
        yield (
            f"/classify, {name}: fingerprints/s; ms at 50% and 99%",
            f"{load['fingerprints_per_second']:,.0f}; {ms['p50']:.2f} and {ms['p99']:.2f}{reloads}",
        )
    if "times_the_peer" in found:
        yield "single requests/s to the peer's", f"{found['times_the_peer']:.1f}x"
        yield "fingerprints/s in batches to the peer's", f"{found['batches_times_the_peer']:.0f}x"
    for kind, way in found.get("ingest", {}).items():
        yield (
            f"ZMQ to {kind}, rows/s stored of those offered",
            f"{way['stored_per_second']:,.0f} of {way['offered_per_second']:,.0f}, every row there",
        )
    if soak := found.get("soak"):
        yield (
            f"soak of {soak['minutes']:g} minutes: resident memory, slope",
            f"{soak['resident_mb']:.0f} MB, {soak['mb_per_minute']:+.2f} MB a minute",
        )
    for name, met in found["targets"].items():
        yield name, "met" if met else "missed"


def of_sidecar_fuzz(found: dict[str, Any]) -> Iterator[Figure]:
    counts, memory = found["fingerprints"], found["resident_mib"]
    yield (
        f"{found['messages']:,} mutated messages (seed {found['seed']})",
        f"each answered or counted: {found['malformed']:,} of the stream malformed, "
        f"{counts['stored']:,} rows stored, {counts['duplicate']:,} duplicates, "
        f"{counts['invalid']:,} invalid",
    )
    yield "resident memory, MiB", f"{memory['first']:.0f} at first, {memory['last']:.0f} at the end"


def of_stream(found: dict[str, Any]) -> Iterator[Figure]:
    rows = f"{found['batch_rows']} rows"
    for name, way in (("the sender", found["send"]), ("JSON of each row", found["peer"])):
        yield (
            f"us of the caller for {rows}, {name}, median (p99)",
            f"{way['median_us']:.0f} ({way['p99_us']:.0f})",
        )
    yield (
        f"CPU us to encode {rows}, to decode them",
        f"{found['encode_cpu_us']:.0f}, {found['decode_cpu_us']:.0f}",
    )


def of_answer_bytes(found: dict[str, Any]) -> Iterator[Figure]:
    for mode, sizes in found["bytes_a_step"].items():
        yield (
            f"{mode}: bytes a step of a stream, compressed, plain; as published",
            f"{sizes['stream, gzip']:.0f}, {sizes['stream']:.0f}; "
            f"{sizes['entries as published']:.0f} "
            f"({sizes['times the compressed stream']:.1f}x)",
        )


def of_capture_memory(found: dict[str, Any]) -> Iterator[Figure]:
    for case in found["cases"]:
        yield (
            f"{case['mode']}, {case['layers']} layers, {case['requests']} requests of "
            f"{found['length']:,} tokens: MB, at the least",
            f"{case['bytes'] / 1e6:.2f}, {case['least_bytes'] / 1e6:.2f}",
        )


def of_sidecar_under_engine(found: dict[str, Any]) -> Iterator[Figure]:
    rows = found["rows"]
    yield (
        f"{rows['expected']:,} rows of {found['requests']:,} answers, sidecar killed",
        f"{rows['in_store']:,} stored, {rows['dropped']:,} dropped by the sender, "
        f"{rows['lost_with_the_killed']:,} lost with the killed; {found['failed']} answers failed",
    )
    for name, window in found["windows"].items():
        what = "sidecar" if name == "without" else "that"
        yield (
            f"{name} {what}: ms of a token, of the model and of all CPUs",
            f"{window['model_ms_per_token']:.2f}, {window['server_cpu_ms_per_token']:.2f}",
        )


def of_page(found: dict[str, Any]) -> Iterator[Figure]:
    for view, times in found["first_paint"].items():
        paint, ready = times["paint_ms"], times["ready_ms"]
        yield (
            f"{view}: first paint, ready, median (worst)",
            f"{paint['median']:.0f} ({paint['worst']:.0f}) ms, "
            f"{ready['median']:.0f} ({ready['worst']:.0f}) ms",
        )
    for view, sent in found["bytes"].items():
        yield f"{view}: KB that are sent", f"{sent / 1000:.0f}"
    live = found["live"]
    yield (
        f"Live at {live['rows_per_s']:,} rows/s: browser, its main thread, sidecar",
        f"{live['browser_core_share']:.0%}, {live['page_main_thread_share']:.0%}, "
        f"{live['sidecar_core_share']:.0%} of a core",
    )


def of_page_map(found: dict[str, Any]) -> Iterator[Figure]:
    for case in found["maps"]:
        yield (
            f"{case['rows']:,} points, {case['way']}: frames/s; median, 95% ms; CPU ms a frame",
            f"{case['frames_per_s']:.0f}; {case['median_ms']:.0f}, {case['p95_ms']:.0f}; "
            f"{case['cpu_ms_per_frame']:.0f} ({case['points_while_moving']:,} points a frame)",
        )
    for name, met in found["targets"].items():
        yield name, "met" if met else "missed"
