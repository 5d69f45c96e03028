"""The loops over rows and groups of a tree, compiled.

They run outside of Python's lock, so that trees are made in as many threads as there are cores.
Sums are added in the order of the rows, without reordering, so that every machine gives the same.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from discovery.engines.compiled import keep_compiled

# Scores of this many centres are compared side by side, which a processor does in one instruction.
LANES = 16


@njit(nogil=True)
def nearest(rows, centres, cell):  # type: ignore[no-untyped-def]
    """The number of each row's nearest centre, of equally near ones the first.

    Args:
        rows: float32[n, d]; centres: float32[c, d]; cell: int64[n], filled.
    """
    count, width = centres.shape
    padded = -(-count // LANES) * LANES
    # |x - p|^2 = |x|^2 + (|p|^2 - 2 x.p): the bracket decides.
    folded = np.zeros((width, padded), np.float32)
    norms = np.full(padded, np.inf, np.float32)
    for centre in range(count):
        norms[centre] = 0.0
        for k in range(width):
            value = centres[centre, k]
            folded[k, centre] = -np.float32(2.0) * value
            norms[centre] += value * value
    scores, lanes = np.empty(padded, np.float32), np.empty(LANES, np.float32)
    for row in range(len(rows)):
        scores[:] = norms
        for k in range(width):
            value, own = rows[row, k], folded[k]
            for centre in range(padded):
                scores[centre] += value * own[centre]
        lanes[:] = np.inf
        for start in range(0, padded, LANES):
            part = scores[start : start + LANES]
            for lane in range(LANES):
                lanes[lane] = part[lane] if part[lane] < lanes[lane] else lanes[lane]
        least = lanes[0]
        for lane in range(1, LANES):
            least = lanes[lane] if lanes[lane] < least else least
        first = 0
        while first < count - 1 and scores[first] != least:
            first += 1
        cell[row] = first


@njit(nogil=True)
def means(rows, cell, centres):  # type: ignore[no-untyped-def]
    """Move each centre float32[c, d] to the mean of the rows float32[n, d] of its cell int64[n].
    One without rows stays."""
    count, width = centres.shape
    sums, sizes = np.zeros((count, width)), np.zeros(count)
    for row in range(len(rows)):
        own = cell[row]
        sizes[own] += 1.0
        for k in range(width):
            sums[own, k] += rows[row, k]
    for own in range(count):
        if sizes[own] > 0.0:
            for k in range(width):
                centres[own, k] = sums[own, k] / sizes[own]


@njit(nogil=True)
def count_shared(cell, near, taken, found):  # type: ignore[no-untyped-def]
    """Count the neighbours int32[n, k] of taken rows bool[n] that are taken too, by the cells
    int64[n] of both: found, int64[c, c], is filled."""
    for row in range(len(cell)):
        if taken[row]:
            own = found[cell[row]]
            for k in range(near.shape[1]):
                other = near[row, k]
                if taken[other]:
                    own[cell[other]] += 1


@njit(nogil=True)
def likest_of(alike, row, best, most):  # type: ignore[no-untyped-def]
    """Find the first of the likest groups of a row of float64[c, c]."""
    own, at = alike[row], 0
    for other in range(1, len(own)):
        if own[other] > own[at]:
            at = other
    best[row], most[row] = at, own[at]


@njit(nogil=True)
def likeness(shared, volume, size, least, power, one, other):  # type: ignore[no-untyped-def]
    """How alike two groups are; a small one and any that it shares neighbours with, more than all
    others."""
    both = shared[one, other]
    if both <= 0.0:
        return 0.0
    alike = both / (volume[one] * volume[other]) ** power
    # No other likeness reaches 2: it is at most 1 / sqrt(volume), of volumes of 0.5 at least.
    return alike + 2.0 if size[one] < least or size[other] < least else alike


@njit(nogil=True)
def merge(shared, size, least, power, merged):  # type: ignore[no-untyped-def]
    """Merge groups, the likest two first, until none share neighbours; returns how many merged.

    Args:
        shared: float64[c, c], symmetric, changed; size: float64[c], rows of each, changed.
        least: groups of fewer rows merge before all others.
        power: of the product of two groups' neighbours, that what they share is divided by.
        merged: int64[c - 1, 2], filled.
    """
    count = len(shared)
    volume, group = np.empty(count), np.arange(count)
    for row in range(count):
        # Halves of numbers; a cell that shares nothing is like no other.
        volume[row] = max(shared[row].sum(), 0.5)
        shared[row, row] = 0.0
    alike = np.zeros((count, count))
    best, most = np.zeros(count, np.int64), np.zeros(count)
    for row in range(count):
        for other in range(count):
            alike[row, other] = likeness(shared, volume, size, least, power, row, other)
        likest_of(alike, row, best, most)
    done = 0
    while done < count - 1:
        first = int(most.argmax())
        second = best[first]
        if most[first] <= 0.0:
            break
        merged[done, 0], merged[done, 1] = group[first], group[second]
        group[first] = count + done
        done += 1
        for other in range(count):
            shared[first, other] += shared[second, other]
            shared[other, first] = shared[first, other]
            shared[second, other] = shared[other, second] = 0.0
            alike[second, other] = alike[other, second] = 0.0
        shared[first, first] = 0.0
        volume[first] += volume[second]
        size[first] += size[second]
        for other in range(count):
            own = likeness(shared, volume, size, least, power, first, other)
            alike[first, other] = alike[other, first] = own
        for row in range(count):
            own = alike[row, first]
            if row in (first, second) or best[row] in (first, second):
                likest_of(alike, row, best, most)
            elif own > most[row] or (own == most[row] and first < best[row]):
                best[row], most[row] = first, own
    return done


@njit(nogil=True)
def tree(rows, near, taken, start, rounds, least, power, cell, merged):  # type: ignore[no-untyped-def]
    """Make the tree of the rows that are taken; returns how many of its groups merged.

    Args:
        rows: float32[n, d]; near: int32[n, k], neighbours of each; taken: bool[n].
        start: int64[c], numbers among the taken rows of those that the cells' centres start at.
        rounds: of k-means; least, power: as of `merge`.
        cell: int64[n], filled with the cell of each row, taken or not; merged: as of `merge`.
    """
    count, own = len(start), np.empty((taken.sum(), rows.shape[1]), np.float32)
    at = 0
    for row in range(len(rows)):
        if taken[row]:
            own[at] = rows[row]
            at += 1
    centres = np.empty((count, rows.shape[1]), np.float32)
    for centre in range(count):
        centres[centre] = own[start[centre]]
    cell_of_own = np.empty(len(own), np.int64)
    for _ in range(rounds):
        nearest(own, centres, cell_of_own)
        means(own, cell_of_own, centres)
    nearest(rows, centres, cell)
    found = np.zeros((count, count), np.int64)
    count_shared(cell, near, taken, found)
    shared, sizes = (found + found.T) / 2.0, np.zeros(count)
    for row in range(len(rows)):
        if taken[row]:
            sizes[cell[row]] += 1.0
    return merge(shared, sizes, least, power, merged)


@njit(nogil=True)
def group_shares(cell, atom, atoms, merged, share, size):  # type: ignore[no-untyped-def]
    """How far each atom is in each group of a tree.

    Args:
        cell, atom: int64[n], of each row; atoms: int64[a], rows of each.
        merged: int64[m, 2], the merges of c cells.
        share: float32[c + m, a], filled; size: int64[c + m], zeros, filled with rows of each.
    """
    cells = len(share) - len(merged)
    found = np.zeros(share.shape)
    for row in range(len(cell)):
        found[cell[row], atom[row]] += 1.0
        size[cell[row]] += 1
    for own in range(cells):
        for k in range(len(atoms)):
            found[own, k] /= atoms[k]
    for number in range(len(merged)):
        first, second = merged[number]
        found[cells + number] = found[first] + found[second]
        size[cells + number] = size[first] + size[second]
    for group in range(len(share)):
        for k in range(len(atoms)):
            share[group, k] = found[group, k]


@njit(nogil=True)
def trees(  # type: ignore[no-untyped-def]
    rows, near, taken, start, cells, rounds, least, power, atom, atoms, merged, done, share, size
):
    """Make t trees, one after another, and find how far atoms are in their groups.

    Args: those of `tree` and `group_shares`, for each tree: taken: bool[t, n]; start: int64[t, c],
        of which the first cells[t] count; cells: int64[t]; least: float64[t]; merged:
        int64[t, c - 1, 2]; share: float32[t, 2c - 1, a]; size: int64[t, 2c - 1].
        done: int64[t], filled with how many groups of each merged.
    """
    cell = np.empty(len(rows), np.int64)
    for number in range(len(taken)):
        count, own = cells[number], merged[number]
        done[number] = tree(
            rows, near, taken[number], start[number, :count], rounds, least[number], power, cell,
            own[: count - 1],
        )  # fmt: skip
        groups = count + done[number]
        group_shares(
            cell, atom, atoms, own[: done[number]], share[number, :groups], size[number, :groups]
        )


@njit(nogil=True)
def cells_of_atoms(share, begins, start, cell, part):  # type: ignore[no-untyped-def]
    """List the cells of each tree that have rows of each atom, as `likest_again` has them.

    Args:
        share: float32[c, a], of each atom's rows in each cell of all trees, those of tree t from
            begins[t] to begins[t + 1]. start, cell, part: filled.
    """
    count = 0
    for tree in range(len(start)):
        for atom in range(share.shape[1]):
            start[tree, atom] = count
            for number in range(begins[tree], begins[tree + 1]):
                if share[number, atom] > 0.0:
                    cell[count] = number - begins[tree]
                    part[count] = share[number, atom]
                    count += 1
        start[tree, -1] = count


@njit(nogil=True, error_model="numpy")
def likest_again(  # type: ignore[no-untyped-def]
    begin, end, compared, again, groups, size, weights, start, cell, part, cells, merges, merged
):
    """How like the likest group of each of the next `compared` trees is to each group of the trees
    from `begin` to `end`, on average: the rows in both over the rows in either. What groups share
    is the sum of what their cells do.

    Args:
        again: float64, of each group, zeros, filled for those trees.
        groups, size: the groups of tree t are those from groups[t] to groups[t + 1]; their rows
            float32, infinite for one that is not to be found.
        weights: float32[a], rows of each atom.
        start, cell, part: the cells that have rows of an atom, and how much of it: of the atom k of
            tree t those from start[t, k] to start[t, k + 1], int64[t, a + 1], int32 and float32.
        cells: int64[t]; merges, merged: the merges of tree t are int64[m, 2] from merges[t] to
            merges[t + 1].
    """
    most = 0
    for tree in range(len(cells)):
        most = max(most, groups[tree + 1] - groups[tree])
    room, best = np.empty((most, most), np.float32), np.empty(most, np.float32)
    for own in range(begin, end):
        pairs = merged[merges[own] : merges[own + 1]]
        rows = size[groups[own] : groups[own + 1]]
        found = again[groups[own] : groups[own + 1]]
        both = room[:, : len(rows)]
        for turn in range(compared):
            other = (own + 1 + turn) % len(cells)
            both[: cells[other]] = 0.0
            for atom in range(len(weights)):
                for i in range(start[other, atom], start[other, atom + 1]):
                    shared, of_atom = both[cell[i]], part[i] * weights[atom]
                    for k in range(start[own, atom], start[own, atom + 1]):
                        shared[cell[k]] += of_atom * part[k]
            for number in range(cells[other]):
                shared = both[number]
                for k in range(len(pairs)):
                    shared[cells[own] + k] = shared[pairs[k, 0]] + shared[pairs[k, 1]]
            first = merges[other]
            for number in range(merges[other + 1] - first):
                one, two = both[merged[first + number, 0]], both[merged[first + number, 1]]
                shared = both[cells[other] + number]
                for k in range(len(rows)):
                    shared[k] = one[k] + two[k]
            best[:] = 0.0
            for number in range(groups[other + 1] - groups[other]):
                theirs, shared = size[groups[other] + number], both[number]
                if theirs == np.inf:
                    continue
                for k in range(len(rows)):
                    like = shared[k] / (rows[k] + theirs - shared[k])
                    best[k] = like if like > best[k] else best[k]
            for k in range(len(rows)):
                found[k] += best[k] / compared


@njit(nogil=True)
def squares_to(points, centre, least):  # type: ignore[no-untyped-def]
    """Lower each of float64[n] to the squared distance of its point float64[n, d] to a centre,
    where that is less."""
    for row in range(len(points)):
        apart = 0.0
        for k in range(points.shape[1]):
            apart += (points[row, k] - centre[k]) ** 2
        least[row] = apart if apart < least[row] else least[row]


@njit(nogil=True)
def drawn(weights, least, draw):  # type: ignore[no-untyped-def]
    """The point at the share `draw` in [0, 1) of all weights float64[n] times float64[n]."""
    left = 0.0
    for row in range(len(weights)):
        left += weights[row] * least[row]
    left *= draw
    for row in range(len(weights) - 1):
        left -= weights[row] * least[row]
        if left < 0.0:
            return row
    return len(weights) - 1


@njit(nogil=True)
def moved(points, weights, centres):  # type: ignore[no-untyped-def]
    """Move each centre float64[c, d] to the mean of the points nearest to it; returns the weighted
    sum of squares about the centres as they were."""
    count, width = centres.shape
    sums, sizes, squares = np.zeros((count, width)), np.zeros(count), 0.0
    for row in range(len(points)):
        own, least = 0, np.inf
        for centre in range(count):
            apart = 0.0
            for k in range(width):
                apart += (points[row, k] - centres[centre, k]) ** 2
            if apart < least:
                own, least = centre, apart
        squares += weights[row] * least
        sizes[own] += weights[row]
        for k in range(width):
            sums[own, k] += weights[row] * points[row, k]
    for centre in range(count):
        if sizes[centre] > 0.0:
            for k in range(width):
                centres[centre, k] = sums[centre, k] / sizes[centre]
    return squares


@njit(nogil=True)
def settled(points, weights, rounds, least, centres):  # type: ignore[no-untyped-def]
    """Move centres by at most so many rounds of k-means, until one gains no more than that share
    of the squares, which are returned. Args: as of `moved`."""
    before = np.inf
    for _ in range(rounds):
        squares = moved(points, weights, centres)
        if squares >= before * (1.0 - least):
            break
        before = squares
    return squares


@njit(nogil=True)
def best_of_starts(points, weights, draws, rounds, best):  # type: ignore[no-untyped-def]
    """k-means from several starts by k-means++ (Arthur & Vassilvitskii 2007). Fills `best`,
    float64[c, d], with the centres of the least squares, and returns these.

    Args:
        points: float64[n, d]; weights: float64[n]; draws: float64[starts, c], in [0, 1).
        rounds: most of them for each start; one ends when a round gains a millionth or less.
    """
    least_squares, ones = np.inf, np.ones(len(points))
    for start in range(len(draws)):
        centres, least = np.empty_like(best), np.full(len(points), np.inf)
        for centre in range(len(centres)):
            at = drawn(weights, least if centre else ones, draws[start, centre])
            centres[centre] = points[at]
            squares_to(points, centres[centre], least)
        squares = settled(points, weights, rounds, 1e-6, centres)
        if squares < least_squares:
            least_squares = squares
            best[:] = centres
    return least_squares


# Compiled, or loaded, with this module and not at their first call: a search for clusters may run
# beside a thread that imports or compiles, and neither is made for two threads at once.
for loop, signature in (
    (nearest, "void(f4[:, ::1], f4[:, ::1], i8[::1])"),
    (means, "void(f4[:, ::1], i8[::1], f4[:, ::1])"),
    (
        trees,
        "void(f4[:, ::1], i4[:, ::1], b1[:, ::1], i8[:, ::1], i8[::1], i8, f8[::1], f8, i8[::1],"
        "i8[::1], i8[:, :, ::1], i8[::1], f4[:, :, ::1], i8[:, ::1])",
    ),
    (cells_of_atoms, "void(f4[:, ::1], i8[::1], i8[:, ::1], i4[::1], f4[::1])"),
    (
        likest_again,
        "void(i8, i8, i8, f8[::1], i8[::1], f4[::1], f4[::1], i8[:, ::1], i4[::1], f4[::1],"
        "i8[::1], i8[::1], i8[:, ::1])",
    ),
    (settled, "f8(f8[:, ::1], f8[::1], i8, f8, f8[:, ::1])"),
    (best_of_starts, "f8(f8[:, ::1], f8[::1], f8[:, ::1], i8, f8[:, ::1])"),
):
    keep_compiled(loop)
    loop.compile(signature)
