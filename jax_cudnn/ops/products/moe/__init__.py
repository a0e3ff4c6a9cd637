# SPDX-License-Identifier: Apache-2.0
"""The mixture of experts: router, permutation, exchange over devices, and layer."""
