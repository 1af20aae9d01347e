"""Writes and reads training checkpoints through `torch.distributed.checkpoint`.

    import torch.distributed.checkpoint as dcp
    from overwire.checkpoints import CheckpointReader, CheckpointWriter

    dcp.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()},
             storage_writer=CheckpointWriter("step-100"))
    dcp.load(state, storage_reader=CheckpointReader("step-100"))

The folder is also a model. `load_file("step-100")` returns the tensors below "model", each as a whole, even if the
tensors were sharded over the ranks.
"""

from ..errors import MissingPackageError

try:
    from torch.distributed.tensor import DTensor as _DTensor  # noqa: F401
except ImportError as error:
    from importlib import metadata

    there = next((one.version for one in metadata.distributions(name="torch")), "none")
    raise MissingPackageError(
        f"overwire: overwire.checkpoints needs torch 2.5 or later, but found {there}: pip install -U torch"
    ) from error

from .reader import CheckpointReader
from .staging import CheckpointStager
from .writer import CheckpointWriter

__all__ = ["CheckpointReader", "CheckpointStager", "CheckpointWriter"]
