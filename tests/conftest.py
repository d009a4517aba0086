"""Eight virtual CPU devices, and libtpu told that it only compiles. This must stand before jax is imported."""

import os

os.environ.update(
    JAX_PLATFORMS="cpu",
    JAX_NUM_CPU_DEVICES="8",
    TPU_SKIP_MDS_QUERY="1",
    TPU_ACCELERATOR_TYPE="v5litepod-16",
    TPU_WORKER_HOSTNAMES="localhost",
    HF_HUB_OFFLINE="1",
)
