# SPDX-License-Identifier: Apache-2.0
"""The model of examples/train_gpt.py, and how it is divided over devices."""
