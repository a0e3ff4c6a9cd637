# SPDX-License-Identifier: Apache-2.0
"""What the families' legalisations share: the editor, layouts, the result's type."""
