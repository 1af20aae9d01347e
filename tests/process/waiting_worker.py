"""Calls every function that can wait, in one process, with servers and files that do not answer.

test_waiting.py starts this program.

    waiting_worker.py servers | special | signals | torch FOLDER

It prints one JSON object per cell: its name, how it ended, and how many connections a server saw. For `signals` it also
prints how long Ctrl-C took ("heard", in seconds).
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from waiting_servers import MODEL, Server

# A call that takes more seconds than this is considered to hang, and the process ends.
HANG = 20.0


@contextlib.contextmanager
def watched(name: str) -> Iterator[None]:
    """Prints the name of the block. If the block hangs, prints all stacks and ends the process."""
    print(json.dumps({"begins": name}), flush=True)
    faulthandler.dump_traceback_later(HANG, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def tell(name: str, **found: Any) -> None:
    print(json.dumps({"cell": name, **found}), flush=True)


def ending(verb: Callable[[], Any]) -> str:
    """Returns how a call ends: "returned", the class of an overwire error, or the text of another error."""
    import overwire as ow

    try:
        verb()
    except ow.OverwireError as error:
        return type(error).__name__
    except Exception as error:
        return f"not one of ours: {type(error).__name__}: {error}"
    return "returned"


def cli(*argv: str) -> Callable[[], Any]:
    """Returns a function that runs a command line and raises an error if the command fails."""

    def verb() -> None:
        import overwire as ow
        from overwire import _engine

        status = _engine.cli(list(argv))
        if status == 130:
            raise KeyboardInterrupt
        if status:
            raise ow.OverwireError(str(status))

    return verb


def urls(server: Server, folder: Path, options: dict[str, str]) -> dict[str, Callable[[], Any]]:
    """Returns calls of every function that reads over HTTP."""
    import overwire as ow
    from overwire.records import read_records
    from overwire.stores import ObjectReader

    host = f"http://127.0.0.1:{server.port}"
    url, o = host + "/m.safetensors", {"storage_options": options}
    storage = ["--storage", json.dumps(options)]
    return {
        "load_file": lambda: ow.load_file(url, framework="np", **o),
        "load_file keys": lambda: ow.load_file(url, framework="np", keys=["a"], **o),
        "load_file index.json": lambda: ow.load_file(url + ".index.json", framework="np", **o),
        "load_file folder": lambda: ow.load_file(host + "/folder/", framework="np", **o),
        "load_file filter": lambda: ow.load_file(host + "/folder/", framework="np", filter=bool, **o),
        "load_file list": lambda: ow.load_file([url, host + "/n.safetensors"], framework="np", **o),
        "stream": lambda: list(ow.stream(url, framework="np", **o)),
        "safe_open": lambda: ow.safe_open(url, "np", **o),
        "plan": lambda: ow.plan(url, framework="np", **o),
        "inspect": lambda: ow.inspect(url, **o),
        "verify": lambda: ow.verify(url, **o),
        "convert": lambda: ow.convert(url, folder / "out.safetensors", **o),
        "read_bytes": lambda: ow.read_bytes(url, **o),
        "read_records": lambda: read_records(host + "/m.tensors", **o),
        "ObjectReader": lambda: ObjectReader(url, **o).read(),
        "ObjectReader close": lambda: close_early(ObjectReader(url, **o), server),
        "preload": lambda: ended_preload(ow.preload(url, **o), "wait"),
        "preload result": lambda: ended_preload(ow.preload(url + "?2", **o), "result"),
        "preload meta.csv": lambda: ow.preload(host + "/nya/meta.csv", **o),
        "preload pickle": lambda: ow.preload(host + "/x.pkl", **o),
        "preload and load": lambda: beside_preload(
            ow.preload(url + "?3", **o), lambda: ow.load_file(url + "?3", framework="np", **o)
        ),
        "load_compressed_pickle": lambda: ow.load_compressed_pickle(host + "/x.pkl", **o),
        "load_compressed": lambda: ow.load_compressed(host + "/x.pth", **o),
        "overwire inspect": cli("inspect", url, *storage),
        "overwire verify": cli("verify", url, *storage),
        "overwire load": cli("load", url, *storage),
        "overwire fetch": cli("fetch", url, "-o", str(folder / "fetched"), *storage),
        "overwire compress": cli("compress", url, "-o", str(folder / "packed"), *storage),
    }


def ended_preload(preload: Any, method: str) -> None:
    """Calls a method that waits for a preload. Then cancels the preload, because it continues after Ctrl-C."""
    try:
        getattr(preload, method)()
    finally:
        preload.cancel()


def beside_preload(preload: Any, load: Callable[[], Any]) -> None:
    """Loads a file while it is being preloaded, so that it is opened twice. Then cancels the preload."""
    try:
        load()
    finally:
        preload.cancel()


def close_early(reader: Any, server: Server) -> None:
    """Closes a reader that has an open request, and ends as a cancelled wait does."""
    server.reached.wait(HANG)
    reader.close()
    raise_typed()


def raise_typed() -> None:
    import overwire as ow

    raise ow.CancelledError("closed as intended")


def stores(silent: Server, folder: Path, options: dict[str, str]) -> dict[str, Callable[[], Any]]:
    """Returns calls of every function that reads from or writes to a store."""
    import numpy as np
    import overwire as ow
    from overwire.stores import ObjectReader, ObjectWriter, presign, write_bytes

    s3 = {**options, "endpoint_url": f"http://127.0.0.1:{silent.port}", "region": "us-east-1", "key": "k", "secret": "s"}
    redis = f"redis://127.0.0.1:{silent.port}"
    tensors = {"a": np.zeros(8, np.uint8)}

    def written(uri: str, o: dict[str, str]) -> None:
        with ObjectWriter(uri, storage_options=o) as file:
            file.write(b"content")

    verbs: dict[str, Callable[[], Any]] = {}
    for name, host, o in (("s3", "s3://bucket", s3), ("redis", redis, options)):
        for verb, call in {
            "load_file": lambda u, o: ow.load_file(u + "/m.safetensors", framework="np", storage_options=o),
            "folder": lambda u, o: ow.load_file(u + "/folder/", framework="np", storage_options=o),
            "save_file": lambda u, o: ow.save_file(tensors, u + "/m.safetensors", storage_options=o),
            "save_file shards": lambda u, o: ow.save_file(tensors, u + "/m.safetensors", max_shard_size=8, storage_options=o),
            "convert": lambda u, o: ow.convert(folder / "sound.safetensors", u + "/m.safetensors", storage_options=o),
            "compress_pickle": lambda u, o: ow.compress_pickle(tensors, u + "/x.pkl", storage_options=o),
            "ObjectReader": lambda u, o: ObjectReader(u + "/x", storage_options=o).read(),
            "ObjectWriter": lambda u, o: written(u + "/x", o),
            "write_bytes": lambda u, o: write_bytes(u + "/x", b"content", o),
        }.items():
            verbs[f"{name} {verb}"] = lambda call=call, host=host, o=o: call(host, o)
    # presign gets its credentials from a server, and the SDK sets the timeout.
    verbs["presign"] = lambda: presign(
        "s3://bucket/x", 60, storage_options={**options, "endpoint_url": s3["endpoint_url"], "region": "us-east-1"}
    )
    return verbs


def servers(folder: Path) -> None:
    """Calls each function with each kind of server and a short timeout."""
    kinds = {kind: Server(kind) for kind in ("silent", "trickle", "headers")}
    options = {"timeout": "0.1"}
    for kind, server in kinds.items():
        for name, verb in urls(server, folder, options).items():
            if kind != "silent" and name.startswith(("load_file ", "preload", "overwire")):
                continue  # these functions open files as others do
            server.reset()
            with watched(f"{name}, {kind}"):
                ended, seen = ending(verb), server.drained()
            tell(f"{name}, {kind}", ended=ended, seen=seen)
    server = Server("stops")
    for name in ("load_file", "stream", "ObjectReader", "read_bytes", "convert", "preload"):
        verb = urls(server, folder, {**options, "retries": "1"})[name]
        with watched(f"{name}, stops"):
            tell(f"{name}, stops", ended=ending(verb))
    tables = (("", kinds["silent"], ""), (", headers", kinds["headers"], "s3 "), (", line", Server("line"), "redis "))
    for kind, server, store in tables:
        for name, verb in stores(server, folder, options).items():
            if name != "presign" and name.startswith(store):
                server.reset()
                with watched(name + kind):
                    ended, seen = ending(verb), server.drained()
                tell(name + kind, ended=ended, seen=seen)


def interrupted(name: str, verb: Callable[[], Any], reached: Callable[[], Any], at: Server | None = None) -> None:
    """Calls a function that would wait for a minute, and sends SIGINT after it has connected."""
    sent = [0.0]
    over = threading.Event()

    def send() -> None:
        reached()
        if not over.is_set():
            sent[0] = time.monotonic()
            os.kill(os.getpid(), signal.SIGINT)

    if at is not None:
        at.reset()
    sender = threading.Thread(target=send, daemon=True)
    with watched(name):
        ended, heard = "", 0.0
        try:
            try:
                sender.start()
                verb()
                ended = "returned"
            except KeyboardInterrupt:
                ended, heard = "KeyboardInterrupt", time.monotonic() - sent[0]
            except BaseException as error:
                ended = repr(error)
            over.set()
            if at is not None:
                at.reached.set()
            sender.join()
        except KeyboardInterrupt:  # Ctrl-C came after the function had ended
            ended = ended or "late"
        # All connections of the function must be closed.
        if at is not None:
            at.drained()
    tell(name, ended=ended, heard=round(heard, 4))


def signals(folder: Path) -> None:
    """Sends Ctrl-C to each function while it waits."""
    options = {"timeout": "60"}
    silent = Server("silent")
    for name, verb in {**urls(silent, folder, options), **stores(silent, folder, options)}.items():
        if name == "ObjectReader close":
            continue
        os.environ.pop("AWS_CONTAINER_CREDENTIALS_FULL_URI", None)
        if name == "presign":
            os.environ["AWS_CONTAINER_CREDENTIALS_FULL_URI"] = f"http://127.0.0.1:{silent.port}/credentials"
            silent.reset()
        # The SDK fetches credentials once for all callers. Its own timeout ends this request.
        interrupted(name, verb, silent.reached.wait, None if name == "presign" else silent)
    for kind in ("trickle", "headers", "stops"):
        server = Server(kind)
        for name in ("load_file", "stream", "safe_open", "ObjectReader", "verify", "preload"):
            if kind != "stops" or name not in ("safe_open", "verify"):  # these read only the beginning of the file
                interrupted(f"{name}, {kind}", urls(server, folder, options)[name], server.reached.wait, server)
    nobodys(Server("silent"))
    uploads(Server("store"), options)
    left = sorted(path.name for path in folder.iterdir() if path.name != "sound.safetensors")
    tell("files that are left", ended=" ".join(left) or "none")
    keys(folder)


def nobodys(server: Server) -> None:
    """Checks that a job ends if its number is dropped, as happens if Ctrl-C arrives before the number is stored."""
    from engine_calls import fetch_start, verify_start

    spec = {"uris": [f"http://127.0.0.1:{server.port}/m.safetensors"], "storage": {"storage": {"timeout": "60"}}}
    with watched("a number that no one holds"), open(os.devnull, "wb") as sink:
        for start, more in ((verify_start, {}), (fetch_start, {"fd": sink.fileno()})):
            server.reset()
            number = start(json.dumps({**spec, **more}))
            server.reached.wait()
            del number
            server.drained()
    tell("a number that no one holds", ended="closed")


def uploads(server: Server, options: dict[str, str]) -> None:
    """Sends Ctrl-C during an upload to a store. The upload must then be aborted."""
    import numpy as np
    import overwire as ow
    from overwire.stores import ObjectWriter

    o = {**options, "endpoint_url": f"http://127.0.0.1:{server.port}", "region": "us-east-1", "key": "k", "secret": "s"}
    tensors = {"a": np.zeros(40 << 20, np.uint8)}

    def written() -> None:
        with ObjectWriter("s3://bucket/x", storage_options=o) as file:
            file.write(tensors["a"].data)

    for name, verb in {
        "save_file to a store that stops": lambda: ow.save_file(tensors, "s3://bucket/m.safetensors", compress=False, storage_options=o),
        "ObjectWriter to a store that stops": written,
    }.items():
        server.reset()
        interrupted(name, verb, server.reached.wait)


def keys(folder: Path) -> None:
    """Sends Ctrl-C while a key is derived. The derivation itself cannot be stopped."""
    import numpy as np
    import overwire as ow
    from overwire.records import KeyDerivation, derive_key

    # With this many passes, the derivation takes minutes, but little memory.
    passes, memory = 1024, 64 << 20
    path = folder / "sealed.tensors"
    ow.save_file({"a": np.zeros(1000, np.uint8)}, path, storage_options={"encryption_password": "x"})
    data = path.read_bytes()
    old = (3).to_bytes(8, "little") + (256 << 20).to_bytes(8, "little")
    assert data.count(old) == 1
    path.write_bytes(data.replace(old, passes.to_bytes(8, "little") + memory.to_bytes(8, "little")))
    secret = {"storage_options": {"decryption_password": "x"}}

    def soon() -> None:
        time.sleep(0.2)

    for name, verb in {
        "derive_key": lambda: derive_key(b"x", KeyDerivation(passes, memory, bytes(16))),
        "load_file of a sealed file": lambda: ow.load_file(path, framework="np", **secret),
        "verify of a sealed file": lambda: ow.verify(path, **secret),
        "convert of a sealed file": lambda: ow.convert(path, folder / "open.safetensors", **secret),
        "save_file of a sealed file": lambda: ow.save_file(
            {"a": np.zeros(1000, np.uint8)}, folder / "y.tensors", storage_options={"encryption_password": "x"}
        ),
    }.items():
        interrupted(name, verb, soon)


# Kinds of special files, and the functions that make them at a path.
SPECIAL: dict[str, Callable[[Path], Any]] = {
    "pipe": os.mkfifo,
    "link to a pipe": lambda path: (os.mkfifo(path.with_name(path.name + "-pipe")), path.symlink_to(path.name + "-pipe")),
    "/dev/zero": lambda path: path.symlink_to("/dev/zero"),
    "/dev/null": lambda path: path.symlink_to("/dev/null"),
    "/proc": lambda path: path.symlink_to("/proc/self/status"),
    "memory": lambda path: path.symlink_to("/proc/self/mem"),
    "link to itself": lambda path: path.symlink_to(path),
    "link to its folder": lambda path: path.symlink_to("."),
    "folder": lambda path: path.mkdir(),
    "link to nothing": lambda path: path.symlink_to("nowhere"),
}
_held: list[Any] = []


def bound(path: Path) -> None:
    sock = socket.socket(socket.AF_UNIX)
    here = os.getcwd()
    os.chdir(path.parent)  # a socket's path must be short
    sock.bind(path.name)
    os.chdir(here)
    _held.append(sock)


def terabytes(path: Path) -> None:
    with path.open("wb") as file:
        os.truncate(file.fileno(), 1 << 43)


SPECIAL |= {"socket": bound, "terabytes": terabytes}


def special(folder: Path) -> None:
    """Puts each kind of special file at each path that a function opens, and calls the function."""
    import numpy as np
    import overwire as ow
    from overwire.compat.safetensors import numpy as st
    from overwire.records import read_records
    from overwire.stores import ObjectReader

    tensors = {"a": np.zeros(64, np.uint8)}
    index = json.dumps({"metadata": {"total_size": 64}, "weight_map": {"a": "model-00001-of-00001.safetensors"}})

    def model(at: Path, make: Callable[[Path], Any]) -> dict[str, Callable[[], Any]]:
        path = at / "m.safetensors"
        make(path)
        return {
            "load_file": lambda: ow.load_file(path, framework="np"),
            "load_file folder": lambda: ow.load_file(at, framework="np"),
            "load_file list": lambda: ow.load_file([path], framework="np"),
            "stream": lambda: list(ow.stream(path, framework="np")),
            "safe_open": lambda: ow.safe_open(path, "np"),
            "plan": lambda: ow.plan(path, framework="np"),
            "pin": lambda: ow.pin(path).release(),
            "inspect": lambda: ow.inspect(path),
            "verify": lambda: ow.verify(path),
            "convert": lambda: ow.convert(path, at / "out.safetensors"),
            "preload": lambda: ow.preload(path).result(HANG),
            "read_bytes": lambda: ow.read_bytes(path, 1 << 20),
            "read_records": lambda: read_records(path),
            "ObjectReader": lambda: ObjectReader(path).read(1),
            "overwire verify": cli("verify", str(path)),
            "overwire fetch": cli("fetch", str(path), "-o", str(at / "fetched")) if make is not terabytes else must_not,
            "compat.safetensors.numpy": lambda: ours(lambda: st.load_file(path)),
            # save_file is last, because it may create a file.
            "save_file": lambda: ow.save_file(tensors, path),
        }

    def shard(at: Path, make: Callable[[Path], Any]) -> dict[str, Callable[[], Any]]:
        (at / "model.safetensors.index.json").write_text(index)
        make(at / "model-00001-of-00001.safetensors")
        return {
            "load_file": lambda: ow.load_file(at, framework="np"),
            "verify": lambda: ow.verify(at),
            "convert": lambda: ow.convert(at, f"{at}-out/"),
        }

    def index_json(at: Path, make: Callable[[Path], Any]) -> dict[str, Callable[[], Any]]:
        ow.save_file(tensors, at / "model-00001-of-00001.safetensors")
        make(at / "model.safetensors.index.json")
        return {
            "load_file": lambda: ow.load_file(at, framework="np"),
            "load_file filter": lambda: ow.load_file(at, framework="np", filter=bool),
            "inspect": lambda: ow.inspect(at),
            "convert": lambda: ow.convert(at, f"{at}-out/"),
            "save_file": lambda: ow.save_file(tensors, at / "model.safetensors", max_shard_size=64),
        }

    def bundle(at: Path, make: Callable[[Path], Any]) -> dict[str, Callable[[], Any]]:
        path = at / "x.pkl"
        ow.compress_pickle(tensors, path)
        path.unlink()
        make(path)
        return {
            "load_compressed_pickle": lambda: ow.load_compressed_pickle(path),
            "load_compressed": lambda: ow.load_compressed(path),
            "preload": lambda: ow.preload(path).result(HANG),
            "inspect": lambda: ow.inspect(path),
            "verify": lambda: ow.verify(path),
        }

    def container(at: Path, make: Callable[[Path], Any]) -> dict[str, Callable[[], Any]]:
        path = at / "x.pkl"
        ow.compress_pickle(tensors, path)
        (at / "nya/x.safetensors").unlink()
        make(at / "nya/x.safetensors")
        return {
            "load_compressed_pickle": lambda: ow.load_compressed_pickle(path),
            "preload": lambda: ow.preload(path).result(HANG),
        }

    def manifest(at: Path, make: Callable[[Path], Any]) -> dict[str, Callable[[], Any]]:
        make(at / "meta.csv")
        return {
            "preload": lambda: ow.preload(at / "meta.csv").result(HANG),
            "inspect": lambda: ow.inspect(at / "meta.csv"),
        }

    def neighbours(at: Path, make: Callable[[Path], Any]) -> dict[str, Callable[[], Any]]:
        make(at / "x.pth")  # if it were a pickle, it would share the name of the container
        make(at / "unrelated.pkl")
        return {
            "compress_pickle": lambda: must(ow.compress_pickle(tensors, at / "x.pkl")),
            "compress_pickle again": lambda: must(ow.compress_pickle(tensors, at / "x.pkl")),
            "load_compressed_pickle": lambda: must(ow.load_compressed_pickle(at / "x.pkl")),
        }

    places = [model, shard, index_json, bundle, container, manifest, neighbours]
    for number, (kind, make) in enumerate(SPECIAL.items()):
        for place in places:
            at = folder / f"{place.__name__}-{number}"
            at.mkdir()
            for name, verb in place(at, make).items():
                cell = f"{name}, {place.__name__} is {kind}"
                with watched(cell):
                    ended = ending(verb)
                tell(cell, ended=ended)
    with open("/dev/zero", "rb") as file, watched("load_file of an open device"):
        tell("load_file of an open device", ended=ending(lambda: ow.load_file(file, framework="np")))


def must_not() -> None:
    """Replaces a call that would copy all data. Raises a typed error, because the call is not expected here."""
    raise_typed()


def must(_: Any) -> None:
    """Raises a typed error if the argument could be computed, because the caller counts a typed error as success."""
    raise_typed()


def ours(verb: Callable[[], Any]) -> None:
    """Calls a function of a compat module. Any error counts as typed, because compat modules raise the original
    library's errors."""
    try:
        verb()
    except Exception:
        raise_typed()


def with_torch(folder: Path) -> None:
    """Calls the functions of compat modules that need torch."""
    import overwire as ow
    from overwire.compat import fastsafetensors, nyacomp, tensorizer
    from overwire.compat.fastsafetensors.common import SafeTensorsMetadata
    from overwire.compat.fastsafetensors.config import LoaderConfig
    from overwire.compat.nyacomp import hlif, manifests
    from overwire.compat.safetensors import torch as st

    def deserialized(path: Path) -> None:
        with tensorizer.TensorDeserializer(str(path), device="cpu") as found:
            list(found.items())

    for number, (kind, make) in enumerate(SPECIAL.items()):
        at = folder / str(number)
        at.mkdir()
        for name in ("m.safetensors", "m.tensors", "x.pth", "config.json", "merged_tensors.csv", ".s3cfg"):
            make(at / name)
        fast = fastsafetensors.SingleGroup()

        def fastload(at: Path = at, fast: Any = fast) -> None:
            loader = fastsafetensors.SafeTensorsFileLoader(fast, "cpu")
            loader.add_filenames({0: [str(at / "m.safetensors")]})
            loader.copy_files_to_device()

        for name, verb in {
            "safetensors.torch.load_file": lambda at=at: st.load_file(at / "m.safetensors"),
            "TensorDeserializer": lambda at=at: deserialized(at / "m.tensors"),
            "open_stream": lambda at=at: tensorizer.stream_io.open_stream(str(at / "m.tensors")).read(1) and None,
            "s3cfg": lambda at=at: tensorizer._s3.s3cfg_values(str(at / ".s3cfg")),
            "fastsafetensors": fastload,
            "SafeTensorsMetadata": lambda at=at: SafeTensorsMetadata.from_file(str(at / "m.safetensors"), None),
            "LoaderConfig": lambda at=at: LoaderConfig.from_file(str(at / "config.json")),
            "nyacomp.load_compressed": lambda at=at: nyacomp.load_compressed(at / "x.pth"),
            "nyacomp sniff": lambda at=at: hlif.sniff(str(at / "x.pth")),
            "nyacomp read_merge_info": lambda at=at: manifests.read_merge_info(at / "x.pth"),
            "load_model": lambda at=at: ow.load_model(None, at / "m.safetensors"),
        }.items():
            cell = f"{name} of {kind}"
            with watched(cell):
                ended = ending(lambda verb=verb: ours(verb))
            tell(cell, ended=ended)
    silent = Server("silent")
    host = f"http://127.0.0.1:{silent.port}"
    for name, verb in {
        "open_stream http": lambda: tensorizer.stream_io.open_stream(host + "/m.tensors").read(1),
        "open_stream redis": lambda: tensorizer.stream_io.open_stream(f"redis://127.0.0.1:{silent.port}/m").read(1),
        "TensorDeserializer http": lambda: tensorizer.TensorDeserializer(host + "/m.tensors", device="cpu"),
        "safetensors.torch.load_file http": lambda: ow.load_file(host + "/m.safetensors", storage_options={"timeout": "60"}),
    }.items():
        interrupted(name, verb, silent.reached.wait, silent)


if __name__ == "__main__":
    what, where = sys.argv[1], Path(sys.argv[2])
    # Background jobs of a shell start with SIGINT ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for variable in [name for name in os.environ if name.startswith(("AWS_", "OVERWIRE_", "PRELOAD", "REDISCLI_"))]:
        del os.environ[variable]
    os.environ["AWS_EC2_METADATA_DISABLED"] = "true"
    os.environ["AWS_CONFIG_FILE"] = os.environ["AWS_SHARED_CREDENTIALS_FILE"] = os.devnull
    where.joinpath("sound.safetensors").write_bytes(MODEL)
    {"servers": servers, "special": special, "signals": signals, "torch": with_torch}[what](where)
    os._exit(0)  # a key derivation may still run
