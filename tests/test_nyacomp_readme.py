"""nyacomp's documented use, by programs that import `nyacomp` and know nothing of
overwire: with a pipeline that only looks like one, and with one of diffusers."""

from __future__ import annotations

import os
from pathlib import Path

import overwire as ow
import pytest
from overwire import compat

# The module that both the program that saves and the one that loads import.
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

LOAD = """
import nyacomp
assert nyacomp.decompressor is not None
import sys
assert "torch" not in sys.modules
import torch, parts
assert torch.equal(parts.run(nyacomp.load_compressed("model/boneless_model.pth")), torch.load("wanted.pt"))
"""


@pytest.mark.slow
@pytest.mark.parametrize("parts", [DUCK, REAL], ids=["duck-typed", "diffusers"])
def test_the_readme(tmp_path: Path, script, parts: str) -> None:
    path = os.pathsep.join(filter(None, [compat.path("nyacomp"), os.environ.get("PYTHONPATH", ""), str(tmp_path)]))
    (tmp_path / "parts.py").write_text(parts + RUN[parts])
    (tmp_path / "model").mkdir()
    (tmp_path / "other").mkdir()
    script(SAVE, PYTHONPATH=path)
    # Compressed tensor files in model/nya, model/meta.csv, merged_tensors.csv, metadata.pkl.
    found = {str(p.relative_to(tmp_path / "model")) for p in (tmp_path / "model").rglob("*") if p.is_file()}
    assert found >= {"nya/boneless_bundle.safetensors", "meta.csv", "nya/meta.csv", "merged_tensors.csv", "metadata.pkl"}
    ow.verify(tmp_path / "model/boneless_model.pth")
    if parts == REAL:
        return  # importing diffusers a second time would show nothing else
    # PRELOAD_PATH is the location of meta.csv, or its URL.
    for place in ("model/meta.csv", f"file://{tmp_path}/model/nya/meta.csv"):
        done = script(
            LOAD, PYTHONPATH=path, PRELOAD_PATH=place, OVERWIRE_LOG="debug", NUM_THREADS="2", NUM_STREAMS="4", DEBUG="0", SILENT="0"
        )
        assert "nothing is preloaded" not in done.stderr
