# SPDX-License-Identifier: Apache-2.0
"""What the examples that learn from images share: images, training, report."""
