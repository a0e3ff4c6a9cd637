# SPDX-License-Identifier: Apache-2.0
"""How a graph's arrays are divided among devices, and what their types say of it."""
