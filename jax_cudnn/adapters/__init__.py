# SPDX-License-Identifier: Apache-2.0
"""Adapters for models of other libraries, a module for each.

``jax_cudnn.adapters.keras``, ``.equinox`` and ``.maxtext``. Each imports its library,
so that only those who ask for it need it. Flax has a package of its own,
``jax_cudnn.flax``.
"""
