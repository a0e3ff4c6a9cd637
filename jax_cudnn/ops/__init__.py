# SPDX-License-Identifier: Apache-2.0
"""The public operations, one a module: argument checks, docstring, graph."""
