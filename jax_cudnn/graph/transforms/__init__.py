# SPDX-License-Identifier: Apache-2.0
"""Graphs from graphs: derivatives, folded examples, joined graphs, saved results."""
