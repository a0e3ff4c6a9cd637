# SPDX-License-Identifier: Apache-2.0
"""`jax_cudnn.fuse`: splits a traced function into cuDNN's kernels and XLA's rest."""
