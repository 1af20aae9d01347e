"""Runs the programs of tensorizer's README in a process in which `tensorizer` is overwire's drop-in. Only the bucket,
the device and the name of the model differ. A stand-in for `transformers` makes a small model instead of downloading
one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import overwire
import pytest
import stores
import warm
from conftest import cleaned

# Names that the examples import from transformers.
TRANSFORMERS = '''
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(40, 16)
        self.h = nn.ModuleList([nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16)) for _ in range(3)])
        self.lm_head = nn.Linear(16, 40, bias=False)
        self.register_buffer("mask", torch.tril(torch.ones(8, 8, dtype=torch.bool)), persistent=False)

    def forward(self, ids):
        x = self.wte(ids)
        for layer in self.h:
            x = x + layer(x)
        return self.lm_head(x)

    def generate(self, ids, max_new_tokens, do_sample, pad_token_id):
        for _ in range(max_new_tokens):
            ids = torch.cat([ids, self(ids)[:, -1:].argmax(-1)], 1)
        return ids

class AutoConfig:
    from_pretrained = staticmethod(lambda name: name)

class AutoModelForCausalLM:
    @staticmethod
    def from_pretrained(name, revision, torch_dtype, low_cpu_mem_usage):
        torch.manual_seed(1)
        return Model().to(torch_dtype)
    from_config = staticmethod(lambda config: Model())

class AutoTokenizer:
    eos_token_id = 0
    from_pretrained = classmethod(lambda cls, name: cls())
    encode = lambda self, text, return_tensors: torch.tensor([[ord(c) % 40 for c in text]])
    decode = lambda self, ids, skip_special_tokens: " ".join(map(str, ids.tolist()))
'''

SERIALIZE = """
import torch
from tensorizer import TensorSerializer
from transformers import AutoModelForCausalLM

model_ref = "EleutherAI/gpt-neo-125M"
model_name = model_ref.split("/")[-1]
s3_uri = f"{BUCKET}/{model_name}.tensors"

model = AutoModelForCausalLM.from_pretrained(
    model_ref,
    revision="float16",
    torch_dtype=torch.float16,
    low_cpu_mem_usage=True,
)

serializer = TensorSerializer(s3_uri)
serializer.write_module(model)
serializer.close()
"""

DESERIALIZE = """
import time
import torch
from tensorizer import TensorDeserializer
from tensorizer.utils import no_init_or_tensor, convert_bytes, get_mem_usage

from transformers import AutoModelForCausalLM, AutoTokenizer, AutoConfig

model_ref = "EleutherAI/gpt-neo-125M"
model_name = model_ref.split("/")[-1]
s3_uri = f"{BUCKET}/{model_name}.tensors"

config = AutoConfig.from_pretrained(model_ref)

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
with torch.device(device), no_init_or_tensor():
    model = AutoModelForCausalLM.from_config(config)
assert all(p.is_meta for p in model.parameters())

print(f"Deserializing to {device}:")
before_mem = get_mem_usage()

start = time.perf_counter()
deserializer = TensorDeserializer(s3_uri, device=device)
deserializer.load_into_module(model)
end = time.perf_counter()

after_mem = get_mem_usage()

total_bytes_str = convert_bytes(deserializer.total_tensor_bytes)
duration = end - start
per_second = convert_bytes(deserializer.total_tensor_bytes / duration)
deserializer.close()
print(f"Deserialized {total_bytes_str} in {end - start:0.2f}s, {per_second}/s")
print(f"Memory usage before: {before_mem}")
print(f"Memory usage after: {after_mem}")

model.eval()
tokenizer = AutoTokenizer.from_pretrained(model_ref)
eos = tokenizer.eos_token_id
input_ids = tokenizer.encode(
    "¡Hola! Encantado de conocerte. hoy voy a", return_tensors="pt"
).to(device)

with torch.no_grad():
    output = model.generate(
        input_ids, max_new_tokens=50, do_sample=True, pad_token_id=eos
    )

print(f"Output: {tokenizer.decode(output[0], skip_special_tokens=True)}")
want = AutoModelForCausalLM.from_pretrained(model_ref, revision="float16", torch_dtype=torch.float16, low_cpu_mem_usage=True)
assert all(torch.equal(p, model.state_dict()[n]) for n, p in want.state_dict().items())
assert torch.equal(output, want.generate(input_ids, 50, True, eos)) and not model.mask.is_meta
"""

ENCRYPTION = """
from tensorizer import (
    EncryptionParams, DecryptionParams, TensorDeserializer, TensorSerializer
)
from transformers import Model

model, twin = Model(), Model()

encryption_params = EncryptionParams.random()

serializer = TensorSerializer("model.tensors", encryption=encryption_params)
serializer.write_module(model)  # or write_state_dict(), etc.
serializer.close()

with open("tensor.key", "wb") as key_file:
    key_file.write(encryption_params.key)

with open("tensor.key", "rb") as key_file:
    key: bytes = key_file.read()

decryption_params = DecryptionParams.from_key(key)

deserializer = TensorDeserializer("model.tensors", encryption=decryption_params)
deserializer.load_into_module(twin)
deserializer.close()
import torch
assert all(torch.equal(p, twin.state_dict()[n]) for n, p in model.state_dict().items())
"""

STATE_DICTS = """
from tensorizer import TensorDeserializer, TensorSerializer
import torch
from transformers import Model

model: torch.nn.Module = Model()

state_dict = model.state_dict()
torch.save(state_dict, "model.pt")

state_dict = torch.load("model.pt", map_location="cpu")
model.load_state_dict(state_dict)

state_dict = model.state_dict()
serializer = TensorSerializer("model.tensors")
serializer.write_state_dict(state_dict)
serializer.close()

twin = Model()
with TensorDeserializer("model.tensors", device="cpu") as state_dict:
    twin.load_state_dict(state_dict)
assert all(torch.equal(p, twin.state_dict()[n]) for n, p in model.state_dict().items())
"""

TORCH_COMPAT = """
from __future__ import annotations
import io, os, sys, threading, types
import torch
from tensorizer.torch_compat import tensorizer_loading, tensorizer_saving
from transformers import Model

model: torch.nn.Module = Model()

state_dict = model.state_dict()

with tensorizer_saving("model.pt.tensors"):
    torch.save(state_dict, "model.pt")

with tensorizer_loading("model.pt.tensors", device="cpu"):
    state_dict = torch.load("model.pt")
model.load_state_dict(state_dict)
assert os.path.getsize("model.pt") < 20_000

# Acts like a library that keeps a reference to torch.save when it is imported.
with tensorizer_saving():
    library = types.ModuleType("library")
    exec("from torch import save", vars(library))

library.save(state_dict, "plain.pt")
assert not os.path.exists("plain.pt.tensors")
with tensorizer_saving():
    library.save(state_dict, "train.pt")
assert os.path.exists("train.pt.tensors")


def tensors_path(f: torch.types.FileLike) -> str | None:
    if isinstance(f, str):
        return f.replace(".pt", "-tensor-data.tensors", 1)
    else:
        return None


state_dict = model.state_dict()

with tensorizer_saving(tensors_path):
    torch.save(state_dict, "named.pt")
    whole = io.BytesIO()
    torch.save(state_dict, whole)

with tensorizer_loading(tensors_path, device="cpu"):
    found = torch.load("named.pt")
    whole.seek(0)
    also = torch.load(whole)
assert os.path.exists("named-tensor-data.tensors") and not os.path.exists("named.pt.tensors")
assert all(torch.equal(t, found[n]) and torch.equal(t, also[n]) for n, t in state_dict.items())

# Both contexts can be used together and nested. They affect only this thread.
with tensorizer_saving("outer.tensors"), tensorizer_loading("outer.tensors", device="cpu"):
    with tensorizer_saving("inner.tensors", limit_cpu_concurrency=1):
        torch.save(state_dict, "x.pt")
    torch.save(state_dict, "y.pt")
    t = threading.Thread(target=lambda: torch.save(state_dict, "thread.pt"))
    t.start(); t.join()
    assert torch.equal(torch.load("y.pt")["lm_head.weight"], model.lm_head.weight)
assert os.path.exists("inner.tensors") and os.path.exists("outer.tensors")
assert torch.equal(torch.load("thread.pt")["lm_head.weight"], model.lm_head.weight)
with tensorizer_saving():
    torch.save(model, "model-whole.pt")
with tensorizer_loading(device="cpu", suppress_weights_only=True):
    assert torch.equal(torch.load("model-whole.pt", weights_only=True).lm_head.weight, model.lm_head.weight)
"""

NUMPY = """
import numpy, torch
from tensorizer import TensorDeserializer, TensorSerializer, TensorType
serializer = TensorSerializer("arrays.tensors")
serializer.write_tensor(0, "a", TensorType.PARAM, numpy.arange(6).reshape(2, 3))
serializer.write_tensor(0, "b", TensorType.PARAM, torch.ones(3).bfloat16())
serializer.close()
deserializer = TensorDeserializer("arrays.tensors", device="cpu", num_readers=2)
try:
    list(deserializer.read_numpy_arrays())
    raise AssertionError("an opaque datatype passed")
except ValueError:
    pass
for idx, kind, name, array, is_opaque, dtype in TensorDeserializer("arrays.tensors", device="cpu").read_numpy_arrays(allow_raw_data=True):
    assert (is_opaque, dtype) == ((True, "torch.bfloat16") if name == "b" else (False, None))
    assert (array == (16256 if name == "b" else numpy.arange(6).reshape(2, 3))).all()
"""

STREAMS = """
from tensorizer import TensorSerializer, TensorDeserializer
from tensorizer.stream_io import open_stream
import torch
serializer = TensorSerializer(
    open_stream(s3_uri,
                "wb",
                s3_access_key_id=ACCESS_KEY,
                s3_secret_access_key=SECRET_KEY,
                s3_endpoint=ENDPOINT, force_http=True))
serializer.write_state_dict({"a": torch.arange(5)})
serializer.close()
deserializer = TensorDeserializer(
    open_stream(s3_uri,
                "rb",
                s3_access_key_id=ACCESS_KEY,
                s3_secret_access_key=SECRET_KEY,
                s3_endpoint=ENDPOINT, force_http=True), device="cpu")
assert torch.equal(deserializer["a"], torch.arange(5))
"""


def run(folder: Path, *programs: str, env: dict[str, str] | None = None) -> str:
    """Runs each program in its own namespace, in one process in which `tensorizer` is overwire's drop-in."""
    (folder / "transformers.py").write_text(TRANSFORMERS)
    check = "import tensorizer\nassert 'overwire' in tensorizer.__name__\n"
    for i, program in enumerate(programs):
        (folder / f"program{i}.py").write_text(program)
        check += f"exec(compile(open('program{i}.py').read(), 'program{i}.py', 'exec'), {{}})\n"
    home = str(Path(overwire.__file__).parents[1])
    paths = [str(folder), overwire.compat.path("tensorizer"), home]
    clean = cleaned("AWS_")
    done = warm.run(["-c", check], cwd=folder, env=clean | {"PYTHONPATH": os.pathsep.join(paths)} | (env or {}))
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_examples(tmp_path: Path) -> None:
    """All examples without a bucket run, and the first two with a folder in place of the bucket."""
    bucket = f"BUCKET = {str(tmp_path / 'bucket')!r}\n"
    said = run(tmp_path, bucket + SERIALIZE, bucket + DESERIALIZE, ENCRYPTION, STATE_DICTS, TORCH_COMPAT, NUMPY)
    assert "Deserializing to" in said and "/s" in said and "Memory usage after: CPU" in said and "Output: " in said


@pytest.fixture
def s3() -> Iterator[dict[str, Any]]:
    with stores.s3() as (options, _):
        yield options


@pytest.mark.slow
def test_examples_on_s3(tmp_path: Path, s3: dict[str, Any]) -> None:
    """The examples with a bucket run with credentials from ~/.s3cfg, and with credentials that are passed to
    open_stream."""
    host = str(s3["endpoint_url"]).removeprefix("http://")
    home = tmp_path / "home"
    home.mkdir()
    (home / ".s3cfg").write_text(
        f"[default]\naccess_key = {s3['key']}\nsecret_key = {s3['secret']}\nhost_base = {host}\nuse_https = False\n"
    )
    bucket = "BUCKET = 's3://models'\n"
    given = f"s3_uri = 's3://models/streams.tensors'; ACCESS_KEY = {s3['key']!r}; SECRET_KEY = {s3['secret']!r}; ENDPOINT = {host!r}\n"
    said = run(tmp_path, bucket + SERIALIZE, bucket + DESERIALIZE, given + STREAMS, env={"HOME": str(home)})
    assert "Deserialized" in said
