# SPDX-License-Identifier: Apache-2.0
"""Tools that the families' legalisations share: editor, layouts, result type."""
