"""`attn send`: what reaches a receiver, and what is said where it does not."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pytest
import zmq
from processes import AttnProcess

from pipeline import record
from pipeline.store.open import open_store
from pipeline.store.transfer import export_file
from pipeline.stream import curve
from pipeline.stream.wire import Message, decode

ROWS = 600


class Receiver:
    """Receives in a thread, from now on."""

    def __init__(self, keys: Path | None = None, hwm: int = 1_000) -> None:
        self.messages: list[Message] = []
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PULL)
        self._socket.linger, self._socket.rcvhwm = 0, hwm
        self._authenticator = None
        if keys is not None:
            server = curve.server_keys(keys)
            self._authenticator = server.authenticator(self._context)
            server.apply(self._socket)
        self._socket.bind("tcp://127.0.0.1:*")
        self.address = self._socket.last_endpoint.decode()
        self._end = threading.Event()
        self.reads = threading.Event()
        self.reads.set()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._end.is_set():
            if self.reads.wait(0.02) and self._socket.poll(20):
                self.messages.append(
                    decode(self._socket.recv(), max_rows=70_000, max_bytes=1 << 26)
                )

    @property
    def rows(self) -> int:
        return sum(one.batch.num_rows for one in self.messages)

    def table(self, rows: int) -> pa.Table:
        """What came, once that is so many rows."""
        deadline = time.monotonic() + 20
        while self.rows < rows and time.monotonic() < deadline:
            time.sleep(0.01)
        assert self.rows == rows
        return pa.Table.from_batches([one.batch for one in self.messages])

    def close(self) -> None:
        self._end.set()
        self._thread.join()
        self._socket.close()
        if self._authenticator is not None:
            self._authenticator.stop()
        self._context.term()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    made = Receiver()
    yield made
    made.close()


@pytest.fixture
def store(records, tmp_path: Path) -> Path:
    path = tmp_path / "fingerprints.db"
    with open_store(path, create=True) as opened:
        opened.append(records(ROWS))
    return path


def exported(store: Path, name: str) -> Path:
    path = store.parent / name
    with open_store(store, read_only=True) as opened:
        export_file(opened, path)
    return path


@pytest.mark.parametrize("name", ["fingerprints.db", "a.parquet", "a.jsonl", "a.jsonl.gz"])
def test_a_source_of_any_kind_reaches_the_receiver_whole(attn, records, receiver, store, name):
    source = store if name.endswith(".db") else exported(store, name)
    done = attn("send", source, "--to", receiver.address, "--batch-rows", "256")
    assert (done.returncode, done.stderr) == (0, "")
    said = f"{receiver.address}: 600 rows sent in 3 messages, 0 dropped, 0 rejected"
    assert done.stdout.startswith(said)
    assert receiver.table(ROWS).to_pylist() == records(ROWS).to_pylist()
    assert [one.batch.num_rows for one in receiver.messages] == [256, 256, 88]


def test_a_folder_and_standard_input_are_sources_too(attn, records, receiver, store, tmp_path):
    with open_store(tmp_path / "folder", create=True) as opened:
        opened.append(records(ROWS))
    done = attn("send", tmp_path / "folder", "--to", receiver.address, "--json")
    facts = json.loads(done.stdout)
    assert facts["sent"] == {"messages": 3, "rows": ROWS}
    assert facts["dropped"] == {"messages": 0, "rows": 0} and facts["rejected"] == {}
    assert (facts["to"], facts["sender_id"]) == (receiver.address, receiver.messages[0].sender_id)
    lines = exported(store, "a.jsonl").read_text()
    done = attn("send", "-", "--to", receiver.address, "--sender-id", "me", stdin=lines)
    assert done.returncode == 0, done.stderr
    receiver.table(2 * ROWS)
    assert {one.sender_id for one in receiver.messages[3:]} == {"me"}
    refused = attn("send", "-", "--to", receiver.address, "--repeat", "2", stdin=lines)
    assert refused.returncode == 2 and "standard input cannot be read again" in refused.stderr


def test_repeated_rows_are_new_requests_of_now(attn, records, receiver, store):
    before = datetime.now(UTC)
    done = attn(
        "send", store, "--to", receiver.address, "--repeat", "3", "--request-suffix", "~", "--now"
    )
    assert done.returncode == 0, done.stderr
    table = receiver.table(3 * ROWS)
    ids = records(ROWS).column("request_id").to_pylist()
    assert table.column("request_id").to_pylist() == [f"{i}~{n}" for n in (1, 2, 3) for i in ids]
    times = table.column("captured_at").to_pylist()
    assert before <= times[0] and times == sorted(times) and times[-1] <= datetime.now(UTC)
    assert record.conform(table).rejected == {}
    changed = ("request_id", "captured_at")
    same = [name for name in record.SCHEMA.names if name not in changed]
    assert table.slice(ROWS, ROWS).select(same).to_pylist() == [
        {name: row[name] for name in same} for row in records(ROWS).to_pylist()
    ]


def test_rows_that_are_not_records_are_not_sent_and_said(attn, receiver, store):
    path = exported(store, "a.jsonl")
    first = path.read_text().splitlines(keepends=True)[0]
    with path.open("a") as file:
        file.write("no record\n")
        file.write(first.replace('"position": 0', '"position": -1'))
    done = attn("send", path, "--to", receiver.address)
    assert done.returncode == 0
    assert "600 rows sent" in done.stdout and "2 rejected" in done.stdout
    assert "rejected 1: not JSON" in done.stderr and "rejected 1: negative position" in done.stderr
    receiver.table(ROWS)


def test_a_rate_is_kept(attn, receiver, store):
    done = attn(
        "send", store, "--to", receiver.address, "--rate", "1000", "--batch-rows", "10", "--json"
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["seconds"] >= (ROWS - 10) / 1000
    receiver.table(ROWS)


def test_without_a_receiver_one_line_says_so(attn, store):
    with zmq.Context() as context, context.socket(zmq.PULL) as socket:
        socket.bind("tcp://127.0.0.1:*")
        address = socket.last_endpoint.decode()
    for more in ([], ["--rate", "100", "--batch-rows", "10"]):
        done = attn("send", store, "--to", address, "--timeout", "0.5", *more)
        assert done.returncode == 3
        assert done.stderr == (
            f"error: nobody received at {address} within 0.5 s: start the receiver, and give "
            "both ends the same keys or none\n"
        )
        assert "0 rows sent in 0 messages" in done.stdout


def test_what_a_slow_receiver_does_not_take_is_dropped_and_said(attn, records, tmp_path):
    with open_store(tmp_path / "folder", create=True) as opened:
        opened.append(records(60_000))
    receiver = Receiver(hwm=1)
    try:
        receiver.reads.clear()
        done = attn(
            "send", tmp_path / "folder", "--to", receiver.address, "--rate", "1e9", "--json",
            "--timeout", "6", "--repeat", "8",
        )  # fmt: skip
        facts = json.loads(done.stdout)
        assert done.returncode == 3
        assert facts["sent"]["rows"] + facts["dropped"]["rows"] == 480_000
        assert facts["dropped"]["rows"] > 0
        dropped = f"{facts['dropped']['rows']:,} rows were dropped"
        assert done.stderr.splitlines()[-1].startswith(f"error: {dropped}")
        receiver.reads.set()
        deadline = time.monotonic() + 20
        while receiver.rows < facts["sent"]["rows"] and time.monotonic() < deadline:
            time.sleep(0.01)
        # Nothing is missing in between. A message that was being written may have come as well.
        assert facts["sent"]["rows"] <= receiver.rows < facts["sent"]["rows"] + 8 * 256
        last = receiver.messages[-1]
        assert last.rows_before + last.batch.num_rows == receiver.rows
    finally:
        receiver.close()


def test_ctrl_c_ends_it_with_a_summary(receiver, store):
    process = AttnProcess(
        "send", store, "--to", receiver.address, "--rate", "100", "--batch-rows", "1", "--repeat",
        "1000",
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 60
        while receiver.rows < 5 and time.monotonic() < deadline:
            time.sleep(0.01)
        process.signal(signal.SIGINT)
        done = process.finish(60)
    finally:
        process.end()
    assert done.returncode == 130
    assert " rows sent in " in done.stdout
    assert done.stderr.splitlines()[-1].startswith("interrupted: ")


def test_it_speaks_curve(attn, store, tmp_path):
    curve.make_keys(tmp_path / "keys")
    receiver = Receiver(tmp_path / "keys")
    try:
        done = attn("send", store, "--to", receiver.address, "--curve-keys", tmp_path / "keys")
        assert (done.returncode, done.stderr) == (0, "")
        receiver.table(ROWS)
        done = attn("send", store, "--to", receiver.address, "--timeout", "0.5")
        assert done.returncode == 3 and "give both ends the same keys" in done.stderr
    finally:
        receiver.close()


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["missing.db"], "missing.db does not exist"),
        (["records.txt"], "use a name that ends in"),
        (["{store}", "--to", "tcp://gpu-7:9001"], "give --curve-keys DIR"),
        (["{store}", "--to", "nowhere"], "is no address"),
        (["{store}", "--rate", "0"], "is not a rate"),
        (["{store}", "--rate", "nan"], "is not a rate"),
        (["{store}", "--batch-rows", "0"], "use 1 to 65,536"),
        (["{store}", "--repeat", "0"], "use 1 or more"),
        (["{store}", "--timeout", "inf"], "--timeout inf: use"),
        (["{store}", "--curve-keys", "nowhere"], "make keys with"),
    ],
)
def test_what_cannot_be_sent_is_one_line(attn, store, arguments, problem):
    done = attn("send", *(word.format(store=store) for word in arguments))
    assert done.returncode == 2
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    assert problem in done.stderr


def test_an_empty_store_has_nothing_to_send(attn, tmp_path):
    open_store(tmp_path / "empty.db", create=True).close()
    done = attn("send", tmp_path / "empty.db")
    assert done.returncode == 2 and "has no records to send" in done.stderr
