"""Saves weights to S3 and Redis and loads them, without a local file.

    S3=s3://bucket/folder/ REDIS=redis://localhost:6379/folder/ python stores.py

Credentials come from the same sources as for the AWS tools (AWS_ACCESS_KEY_ID,
profiles, pod, container and machine roles). AWS_ENDPOINT_URL_S3 selects another store.
REDISCLI_AUTH is the Redis password. storage_options override these for one call.
"""

import os

import numpy as np
import overwire as ow

weights = {"embed": np.random.default_rng(0).standard_normal((512, 64)).astype(np.float32)}

for folder in filter(None, (os.environ.get("S3"), os.environ.get("REDIS"))):
    # The file is uploaded in parts, in bounded memory, and appears when it is complete.
    report = ow.save_file(weights, folder + "model.safetensors")
    print(f"{report.files[0]}: {report.bytes_out} bytes, ratio {report.ratio:.3f}")

    # Ranges are read directly into the tensors. A read resumes if its connection breaks.
    tensors = ow.load_file(folder + "model.safetensors", framework="np", storage_options={"timeout": 10})
    assert np.array_equal(tensors["embed"], weights["embed"])

    # Any Python object with tensors in it.
    ow.save_bundle({"step": 7, "weights": weights}, folder + "checkpoint.pkl")
    assert ow.load_bundle(folder + "checkpoint.pkl")["step"] == 7

if "S3" not in os.environ and "REDIS" not in os.environ:
    print(__doc__)
