"""The classifier: one run's artifacts name the behaviour of any fingerprint, on any CPU."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from planted import planted
from published import RUN_ID, Mixed, Published, labels_by_row, layered, mixed, published
from shared import REPO, without_pandas
from threadpoolctl import threadpool_info

from capture_kernels.errors import RecordError
from capture_kernels.fingerprint.vector import Layout
from capture_kernels.fingerprint.zones import ZONES, ZoneRules
from discovery.artifacts.classifier import Classifier
from discovery.artifacts.prototypes import nearest_prototype
from discovery.commands.classify import answers

FLAT = [0.1875, 0.3125, 0.5, 0.5] + [0.0625] * 16


@pytest.fixture(scope="session")
def run(attn, tmp_path_factory) -> Published:
    return published(attn, tmp_path_factory)


@pytest.fixture(scope="session")
def mixed_run(attn, tmp_path_factory) -> Mixed:
    return mixed(attn, tmp_path_factory)


@pytest.fixture(scope="session")
def classifier(run) -> Classifier:
    return Classifier.load(run.output)


def test_the_rows_of_a_run_get_the_cluster_that_the_run_gave_them(run, classifier):
    given = labels_by_row(run.folder, len(run.vectors))
    found = classifier.classify(run.vectors)
    inside = given >= 0
    assert (found.cluster_id[inside] == given[inside]).mean() >= 0.97


@pytest.mark.parametrize("seed", [101, 102])
def test_new_rows_get_the_cluster_of_their_behaviour(run, classifier, seed):
    labels = labels_by_row(run.folder, len(run.vectors))
    counts = np.zeros((labels.max() + 2, run.truth.max() + 1))
    planted_rows = run.truth >= 0
    np.add.at(counts, (labels[planted_rows], run.truth[planted_rows]), 1)
    behaviour_of = counts.argmax(axis=1)  # of each cluster; the last is noise
    behaviour_of[-1] = -1
    vectors, truth = planted(3_001, seed)
    found = behaviour_of[classifier.classify(vectors).cluster_id]
    assert (found[truth >= 0] == truth[truth >= 0]).mean() >= 0.95


def test_the_run_measured_its_classifier_on_rows_that_it_had_not_seen(classifier, run):
    quality = json.loads((run.folder / "manifest.json").read_text())["quality"]
    assert quality["classifier_agreement"] >= 0.95
    assert 0.14 < quality["classifier_held_out_rows"] / len(run.vectors) < 0.25


@pytest.mark.parametrize(
    "vector",
    [
        np.full(20, 50.0),
        np.r_[np.zeros(4), np.zeros(15), 9.0],
        np.full(20, 1e30),
        np.r_[FLAT[:4], 0.125, 0.0625, FLAT[6:]],
    ],
)
def test_a_vector_that_no_attention_row_has_gets_a_reason_and_the_others_an_answer(
    classifier, vector
):
    bad, good = classifier.answer([vector, FLAT])
    assert bad["error"].startswith("no attention row has this vector: ")
    assert "manifold" not in bad and "error" not in good
    assert good["manifold"] == classifier.answer([FLAT])[0]["manifold"]


def test_a_vector_far_from_all_that_the_run_saw_is_noise_without_a_label(classifier):
    found = classifier.classify(np.full(20, 50.0))
    assert found.cluster_id.tolist() == [-1]
    assert found.probability.tolist() == [0.0]


@pytest.mark.parametrize("rows", [1, 2, 255, 256, 257, 1_000])
def test_a_batch_is_classified_as_its_rows_are_one_by_one(classifier, rows):
    vectors, _ = planted(rows, rows)
    whole = classifier.classify(vectors)
    for row in range(0, rows, max(1, rows // 25)):
        alone = classifier.classify(vectors[row])
        for batch, single in zip(whole, alone, strict=True):
            np.testing.assert_array_equal(batch[row], single[0])


def test_no_rows_give_no_answers(classifier):
    found = classifier.classify(np.empty((0, 20), np.float32))
    assert [len(column) for column in found] == [0] * 7
    assert found.coordinates.shape == (0, 2)
    assert classifier.answer(np.empty((0, 20), np.float32)) == classifier.answer([]) == []


@pytest.mark.parametrize(
    "vectors",
    [
        [0.1] * 19,
        [0.1] * 21,
        np.zeros((3, 4, 20)),
        np.zeros((2, 16)),
        0.5,
        "twenty numbers",
        [[0.1] * 20, [0.1] * 19],
        [{"vector": 1}] * 20,
        [None] * 20,
        [0.1] * 19 + [float("nan")],
        [0.1] * 19 + [float("inf")],
        [0.1] * 19 + [1e300],
        [0.1] * 19 + [10**400],
        [0.1] * 19 + [-1e-6],
    ],
    ids=lambda value: str(value)[:30],
)
@pytest.mark.filterwarnings("error")
def test_what_is_no_fingerprint_is_refused(classifier, vectors):
    with pytest.raises(RecordError) as refused:
        classifier.classify(vectors)
    assert "\n" not in str(refused.value)


def test_zones_are_those_of_the_one_table_of_rules(classifier):
    vectors, _ = planted(2_000, 8)
    expected = ZoneRules().classify(vectors, Layout.LOG16)
    found = classifier.classify(vectors)
    np.testing.assert_array_equal(found.zone, expected.zone)
    np.testing.assert_array_equal(found.zone_confidence, expected.confidence)
    answers = classifier.answer(vectors[:50])
    assert [answer["manifold"]["zone"] for answer in answers] == expected.names[:50]


def test_an_answer_is_json_with_the_label_of_its_cluster(run, classifier):
    answers = classifier.answer(run.vectors[:200])
    assert json.loads(json.dumps(answers)) == answers
    for answer in answers:
        assert set(answer) == {"manifold", "schema_version", "run_id"}
        assert (answer["schema_version"], answer["run_id"]) == (1, RUN_ID)
        manifold = answer["manifold"]
        assert manifold["cluster_label"] == classifier.labels.get(manifold["cluster_id"])
        assert 0 <= manifold["probability"] <= 1
        assert 0 < manifold["confidence"] <= 1
        assert manifold["cluster_label"] is not None or manifold["cluster_id"] == -1


@pytest.mark.parametrize(
    ("rows", "landmarks", "dimensions"), [(1, 1, 2), (300, 7, 16), (513, 999, 5)]
)
def test_the_nearest_landmark_is_exact(rows, landmarks, dimensions):
    rng = np.random.default_rng(rows)
    points = rng.normal(size=(landmarks, dimensions)).astype(np.float32)
    queries = rng.normal(size=(rows, dimensions)).astype(np.float32)
    queries[0] = points[-1]
    found = nearest_prototype(queries, points)
    exact = np.linalg.norm(queries[:, None].astype(float) - points[None], axis=2)
    np.testing.assert_array_equal(found.row, exact.argmin(axis=1))
    np.testing.assert_allclose(found.distance, exact.min(axis=1), rtol=1e-5)
    assert found.distance[0] == 0.0


def test_classifying_needs_no_library_but_numpy_and_arrow(run, tmp_path):
    script = textwrap.dedent(
        """
        import json, sys
        from discovery.artifacts.classifier import Classifier
        classifier = Classifier.load(sys.argv[1])
        print(len(classifier.answer([[0.05] * 20] * 3)))
        print(json.dumps(sorted({name.split(".")[0] for name in sys.modules})))
        """
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(run.output)],
        capture_output=True, text=True, timeout=120, env=without_pandas(tmp_path),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    count, modules = done.stdout.splitlines()
    assert count == "3"
    heavy = {"sklearn", "umap", "numba", "hdbscan", "scipy", "dask", "distributed", "torch",
             "pandas", "cudf", "cuml", "cupy"}  # fmt: skip
    assert not heavy & set(json.loads(modules))


# The command.


@pytest.fixture
def lines(run) -> list[str]:
    """Fingerprints as JSON lines: a list, an object with fields of its own, a blank line, ..."""
    vectors = run.vectors[:4].tolist()
    return [
        json.dumps(vectors[0]),
        json.dumps({"vector": vectors[1], "request_id": "my request", "note": {"a": [1]}}),
        "   ",
        json.dumps({"request_id": "é", "vector": vectors[2]}),
        "",
        json.dumps(vectors[3]) + "\r",
    ]


def test_classify_answers_a_file_and_a_stream_alike(attn, run, classifier, lines, tmp_path):
    file = tmp_path / "in.jsonl"
    file.write_text("\n".join(lines), encoding="utf-8")
    from_file = attn("classify", "--artifacts", run.output, file)
    from_stream = attn("classify", "--artifacts", run.folder, stdin="\n".join(lines) + "\n")
    assert from_file.returncode == from_stream.returncode == 0, from_file.stderr
    assert from_file.stdout == from_stream.stdout
    assert from_file.stderr == from_stream.stderr == ""
    answers = [json.loads(line) for line in from_file.stdout.splitlines()]
    expected = classifier.answer(run.vectors[:4])
    assert answers[0] == expected[0]
    assert answers[1] == {"request_id": "my request", "note": {"a": [1]}, **expected[1]}
    assert answers[2] == {"request_id": "é", **expected[2]}
    assert answers[3] == expected[3]


def test_classify_of_nothing_answers_nothing(attn, run):
    done = attn("classify", "--artifacts", run.output, stdin="\n\n")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


BAD_LINES = [
    b"not json",
    b"\xff\xfe",
    b"[" * 100_000,
    b"{}",
    b"7",
    b"null",
    b'{"vector": null}',
    b'{"vector": "text"}',
    json.dumps(FLAT[1:]).encode(),
    json.dumps([*FLAT, 0.05]).encode(),
    json.dumps([*FLAT[1:], "0.05"]).encode(),
    json.dumps([*FLAT[1:], True]).encode(),
    json.dumps([*FLAT[1:], float("nan")]).encode(),
    json.dumps([*FLAT[1:], float("inf")]).encode(),
    json.dumps([*FLAT[1:], 1e300]).encode(),
    json.dumps([*FLAT[1:], 10**400]).encode(),
    json.dumps([*FLAT[1:], -0.1]).encode(),
    json.dumps([FLAT]).encode(),
]


@pytest.mark.parametrize("bad", BAD_LINES, ids=lambda line: repr(line[-24:]))
def test_a_line_that_is_no_fingerprint_is_named(classifier, bad):
    good = json.dumps(FLAT).encode()
    first, second, third = answers([(2, good), (3, bad), (4, good)], classifier)
    assert first["manifold"]["zone"] in ZONES and first == third
    assert second["line"] == 3 and second["error"] and "manifold" not in second


@pytest.mark.parametrize("field", [{"layout": 2}, {"layout": "layered"}, {"capture_id": "other"}])
def test_a_record_of_another_layout_or_capture_gets_a_reason_and_the_others_an_answer(
    classifier, field
):
    record = {"vector": FLAT, "layout": 1, "capture_id": classifier.capture_id}
    first, second, third, fourth = classifier.answer([record, record | field, {}, FLAT])
    assert first == fourth == classifier.answer([FLAT])[0]
    assert set(second) == set(third) == {"error", "schema_version", "run_id"}
    assert "the run" in second["error"]
    assert "needs a vector" in third["error"]


def test_threads_that_classify_at_once_get_the_answers_of_one(classifier):
    vectors, _ = planted(20_000, 3)
    chunks = np.array_split(vectors, 16)
    alone = [classifier.classify(chunk) for chunk in chunks]
    before = threadpool_info()
    with ThreadPoolExecutor(8) as threads:
        together = list(threads.map(classifier.classify, chunks))
    for one, other in zip(alone, together, strict=True):
        for column, same in zip(one, other, strict=True):
            np.testing.assert_array_equal(column, same)
    assert threadpool_info() == before


def test_classify_answers_a_live_stream_line_by_line(run):
    command = [sys.executable, str(REPO / "cli.py"), "classify", "--artifacts", str(run.output)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        for _ in range(3):
            process.stdin.write(json.dumps(FLAT).encode() + b"\n")
            process.stdin.flush()
            assert json.loads(process.stdout.readline())["run_id"]
        process.stdin.close()
    assert process.returncode == 0


def test_classify_stops_at_a_bad_line_with_one_line_that_names_it(attn, run, lines, tmp_path):
    file = tmp_path / "in.jsonl"
    file.write_bytes("\n".join(lines).encode() + b"\n\xff\xfe\n")
    for done in (
        attn("classify", "--artifacts", run.output, file),
        attn("classify", "--artifacts", run.output, stdin="\n".join([*lines, "[1, 2"])),
    ):
        assert done.returncode == 2
        assert done.stderr == "error: line 7 is not JSON\n"
        # What came before it is answered.
        assert len(done.stdout.splitlines()) == 4


def test_classify_skips_bad_lines_and_says_so(attn, run, lines, tmp_path):
    file = tmp_path / "in.jsonl"
    bad = ["{", json.dumps({"vector": [1], "request_id": "mine"}), "[" + " " * 3_000_000 + "]"]
    file.write_text("\n".join([lines[0], *bad, lines[1]]), encoding="utf-8")
    done = attn("classify", "--artifacts", run.output, "--skip-bad", file)
    assert (done.returncode, done.stderr) == (3, "lines that could not be classified: 3\n")
    answered = [json.loads(line) for line in done.stdout.splitlines()]
    assert [answer.get("line") for answer in answered] == [None, 2, 3, 4, None]
    assert answered[1]["error"] == "is not JSON"
    assert answered[2]["request_id"] == "mine" and "needs a vector" in answered[2]["error"]
    assert answered[3]["error"] == "is longer than 1,048,576 bytes"
    good = attn("classify", "--artifacts", run.output, "--skip-bad", stdin=lines[0])
    assert (good.returncode, good.stderr) == (0, "")


def test_classify_stops_at_a_line_that_never_ends(run):
    command = [sys.executable, str(REPO / "cli.py"), "classify", "--artifacts", str(run.output)]
    with open("/dev/zero", "rb") as endless:  # noqa: PTH123
        done = subprocess.run(command, stdin=endless, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr == "error: line 1 is longer than 1,048,576 bytes\n"


def test_classify_without_artifacts_or_without_its_file_says_so(attn, run, tmp_path):
    no_run = attn("classify", "--artifacts", tmp_path, stdin="")
    assert no_run.returncode == 2
    assert no_run.stderr.startswith(f"error: {tmp_path} holds no finished run")
    no_file = attn("classify", "--artifacts", run.output, tmp_path / "nowhere.jsonl")
    assert no_file.returncode == 2
    assert no_file.stderr.startswith(f"error: cannot read {tmp_path}/nowhere.jsonl: No such file")


def test_classify_ends_quietly_when_its_reader_has_enough(run, tmp_path):
    file = tmp_path / "many.jsonl"
    file.write_text(f"{json.dumps(FLAT)}\n" * 20_000)
    command = [sys.executable, str(REPO / "cli.py"), "classify", "--artifacts", str(run.output)]
    with subprocess.Popen(
        [*command, str(file)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert json.loads(process.stdout.readline())["schema_version"] == 1
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 0


def test_a_layered_run_classifies_layered_rows(attn, mixed_run, tmp_path):
    output = tmp_path / "layered"
    done = attn("discover", "--db", mixed_run.db, "--output", output, "--layout", "layered",
                "--hours", "0")  # fmt: skip
    assert done.returncode == 0, done.stderr
    manifest = json.loads((output / "latest" / "manifest.json").read_text())
    assert (manifest["layout"], manifest["counts"]["rows"]) == ("layered", 300)
    assert manifest["counts"]["clusters"] >= 3
    classifier = Classifier.load(output)
    assert classifier.layout is Layout.LAYERED
    vectors = layered(101, 5)
    found = classifier.classify(vectors)
    expected = ZoneRules().classify(vectors, Layout.LAYERED)
    np.testing.assert_array_equal(found.zone, expected.zone)
    # Its histogram is of places in the context, and its bands end at 10 and 100 tokens.
    assert all("context" in label for label in classifier.labels.values())
