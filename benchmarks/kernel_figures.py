"""What the kernel benchmark tells of its figures: tables, wrong answers, and targets.

The targets are those of the issue "Kernels", on one H200. `heads` (statistics and the top k of each
head) is the variant that its shares of the bandwidth and its small batches are about.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from benchmarks.kernel_cases import TOP_K

TARGET_DEVICE = "H200"
HEADS_US, MEAN_US = 150.0, 165.0
# 80% of the 4.39 TB/s that the host reads; a sum may read more.
LEAST_GB_PER_SECOND, LARGE_KEY_BYTES = 0.80 * 4390, 128e6
# Small is what one request of 8,192 keys reads; between the two nothing is promised.
SMALL_US, SMALL_KEY_BYTES = 12.0, 17e6
FUSED_RATIO = 1.03
NOBODY_US = 2.0
MEMORY_BYTES = 1e6

TITLES = {
    "statistics": "statistics",
    "heads": f"statistics, top {TOP_K} of each head",
    "mean": f"statistics, top {TOP_K} of each head and the mean",
}
ONE = "one layer a step"
OFF, ON = "fused, statistics off", "fused, statistics"
SGLANG = "SGLang"
SUM = "torch.sum of as many bytes"


class Target(NamedTuple):
    """What a figure must be: at most its bound, or at least; None where it was not measured."""

    name: str
    value: float | None
    bound: float
    least: bool = False

    @property
    def met(self) -> bool | None:
        if self.value is None:
            return None
        return self.value >= self.bound if self.least else self.value <= self.bound

    def __str__(self) -> str:
        word = {None: "not measured", True: "met", False: "MISSED"}[self.met]
        value = "-" if self.value is None else f"{self.value:.4g}"
        side = "at least" if self.least else "at most"
        return f"  {word:<13} {self.name}: {value}, {side} {self.bound:.4g}"


def targets(figures: dict[str, Any]) -> list[Target]:
    """What must be true, with what was measured of it."""
    headline = figures.get("headline", {})
    decode = figures.get("fused", {}).get("ways", {})
    found = [
        Target(f"{TITLES['heads']}, us a layer", us_of(headline, "heads"), HEADS_US),
        Target(f"{TITLES['mean']}, us a layer", us_of(headline, "mean"), MEAN_US),
    ]
    for case in (headline, *figures.get("sweep", [])):
        way = case.get("ways", {}).get("heads")
        if way and case["key_bytes"] >= LARGE_KEY_BYTES:
            name, rate = f"GB/s of K, {case['name']}", way["key_gb_per_second"]
            found.append(Target(name, rate, LEAST_GB_PER_SECOND, least=True))
        elif way and case["key_bytes"] <= SMALL_KEY_BYTES:
            found.append(Target(f"us a layer, {case['name']}", way["us"], SMALL_US))
    off, on = us_of(figures.get("fused", {}), OFF), us_of(figures.get("fused", {}), ON)
    timed = [way["us"] for name, way in decode.items() if SGLANG in name and "us" in way]
    sglang = min(timed, default=None)
    found += [
        Target("fused decode, statistics on over off", ratio(on, off), FUSED_RATIO),
        Target("fused decode with statistics over SGLang's without", ratio(on, sglang), 1.0),
    ]
    for variant, asking in figures.get("asking", {}).items():
        rows = asking["rows"]
        title, whole = f"us a layer, {TITLES[variant]}", max(rows)
        found.append(Target(f"nobody asked, {title}", rows[0]["us"], NOBODY_US))
        for count, way in rows.items():
            if 0 < count < whole:
                bound = SMALL_US + rows[whole]["us"] * count / whole
                found.append(Target(f"{count} of {whole} rows asked, {title}", way["us"], bound))
    plans = figures.get("memory", {}).get("plans", {})
    for name, title in TITLES.items():
        size = plans[name]["bytes"] if name in plans else None
        found.append(Target(f"bytes of a plan for 1,048,576 keys, {title}", size, MEMORY_BYTES))
    return found


def us_of(case: dict[str, Any], name: str) -> float | None:
    way = case.get("ways", {}).get(name)
    return way["us"] if way else None


def ratio(a: float | None, b: float | None) -> float | None:
    return a / b if a is not None and b is not None else None


def problems_in(found: Any, where: str = "") -> Iterator[str]:
    """Every wrong answer in some figures, and of what it is."""
    if isinstance(found, dict):
        where = found.get("name", where)
        yield from (f"{where}: {problem}" for problem in found.get("problems", []))
        for name, part in found.items():
            if name != "problems":
                yield from problems_in(part, f"{where}, {name}" if where else str(name))
    elif isinstance(found, list):
        for part in found:
            yield from problems_in(part, where)


def judged(figures: dict[str, Any]) -> bool:
    """Tell what is wrong and which targets are met; whether all is well. Targets are judged on an
    H200 alone."""
    good = True
    for problem in problems_in(figures):
        print(f"wrong answer: {problem}", file=sys.stderr)
        good = False
    if "targets" not in figures:
        return good
    mine = TARGET_DEVICE in figures["about"]["device"]
    print("targets" if mine else f"targets of an {TARGET_DEVICE}, not judged here")
    for target in targets(figures):
        print(target)
        good &= target.met is not False or not mine
    return good


def wrong(way: dict[str, Any]) -> str:
    return f"  WRONG: {'; '.join(way['problems'])}" if way.get("problems") else ""


def print_ways(found: dict[str, Any], own: str) -> None:
    """A table of ways of one batch, each beside the way `own`, which may not be among them."""
    base = us_of(found, own)
    print(
        f"{found['name']}, {found['layers']} layers: K {found['key_bytes'] / 1e6:,.0f} MB a layer, "
        f"floor {found['floor_us']:.1f} us"
    )
    print(f"  {'':<66}{'us':>9}{'p10':>9}{'p90':>9}{'GB/s of K':>11}{'floor':>8}{'x':>8}")
    for name, way in found["ways"].items():
        if "us" not in way:
            print(f"  {name:<66}{way['left_out']:>9}")
            continue
        beside = ratio(way["us"], base)
        print(
            f"  {TITLES.get(name, name):<66}{way['us']:9.1f}{way['low']:9.1f}{way['high']:9.1f}"
            f"{way['key_gb_per_second']:11,.0f}{found['floor_us'] / way['us']:8.1%}"
            f"{'' if beside is None else f'{beside:8.2f}'}{wrong(way)}"
        )
    sys.stdout.flush()


def print_asking(found: dict[str, Any]) -> None:
    print(
        f"{found['name']}, {found['layers']} layers, by the rows that ask; a schedule takes "
        f"{found['schedule_us']:.2f} us"
    )
    for count, way in found["rows"].items():
        print(f"  {count:>4} rows {way['us']:9.2f} us a layer{wrong(way)}")
    sys.stdout.flush()


def print_memory(found: dict[str, Any]) -> None:
    for name, plan in found["plans"].items():
        print(
            f"a plan for {found['name']}, {TITLES[name]}: {plan['bytes']:,} bytes{wrong(plan)}",
            flush=True,
        )


def print_replay(found: dict[str, Any]) -> None:
    print(
        f"{found['name']}: {found['replays']:,} replays in {found['seconds']:.1f} s, "
        f"{found['looks']} compared with eager steps and with float64 "
        f"({json.dumps(found['errors'])}){wrong(found)}",
        flush=True,
    )


def print_case(case: dict[str, Any]) -> None:
    """One line of the sweep."""
    if "left_out" in case:
        print(f"  {case['name']:<62} left out: {case['left_out']}", flush=True)
        return
    line = f"  {case['name']:<62}{case['key_bytes'] / 1e6:9,.1f} MB{case['floor_us']:9.1f} us "
    for name, way in case["ways"].items():
        line += f"  {name} {way['us']:.1f} ({way['share']:.0%}){wrong(way)}"
    print(line, flush=True)


def print_tunings(found: Sequence[dict[str, Any]], names: Sequence[str], most: int = 20) -> None:
    """The fastest of some tunings."""
    print("".join(f"{name:>10}" for name in names) + f"{'us':>9}{'share':>8}")
    for row in sorted((row for row in found if "us" in row), key=lambda row: row["us"])[:most]:
        told = "".join(f"{row[name]:>10}" for name in names)
        print(f"{told}{row['us']:>9.1f}{row['share']:>8.1%}{wrong(row)}")
    sys.stdout.flush()
