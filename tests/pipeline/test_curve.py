"""CURVE keys: files that only their owner reads, and who gets in with them."""

from __future__ import annotations

import json
import stat
import threading

import pytest
import zmq

from capture_kernels.errors import OptionError, WriteError
from pipeline.stream import curve


def test_keys_are_made_once_and_only_their_owner_reads_them(tmp_path):
    folder = tmp_path / "a" / "keys"
    made = curve.make_keys(folder)
    names = ["server.key", "server.key_secret", "client.key", "client.key_secret"]
    assert [path.name for path in made] == names
    assert {stat.S_IMODE(path.stat().st_mode) for path in made} == {0o600}
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    before = {path: path.read_bytes() for path in made}
    with pytest.raises(OptionError, match="has keys of 'client': give another --client"):
        curve.make_keys(folder)
    more = curve.make_keys(folder, "gpu-2")
    assert [path.name for path in more] == ["gpu-2.key", "gpu-2.key_secret"]
    assert {path: path.read_bytes() for path in made} == before


@pytest.mark.parametrize("name", ["server", "", "a/b", "..", "x" * 65, "a\n"])
def test_a_name_that_is_no_senders_makes_nothing(tmp_path, name):
    with pytest.raises(OptionError, match="cannot be called"):
        curve.make_keys(tmp_path / "keys", name)
    assert not (tmp_path / "keys").exists()


def test_keys_that_cannot_be_used_are_one_line_that_says_what_to_do(tmp_path):
    with pytest.raises(OptionError, match=r"does not exist: make keys with `attn stream keys"):
        curve.server_keys(tmp_path)
    curve.make_keys(tmp_path)
    secret = tmp_path / "client.key_secret"
    text = secret.read_text()
    secret.chmod(0o640)
    with pytest.raises(OptionError, match="can be read by others: chmod 600"):
        curve.client_keys(tmp_path)
    secret.chmod(0o600)
    for bad in ("", "curve\n", text.replace('public-key = "', 'public-key = "x'), "\udcff"):
        secret.write_bytes(bad.encode(errors="surrogateescape"))
        with pytest.raises(OptionError, match="holds no CURVE key"):
            curve.client_keys(tmp_path)
    secret.write_text((tmp_path / "client.key").read_text())
    with pytest.raises(OptionError, match="has no secret key"):
        curve.client_keys(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(WriteError, match="cannot write keys to"):
        curve.make_keys(tmp_path / "file" / "keys")


@pytest.mark.parametrize(
    "address", ["tcp://127.0.0.1:9001", "tcp://127.1.2.3:*", "tcp://localhost:1", "tcp://[::1]:9",
                "ipc:///tmp/x", "inproc://x"],
)  # fmt: skip
def test_on_this_machine_no_keys_are_needed(address):
    curve.check_address(address, has_keys=False)


@pytest.mark.parametrize("address", ["tcp://0.0.0.0:9001", "tcp://*:9001", "tcp://gpu-7:9001",
                                     "tcp://[::]:9001", "tcp://10.0.0.1:*"])  # fmt: skip
def test_off_this_machine_they_are(address):
    with pytest.raises(OptionError, match="give --curve-keys DIR"):
        curve.check_address(address, has_keys=False)
    curve.check_address(address, has_keys=True)


@pytest.mark.parametrize(
    "address", ["", "9001", "tcp://", "tcp://127.0.0.1", "tcp://:1", "ipc://", "tcp://127.0.0.1:x",
                "tcp://h:65536", "http://h:1"],
)  # fmt: skip
def test_what_is_no_address_is_said(address):
    with pytest.raises(OptionError, match="is no address: use tcp://HOST:PORT"):
        curve.check_address(address, has_keys=True)


def sends(port: int, keys: curve.ClientKeys | None) -> threading.Event:
    """Send one message with a context of its own until it is handed over or refused."""
    sent = threading.Event()

    def work() -> None:
        with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
            socket.linger = 0
            socket.sndtimeo = 1_000
            socket.immediate = True  # only to a receiver that has let it in
            if keys is not None:
                keys.apply(socket)
            socket.connect(f"tcp://127.0.0.1:{port}")
            try:
                socket.send(b"hello")
                sent.set()
                socket.linger = 1_000
            except zmq.Again:
                pass

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(30)
    return sent


def test_only_a_sender_whose_key_is_in_the_folder_gets_in(tmp_path):
    curve.make_keys(tmp_path / "here")
    curve.make_keys(tmp_path / "elsewhere")
    server = curve.server_keys(tmp_path / "here")
    with zmq.Context() as context:
        authenticator = server.authenticator(context)
        with context.socket(zmq.PULL) as socket:
            socket.rcvtimeo = 10_000
            server.apply(socket)
            port = socket.bind_to_random_port("tcp://127.0.0.1")
            known = curve.client_keys(tmp_path / "here")
            assert sends(port, known).is_set()
            assert socket.recv() == b"hello"
            stranger = curve.client_keys(tmp_path / "elsewhere")
            socket.rcvtimeo = 0
            for keys in (None, stranger, stranger._replace(server=known.server)):
                assert not sends(port, keys).is_set()
                with pytest.raises(zmq.Again):
                    socket.recv()
            # A key may come, and go, while the receiver runs; a damaged file is no key.
            (tmp_path / "here" / "bad.key").write_text("x")
            curve.make_keys(tmp_path / "here", "late")
            late = curve.client_keys(tmp_path / "here", "late")
            assert sends(port, late).is_set()
            socket.rcvtimeo = 10_000
            assert socket.recv() == b"hello"
            (tmp_path / "here" / "late.key").unlink()
            assert not sends(port, late).is_set()
        authenticator.stop()


def test_the_command_makes_keys_and_says_whose_they_are(attn, tmp_path):
    done = attn("stream", "keys", tmp_path / "keys")
    assert (done.returncode, done.stderr) == (0, "")
    assert f"made {tmp_path / 'keys' / 'client.key_secret'}, which stays secret" in done.stdout
    more = attn("stream", "keys", tmp_path / "keys", "--client", "gpu-2", "--json")
    names = [str(tmp_path / "keys" / f"gpu-2.{kind}") for kind in ("key", "key_secret")]
    assert json.loads(more.stdout) == {"made": names}
    again = attn("stream", "keys", tmp_path / "keys")
    assert again.returncode == 2
    assert again.stderr.startswith("error: ") and again.stderr.count("\n") == 1
    assert curve.client_keys(tmp_path / "keys", "gpu-2").server
