"""The clustering methods that are compared. A new one is a function of (rows, seed) -> `Found`.

    python benchmarks/behaviours.py --method my_module:my_function

runs one that lies elsewhere beside those of `METHODS`.
"""

from __future__ import annotations

import importlib
import importlib.util
import random
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks import common
from benchmarks.common import NOW, WrongAnswerError
from discovery.artifacts.classifier import Classifier
from discovery.artifacts.read import open_artifacts
from discovery.job import discover
from discovery.options import DiscoverOptions

from .rows import Codes, Rows, batch_of, without_truth

# Neighbours that vote on a row where a method has no classifier of its own, and Leiden's.
VOTERS = 15
# Centres of k-means where today's method is not run beside it.
CENTRES = 20


@dataclass(frozen=True)
class Found:
    """What a method says of n rows.

    labels: int[n], -1 for noise; place: the clusters of other rows, int[m], by the method's own
    classifier, None for the vote of the nearest 15 rows; probabilities: float[n], None where the
    method has none; families: the coarser level of a tree of clusters, int[n], and the same of
    other rows.
    """

    labels: Codes
    place: Callable[[Rows], Codes] | None = None
    probabilities: NDArray[np.floating[Any]] | None = None
    families: Codes | None = None
    place_families: Callable[[Rows], Codes] | None = None

    @property
    def clusters(self) -> int:
        return len(np.unique(self.labels[self.labels >= 0]))


Method = Callable[[Rows, int], Found]


def today(rows: Rows, seed: int) -> Found:
    """The product: `attn discover --engine cpu`, and the classifier of its run."""
    return discovered(rows, seed, "consensus")


def by_hdbscan(rows: Rows, seed: int) -> Found:
    """The same with `--clustering hdbscan`, which has no families."""
    return discovered(rows, seed, "hdbscan")


def discovered(rows: Rows, seed: int, clustering: str) -> Found:
    """What a run finds, and where its classifier puts other rows."""
    with tempfile.TemporaryDirectory() as made:
        db = common.make_store(Path(made) / "rows.db", batch_of(rows))
        output = Path(made) / "out"
        options = DiscoverOptions(
            db=str(db), output=str(output), hours=0, seed=seed, engine="cpu", max_per_request=0,
            clustering=clustering,
        )  # fmt: skip
        # By its own name: `latest` does not move to a run that fails its gate.
        artifacts = open_artifacts(output / discover(options, now=NOW)["run_id"])
        found = common.by_key(artifacts.table("embedding"))
        clusters = artifacts.table("clusters")
        classifier = Classifier(artifacts)
    order = np.lexsort((rows.positions, rows.requests))
    if found.column("request_id").to_pylist() != rows.requests[order].tolist():
        raise WrongAnswerError("embedding.parquet has not the rows that were stored")
    labels = np.empty(len(rows), np.int64)
    labels[order] = found.column("cluster_id").to_numpy()
    probabilities = np.empty(len(rows))
    probabilities[order] = found.column("probability").to_numpy()

    def place(others: Rows) -> Codes:
        return classifier.classify(others.vectors).cluster_id.astype(np.int64)

    if clustering == "hdbscan":
        return Found(labels, place, probabilities)
    # The last one is that of noise, whose id is -1.
    family = np.full(int(max(clusters["cluster_id"].to_pylist(), default=-1)) + 2, -1, np.int64)
    family[clusters["cluster_id"].to_numpy()] = clusters["family"].to_numpy()
    return Found(labels, place, probabilities, family[labels], lambda rows: family[place(rows)])


def plain(rows: Rows, seed: int) -> Found:
    """StandardScaler, PCA, UMAP, HDBSCAN; other rows by a vote in the PCA space."""
    return _plain(rows, seed, scaled=True)


def unscaled(rows: Rows, seed: int) -> Found:
    """PCA, UMAP, HDBSCAN; other rows by a vote in the PCA space."""
    return _plain(rows, seed, scaled=False)


def _plain(rows: Rows, seed: int, scaled: bool) -> Found:
    done = common.plain_recipe(rows.vectors, seed, scaled)
    scaler, pca, _, clusterer = done.steps
    labels = done.labels.astype(np.int64)
    return Found(
        labels,
        lambda others: voted(done.space, labels, pca.transform(scaler.transform(others.vectors))),
        clusterer.probabilities_,
    )


def leiden(rows: Rows, seed: int) -> Found:
    """Leiden communities (Traag et al. 2019; modularity) of the graph of each row's 15 nearest in
    the Hellinger distance, its edges weighted by the share of neighbours in common, as PhenoGraph
    does (Levine et al. 2015)."""
    import igraph
    from sklearn.neighbors import NearestNeighbors

    roots = np.sqrt(np.maximum(rows.vectors, 0))
    near = NearestNeighbors(n_neighbors=min(VOTERS + 1, len(rows))).fit(roots)
    graph = near.kneighbors_graph()
    shared = graph.multiply(graph @ graph.T).tocoo()
    degree = near.n_neighbors
    # An edge to a neighbour that shares none stays, thinly.
    edges = graph.tocoo()
    weight = dict(zip(zip(shared.row, shared.col, strict=True), shared.data, strict=True))
    jaccard = [
        (1.0 + weight.get(pair, 0.0)) / (1.0 + 2 * degree - weight.get(pair, 0.0))
        for pair in zip(edges.row, edges.col, strict=True)
    ]
    network = igraph.Graph(len(rows), np.column_stack([edges.row, edges.col]).tolist())
    network.es["weight"] = jaccard
    igraph.set_random_number_generator(random.Random(seed))
    found = network.community_leiden(
        objective_function="modularity", weights="weight", n_iterations=-1
    )
    return Found(np.array(found.membership, np.int64))


def k_means(rows: Rows, seed: int, clusters: int = CENTRES) -> Found:
    """k-means of square roots, by default's settings; other rows by the nearest centre."""
    from sklearn.cluster import KMeans

    roots = np.sqrt(np.maximum(rows.vectors, 0))
    model = KMeans(min(max(clusters, 2), len(rows)), random_state=seed, n_init=10).fit(roots)
    return Found(
        model.labels_.astype(np.int64),
        lambda others: model.predict(np.sqrt(np.maximum(others.vectors, 0))).astype(np.int64),
    )


METHODS: dict[str, Method] = {
    "today": today, "hdbscan": by_hdbscan, "plain": plain, "unscaled": unscaled,
    "leiden": leiden, "k-means": k_means,
}  # fmt: skip


def voted(space: NDArray[Any], labels: Codes, queries: NDArray[Any], voters: int = VOTERS) -> Codes:
    """The commonest label among each query's nearest rows: int64[m]."""
    from sklearn.neighbors import KNeighborsClassifier

    vote = KNeighborsClassifier(min(voters, len(labels))).fit(space, labels)
    return np.asarray(vote.predict(queries), np.int64)


def placed(found: Found, rows: Rows, others: Rows) -> Codes:
    """The clusters that a method which was shown `rows` gives to other rows: int64[m]."""
    if found.place is not None:
        return np.asarray(found.place(without_truth(others)), np.int64)
    roots = [np.sqrt(np.maximum(one.vectors, 0)) for one in (rows, others)]
    return voted(roots[0], found.labels, roots[1])


def missing_methods(names: Sequence[str]) -> dict[str, str]:
    """Of these methods those that cannot run here, and why."""
    if "leiden" in names and importlib.util.find_spec("igraph") is None:
        return {"leiden": "igraph is not installed: pip install igraph"}
    return {}


def method_named(name: str) -> Method:
    """The method of `METHODS`, or the function `module:function`.

    Raises:
        ValueError: there is none of that name.
    """
    if name in METHODS:
        return METHODS[name]
    module, _, function = name.partition(":")
    if not function:
        raise ValueError(f"no method {name!r}: use {', '.join(METHODS)} or module:function")
    try:
        method: Method = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"no method {name!r}: {error}") from None
    return method
