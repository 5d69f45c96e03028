"""Pack Python packages into parts for a GPU host that has no network.

    python tools/gpu_host_parts.py --out .gpu-vllm [--sets vllm] [--extra "orjson lark==1.2.2"]

The host has Python 3.12 on x86-64, an NVIDIA driver and some packages already, and takes files of
limited size. The wheels of a set are fetched for that Python and unpacked into one folder. Files
that the host does not need are dropped. In shared libraries, device code that the host's GPU cannot
run and tables for debuggers are overwritten with zeros, which compress to nothing. What is left is
written as

    OUT/part0, part1, ...   a tar archive under xz, cut into pieces of at most 40 MiB
    OUT/parts.txt           how many pieces there are
    OUT/replaces.txt        globs under site-packages that are removed before unpacking
    OUT/setup.sh            removes those, and unpacks the pieces that lie in /tmp/gpu-parts

On the host: put every part into /tmp/gpu-parts, then run `bash OUT/setup.sh [FOLDER OF PARTS]`.

Sets: vllm  vLLM 0.33.0, torch 2.14.0, Triton 3.8.0 and NCCL 2.30.7, for `vllm serve` of a language
            model on one Hopper GPU. Python calls it as `python -m vllm.entrypoints.cli.main serve`.
            Without FlashInfer, DeepGEMM, the CUTLASS DSL, FlashAttention 2 and 4, and vllm-rs.
"""

from __future__ import annotations

import argparse
import hashlib
import mmap
import re
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple


@dataclass(frozen=True)
class PackageSet:
    """What travels together.

    wheels: requirements, each fetched without its own needs.
    dropped: globs under site-packages that do not travel.
    replaces: globs under the host's site-packages to remove, besides older copies of `wheels`.
    """

    wheels: str
    dropped: str = ""
    replaces: str = ""


SETS = {
    "vllm": PackageSet(
        wheels="""
        vllm==0.33.0 torch==2.14.0 triton==3.8.0 nvidia-nccl-cu13==2.30.7 annotated-types==0.8.0
        apache-tvm-ffi==0.1.11 blake3==1.0.11 cachetools==8.0.2 cbor2==6.3.0
        compressed-tensors==0.17.0 distro==1.9.0 fastapi==0.136.3 httpcore2==2.16.2 httpx2==2.16.2
        ijson==3.6.0 jiter==0.19.0 jmespath==1.1.0 jsonschema==4.26.0
        jsonschema-specifications==2025.9.1 lark==1.2.2 llguidance==1.7.6 loguru==0.7.3
        model-hosting-container-standards==0.1.16 msgspec==0.22.0 openai==3.57.0 orjson==3.13.0
        oss-harmony==0.0.11 partial-json-parser==0.2.1.1.post7
        prometheus-fastapi-instrumentator==8.1.0 pybase64==1.5.1 pydantic==2.14.4
        pydantic-core==2.50.5 python-json-logger==4.2.0 python-multipart==0.0.34 pyzmq==27.3.0
        referencing==0.37.0 rpds-py==2026.9.1 setproctitle==1.3.8 sniffio==1.3.1 starlette==1.10.0
        torchvision==0.29.0 truststore==0.10.5 typing-extensions==4.16.0 typing-inspection==0.4.5
        uvicorn==0.54.0 watchfiles==1.3.0 xgrammar==0.2.8
        """,
        # FlashAttention 3 serves Hopper; with `cute`, vLLM would pick version 4, which needs the
        # CUTLASS DSL. It looks for each of these before it imports it. Of Triton go the profiler's
        # libraries, the assembler for Blackwell, and what its tests load.
        dropped="""
        vllm/vllm-rs vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so vllm/vllm_flash_attn/cute
        vllm/_deepselect_C.abi3.so vllm/_flashkda_C.abi3.so vllm/_qutlass_C.abi3.so
        vllm/third_party/deep_gemm vllm/third_party/fmha_sm100 vllm/third_party/tml_fa4
        triton/backends/amd/lib triton/backends/nvidia/lib/cupti*
        triton/backends/nvidia/bin/ptxas-blackwell triton/backends/nvidia/bin/nvdisasm
        triton/_C/libproton.so triton/instrumentation triton/plugins
        nvidia/nccl/include nvidia/nccl/lib/libnccl_device.bc
        torch/bin/test_* torch/bin/protoc* torch/share torch/lib/*.a
        """,
        # Built for an older torch: importing it would fail.
        replaces="""
        torchaudio torio torchaudio-*.dist-info
        """,
    ),
    "none": PackageSet(wheels=""),
}

# pip takes a wheel only if one of its tags is named here.
GLIBC = (5, 12, 17, 18, 24, 26, 27, 28, 31, 34, 35)
PLATFORMS = ["manylinux1", "manylinux2010", "manylinux2014", *(f"manylinux_2_{n}" for n in GLIBC)]
TARGET = ["--no-deps", "--only-binary=:all:", "--python-version=3.12", "--implementation=cp"]
TARGET += [f"--platform={platform}_x86_64" for platform in PLATFORMS]

# Folders of site-packages that several packages share.
SHARED_FOLDERS = {"nvidia"}
PART_BYTES = 40 << 20

# A fat binary: a header (magic, version, its length, that of the body), then entries, each a header
# (kind, version, its length, that of the payload) before its payload.
FAT_SECTIONS = {".nv_fatbin", "__nv_relfatbin"}
FAT_MAGIC = 0xBA55ED50
FAT_HEADER = struct.Struct("<IHHQ")
ENTRY_HEADER = struct.Struct("<HHIQ")
ENTRY_ARCH_OFFSET = 28
PTX, CUBIN = 1, 2
SHF_ALLOC = 2

SETUP = """\
set -e
here=$(cd "$(dirname "$0")" && pwd)
parts=${1:-/tmp/gpu-parts}
want=$(cat "$here/parts.txt")
have=$(ls "$parts"/part[0-9]* | wc -l)
[ "$have" = "$want" ] || { echo "$have of $want parts in $parts"; exit 1; }
site=$(python3 -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
while read -r old; do rm -rf "$site"/$old; done < "$here/replaces.txt"
cat $(ls "$parts"/part[0-9]* | sort -V) | xz -dc -T0 | tar -C "$site" --no-same-owner -x
# A server of several processes would compile all of it in each.
(cd "$site" && ls -d $(cat "$here/replaces.txt") | xargs python3 -m compileall -qj0) || true
echo "unpacked $want parts into $site"
"""


class Section(NamedTuple):
    """A section of an ELF file. offset, size: bytes; loaded: whether a process maps it."""

    name: str
    offset: int
    size: int
    loaded: bool


class Entry(NamedTuple):
    """Code for one architecture. offset, size: bytes of its payload; arch: 90 for sm_90(a)."""

    kind: int
    arch: int
    offset: int
    size: int


def pip(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", "--quiet", *arguments], check=True)


def download(requirements: list[str], cache: Path) -> list[Path]:
    """Paths of the wheels, each fetched once."""
    wheels: list[Path] = []
    for requirement in requirements:
        folder = cache / hashlib.sha256(requirement.encode()).hexdigest()[:16]
        if not list(folder.glob("*.whl")):
            print(f"fetching {requirement}", flush=True)
            pip("download", *TARGET, "--dest", str(folder), requirement)
        wheels += folder.glob("*.whl")
    return wheels


def sections(data: mmap.mmap) -> list[Section]:
    """Sections of a 64-bit little-endian ELF file, but for the table of their names."""
    (table,) = struct.unpack_from("<Q", data, 40)
    entry_size, count, names_index = struct.unpack_from("<HHH", data, 58)
    headers = [
        struct.unpack_from("<IIQQQQ", data, table + index * entry_size) for index in range(count)
    ]
    if not headers:
        return []
    names = headers[names_index][4]
    found = []
    for index, (name, _, flags, _, offset, size) in enumerate(headers):
        if index != names_index:
            start = names + name
            text = data[start : data.find(b"\0", start)].decode()
            found.append(Section(text, offset, size, bool(flags & SHF_ALLOC)))
    return found


def fat_binaries(data: mmap.mmap, section: Section) -> Iterator[list[Entry]]:
    """Entries of each fat binary of a section."""
    position, section_end = section.offset, section.offset + section.size
    while position + FAT_HEADER.size <= section_end:
        magic, _, header_size, body_size = FAT_HEADER.unpack_from(data, position)
        if magic != FAT_MAGIC:
            position += 8
            continue
        position += header_size
        end = position + body_size
        entries = []
        while position + ENTRY_HEADER.size <= end:
            kind, _, header_size, size = ENTRY_HEADER.unpack_from(data, position)
            (arch,) = struct.unpack_from("<I", data, position + ENTRY_ARCH_OFFSET)
            position += header_size
            entries.append(Entry(kind, arch, position, size))
            position += size
        yield entries
        position = end


def useless_entries(entries: list[Entry], arch: int) -> list[Entry]:
    """Entries of a fat binary that a GPU of `arch` never loads.

    It takes a cubin of its own major version, not newer than itself; without one it compiles PTX.
    """
    cubins = [e for e in entries if e.kind == CUBIN and arch // 10 * 10 <= e.arch <= arch]
    if cubins:
        return [entry for entry in entries if entry not in cubins]
    return [entry for entry in entries if entry.kind != PTX or entry.arch > arch]


def trim(library: Path, arch: int) -> int:
    """Overwrite with zeros what the host does not use of an ELF file; returns how many bytes."""
    zeroed = 0
    with library.open("r+b") as file, mmap.mmap(file.fileno(), 0) as data:
        if data[:6] != b"\x7fELF\x02\x01":
            return 0
        ranges = []
        for section in sections(data):
            if section.name in FAT_SECTIONS:
                for entries in fat_binaries(data, section):
                    ranges += [(e.offset, e.size) for e in useless_entries(entries, arch)]
            elif not section.loaded and re.match(r"\.(symtab|strtab|debug_)", section.name):
                ranges.append((section.offset, section.size))
        for offset, size in ranges:
            data[offset : offset + size] = bytes(size)
            zeroed += size
    return zeroed


def drop(site: Path, globs: str) -> None:
    """Remove what `globs` match."""
    for glob in globs.split():
        for path in site.glob(glob):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()


def replaced(site: Path) -> list[str]:
    """Globs of older copies of all that lies in `site`."""
    globs = set()
    for path in site.iterdir():
        if path.suffix == ".dist-info":
            globs.add(f"{path.name.split('-')[0]}-*.dist-info")
        elif path.name in SHARED_FOLDERS:
            globs |= {f"{path.name}/{child.name}" for child in path.iterdir() if child.is_dir()}
        else:
            globs.add(path.name)
    return sorted(globs)


def name_of(requirement: str) -> str:
    return re.split(r"[=<>!~ ]", requirement)[0].lower().replace("_", "-")


def write_parts(site: Path, out: Path) -> int:
    """Write the archive of `site` in parts; returns how many bytes they have together."""
    tar = subprocess.Popen(
        ["tar", "-C", str(site), "--sort=name", "--owner=0", "--group=0", "-c", "."],
        stdout=subprocess.PIPE,
    )
    xz = subprocess.Popen(["xz", "-6", "-T0"], stdin=tar.stdout, stdout=subprocess.PIPE)
    assert tar.stdout and xz.stdout
    tar.stdout.close()
    count = total = 0
    while part := xz.stdout.read(PART_BYTES):
        (out / f"part{count}").write_bytes(part)
        count, total = count + 1, total + len(part)
    if tar.wait() or xz.wait():
        raise SystemExit("the archive could not be written")
    (out / "parts.txt").write_text(f"{count}\n")
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for the parts, made anew")
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "gpu-host-parts")
    parser.add_argument("--sets", default="vllm", help=f"comma separated: {', '.join(SETS)}")
    parser.add_argument("--extra", default="", help="more requirements, without their own needs")
    parser.add_argument("--arch", type=int, default=90, help="compute capability times ten")
    args = parser.parse_args()

    chosen = [SETS[name] for name in args.sets.split(",")]
    requirements = {name_of(r): r for one in chosen for r in one.wheels.split()}
    requirements |= {name_of(r): r for r in args.extra.split()}
    if not requirements:
        parser.error("nothing to pack")
    wheels = download(list(requirements.values()), args.cache)
    site = args.cache / "site"
    shutil.rmtree(site, ignore_errors=True)
    pip("install", "--no-index", "--no-compile", "--target", str(site), *TARGET, *map(str, wheels))
    # Commands name the Python that installed them.
    drop(site, "bin")
    globs = replaced(site)
    for one in chosen:
        drop(site, one.dropped)
        globs += one.replaces.split()
    for path in sorted(site.rglob("*")):
        if path.is_file() and path.stat().st_size > 1 << 20 and (zeroed := trim(path, args.arch)):
            print(f"{path.relative_to(site)}: {zeroed / 1e6:.1f} MB zeroed", flush=True)

    shutil.rmtree(args.out, ignore_errors=True)
    args.out.mkdir(parents=True)
    total = write_parts(site, args.out)
    (args.out / "replaces.txt").write_text("".join(f"{glob}\n" for glob in globs))
    (args.out / "setup.sh").write_text(SETUP)
    count = len(list(args.out.glob("part*[0-9]")))
    print(f"{total / 1e6:.0f} MB in {count} parts in {args.out}")


if __name__ == "__main__":
    main()
