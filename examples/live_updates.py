"""Updates a running model in place with the changes of each training step.

Both the trainer and the running model are in this program. They exchange a file, which could also be in a shared
folder, in S3 or in Redis. Inference engines accept the same deltas: docs/live-updates.md.
"""

import tempfile
from pathlib import Path

import overwire as ow
import torch

torch.manual_seed(0)


def model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 8))


trainer, runs = model().bfloat16(), model().bfloat16()
optimizer = torch.optim.SGD(trainer.parameters(), lr=0.01)
x, y = torch.randn(512, 64).bfloat16(), torch.randint(0, 8, (512,))

with tempfile.TemporaryDirectory() as folder:
    whole, delta = Path(folder, "whole.safetensors"), Path(folder, "delta.safetensors")

    # The first push has all weights. The trainer keeps a copy of the pushed weights.
    ow.save_model(trainer, whole)
    ow.load_model(runs, whole)
    pushed = {name: tensor.clone() for name, tensor in trainer.state_dict().items()}

    sent = 0
    for step in range(100):
        at = step * 5 % 500
        loss = torch.nn.functional.cross_entropy(trainer(x[at : at + 16]), y[at : at + 16])
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call, unused-ignore]
        optimizer.step()

        sent += ow.save_delta(trainer, pushed, delta).stored
        with torch.no_grad():
            for name, tensor in trainer.state_dict().items():
                pushed[name].copy_(tensor)

        at_once = ow.open_delta(delta)  # read and checked while the model still runs
        ow.apply_delta(runs, at_once)  # in place: digests compared before and after

for name, tensor in trainer.state_dict().items():
    assert torch.equal(runs.state_dict()[name].view(torch.int16), tensor.view(torch.int16)), name
size = sum(tensor.nbytes for tensor in pushed.values())
print(f"100 deltas, {sent / 100 / size:.3f} of the model each; both sides have the same bits")
