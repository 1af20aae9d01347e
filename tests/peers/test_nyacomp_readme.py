"""Tests the documented use of nyacomp with programs that import `nyacomp` and do not know overwire. One program saves
an object that only looks like a pipeline, the other a diffusers pipeline."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import overwire as ow
import processes
import pytest
from overwire import compat

# The program that saves and the program that loads both import this module.
DUCK = """
import torch
from torch import nn

class Pipeline:
    def __init__(self):
        torch.manual_seed(0)
        self.unet = nn.Sequential(nn.Linear(96, 640), nn.SiLU(), nn.Linear(640, 96)).half()
        self.vae = nn.Conv2d(3, 8, 3)
        self.scheduler = {"betas": torch.linspace(0, 1, 9)}
        self.config = {"_class_name": "Pipeline", "unet": ("x", "y"), "vae": ("x", "y"), "scheduler": ("x", "y"), "safety_checker": None}
    def __call__(self):
        return self.unet(torch.ones(2, 96).half()).float().sum() + self.vae(torch.ones(1, 3, 8, 8)).sum() + self.scheduler["betas"].sum()

def make():
    return Pipeline(), nn.Linear(32, 2)
"""

REAL = """
import os
os.environ["HF_HUB_OFFLINE"] = "1"
import torch
from diffusers import AutoencoderKL, DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel
from transformers import CLIPTextConfig, CLIPTextModel

def make():
    torch.manual_seed(0)
    unet = UNet2DConditionModel(sample_size=8, block_out_channels=(32, 64), layers_per_block=1, norm_num_groups=8, cross_attention_dim=32,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"))
    vae = AutoencoderKL(block_out_channels=[32], norm_num_groups=8, latent_channels=4)
    text = CLIPTextModel(CLIPTextConfig(hidden_size=32, intermediate_size=37, num_attention_heads=4, num_hidden_layers=1,
        vocab_size=100, max_position_embeddings=16))
    pipe = StableDiffusionPipeline(vae=vae, text_encoder=text, tokenizer=None, unet=unet, scheduler=DDIMScheduler(),
        safety_checker=None, feature_extractor=None, requires_safety_checker=False)
    pipe.set_progress_bar_config(disable=True)
    return pipe, torch.nn.Linear(32, 2)
"""

RUN = {
    DUCK: "def run(pipe): return pipe().detach()",
    REAL: """
def run(pipe):
    embeds = torch.linspace(-1, 1, 16 * 32).reshape(1, 16, 32)
    return pipe(prompt_embeds=embeds, negative_prompt_embeds=embeds * 0, num_inference_steps=2, height=8, width=8,
        output_type="pt", generator=torch.Generator().manual_seed(0)).images
""",
}

SAVE = """
import nyacomp, torch, parts

class Predictor:
    def setup(self):
        self.pipe, self.safety_checker = parts.make()
        self.wanted = parts.run(self.pipe)
        bundle = [self.pipe, self.safety_checker]
        # works for any python object with tensors
        assert 0.5 < nyacomp.compress_pickle(bundle, "model/boneless_bundle.pkl") < 1
        (self.pipe, self.safety_checker) = nyacomp.load_compressed_pickle("model/boneless_bundle.pkl")

predictor = Predictor()
predictor.setup()
assert torch.equal(parts.run(predictor.pipe), predictor.wanted)

model = predictor.pipe
# works for pipelines, state dicts, and modules
nyacomp.compress(model, "model/boneless_model.pth")
assert torch.equal(parts.run(nyacomp.load_compressed("model/boneless_model.pth")), predictor.wanted)
for other in (model.unet, model.unet.state_dict()):
    nyacomp.compress(other, "other/boneless_model.pth")
    got = nyacomp.load_compressed("other/boneless_model.pth")
    got = got if isinstance(got, dict) else got.state_dict()
    assert all(torch.equal(tensor, got[name]) for name, tensor in model.unet.state_dict().items())
torch.save(predictor.wanted, "wanted.pt")
"""

CURL = """
import nyacomp
assert nyacomp.decompressor is not None
import sys
assert "torch" not in sys.modules
import overwire, torch
from nyacomp import _nyacomp
from overwire.model import joining
assert joining._started
wanted = torch.load("wanted.pt")
model = nyacomp.load_compressed("model/boneless_model.pth")
assert all(torch.equal(a, b) for a, b in zip(model.parameters(), wanted, strict=True))
url = nyacomp.HOST
first = _nyacomp.AsyncDecompressor(url + "/nya/meta.csv").get()
assert len(first) == len(wanted) and all(torch.equal(a, b.to(a.device)) for a, b in zip(first, wanted, strict=True))
wrong = {"short": (overwire.CorruptError, "bod"), "long": (overwire.OverwireError, ""), "gone": (overwire.IOFailure, "404")}
for name, (kind, words) in wrong.items():
    try:
        _nyacomp.decompress_from_meta(url + f"/nya/{name}.csv")
    except kind as error:
        assert words in str(error) and "/nya/" in str(error) and "overwire-" not in str(error), error
    else:
        raise AssertionError(name)
bundle = overwire.load_compressed_pickle(url + "/bundle/x.pkl")
assert bundle["step"] == 7 and torch.equal(bundle["weights"], wanted[0])
"""

LOAD = """
import nyacomp
assert nyacomp.decompressor is not None
import sys
assert "torch" not in sys.modules
import torch, parts
assert torch.equal(parts.run(nyacomp.load_compressed("model/boneless_model.pth")), torch.load("wanted.pt"))
"""


def test_everything_through_curl(tmp_path: Path, script, monkeypatch) -> None:
    """As in the README, PRELOAD_PATH is the URL of model/meta.csv, and DOWNLOADER_PATH is curl. Everything (manifests,
    containers, tensor files, bundles) is downloaded through curl, and preloaded files only once. curl's messages go to
    the file that DOWNLOAD_LOG names. A wrong size in a manifest and a missing file raise errors that name the file."""
    real = shutil.which("curl")
    if real is None:
        pytest.skip("no curl")
    import torch
    from overwire.compat import nyacomp
    from overwire.compat.nyacomp import _nyacomp, tensor_bytes

    module = torch.nn.Linear(70, 300).bfloat16()
    wanted = [param.detach().clone() for param in module.parameters()]
    torch.save(wanted, tmp_path / "wanted.pt")
    served = tmp_path / "served"
    (served / "nya").mkdir(parents=True)
    size = _nyacomp.compress(tensor_bytes(wanted[0]), served / "nya/0.gz")
    (served / "nya/1.raw").write_bytes(tensor_bytes(wanted[1]))
    ow.compress_pickle({"weights": wanted[0], "step": 7}, served / "bundle/x.pkl")
    curl = tmp_path / "curl"
    tell = f'echo "$$ $url" >> {tmp_path}/asked; echo "for $url" >&2'
    curl.write_text(f'#!/bin/sh\nfor url; do case $url in http*) {tell};; esac; done\nexec {real} "$@"\n')
    curl.chmod(0o755)
    with processes.overwire_serve(served) as url:
        url = url.rstrip("/")
        (served / "nya/meta.csv").write_text(
            f"0,1\n{url}/nya/0.gz 300;70 bfloat16 {300 * 70 * 2} {size}\n{url}/nya/1.raw 300 bfloat16 600 600"
        )
        for name, file, listed in (("short", "0.gz", size - 1), ("long", "0.gz", size + 1), ("gone", "none.gz", size)):
            (served / f"nya/{name}.csv").write_text(
                f"0,1\n{url}/nya/{file} 300;70 bfloat16 {300 * 70 * 2} {listed}\n{url}/nya/1.raw 300 bfloat16 600 600"
            )
        with monkeypatch.context() as patch:
            patch.chdir(tmp_path)
            patch.setenv("DOWNLOAD", "1")
            patch.setenv("HOST", url)
            Path("model").mkdir()
            nyacomp.compress(module, "model/boneless_model.pth")
        (served / "model").mkdir()  # "you must manually upload the outputted tensors"
        (tmp_path / "model/nya").rename(served / "model/nya")
        shutil.copy(tmp_path / "model/meta.csv", served / "model")
        path = os.pathsep.join(filter(None, [compat.path("nyacomp"), os.environ.get("PYTHONPATH", "")]))
        script(CURL, PYTHONPATH=path, PRELOAD_PATH=f"{url}/model/meta.csv", REMOTE_CSV="1", DOWNLOAD="1", HOST=url,
               DOWNLOADER_PATH=str(curl), OVERWIRE_DOWNLOADER_LOG=str(tmp_path / "log"), SKIP_SETPIPE_SZ="1")  # fmt: skip
    lines = (tmp_path / "asked").read_text().replace(url + "/", "").splitlines()
    asked = [line.split()[1] for line in lines]
    # As in nyacomp, one process gets the URLs of all tensor files, in the order of the manifest.
    calls: dict[str, list[str]] = {}
    for line in lines:
        calls.setdefault(line.split()[0], []).append(line.split()[1])
    files = [names for names in calls.values() if set(names) & {"nya/0.gz", "nya/1.raw", "nya/none.gz"}]
    assert files == [["nya/0.gz", "nya/1.raw"]] * 3 + [["nya/none.gz", "nya/1.raw"]]
    assert {"nya/meta.csv", "nya/0.gz", "nya/1.raw", "bundle/x.pkl", "bundle/nya/x.safetensors"} <= set(asked)
    assert asked.count("model/nya/boneless_model.safetensors") == 1
    assert f"for {url}/nya/0.gz" in (tmp_path / "log").read_text()


def test_the_command_line_of_remotefile(tmp_path: Path) -> None:
    """`overwire fetch -s -v URL...` writes only the bodies, in order. While nothing reads its output, it downloads up
    to 64 MiB in advance, so a full pipe does not stall a server. After a failure, it exits with the documented status
    and does not hang."""
    bodies = {f"/{name}": os.urandom(size) for name, size in (("a", 9 << 20), ("b", 0), ("c", 17 << 20))}
    sent = dict.fromkeys(bodies, 0)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            whole, spread = bodies.get(self.path), self.headers.get("Range")
            body = whole or b""
            if spread and body:
                first, last = spread.removeprefix("bytes=").split("-")
                body = body[int(first) : int(last) + 1 if last else None]
            self.send_response(404 if whole is None else 206 if spread and whole else 200)
            if spread and whole:
                self.send_header("Content-Range", f"bytes {first}-{int(first) + len(body) - 1}/{len(whole)}")
            self.send_header("ETag", '"1"')
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
            if whole:
                sent[self.path] += len(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    command = [sys.executable, "-m", "overwire", "fetch", "-s", "-v"]
    try:
        argv = [*command, *(url + name for name in bodies)]
        with processes.started(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            until = time.monotonic() + 60
            while any(sent[name] < len(body) for name, body in bodies.items()) and time.monotonic() < until:
                time.sleep(0.01)
            assert all(sent[name] >= len(body) for name, body in bodies.items()), sent  # although the pipe is full
            assert process.communicate(timeout=60)[0] == b"".join(bodies.values()) and process.returncode == 0
        done = subprocess.run([*command, url + "/b", url + "/none"], capture_output=True, timeout=60, check=False)
        assert done.returncode == 3 and done.stdout == b"" and b"/none" in done.stderr
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.slow
@pytest.mark.imports_torch
@pytest.mark.parametrize("parts", [DUCK, REAL], ids=["duck-typed", "diffusers"])
def test_the_readme(tmp_path: Path, script, parts: str) -> None:
    """The README's programs save and load a pipeline through files, manifests and preloads."""
    path = os.pathsep.join(filter(None, [compat.path("nyacomp"), os.environ.get("PYTHONPATH", ""), str(tmp_path)]))
    (tmp_path / "parts.py").write_text(parts + RUN[parts])
    (tmp_path / "model").mkdir()
    (tmp_path / "other").mkdir()
    script(SAVE, PYTHONPATH=path)
    # Compressed tensor files are in model/nya, with model/meta.csv, merged_tensors.csv and metadata.pkl.
    found = {str(p.relative_to(tmp_path / "model")) for p in (tmp_path / "model").rglob("*") if p.is_file()}
    assert found >= {"nya/boneless_bundle.safetensors", "meta.csv", "nya/meta.csv", "merged_tensors.csv", "metadata.pkl"}
    ow.verify(tmp_path / "model/boneless_model.pth")
    if parts == REAL:
        return  # a second import of diffusers would show nothing new
    # PRELOAD_PATH is the path or the URL of meta.csv.
    for place in ("model/meta.csv", f"file://{tmp_path}/model/nya/meta.csv"):
        done = script(
            LOAD, PYTHONPATH=path, PRELOAD_PATH=place, OVERWIRE_LOG="debug", NUM_THREADS="2", NUM_STREAMS="4", DEBUG="0", SILENT="0"
        )
        assert "nothing is preloaded" not in done.stderr
