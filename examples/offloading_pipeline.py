"""Runs a diffusers pipeline that does not fit on the device, and loads each block only while the block runs.

Run it on a GPU if there is one.
"""

from __future__ import annotations

import sys

import overwire as ow
import torch

try:
    from diffusers import AutoencoderKL, DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel
    from transformers import CLIPTextConfig, CLIPTextModel
except ImportError:
    sys.exit("this example needs diffusers and transformers")

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)

# In your program: pipe = StableDiffusionPipeline.from_pretrained(NAME, torch_dtype=torch.bfloat16)
pipe = StableDiffusionPipeline(
    unet=UNet2DConditionModel(
        block_out_channels=(32, 64),
        layers_per_block=2,
        sample_size=8,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=32,
        attention_head_dim=2,
    ),
    vae=AutoencoderKL(
        block_out_channels=(32, 64),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=4,
    ),
    text_encoder=CLIPTextModel(
        CLIPTextConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=2, vocab_size=100)  # type: ignore[no-untyped-call, unused-ignore]
    ),
    tokenizer=None,
    scheduler=DDIMScheduler(),
    safety_checker=None,
    feature_extractor=None,
    requires_safety_checker=False,
).to(device)
pipe.set_progress_bar_config(disable=True)
words, nothing = torch.arange(10, device=device)[None], torch.zeros(1, 10, dtype=torch.int64, device=device)


def images() -> torch.Tensor:
    with torch.inference_mode():
        prompt, negative = (pipe.text_encoder(ids)[0] for ids in (words, nothing))
    return torch.tensor(
        pipe(
            prompt_embeds=prompt,
            negative_prompt_embeds=negative,
            num_inference_steps=3,
            generator=torch.Generator(device).manual_seed(7),
            output_type="np",
        ).images
    )


resident = images()
with ow.offload(pipe, device) as offloaded:
    print(offloaded, "- models:", sorted({name.partition(".")[0] for name in offloaded.blocks}))
    assert torch.equal(images(), resident)
assert torch.equal(images(), resident)
