"""Tests that hostile pickles run no code. A separate process loads a corpus of known attacks without trust=True, and an
audit hook records every import, file, process and socket.

`python test_pickle_hostile.py FOLDER` starts that process.
"""

from __future__ import annotations

import contextlib
import copyreg
import hashlib
import io
import pickle
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import warm

Case = tuple[str, bytes]

# A reference to the blob that `bundle` makes, as an array of its length.
ARRAY = ("array", 0, "<f4", (100,), (4,), 0, True, 0, 400)

# Callables that known pickle attacks use, with arguments for a call.
CALLS: dict[str, tuple[Any, ...]] = {
    "os.system": ("touch sentinel",),
    "posix.system": ("touch sentinel",),
    "os.popen": ("touch sentinel",),
    "os.execvp": ("touch", ["touch", "sentinel"]),
    "os.posix_spawnp": ("touch", ["touch", "sentinel"], {}),
    "os.mkdir": ("sentinel",),
    "os.putenv": ("SENTINEL", "1"),
    "os.open": ("sentinel", 65),
    "os.remove": ("container",),
    "os._exit": (0,),
    "subprocess.Popen": (["touch", "sentinel"],),
    "subprocess.check_output": (["touch", "sentinel"],),
    "subprocess.getoutput": ("touch sentinel",),
    "pty.spawn": (["touch", "sentinel"],),
    "builtins.eval": ("open('sentinel','w')",),
    "builtins.exec": ("open('sentinel','w')",),
    "builtins.compile": ("open('sentinel','w')", "x", "exec"),
    "builtins.__import__": ("antigravity",),
    "builtins.open": ("sentinel", "w"),
    "builtins.getattr": ("x", "join"),
    "builtins.setattr": ("x", "join", 1),
    "builtins.globals": (),
    "builtins.input": (),
    "builtins.breakpoint": (),
    "builtins.map": ("x", [1]),
    "builtins.type": ("X", (), {}),
    "builtins.vars": (),
    "builtins.property": (),
    "builtins.exit": (),
    "io.open": ("sentinel", "w"),
    "io.FileIO": ("sentinel", "w"),
    "_io.FileIO": ("sentinel", "w"),
    "pathlib.Path": ("sentinel",),
    "shutil.rmtree": (".",),
    "shutil.copyfile": ("container", "sentinel"),
    "tempfile.mkstemp": (),
    "runpy.run_path": ("evil.py",),
    "runpy._run_code": ("open('sentinel','w')", {}),
    "importlib.import_module": ("antigravity",),
    "importlib.machinery.SourceFileLoader": ("x", "evil.py"),
    "code.InteractiveInterpreter": (),
    "timeit.timeit": ("open('sentinel','w')",),
    "cProfile.run": ("open('sentinel','w')",),
    "profile.run": ("open('sentinel','w')",),
    "pdb.run": ("open('sentinel','w')",),
    "bdb.Bdb": (),
    "trace.Trace": (),
    "doctest.debug_script": ("open('sentinel','w')",),
    "webbrowser.open": ("http://127.0.0.1:9/",),
    "antigravity.x": (),
    "urllib.request.urlopen": ("http://127.0.0.1:9/",),
    "socket.create_connection": (("127.0.0.1", 9),),
    "http.client.HTTPConnection": ("127.0.0.1", 9),
    "smtplib.SMTP": ("127.0.0.1", 9),
    "ctypes.CDLL": ("libc.so.6",),
    "ctypes.string_at": (1,),
    "_ctypes.dlopen": ("libc.so.6", 2),
    "mmap.mmap": (-1, 4096),
    "marshal.loads": (b"N",),
    "pickle.loads": (b"cos\nsystem\n(S'touch sentinel'\ntR.",),
    "_pickle.loads": (b"N.",),
    "pickle.Unpickler": (b"",),
    "shelve.open": ("sentinel",),
    "dbm.open": ("sentinel", "c"),
    "sqlite3.connect": ("sentinel",),
    "types.FunctionType": (),
    "types.CodeType": (),
    "types.SimpleNamespace": (),
    "functools.partial": (),
    "functools.reduce": ("x", [1]),
    "operator.attrgetter": ("__class__",),
    "operator.methodcaller": ("system", "touch sentinel"),
    "operator.itemgetter": (0,),
    "itertools.starmap": ("x", []),
    "copyreg._reconstructor": (object, object, None),
    "copyreg.add_extension": ("os", "system", 9),
    "codecs.decode": (b"x", "hex"),
    "_codecs.encode": ("x", "rot13"),
    "signal.raise_signal": (9,),
    "threading.Thread": (),
    "_thread.start_new_thread": ("x", ()),
    "multiprocessing.Process": (),
    "concurrent.futures.ProcessPoolExecutor": (),
    "asyncio.run": ("x",),
    "logging.config.listen": (),
    "logging.FileHandler": ("sentinel",),
    "sys.settrace": (None,),
    "sys.exit": (0,),
    "sys.addaudithook": ("x",),
    "gc.get_objects": (),
    "inspect.currentframe": (),
    "site.addsitedir": (".",),
    "zipimport.zipimporter": ("x.zip",),
    "venv.create": ("sentinel",),
    "ensurepip.bootstrap": (),
    "unittest.main": (),
    "weakref.finalize": ("x", "y"),
    "contextlib.ExitStack": (),
    "collections.namedtuple": ("X", "a"),
    "collections.Counter": ("x",),
    "dataclasses.make_dataclass": ("X", []),
    "enum.Enum": ("X", "a"),
    "uuid.UUID": ("x",),
    "random.Random": (),
    "datetime.datetime.fromtimestamp": (0,),
    "decimal.getcontext": (),
    "torch.load": ("evil.pt",),
    "torch.save": ({}, "sentinel"),
    "torch.hub.load": ("x/y", "z"),
    "torch.jit.load": ("evil.pt",),
    "torch.ops.load_library": ("evil.so",),
    "torch.classes.load_library": ("evil.so",),
    "torch.utils.cpp_extension.load_inline": ("x", "int main(){}"),
    "torch.serialization.load": ("evil.pt",),
    "torch.from_file": ("container", True, 4),
    "torch.UntypedStorage.from_file": ("container", True, 4),
    "torch.set_num_threads": (1,),
    "torch.compile": ("x",),
    "torch.manual_seed": (1,),
    "torch.nn.Module": (),
    "torch.nn.functional.boolean_dispatch": (),
    "torch.nn.functional.torch": (),
    "torch.nn.modules.module.torch": (),
    "torch.nn.modules.module.functools": (),
    "torch.nn.modules.module._addindent": ("x", 1),
    "torch.nn.modules.module.register_module_forward_hook": ("x",),
    "torch.nn.modules.utils._ntuple": (1,),
    "torch._utils._import_dotted_name": ("os.system",),
    "torch._utils._rebuild_wrapper_subclass": (),
    "torch._utils._rebuild_device_tensor_from_numpy": (),
    "torch._utils._rebuild_nested_tensor": (),
    "torch._tensor._rebuild_from_type": (),
    "torch.storage._load_from_bytes": (b"x",),
    "torch.package.PackageImporter": ("x",),
    "torch.distributed.init_process_group": (),
    "torch.multiprocessing.spawn": ("x",),
    "torch.fx.graph_module.reduce_graph_module": ({}, "import antigravity"),
    "torch.os.system": ("touch sentinel",),
    "torch._C._nn.linear": (),
    "numpy.load": ("evil.npy",),
    "numpy.save": ("sentinel", [1]),
    "numpy.fromfile": ("container",),
    "numpy.memmap": ("sentinel",),
    "numpy.dtype": ("O",),
    "numpy.core.multiarray._reconstruct": (),
    "numpy._core.multiarray._reconstruct": (),
    "numpy._core.multiarray.scalar": (),
    "numpy._core.numeric._frombuffer": (),
    "numpy.testing._private.utils.runstring": ("open('sentinel','w')", {}),
    "numpy.ctypeslib.load_library": ("evil", "."),
    "numpy.lib.npyio.NpzFile": ("x",),
    "numpy.vectorize": ("x",),
    "overwire.compress_pickle": ({}, "sentinel"),
    "overwire.load_compressed_pickle": ("x.pkl",),
    "overwire.save_file": ({}, "sentinel"),
    "overwire.rebuild.np_dtype": ("O",),
    "overwire.rebuild.spec_of": ("O",),
    "overwire.rebuild.annotations": (),
    "overwire._engine.cli": (["compress"],),
    "overwire.bundles.bundle.write_bytes": ("sentinel", b"x", None),
    "overwire.bundles.allowlist.AllowList": ("x",),
}

# Dotted names that reach forbidden objects through allowed objects.
DOTTED = [
    ("builtins", "object.__subclasses__"),
    ("builtins", "dict.__class__.__base__"),
    ("builtins", "str.format"),
    ("collections", "OrderedDict.__init__"),
    ("collections", "abc.sys.modules"),
    ("datetime", "sys.modules"),
    ("torch", "Tensor.__reduce_ex__"),
    ("torch", "Tensor.numpy"),
    ("torch", "device.__class__"),
    ("torch", "serialization.os.system"),
    ("torch._utils", "torch.hub.load"),
    ("torch._utils", "torch.load"),
    ("torch._utils", "_rebuild_tensor_v2.__globals__"),
    ("torch._utils", "torch.os.system"),
    ("torch.serialization", "_get_layout.__globals__"),
    ("torch.nn.modules.linear", "Linear.__init__.__globals__"),
    ("torch.nn.modules.linear", "Linear.forward"),
    ("torch.nn.modules.linear", "Linear.__class__"),
    ("torch.nn.modules.module", "Module.__init_subclass__"),
    ("torch.nn.functional", "relu.__globals__"),
    ("torch.nn.functional", "torch.os.system"),
    ("overwire.rebuild", "dtype.__globals__"),
    ("overwire.rebuild", "array.__code__"),
    ("numpy", "ndarray.tofile"),
    ("numpy", "float32.__class__"),
]


def text(value: str) -> bytes:
    data = value.encode()
    return b"\x8c" + bytes([len(data)]) + data if len(data) < 256 else b"X" + struct.pack("<I", len(data)) + data


def push(value: Any) -> bytes:
    """Returns the opcodes that push plain data."""
    data = pickle.dumps(value, protocol=5)[2:-1]
    return data[9:] if data[:1] == pickle.FRAME else data


def stack_global(module: str, name: str) -> bytes:
    return text(module) + text(name) + b"\x93"


def named(module: str, name: str) -> bytes:
    return b"c" + module.encode() + b"\n" + name.encode() + b"\n"


def linear() -> bytes:
    return stack_global("torch.nn.modules.linear", "Linear")


def whole(body: bytes) -> bytes:
    return b"\x80\x05" + body + b"."


def families() -> Iterator[Case]:
    for path, args in CALLS.items():
        module, name = path.rsplit(".", 1)
        try:
            pushed = push(args)
        except Exception:
            pushed = b")"
        yield f"reduce {path}", whole(stack_global(module, name) + pushed + b"R")
        yield f"global {path}", b"\x80\x02" + named(module, name) + pushed + b"R."
        yield f"inst {path}", b"(" + push("touch sentinel") + b"i" + f"{module}\n{name}\n".encode() + b"."
        yield f"newobj {path}", whole(stack_global(module, name) + pushed + b"\x81")
        yield (
            f"hidden in a tensor's state: {path}",
            whole(linear() + b")\x81}" + text("x") + stack_global(module, name) + pushed + b"Rsb"),
        )
    for module, name in DOTTED:
        yield f"dotted {module} {name}", whole(stack_global(module, name) + b")R")
    yield "obj", b"\x80\x02(" + named("os", "system") + push("touch sentinel") + b"o."
    yield "newobj_ex", whole(stack_global("subprocess", "Popen") + push((["touch", "sentinel"],)) + b"}\x92")
    yield "module with newline", whole(text("os\n") + text("system") + b"\x93" + push(("touch sentinel",)) + b"R")
    yield "module is not a str", whole(b"K\x01K\x02\x93")
    yield "empty names", whole(stack_global("", "") + b")R")
    yield from builds()
    yield from references()
    yield from tensors()
    yield from arrays()
    yield from broken()


def builds() -> Iterator[Case]:
    """Yields pickles with BUILD opcodes on objects that the allow-list permits."""
    states = {
        "dict": push({"__defaults__": (1,), "evil": 1}),
        "slots": push((None, {"__defaults__": (1,), "forward": 1, "__doc__": "evil"})),
        "call": push(({"x": 1}, {"_call": 1, "__call__": 1})),
    }
    targets = {
        "relu": stack_global("torch.nn.functional", "relu"),
        "gelu": stack_global("torch._C._nn", "gelu"),
        "class Linear": linear(),
        "class Module": stack_global("torch.nn.modules.module", "Module"),
        "class Parameter": stack_global("torch.nn.parameter", "Parameter"),
        "class Tensor": stack_global("torch", "Tensor"),
        "class Size": stack_global("torch", "Size"),
        "class OrderedDict": stack_global("collections", "OrderedDict"),
        "class datetime": stack_global("datetime", "datetime"),
        "class object": stack_global("builtins", "object"),
        "guard": stack_global("torch._utils", "_rebuild_tensor_v2"),
        "rebuild": stack_global("overwire.rebuild", "dtype"),
        "dtype": stack_global("torch", "float32"),
        "numpy type": stack_global("numpy", "float32"),
        "ndarray": stack_global("numpy", "ndarray"),
        "np.dtype": stack_global("overwire.rebuild", "dtype") + push(("O",)) + b"R",
    }
    forged = push((3, "|", None, None, None, 8, 1, 0))  # an object dtype without its reference flag
    for name, target in targets.items():
        for kind, state in states.items():
            yield f"build {kind} on {name}", whole(target + state + b"b")
        yield f"forged dtype state on {name}", whole(target + forged + b"b")
    hooks = b"}" + text("_forward_hooks") + b"}K\x01" + stack_global("os", "system") + b"ss"
    yield "hook", whole(linear() + b")\x81" + hooks + b"b")


def references() -> Iterator[Case]:
    """Yields pickles with persistent ids that have wrong contents."""
    pids: list[Any] = [
        0, "0", "x", None, (), ("storage",), ("storage", 0, "float32", 400, 1), ("storage", 9, "float32", 400),
        ("storage", -5, "float32", 400), ("storage", 0, "float32", 4000), ("storage", 0, "float32", -1),
        ("storage", 0, "load", 400), ("storage", 0, "os", 400), ("storage", 0, "Tensor", 400),
        ("storage", True, "float32", 400), ("storage", 0.0, "float32", 400), ("storage", 0, 3, 400),
        ("storage", 1 << 70, "float32", 400), ("storage", 0, "float32", 1 << 70), ("storage", -1, "float32", 4),
        ("file", "/etc/passwd"), ("array", 0, "<f4", (100,), (4,), 0, True, 0), ("array", 0, "O", (50,), (8,), 0, True, 0, 400),
        ("array", 0, "<f4", (101,), (4,), 0, True, 0, 400), ("array", 0, "<f4", (100,), (400,), 0, True, 0, 400),
        ("array", 0, "<f4", (100,), (-4,), 0, True, 0, 400), ("array", 0, "<f4", (-1,), (4,), 0, True, 0, 400),
        ("array", 0, "<f4", (1 << 62,), (0,), 0, True, 0, 400), ("array", 0, "<f4", (1,), (4,), -4, True, 0, 400),
        ("array", 0, "<f4", (1,), (4,), 400, True, 0, 400), ("array", 0, "<f4", (1,), (4,), 0, 1, 0, 400),
        ("array", 0, [("a", "O", ())], (1,), (8,), 0, True, 0, 400), ("array", 0, "evil", (1,), (4,), 0, True, 0, 400),
        ("array", 0, "<f4" * 999, (1,), (4,), 0, True, 0, 400), ("array", -1, "<f4", (1,), (4,), 0, True, 0, 0),
        ("array", 0, [("a", "<f4")], (1,), (4,), 0, True, 0, 400), ("array", 0, b"<f4", (1,), (4,), 0, True, 0, 400),
        ("array", 0, "<f4", (2, 1 << 40, 1 << 40), (4, 4, 4), 0, True, 0, 400),
        ("array", 0, "__import__", (1,), (4,), 0, True, 0, 400),
    ]  # fmt: skip
    for at, pid in enumerate(pids):
        yield f"persistent id {at} {str(pid)[:60]}", whole(push(pid) + b"Q")
    yield "text persistent id", b"\x80\x02Pos.system\n."
    for kinds in (("storage", "array"), ("array", "storage")):
        refs = {
            "storage": push(("storage", 0, "float32", 400)),
            "array": push(ARRAY),
        }
        yield f"one blob as both {kinds}", whole(b"".join(refs[k] + b"Q0" for k in kinds) + b"N")


def tensors() -> Iterator[Case]:
    """Yields pickles that call rebuilding functions with arguments that reach outside a blob."""
    storage = push(("storage", 0, "float32", 400)) + b"Q"
    untyped = push(("storage", 0, "", 400)) + b"Q"
    v2 = stack_global("torch._utils", "_rebuild_tensor_v2")
    v3 = stack_global("torch._utils", "_rebuild_tensor_v3")
    float32 = stack_global("torch", "float32")
    extents: list[tuple[Any, Any, Any]] = [
        (0, (101,), (1,)), (100, (1,), (1,)), (-1, (1,), (1,)), (0, (2,), (100,)), (0, (100,), (-1,)), (0, (-1,), (1,)),
        (0, (1 << 62,), (0,)) if False else (0, (10, 11), (10, 1)), (0, (2, 2), (1,)), (0, (1 << 62, 4), (1, 1)),
        (1 << 63, (1,), (1,)), (0, (1.5,), (1,)), (0, "ab", (1, 1)), (0, (True,), (1,)), (0, (1,) * 65, (1,) * 65),
        ((1 << 64) - 1, (1,), (1,)), (0, (2,), (1 << 62,)), (None, (1,), (1,)), (0, None, None),
    ]  # fmt: skip
    for at, (offset, size, stride) in enumerate(extents):
        rest = push(offset) + push(size) + push(stride)
        yield f"extent {at}", whole(v2 + b"(" + storage + rest + b"\x89}tR")
        yield f"extent v3 {at}", whole(v3 + b"(" + untyped + rest + b"\x89}" + float32 + b"tR")
    good = push(0) + push((4,)) + push((1,))
    yield "storage is a list", whole(v2 + b"(" + push([1]) + good + b"\x89}tR")
    yield "metadata", whole(v2 + b"(" + storage + good + b"\x89}" + push({"evil": 1}) + b"tR")
    wider = push(0) + push((100,)) + push((1,))
    yield "v3 wider", whole(v3 + b"(" + untyped + wider + b"\x89}" + stack_global("torch", "float64") + b"tR")
    tensor = v2 + b"(" + storage + good + b"\x89}tR"
    from_type = stack_global("torch._tensor", "_rebuild_from_type_v2")
    for name, function in {"set": stack_global("builtins", "set"), "Linear": linear()}.items():
        yield f"from type {name}", whole(from_type + b"(" + function + stack_global("torch", "Tensor") + b")}tR")
    yield "from type, type", whole(from_type + b"(" + v2 + linear() + b"(" + storage + good + b"\x89}t}tR")
    yield (
        "from type, state",
        whole(from_type + b"(" + v2 + stack_global("torch", "Tensor") + b"(" + storage + good + b"\x89}t" + push([1]) + b"tR"),
    )
    parameter = stack_global("torch._utils", "_rebuild_parameter")
    yield "parameter of a list", whole(parameter + b"(" + push([1]) + b"\x88}tR")
    sparse = stack_global("torch._utils", "_rebuild_sparse_tensor")
    coo = stack_global("torch.serialization", "_get_layout") + push(("torch.sparse_coo",)) + b"R"
    int_storage = push(("storage", 0, "int64", 400)) + b"Q"
    indices = v2 + b"(" + int_storage + push(0) + push((1, 4)) + push((4, 1)) + b"\x89}tR"
    yield (
        "sparse indices outside",
        whole(sparse + b"(" + coo + b"(" + indices + tensor + stack_global("torch", "Size") + push(((2,),)) + b"Rt" + b"tR"),
    )
    yield "sparse of nothing", whole(sparse + b"(" + coo + push((1, 2, 3)) + b"tR")
    yield "layout", whole(stack_global("torch.serialization", "_get_layout") + push(("torch.load",)) + b"R")
    meta = stack_global("torch._utils", "_rebuild_meta_tensor_no_storage")
    yield "meta of nothing", whole(meta + push((1, 2, 3, 4)) + b"R")


def arrays() -> Iterator[Case]:
    """Yields pickles that call overwire's own rebuilding functions with wrong arguments."""
    bad: dict[str, list[tuple[Any, ...]]] = {
        "dtype": [("evil",), (3,), ([1],), ([("a",)],), ([("a", "<f4", (-1,))],), ([("a", "<f4", 3)],),
                  ("__import__('os')",), ()],
        "scalar": [("O", b"12345678"), ("<f4", b"1"), ("<f4", "1234"), ("<f4", bytearray(b"1234")),
                   ([("a", "O", ())], b"12345678")],
        "array": [("O", (2,), False, [1]), ("O", (-1,), False, []), ("O", (1 << 62, 4), False, []), ("O", 3, False, []),
                  ("O", (1,), False, "x"), ("evil", (0,), False, [])],
    }  # fmt: skip
    for name, all_args in bad.items():
        for at, args in enumerate(all_args):
            yield f"rebuild.{name} {at}", whole(stack_global("overwire.rebuild", name) + push(args) + b"R")


def broken() -> Iterator[Case]:
    good = pickle.dumps({"a": [1, 2, "x"], "b": (3.0, None)}, protocol=5)
    for cut in range(0, len(good), 3):
        yield f"cut at {cut}", good[:cut]
    yield "nothing", b""
    yield "a text", b"import os; os.system('touch sentinel')"
    yield "huge frame", b"\x80\x05\x95" + b"\xff" * 8 + b"."
    yield "huge bytes", b"\x80\x05\x8e" + struct.pack("<Q", 1 << 60) + b"."
    yield "protocol 9", b"\x80\x09N."
    yield "deep", whole(b"]" * 1 + b"]" * 100_000 + b"a" * 100_000)
    yield "memo", whole(b"h\x09")
    yield "stack", whole(b"0000")
    yield "buffer", whole(b"\x97")


def bundle(folder: Path, number: int, data: bytes) -> Path:
    """Writes a complete bundle with `data` as its pickle and one blob of 400 bytes."""
    import overwire as ow
    import torch

    path = folder / f"{number}.pkl"
    path.write_bytes(data)
    (folder / "nya").mkdir(exist_ok=True)
    metadata = {"overwire.pickle": hashlib.sha256(data).hexdigest(), "overwire.blobs": "w"}
    ow.save_file({"w": torch.full((100,), 1e9)}, folder / "nya" / f"{number}.safetensors", metadata, compress=False)
    return path


def whole_bundle(folder: Path, number: int, data: bytes, blobs: list[bytes]) -> Path:
    """Writes a complete bundle with any pickle and any blobs."""
    import numpy as np
    import overwire as ow

    path = folder / f"{number}.pkl"
    path.write_bytes(data)
    (folder / "nya").mkdir(exist_ok=True)
    tensors = {f"b{at}": np.frombuffer(blob, np.uint8) for at, blob in enumerate(blobs)}
    metadata = {"overwire.pickle": hashlib.sha256(data).hexdigest(), "overwire.blobs": "\n".join(tensors)}
    ow.save_file(tensors, folder / "nya" / f"{number}.safetensors", metadata, compress=False)
    return path


WATCHED = ("import", "exec", "compile", "open", "os.", "subprocess.", "socket.", "ctypes.", "shutil.", "marshal.", "sys.add",
           "pty.", "urllib.", "webbrowser.", "mmap.", "code.__new__", "function.__new__", "signal.", "sqlite3.")  # fmt: skip


def hunt(folder: Path) -> None:
    """Loads the corpus, and prints every recorded action except reads of the corpus files."""
    import overwire as ow
    import torch

    state = torch.nn.functional.relu.__defaults__, dict(torch.nn.functional.relu.__dict__), torch.nn.Linear.forward
    cases = list(families())
    paths = [bundle(folder, number, data) for number, (_, data) in enumerate(cases)]
    # These loads make the imports that valid loads need, before the hook is active.
    ow.compress_pickle({"a": torch.ones(3), "l": torch.nn.Linear(2, 2), "s": torch.ones(2).to_sparse()}, folder / "honest.pkl")
    ow.load_compressed_pickle(folder / "honest.pkl")
    for body in (
        b"\x80\x05" + stack_global("os", "system") + b".",
        whole(push(ARRAY) + b"Q"),
    ):
        with contextlib.suppress(ow.OverwireError):
            ow.load_compressed_pickle(bundle(folder, 10**6, body))

    events: list[str] = []
    watching = False

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if not watching or not event.startswith(WATCHED):
            return
        if event == "open" and str(args[0]).startswith(str(folder)) and "w" not in (args[1] or "r"):
            return
        events.append(f"{event} {args!r:.200}")

    sys.addaudithook(hook)
    refused = 0
    for (name, _), path in zip(cases, paths, strict=True):
        events.clear()
        watching = True
        try:
            made = ow.load_compressed_pickle(path)
            outcome = f"made {type(made).__name__}"
        except ow.OverwireError as error:
            outcome = type(error).__name__
            refused += 1
        except MemoryError:
            outcome = "MemoryError"
            refused += 1
        finally:
            watching = False
        if events:
            print("EVENT", name, outcome, events[:3])
        if outcome.startswith("made") and not name.startswith(("deep",)):
            print("MADE", name, outcome)
    assert state == (
        torch.nn.functional.relu.__defaults__, dict(torch.nn.functional.relu.__dict__), torch.nn.Linear.forward,
    )
    for root in (folder, Path.cwd()):
        assert not list(root.rglob("*sentinel*"))
    print("CASES", len(cases), "REFUSED", refused)


def test_no_hostile_pickle_runs_code(tmp_path: Path) -> None:
    done = warm.run([__file__, tmp_path], cwd=tmp_path, timeout=280)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "EVENT" not in done.stdout and "MADE" not in done.stdout, done.stdout[:5000]
    last = done.stdout.splitlines()[-1].split()
    assert last[0] == "CASES" and int(last[1]) >= 200 and int(last[3]) >= int(last[1]) * 0.9


def test_the_error_names_the_refused_global(tmp_path: Path) -> None:
    import overwire as ow

    with pytest.raises(ow.UntrustedPickleError, match=r"os\.system.*trust=True") as caught:
        ow.load_compressed_pickle(bundle(tmp_path, 0, whole(stack_global("os", "system") + push(("true",)) + b"R")))
    assert isinstance(caught.value, pickle.UnpicklingError)


def test_trust_allows_refused_globals(tmp_path: Path) -> None:
    import overwire as ow

    data = whole(stack_global("operator", "add") + push((2, 3)) + b"R")
    assert ow.load_compressed_pickle(bundle(tmp_path, 0, data), trust=True) == 5


def test_a_forged_dtype_is_refused(tmp_path: Path) -> None:
    import overwire as ow

    # If the flags of a structured dtype falsely say that it has no objects, and an array gets this dtype and raw bytes,
    # numpy would use the bytes as pointers to objects.
    dtype = stack_global("overwire.rebuild", "dtype") + push(([("a", "O", ())],)) + b"R"
    forged = dtype + push((3, "|", None, ("a",), {}, 8, 1, 0)) + b"b"
    array = push(ARRAY) + b"Q"
    state = b"(K\x01" + push((50,)) + forged + b"\x89" + push(b"A" * 400) + b"tb"
    for body in (forged, array + state, array + push((1, (50,), None, False, b"")) + b"b"):
        with pytest.raises(ow.UntrustedPickleError, match="sets the state of numpy"):
            ow.load_compressed_pickle(bundle(tmp_path, 0, whole(body)))


def test_registered_extensions_are_refused(tmp_path: Path) -> None:
    import os

    import overwire as ow

    copyreg.add_extension("os", "system", 77)
    try:
        pickle.Unpickler(io.BytesIO(b"\x80\x02\x82\x4d.")).load()  # the extension is now in the unpickler's cache
        with pytest.raises(ow.UntrustedPickleError, match="opcode"):
            ow.load_compressed_pickle(bundle(tmp_path, 0, b"\x80\x02\x82\x4d" + push(("true",)) + b"R."))
    finally:
        copyreg.remove_extension("os", "system", 77)
    assert os.path.exists(tmp_path / "0.pkl")


if __name__ == "__main__":
    hunt(Path(sys.argv[1]))
