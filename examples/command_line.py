"""Compresses, inspects, verifies and decompresses a file with the command line."""

import subprocess
import sys

import overwire as ow
import torch

ow.save_file({"w": torch.randn(400, 300).bfloat16()}, "plain.safetensors", compress=False)

for command in (
    "overwire compress plain.safetensors -o small.safetensors",
    "overwire inspect small.safetensors",
    "overwire verify small.safetensors",
    "overwire decompress small.safetensors -o back.safetensors",
):
    subprocess.run([sys.executable, "-m", *command.split()], check=True)

assert torch.equal(ow.load_file("back.safetensors")["w"], ow.load_file("plain.safetensors")["w"])
