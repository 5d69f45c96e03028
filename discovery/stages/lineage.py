"""lineage: which cluster of the parent run each one is, and what the next run is matched with."""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from capture_kernels.arrays import Doubles, Floats, Int32s, Ints
from capture_kernels.fingerprint.vector import DIMENSIONS
from capture_kernels.fingerprint.zones import ZONES
from discovery.algorithms.consistency import inconsistent
from discovery.algorithms.known_areas import InAreas
from discovery.algorithms.lineage import (
    Evidence,
    cluster_ids,
    events,
    match,
    thinned,
    with_evidence,
)
from discovery.algorithms.sampling import highest_keys, lowest, request_table, row_hashes
from discovery.algorithms.shares import DistinctCount, RequestCounts, Shares
from discovery.artifacts.prototypes import Codebook, labels_within
from discovery.artifacts.schema import NOISE, identity_in_words
from discovery.engines.protocol import Engine
from discovery.runs.chunks import ChunkVectors, chunk_file
from discovery.runs.folder import reserve_cluster_ids
from discovery.runs.history import next_free_id
from discovery.runs.parent import Parent, damaged_in_words
from discovery.runs.state import manifests, survey
from pipeline.hashing import Hashes

from .areas import gone_areas, own_areas, parts_lost
from .cluster import labelled_rows, run_codebook
from .context import RunContext

# Rows of each cluster that the next run is matched with; of one that has more than a fourteenth of
# all, as many more as that: areas in it are found again by the references about a row.
REFERENCES_EACH, OF_SHARE = 256, 1 / 14
# Least share of rows in both clusters for a link in the manifest.
LEAST_LINK = 1e-4


def parameters(context: RunContext) -> dict[str, Any]:
    return {"parent": context.follows["parent"], "references": (REFERENCES_EACH, OF_SHARE)}


def run(context: RunContext) -> tuple[dict[str, Any], str]:
    parent = context.parent
    codebook = run_codebook(context)
    clusters = context.saved("cluster", "fit.npz")
    count = len(clusters["stability"])
    contingency, kin, shares = label_rows(context, codebook, count)
    rows = contingency.sum()
    # Without a parent nothing is matched, and every cluster is born.
    known = parent.ids if parent else np.empty(0, np.int32)
    their_share = parent.share if parent else np.empty(0)
    found = match(
        kin[:count, :-1] / rows,
        seen_by_own(parent, codebook, count) if parent else np.empty((count, 0)),
        contingency[:count].sum(axis=1) / rows,
        their_share,
        clusters["heir_of"],
        clusters["new"],
    )
    fresh = int((found.heir_of < 0).sum())
    # Ids that any run used are not used again, even if the file that counts them was lost.
    published = manifests(survey(context.options.output_dir)).values()
    least = max(next_free_id(published), known.max(initial=-1) + 1)
    first = reserve_cluster_ids(context.options.output_dir, context.run_id, fresh, int(least))
    ids = cluster_ids(found, known, first)
    context.checkpoint.write_arrays("ids.npz", ids=ids)
    none = np.empty(0)
    # Noise is the last of the shares.
    theirs = (parent.stability, parent.clusters.effective_requests[:-1]) if parent else (none, none)
    fitted = InAreas(clusters["area"], clusters["area_share"])
    areas = own_areas(context, fitted, shares.shares)
    gone = gone_areas(context, parent, shares.shares) if parent else np.empty(0, bool)
    lost = parts_lost(parent, gone, found.heir_of) if parent else np.empty(0)
    changes = with_evidence(
        thinned(events(found, ids, known), known, lost),
        Evidence(ids, clusters["stability"], shares.effective_requests[:-1]),
        Evidence(known, *theirs),
    )
    of = identity_in_words({**context.window, "layout": context.layout.label})
    says = in_one_sentence(context.follows, changes, of, context.options.new_lineage)
    labels = parent.labels if parent else []
    summary = {
        "parent": context.follows["parent"],
        "damaged": context.follows.get("damaged", []),
        "says": says,
        "parent_clusters": [
            {"cluster_id": i, "label": label, "share": share}
            for i, label, share in zip(known.tolist(), labels, their_share.tolist(), strict=True)
        ],
        "links": [
            {"parent": int(known[j]), "child": int(ids[i]),
             "share": round(float(found.common[i, j]), 6)}
            for i, j in np.argwhere(found.linked | (found.common >= LEAST_LINK))
        ],
        "events": changes,
        "areas": [{"requests": round(of, 1)} for of in areas.requests.tolist()],
        "gone_areas": np.flatnonzero(gone).tolist(),
    }  # fmt: skip
    return summary, says


def in_one_sentence(
    follows: dict[str, Any], changes: list[dict[str, Any]], of: str, new_lineage: bool
) -> str:
    """What happened to the clusters since the parent run, or why there is none.

    Args:
        of: the run's identity, in words.
    """
    parent, damaged = follows["parent"], damaged_in_words(follows)
    count = Counter(change["event"] for change in changes)
    if parent is None:
        if new_lineage:
            first = "a new lineage, as was asked for"
        elif damaged:
            first = "no earlier run is left"
        elif follows.get("same"):
            first = f"no earlier run of {of} was served and can be followed"
        elif follows.get("others"):
            first = f"the first run of {of} in its folder"
        else:
            first = "the first run of its lineage"
        words = [f"{first}: {counted(len(changes), 'new cluster')}"]
    else:
        went_on = count["kept"] + count["thinned"] + count["merged"]
        words = [f"{counted(went_on, 'cluster')} of {parent} went on"]
        names = {"born": "born", "died": "died", "split": "split off", "merged": "merged",
                 "thinned": "lost a part"}  # fmt: skip
        words += [f"{count[kind]} {name}" for kind, name in names.items() if count[kind]]
        words[-1] += perhaps_by_chance(changes)
    return ", ".join(words) + (f"; {damaged}" if damaged else "")


def perhaps_by_chance(changes: list[dict[str, Any]]) -> str:
    """How many of the changes may be chance; nothing where none may."""
    # What was absorbed is counted where it was merged.
    real = [one for one in changes if one["event"] not in ("kept", "absorbed")]
    count = sum(one["perhaps_chance"] for one in real)
    return f"; {count} of these {len(real)} perhaps by chance" if count else ""


def counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


class References(NamedTuple):
    """Rows of each of c clusters: vectors float32[m, 20], label int32[m], order uint64[m]; and how
    many each may have, quota int64[c]."""

    vectors: Floats
    label: Int32s
    order: Hashes
    quota: Ints

    @classmethod
    def none(cls, quota: Ints) -> References:
        vectors, label = np.empty((0, DIMENSIONS), np.float32), np.empty(0, np.int32)
        return cls(vectors, label, np.empty(0, np.uint64), quota)

    def keep_lowest(self, vectors: Floats, label: Int32s, order: Hashes) -> References:
        """Of these rows and n more those of lowest order in each cluster: a uniform sample of its
        rows that does not depend on how they are split into chunks.

        Args:
            vectors: float32[n, 20]; label: int32[n], -1 for noise, which is not kept; order:
                uint64[n], evenly spread.
        """
        # Noise, label -1, is the first of the groups.
        counts = np.bincount(label + 1, minlength=len(self.quota) + 1)
        highest = highest_keys(counts, np.append(0, self.quota))[1:]
        inside = np.flatnonzero(label >= 0)
        inside = inside[order[inside] <= highest[label[inside]]]
        label = np.concatenate([self.label, label[inside]])
        order = np.concatenate([self.order, order[inside]])
        vectors = np.concatenate([self.vectors, vectors[inside]])
        kept = lowest(label, order, self.quota)
        return References(vectors[kept], label[kept], order[kept], self.quota)


def references_of(labels: Int32s, clusters: int) -> Ints:
    """How many rows of each cluster are kept, int64[c], by the labels int32[n] of the fit rows."""
    share = np.bincount(labels[labels >= 0], minlength=clusters) / max(len(labels), 1)
    return np.rint(REFERENCES_EACH * np.maximum(share / OF_SHARE, 1.0)).astype(np.int64)


def label_rows(context: RunContext, codebook: Codebook, count: int) -> tuple[Ints, Ints, Shares]:
    """Label every row with this run's prototypes and with the parent's, and save what that gives.

    zones.npz, clusters.npz and labelled.npz hold shares: of the zones, of this run's clusters as
    its prototypes label them, and of the parent's labels. counts.npz holds the contingency, the
    rows beyond the parent's reach, and the rows whose numbers contradict one another.

    Returns:
        contingency int64[c + 1, p + 1], rows by own cluster and by the parent's label; kin, the
        same by the parent's nearest cluster; the shares of this run's clusters. Noise is last in
        each.
    """
    parent = context.parent
    known = len(parent.ids) if parent else 0
    zones, clusters, labelled = (RequestCounts(n) for n in (len(ZONES), count + 1, known + 1))
    contingency, kin = (np.zeros((count + 1, known + 1), np.int64) for _ in range(2))
    fitted = context.saved("cluster", "fit.npz")["label"]
    references = References.none(references_of(fitted, count))
    requests = DistinctCount()
    beyond = wrong = 0
    shared = codebook, parent.codebook if parent else None
    answers = context.compute(label_both, context.rows.references(), *shared)
    for index, (chunk, answer) in enumerate(zip(labelled_rows(context), answers, strict=True)):
        table, request = request_table(chunk.batch)
        hashes = table[request]
        zones.add(hashes, context.saved("zones", chunk_file("zones", index))["zone"])
        # Noise is label -1, which counts as the last category.
        clusters.add(hashes, answer.own % (count + 1))
        labelled.add(hashes, answer.parent % (known + 1))
        contingency += crossed(chunk.members.label, answer.parent, contingency.shape)
        kin += crossed(chunk.members.label, answer.kin, kin.shape)
        beyond += answer.beyond
        wrong += answer.inconsistent
        order = row_hashes(hashes, chunk.batch, context.options.seed)
        references = references.keep_lowest(chunk.vectors, chunk.members.label, order)
        requests.add(table)
        context.chunk_done(index + 1, context.rows.chunks)
    save = context.checkpoint.write_arrays
    counted = {"zones": zones, "clusters": clusters, "labelled": labelled}
    shares = {name: counts.shares(requests.estimate) for name, counts in counted.items()}
    for name, found in shares.items():
        save(f"{name}.npz", **{field: np.array(value) for field, value in vars(found).items()})
    save("references.npz", vectors=references.vectors, label=references.label,
         order=references.order)  # fmt: skip
    save("counts.npz", contingency=contingency, beyond=np.array(beyond),
         inconsistent=np.array(wrong))  # fmt: skip
    return contingency, kin, shares["clusters"]


def crossed(rows: Int32s, columns: NDArray[np.integer[Any]], shape: tuple[int, ...]) -> Ints:
    """How many of n rows are in each pair of categories, -1 being the last: int64[shape]."""
    pair = (rows % shape[0]).astype(np.int64) * shape[1] + columns % shape[1]
    return np.bincount(pair, minlength=shape[0] * shape[1]).reshape(shape)


class Answer(NamedTuple):
    """Of n rows: own and parent's label int32[n] (-1: noise), the parent's nearest cluster int32[n]
    (-1: none in reach), how many are beyond the parent's reach, and how many have numbers that
    contradict one another."""

    own: Int32s
    parent: Int32s
    kin: Int32s
    beyond: int
    inconsistent: int


def label_both(
    engine: Engine, own: Codebook, parent: Codebook | None, chunk: ChunkVectors
) -> Answer:
    vectors = chunk.load(engine)
    labels = engine.host(own.label(vectors))
    wrong = int(inconsistent(vectors, own.layout).sum())
    if parent is None:
        none = np.full(len(vectors), NOISE, np.int32)
        return Answer(labels, none, none, 0, wrong)
    nearest, beyond = parent.nearest(vectors)
    theirs = engine.host(labels_within(parent.labels, nearest.row, beyond))
    kin = engine.host(parent.nearest_member(vectors))
    return Answer(labels, theirs, kin, int(beyond.sum()), wrong)


def seen_by_own(parent: Parent, codebook: Codebook, count: int) -> Doubles:
    """Share of the parent's rows in each of its clusters that this run labels with each of its own:
    float64[c, p]."""
    labels = codebook.nearest_member(parent.references)
    table = crossed(labels, parent.reference_cluster, (count + 1, len(parent.ids)))
    return table[:count] / np.maximum(table.sum(axis=0), 1) * parent.share


def saved_shares(context: RunContext, name: str) -> Shares:
    """The shares that `label_rows` saved: "zones", "clusters" or "labelled"."""
    saved: dict[str, Any] = context.saved("lineage", f"{name}.npz")
    return Shares(**{n: array if array.ndim else array.item() for n, array in saved.items()})
