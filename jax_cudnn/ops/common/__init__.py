# SPDX-License-Identifier: Apache-2.0
"""Tools that all families' operations share: arguments, activations, epilogues."""
