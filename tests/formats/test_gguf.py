"""Tests that GGUF files are listed and verified by their headers, and never saved or loaded. The Python package gguf is
the reference."""

from __future__ import annotations

import http.server
import json
import random
import re
import threading
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import overwire as ow
import processes
import pytest
from gguf import GGMLQuantizationType as Type
from overwire._engine import cli

# Values per block and bytes per block, by type.
SIZES = gguf.GGML_QUANT_SIZES


def write(path: Path, seed: int, types: list[Type]) -> None:
    """Writes a file with the reference's writer. It has a tensor of each type and an entry of each kind."""
    rng = random.Random(seed)
    writer = gguf.GGUFWriter(path, "llama", endianess=rng.choice(list(gguf.GGUFEndian)))
    writer.add_custom_alignment(rng.choice([8, 32, 256]))
    writer.add_uint8("u8", 255)
    writer.add_int64("i64", -(1 << 62))
    writer.add_float32("eps", 1e-5)
    writer.add_float64("pi", 3.5)
    writer.add_bool("yes", True)
    writer.add_string("name", "é\n\x1b[31m")
    writer.add_array("few", [1, 2, 3])
    writer.add_array("words", [f"word {k}" for k in range(rng.randrange(17, 5000))])
    for k, kind in enumerate(types):
        values, size = SIZES[kind]
        rows, blocks = rng.randrange(1, 5), rng.randrange(1, 4)
        data = np.frombuffer(rng.randbytes(rows * blocks * size), np.uint8).reshape(rows, blocks * size)
        writer.add_tensor(f"blk.{k}.{kind.name}", data, raw_shape=(rows, blocks * size), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("seed", range(6))
def test_inspect_and_verify_agree_with_the_reference(tmp_path: Path, seed: int) -> None:
    """Names, types, shapes, sizes, offsets and metadata entries are those that the package gguf reads, for each type
    that it knows."""
    path = tmp_path / "m.gguf"
    types = list(SIZES)
    random.Random(seed).shuffle(types)
    write(path, seed, types)
    reader = gguf.GGUFReader(path)
    (source,) = ow.inspect(path)["sources"]
    assert source["format"] == "gguf" and source["size"] == path.stat().st_size
    assert source["header"] == reader.data_offset
    want = [(t.name, t.tensor_type.name, t.shape.tolist()[::-1], t.n_bytes) for t in reader.tensors]
    assert [(t["name"], t["dtype"], t["shape"], t["bytes"]) for t in source["tensors"]] == want
    assert all(t["coding"] == "plain" and t["stored"] == t["bytes"] for t in source["tensors"])
    fields = {key: field for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    metadata: dict[str, Any] = source["metadata"]
    assert set(metadata) == set(fields) and metadata["name"] == fields["name"].contents()
    assert (metadata["u8"], metadata["i64"], metadata["eps"], metadata["pi"], metadata["yes"], metadata["few"]) == (
        "255", str(-(1 << 62)), "1e-05", "3.5", "true", "[1, 2, 3]")
    assert metadata["words"] == f"{len(fields['words'].data)} of string"
    report = ow.verify(path)
    assert report["ok"] and report["tensors"] == len(types) and report["files"][0]["checked"] == "structure"
    assert "GGUF files have no checksums" in report["note"]


def test_types_equal_the_references() -> None:
    """The engine's table has exactly the types of the package gguf."""
    text = (Path(__file__).resolve().parents[2] / "gosrc/format/gguf/gguf.go").read_text()
    rows = re.findall(r'(\d+): \{"(\w+)", (\d+), (\d+)\}', text)
    table = {int(number): (name, int(values), int(size)) for number, name, values, size in rows}
    assert table == {kind.value: (kind.name, *SIZES[kind]) for kind in SIZES}


def test_unknown_types(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A tensor of an unknown type is listed without its size, and all other tensors completely. `verify` checks the
    other tensors and says that it did not check this one."""
    path = tmp_path / "m.gguf"
    write(path, 5, [Type.Q4_K, Type.F16, Type.F32])
    known = ow.inspect(path)["sources"][0]
    data = bytearray(path.read_bytes())
    at = data.index(b"blk.1.F16") + len("blk.1.F16")
    order = "little" if data[4] == 3 else "big"
    rank = int.from_bytes(data[at : at + 4], order)  # type: ignore[arg-type]
    data[at + 4 + 8 * rank : at + 8 + 8 * rank] = (42).to_bytes(4, order)  # type: ignore[arg-type]
    path.write_bytes(data)
    source = ow.inspect(path)["sources"][0]
    later = {"dtype": "type 42, not known", "bytes": 0, "stored": 0, "coding": "unknown"}
    assert source == known | {"tensors": [known["tensors"][0], known["tensors"][1] | later, known["tensors"][2]]}
    report = ow.verify(path)
    assert report["tensors"] == 2 and report["files"][0]["tensors"] == 2
    assert "1 of 3 tensors have types that are unknown to this version" in report["note"] and "blk.1.F16" in report["note"]
    assert cli(["inspect", str(path)]) == 0
    assert re.search(r"blk\.1\.F16 +type 42, not known +\S+ +- +- +- +unknown", capfd.readouterr().out)
    assert cli(["verify", str(path)]) == 0
    assert "were not verified" in capfd.readouterr().out


def test_commands_accept_gguf_files(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """`overwire inspect` and `overwire verify` accept a GGUF file, even together with other files or from a server, and
    --html writes a page. Terminal control characters are never printed."""
    write(tmp_path / "m.gguf", 1, [Type.Q4_K, Type.F16])
    ow.save_file({"a": np.zeros(3, "f4")}, tmp_path / "a.safetensors")
    both = [str(tmp_path / "m.gguf"), str(tmp_path / "a.safetensors")]
    assert cli(["inspect", *both]) == 0
    out = capfd.readouterr().out
    assert "gguf" in out and "Q4_K" in out and "safetensors" in out and "\x1b" not in out
    assert cli(["verify", *both]) == 0
    assert "structure verified" in capfd.readouterr().out
    assert cli(["inspect", both[0], "--html", str(tmp_path / "page.html")]) == 0
    assert (tmp_path / "page.html").stat().st_size
    with processes.overwire_serve(tmp_path) as address:
        capfd.readouterr()
        assert cli(["inspect", address.rstrip("/") + "/m.gguf", "--json"]) == 0
        assert len(json.loads(capfd.readouterr().out)["sources"][0]["tensors"]) == 2


def test_the_beginning_of_a_remote_file_is_requested_once(tmp_path: Path) -> None:
    """The beginning of a remote GGUF file is requested once."""
    write(tmp_path / "m.gguf", 4, [Type.Q4_K])
    data, heads = (tmp_path / "m.gguf").read_bytes(), []

    class Server(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            first, last = (self.headers.get("Range") or "bytes=0-").removeprefix("bytes=").split("-")
            if not int(first):
                heads.append(self.path)
            part = data[int(first) : int(last) + 1 if last else len(data)]
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {first}-{int(first) + len(part) - 1}/{len(data)}")
            self.send_header("Content-Length", str(len(part)))
            self.send_header("ETag", '"1"')
            self.end_headers()
            self.wfile.write(part)

        def log_message(self, *_: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server)
    with server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        inspection = ow.inspect(f"http://127.0.0.1:{server.server_port}/m.gguf")
        server.shutdown()
    assert inspection["sources"][0]["format"] == "gguf"
    assert heads == ["/m.gguf"]


def test_gguf_files_are_neither_saved_nor_loaded(tmp_path: Path) -> None:
    """Functions that would save or load a GGUF file refuse it, and the error says why."""
    write(tmp_path / "m.gguf", 2, [Type.Q8_0])
    target = tmp_path / "x.safetensors"
    for verb in (ow.load_file, lambda path: ow.convert(path, target), lambda path: ow.save_file({}, path)):
        with pytest.raises((ow.FormatError, ow.ArgumentError), match="GGUF|gguf"):
            verb(tmp_path / "m.gguf")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m.gguf"]


def test_damaged_headers(tmp_path: Path) -> None:
    """A truncated or changed header is read or is refused with the file's name. It never crashes the engine."""
    write(tmp_path / "m.gguf", 3, [Type.Q4_0, Type.F32])
    data = (tmp_path / "m.gguf").read_bytes()
    rng = random.Random(3)
    for _ in range(300):
        damaged = bytearray(data[: rng.choice([len(data), rng.randrange(4, len(data))])])
        for _ in range(rng.randrange(3)):
            damaged[rng.randrange(4, min(len(damaged), 400))] = rng.randrange(256)
        (tmp_path / "d.gguf").write_bytes(damaged)
        try:
            ow.inspect(tmp_path / "d.gguf")
        except (ow.FormatError, ow.CorruptError, ow.NotSupportedError) as error:
            assert "d.gguf" in str(error), error
