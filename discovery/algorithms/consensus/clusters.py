"""Rows to clusters that other requests would give as well.

A tree of cells is made of one half of the requests, and of the other, many times. Of each tree
those groups are taken that the other trees have too (`found_again`), and the clusters are what most
of these agree on (`partition`). What half of the requests shows by chance, the others do not show.
A group that goes on in another at twice the context, in the same requests, is taken for a piece
of one (`lengths`), and what is taken for one may be several, with valleys between them (`parts`).
Where trees hardly find one group again, and no valleys are between their groups, rows are a
continuum, and clusters are its `regions`.
After a parent run, its clusters go on where nothing has changed (`continued`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from capture_kernels.arrays import Doubles, Floats, Int32s, Ints, Mask
from discovery.algorithms.known_areas import InAreas
from discovery.algorithms.threads import one_thread, usable_cpus
from discovery.artifacts.memberships import Memberships
from discovery.artifacts.schema import NOISE

from .areas import AREAS, areas_of
from .cell_tree import POWER, ROUNDS, Tree, cell_centres, nearest_cells, trees_of
from .continued import (
    LEAST_REQUESTS,
    NEW,
    OTHERWISE,
    SHARE_OF_REQUESTS,
    SURE,
    Continued,
    ParentClusters,
    continued,
    counted,
    effective_requests,
    is_new,
    least_requests,
    rows_before,
)
from .found_again import CHANCE, COMPARED, found_again, large_groups
from .groups import DETAIL, LARGEST, agreement, groups_taken, stability_of
from .lengths import (
    ASSUMED,
    ENOUGH,
    LEAST_COMPARED,
    MOST_COMPARED,
    links_of,
    links_of_atoms,
)
from .new_areas import COARSE, PROBED_FAMILIES, probe_of, with_new_areas
from .partition import (
    RELATED,
    STARTS,
    TOGETHER,
    agreement_of_halves,
    families_of,
    median_partition,
    rows_inside,
    without_small,
)
from .parts import DETAILS, SEEN_BY, VALLEY, RowsOfLengths, divided_clusters, mean_valley
from .profiled import AGREED, MANY_REQUESTS, PROFILED_FAMILIES, parts_found, profiled_regions
from .regions import (
    ALIKE,
    FINE,
    LEAST_GAIN,
    MOST_FAMILIES,
    MOST_OF_FAMILY,
    REGION_ROUNDS,
    REGIONS,
    REGIONS_OF_HALVES,
    ROUNDS_OF_ROWS,
    STARTS_OF_ALL,
    STARTS_OF_HALF,
    TIMES,
    RowsInAtoms,
    regions_of,
)
from .request_profiles import DIMENSIONS, STEPS, VOTES
from .row_shares import memberships, row_shares
from .valleys import BINS, LEAST_ROWS, SHRINKAGE, STEPS_OF_OCTAVE

# Trees, two of each division of the requests into halves.
TREES = 200
# Threads that they are made by, and trees that one makes at once; each tree has its random numbers,
# whichever thread makes it.
MOST_THREADS, MOST_AT_ONCE = 16, 25
# Cells of a tree, and atoms, the cells that all trees are compared in: at most so many, and fewer
# where they would have fewer rows than that.
CELLS, CELL_ROWS = 200, 15
ATOMS, ATOM_ROWS = 300, 10
# A group of fewer rows than this share of the smallest cluster merges before all others.
LEAST_GROUP = 0.3
# Rows are a continuum where trees of two halves of the requests agree by less than this, as the
# mean adjusted Rand index. Of 12,000 planted rows they agree by 0.57 to 0.96 (of 3,000 with 30%
# noise by 0.50, of 60 behaviours by 0.47 and more); of real attention by 0.21 to 0.48 (the half to
# develop on, benchmarks/behaviours.py).
CONTINUUM = 0.5
# And where the valleys between the clusters of trees are shallower than this on average. Of those
# 60 behaviours the mean was 0.19 and 0.42, of real attention 0.84 and more.
SHALLOW = 0.6


class Clusters(NamedTuple):
    """Clusters of n rows, numbered by falling size.

    members: of the rows, none of which is noise. stability: float64[c], how far the trees (or the
    regions) of half of the requests have each one. family: int32[c], numbered by falling size.
    heir_of: int32[c], the number of the parent's cluster that each is, -1 for those of this run
    alone; new: bool[c], whether the parent had hardly any rows there. raw_stability: float64[k], of
    the clusters of trees before any is merged for not being found again, also where regions take
    their place: noise has many such. halves_agree: how far trees of two halves of the requests
    agree; regions: whether clusters are those of a continuum; by_requests: whether their families
    are of what requests do, as of `profiled_regions`. areas: of the rows there, none elsewhere.
    """

    members: Memberships
    stability: Doubles
    family: Int32s
    heir_of: Int32s
    new: Mask
    raw_stability: Doubles
    halves_agree: float
    regions: bool
    by_requests: bool
    areas: InAreas

    @property
    def labels(self) -> Int32s:
        """int32[n], the cluster of each row."""
        return self.members.label


def settings() -> dict[str, Any]:
    """All constants that shape the clusters, for the hash of a checkpoint's inputs."""
    return {
        "trees": (TREES, CELLS, CELL_ROWS, ATOMS, ATOM_ROWS, LEAST_GROUP, ROUNDS, POWER),
        "groups": (CHANCE, COMPARED, LARGEST, DETAIL, TOGETHER, RELATED, STARTS),
        "requests": (LEAST_REQUESTS, SHARE_OF_REQUESTS),
        "lengths": (ASSUMED, ENOUGH, LEAST_COMPARED, MOST_COMPARED),
        "parts": (DETAILS, VALLEY, SEEN_BY, STEPS_OF_OCTAVE, LEAST_ROWS, SHRINKAGE, BINS),
        "continued": (OTHERWISE, SURE, NEW),
        "regions": (
            CONTINUUM,
            SHALLOW,
            REGIONS_OF_HALVES,
            REGIONS,
            MOST_FAMILIES,
            MOST_OF_FAMILY,
            ALIKE,
            FINE,
            STARTS_OF_ALL,
            TIMES,
            STARTS_OF_HALF,
            REGION_ROUNDS,
            ROUNDS_OF_ROWS,
            LEAST_GAIN,
            PROBED_FAMILIES,
            COARSE,
        ),
        "profiles": (STEPS, DIMENSIONS, VOTES, PROFILED_FAMILIES, MANY_REQUESTS, AGREED),
        "areas": AREAS,
    }


def load() -> None:
    """Import and compile what `stable_clusters` needs. Without it, that happens where it is called,
    and must not happen there beside another thread that imports or compiles."""
    import scipy.ndimage
    import scipy.sparse.linalg  # noqa: F401
    import sklearn.cluster  # noqa: F401

    from . import loops, partition_loops  # noqa: F401

    with one_thread():
        pass


def stable_clusters(
    rows: Floats,
    near: Int32s,
    requests: Ints,
    size: int,
    seed: int,
    parent: ParentClusters | None = None,
    check: Callable[[], None] = lambda: None,
    octaves: Ints | None = None,
    lengths: Ints | None = None,
    threads: int | None = None,
) -> Clusters:
    """Clusters of n rows, on the host whatever the engine: the arrays of a tree are small.

    Args:
        rows: float32[n, d], in PCA space; near: int32[n, k], numbers of each one's neighbours among
            them, without itself.
        requests: int64[n], a number for the request of each.
        size: fewest rows of a cluster; n is at least that.
        seed: of cells and halves.
        parent: the clusters that go on where nothing has changed.
        check: called before some trees at a time, in any thread; what it raises ends the search.
        octaves: int64[n], the octave of each row's context; None where nothing is known of it.
        lengths: int64[n], of each row's context, as of `length_steps`; None where they are not
            known, and no cluster is looked for parts in.
        threads: how many to use, `MOST_THREADS` at most, which changes only the time; None: one
            for each CPU.
    """
    rng = np.random.default_rng(seed)
    rows, near = np.ascontiguousarray(rows, np.float32), np.ascontiguousarray(near)
    threads = min(MOST_THREADS, threads or usable_cpus())
    with one_thread(), ThreadPoolExecutor(threads) as pool:
        centres = cell_centres(rows, number_of(ATOMS, ATOM_ROWS, len(rows)), rng)
        used, atom = np.unique(nearest_cells(rows, centres), return_inverse=True)
        atoms = np.bincount(atom)
        divided = halves(requests, rng)
        # As many trees at once, `MOST_AT_ONCE` at most, as leave each thread one turn: only between
        # them it needs Python's lock, which another thread may hold for long.
        at_once = min(MOST_AT_ONCE, -(-len(divided) // threads))
        trees = trees_of_halves(rows, near, divided, atom, atoms, size, rng, at_once, pool, check)
        again = found_again(trees, atoms, size, pool, at_once)
        taken = groups_taken(trees, again, size, len(rows))
        together, starts = agreement(taken)
        halves_agree = agreement_of_halves(starts, atoms)
        groups = [large_groups(one, size) for one in trees]
        found_in = stability_of

        def rows_of(of: Ints) -> Doubles:
            return rows_inside(of, atoms).sum(axis=1)

        def stability_of_atoms(of: Ints) -> Doubles:
            return found_in(rows_inside(of, atoms), groups, atoms)

        def most_agree_on(together: Doubles, starts: list[Ints]) -> Ints:
            most = median_partition(together, atoms, starts)
            return without_small(most, together, atoms, size, rows_of)

        labels = most_agree_on(together, starts)
        known = lengths if lengths is None else RowsOfLengths(rows, near, atom, lengths, divided)
        is_continuum = halves_agree < CONTINUUM and (
            known is None or mean_valley(labels, known) >= SHALLOW
        )
        if octaves is not None and not is_continuum:
            linked = links_of_atoms(links_of(rows, requests, octaves), atom, len(atoms))
            taken = groups_taken(trees, again, size, len(rows), linked)
            together, starts = agreement(taken)
            labels = most_agree_on(together, starts)
        raw_stability, related = stability_of_atoms(labels), together
        if known is not None and not is_continuum:
            labels, taken = divided_clusters(
                labels, taken, known, size,
                lambda detail: groups_taken(trees, again, size, len(rows), detail=detail),
            )  # fmt: skip
            together = agreement(taken)[0]
        regions = None
        in_atoms = RowsInAtoms(
            rows, near, requests, atom, len(atoms), size, divided[:REGIONS_OF_HALVES]
        )
        areas = None
        if is_continuum:
            # Of one thread, beside what has many tasks.
            areas = pool.submit(areas_of, near, requests, seed)
            # By place with the same random numbers, whether profiles are tried or not.
            regions = profiled_regions(in_atoms, areas, copy.deepcopy(rng), pool) or regions_of(
                in_atoms, rng, pool
            )
            taken = groups = regions.of_halves
            found_in = parts_found if regions.profiled else stability_of
            # A region that is merged stays in its family.
            family_of_atoms = regions.family[regions.of_atoms]
            together = agreement(taken)[0] + np.equal.outer(family_of_atoms, family_of_atoms)
            labels = without_small(regions.of_atoms, together, atoms, size, rows_of)
        for least, size_of in (
            (least_requests(requests), lambda of: effective_requests(of[atom], requests)),
            (CHANCE, stability_of_atoms),
        ):
            labels = without_small(labels, together, atoms, least, size_of)
        if parent is None:
            count = labels.max() + 1
            found = Continued(labels[atom], np.full(count, NOISE), np.zeros(count, bool))
        else:
            reference_atom = nearest_cells(parent.references, centres[used])
            may_be_new = np.ones(labels.max() + 1, bool)
            if regions is not None:
                probe = probe_of(in_atoms, rng, pool)
                before = rows_before(parent, reference_atom, atoms)
                regions, labels, may_be_new = with_new_areas(
                    regions, labels, probe.areas(lambda of: is_new(of, before, atoms), atoms),
                    atom, atoms, requests, size,
                )  # fmt: skip
                taken = groups = regions.of_halves
            stability = stability_of_atoms(labels)
            found = continued(
                parent, labels, stability, atom, reference_atom, divided, size, may_be_new
            )
        inside = counted(found.labels, atom, len(found.heir_of), len(atoms))
        stability = found_in(inside, groups, atoms)
        if regions is None:
            shares = row_shares(inside, found, together, atom, near)
            likest_of, family = shares.argmax(axis=1), families_of(inside, related)
        else:
            likest_of, family = regions.as_clusters(found)
        label, order = named(likest_of, found)
        return Clusters(
            memberships(label, taken, atom, near),
            stability[order],
            by_size(family[order], np.bincount(label)),
            found.heir_of[order].astype(np.int32),
            found.new[order],
            raw_stability,
            halves_agree,
            regions is not None,
            regions is not None and regions.profiled,
            areas.result().found if areas else InAreas.none(len(rows)),
        )


def number_of(most: int, each: int, rows: int) -> int:
    """How many cells so many rows are put into."""
    return max(1, min(most, rows // each))


def halves(requests: Ints, rng: np.random.Generator) -> list[Mask]:
    """Rows of one half of the requests and of the other, of many divisions: `TREES` of bool[n]."""
    count = int(requests.max(initial=-1)) + 1
    found = []
    for _ in range(TREES // 2):
        first = rng.permutation(count) < count / 2
        # A single request has no other half.
        found += [first[requests], ~first[requests]]
    return [half if half.any() else ~half for half in found]


def trees_of_halves(
    rows: Floats,
    near: Int32s,
    divided: list[Mask],
    atom: Ints,
    atoms: Ints,
    size: int,
    rng: np.random.Generator,
    at_once: int,
    pool: ThreadPoolExecutor,
    check: Callable[[], None],
) -> list[Tree]:
    """The tree of each half of the requests.

    Args:
        divided: bool[n] each, its rows; atom: int64[n], of each row; atoms: int64[a], rows of each.
        at_once: trees of one task.
    """
    starts = []
    for half, own in zip(divided, rng.spawn(len(divided)), strict=True):
        count = int(half.sum())
        starts.append(own.choice(count, number_of(CELLS, CELL_ROWS, count), replace=False))

    def some(first: int) -> list[Tree]:
        check()
        own = slice(first, first + at_once)
        taken = np.array(divided[own])
        least = LEAST_GROUP * size * taken.mean(axis=1)
        return trees_of(rows, near, taken, starts[own], least, atom, atoms)

    return [tree for found in pool.map(some, range(0, len(divided), at_once)) for tree in found]


def named(likest: Ints, found: Continued) -> tuple[Int32s, Ints]:
    """Each row's likest cluster, or the parent's that it is in, numbered by falling size: int32[n];
    and which each is of those before, int64[c]. Clusters without a row are gone.

    Args:
        likest: int64[n], the cluster that each row belongs to most.
    """
    kept = found.heir_of[found.labels] >= 0
    label = np.where(kept, found.labels, likest)
    sizes = np.bincount(label, minlength=len(found.heir_of))
    order = np.argsort(-sizes, kind="stable")[: np.count_nonzero(sizes)]
    number = np.full(len(sizes), NOISE, np.int32)
    number[order] = np.arange(len(order))
    return number[label], order


def by_size(family: Ints, sizes: Ints) -> Int32s:
    """The families int64[c] of clusters of so many rows, numbered by falling size: int32[c]."""
    rows = np.bincount(family, sizes)
    return np.argsort(np.argsort(-rows, kind="stable"))[family].astype(np.int32)
