# SPDX-License-Identifier: Apache-2.0
"""The model of examples/train_llama.py, and how it is divided over devices."""
