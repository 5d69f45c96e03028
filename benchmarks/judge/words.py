"""What the clusters of a run say about context length, task, phase and kind of token.

Of the clusters of a run of the shipped sample, or of any finished run:
  context length   the share of the variance of log2(position) that they explain (eta squared;
                   epsilon squared is corrected for the number of clusters). A map of how far a row
                   could look rather than of what it does would have a large one.
  phase, task, token kind   adjusted mutual information (AMI) with the cluster, over the rows that
                   are in one. `overall` may come by way of context length alone; `within` is the
                   mean over octaves of the position. `by chance` are the same two figures, the
                   largest of --permutations in which the words are exchanged among rows of one
                   octave (tasks: among requests whose longest position is of one octave, for the
                   rows of a request are no independent draws; nor quite are they for phase and
                   kind, whose chance is therefore a little low). Information beyond context
                   length is what `within` has above chance.
A task is what a request id `<task>-NNNN` says. A token's kind is that of the row's own token, by
the demo model's tokenizer: special, whitespace, digit, letter (identifiers), punctuation.

The peer is the plain recipe on the same rows.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from sklearn.metrics import adjusted_mutual_info_score

from benchmarks import common
from benchmarks.common import REPO, WrongAnswerError, by_key
from discovery.artifacts.read import open_artifacts
from pipeline.record import KEY
from pipeline.record import vectors as record_vectors

TOKENIZER = REPO / "examples" / "demo_model" / "tokenizer.json"
SEED = 42
Codes = NDArray[np.int64]
# Rows of an octave in which shares mean something.
MIN_ROWS = 50
# AMI above chance from which a summary calls the clusters informative.
WORTH_SAYING = 0.05
Shuffle = Callable[[Codes, np.random.Generator], Codes]


def token_kinds(tokens: pa.ChunkedArray) -> list[str] | None:
    """Each token's kind; None without a tokenizer or where a row has no token."""
    try:
        from tokenizers import Tokenizer
    except ImportError:
        return None
    if tokens.null_count or not TOKENIZER.exists():
        return None
    tokenizer = Tokenizer.from_file(str(TOKENIZER))
    special = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    ids = tokens.to_pylist()
    words = {i: tokenizer.decode([i], skip_special_tokens=False) for i in set(ids)}
    kinds = {i: "special" if word in special else kind(word) for i, word in words.items()}
    return [kinds[i] for i in ids]


def kind(word: str) -> str:
    """What a piece of text is, by its first character that is not blank."""
    first = word.strip()[:1]
    if not first:
        return "whitespace"
    if first.isdecimal():
        return "digit"
    return "letter" if first.isalpha() or first == "_" else "punctuation"


class RunRows:
    """The rows of a run in the order of their keys: what is known of each, besides its cluster."""

    def __init__(self, embedding: pa.Table) -> None:
        self.table = by_key(embedding)
        self.log2_position = common.log2_position(self.table)
        self.octave = np.floor(self.log2_position).astype(np.int64)
        requests = self.table.column("request_id").to_pylist()
        self.request: Codes
        _, self.request = np.unique(requests, return_inverse=True)
        longest = np.zeros(self.request.max() + 1, np.int64)
        np.maximum.at(longest, self.request, self.octave)
        self.request_octave = longest
        self.words = {
            "phase": self.table.column("phase").cast(pa.string()).to_pylist(),
            "task": [name.rpartition("-")[0] or name for name in requests],
        }
        if kinds := token_kinds(self.table.column("token_id")):
            self.words["kind"] = kinds

    def shuffled_rows(self, codes: Codes, rng: np.random.Generator) -> Codes:
        """The codes exchanged among the rows of one octave."""
        return shuffled_within(codes, self.octave, rng)

    def shuffled_requests(self, codes: Codes, rng: np.random.Generator) -> Codes:
        """The codes exchanged among the requests of one octave; one code a request."""
        _, first = np.unique(self.request, return_index=True)
        return shuffled_within(codes[first], self.request_octave, rng)[self.request]


def shuffled_within(codes: Codes, group: Codes, rng: np.random.Generator) -> Codes:
    out = np.empty_like(codes)
    # Both orders go group by group; within one, the first is random and the second is as found.
    out[np.lexsort((rng.random(len(codes)), group))] = codes[np.argsort(group, kind="stable")]
    return out


def mutual_information(labels: Codes, codes: Codes, octave: Codes) -> dict[str, float]:
    """AMI over all rows, and the mean of the octaves' own, weighted by their rows."""
    shares, weights = [], []
    for one in np.unique(octave):
        rows = octave == one
        if rows.sum() >= MIN_ROWS:
            shares.append(adjusted_mutual_info_score(codes[rows], labels[rows]))
            weights.append(rows.sum())
    return {
        "overall": float(adjusted_mutual_info_score(codes, labels)),
        "within": float(np.average(shares, weights=weights)) if shares else 0.0,
    }


def measure(rows: RunRows, labels: NDArray[np.integer[Any]], permutations: int) -> dict[str, Any]:
    """Every figure of one set of clusters, int[n] with -1 for noise."""
    inside = labels >= 0
    figures: dict[str, Any] = {
        "rows": len(labels),
        "clusters": len(np.unique(labels[inside])),
        "noise_share": float((~inside).mean()),
        "log2_position": common.explained_share(labels, rows.log2_position),
        "mutual_information": {},
    }
    own = labels[inside].astype(np.int64)
    for name, words in rows.words.items():
        _, codes = np.unique(words, return_inverse=True)
        shuffle: Shuffle = rows.shuffled_requests if name == "task" else rows.shuffled_rows
        rng = np.random.default_rng(SEED)
        chance = [
            mutual_information(own, shuffle(codes, rng)[inside], rows.octave[inside])
            for _ in range(permutations)
        ]
        figures["mutual_information"][name] = {
            **mutual_information(own, codes[inside], rows.octave[inside]),
            "overall_by_chance": max(c["overall"] for c in chance),
            "within_by_chance": max(c["within"] for c in chance),
        }
    return figures


def describe(rows: RunRows, labels: NDArray[np.int32], clusters: pa.Table) -> list[dict[str, Any]]:
    """Each cluster by falling size, with its commonest words: share in it, and that share's
    multiple of the share in all rows (lift)."""
    named = dict(
        zip(clusters["cluster_id"].to_pylist(), clusters["label"].to_pylist(), strict=True)
    )
    table = []
    for one in sorted(named, key=lambda c: -int((labels == c).sum())):
        members = labels == one
        line: dict[str, Any] = {
            "cluster_id": one,
            "label": named[one],
            "rows": int(members.sum()),
            "share": float(members.mean()),
            "median_position": float(2.0 ** np.median(rows.log2_position[members])),
        }
        for name, words in rows.words.items():
            values, codes = np.unique(words, return_inverse=True)
            everywhere = np.bincount(codes) / len(codes)
            here = np.bincount(codes[members], minlength=len(values)) / members.sum()
            top = int(here.argmax())
            line[name] = {
                "word": str(values[top]),
                "share": float(here[top]),
                "lift": float(here[top] / everywhere[top]),
            }
        table.append(line)
    return table


def check_tables(clusters: pa.Table, manifest: dict[str, Any], labels: NDArray[np.int32]) -> None:
    """Raise WrongAnswerError unless clusters.parquet and the manifest count the rows' clusters."""
    ids, sizes = np.unique(labels[labels >= 0], return_counts=True)
    sizes_in_table = dict(
        zip(*(clusters[n].to_pylist() for n in ("cluster_id", "size")), strict=True)
    )
    if dict(zip(ids.tolist(), sizes.tolist(), strict=True)) != sizes_in_table:
        raise WrongAnswerError("clusters.parquet and embedding.parquet differ in size")
    if manifest["counts"]["rows"] != len(labels):
        raise WrongAnswerError("the manifest counts other rows than embedding.parquet holds")


def vectors_of(rows: RunRows, records: pa.Table) -> NDArray[np.float32] | None:
    """The vectors float32[n, 20] of the run's rows; None where the records lack some of them."""
    order = pa.table({**{n: rows.table[n] for n in KEY}, "row": np.arange(rows.table.num_rows)})
    numbered = records.select(KEY).append_column("at", pa.array(np.arange(len(records))))
    joined = order.join(numbered, list(KEY), join_type="inner").sort_by("row")
    if joined.num_rows != order.num_rows:
        return None
    return record_vectors(records)[joined.column("at").to_numpy()]


def print_clusters(table: list[dict[str, Any]]) -> None:
    print("the job's clusters; of each the commonest word, its share there, and its lift")
    for line in table:
        cells = [line[name] for name in ("task", "phase", "kind") if name in line]
        said = [f"{cell['word']} {cell['share']:.0%} x{cell['lift']:.1f}" for cell in cells]
        words = "  ".join(f"{text:<22}" for text in said)
        print(
            f"  {line['cluster_id']:>3} {line['rows']:>6,} {line['share']:>6.1%}"
            f"  position {line['median_position']:>5.0f}  {words} {line['label']}"
        )


def print_summary(name: str, figures: dict[str, Any]) -> None:
    explained = figures["log2_position"]
    print(
        f"{name}: {figures['clusters']} clusters of {figures['rows']:,} rows, noise "
        f"{figures['noise_share']:.1%}; of log2(position) they explain "
        f"{explained['eta_squared']:.1%} (epsilon squared {explained['epsilon_squared']:.1%})"
    )
    for word, cells in figures["mutual_information"].items():
        above = cells["within"] - cells["within_by_chance"]
        verdict = "yes" if above >= WORTH_SAYING else "barely" if above > 0 else "no"
        print(
            f"  {word:<6} AMI overall {cells['overall']:.3f} (by chance at most "
            f"{cells['overall_by_chance']:.3f}), within octaves {cells['within']:.3f} (by chance "
            f"at most {cells['within_by_chance']:.3f}): "
            f"beyond context length: {verdict}"
        )


def report(
    artifacts_at: Path | None, records: pa.Table | None, permutations: int
) -> dict[str, Any]:
    """Run the job on the records, or take the finished run, and print and give its figures.

    Args:
        records: of the finished run, for the plain recipe; None where they are not at hand.

    Raises:
        WrongAnswerError: the run's own tables do not agree with each other.
    """
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as made:
        if artifacts_at:
            artifacts = open_artifacts(artifacts_at)
        else:
            assert records is not None
            store = common.make_store(Path(made) / "sample.db", records)
            artifacts = common.run_job(store, Path(made) / "out", SEED).artifacts
        rows = RunRows(artifacts.table("embedding"))
        clusters = artifacts.table("clusters")
    labels = rows.table.column("cluster_id").to_numpy()
    check_tables(clusters, artifacts.manifest, labels)
    figures["job"] = measure(rows, labels, permutations)
    figures["clusters"] = describe(rows, labels, clusters)
    print_clusters(figures["clusters"])
    print_summary("the job", figures["job"])
    vectors = vectors_of(rows, records) if records is not None else None
    if vectors is None:
        print("the plain recipe: left out, the records of this run are not at hand (--db)")
    else:
        plain = common.plain_recipe(vectors, SEED)
        figures["plain_recipe"] = measure(rows, plain.labels, permutations)
        print_summary("the plain recipe", figures["plain_recipe"])
    return figures
