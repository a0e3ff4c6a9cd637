# SPDX-License-Identifier: Apache-2.0
"""Measures the GPU of a machine, so that "auto" knows where cuDNN is the faster one.

Calls of the sizes that models have are drawn (calls.py), those that tell most are
timed by cuDNN and by XLA (choosing.py, measuring.py), and what follows from the times
is derived (rules.py) and stored as a policy table (storing.py). The tables that come
with the package are made by the same code.
"""
