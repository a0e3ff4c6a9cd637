# SPDX-License-Identifier: Apache-2.0
"""The mixture of experts as a layer of nnx and of linen."""
