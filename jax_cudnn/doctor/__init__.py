# SPDX-License-Identifier: Apache-2.0
"""Finds what a machine has for cuDNN under JAX, and what is wrong with it.

Nothing here needs what may be missing: neither JAX nor the extension is imported before
it is looked for.
"""
