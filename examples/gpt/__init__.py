# SPDX-License-Identifier: Apache-2.0
"""The parts of examples/train_gpt.py, which puts them together."""
