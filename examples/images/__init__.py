# SPDX-License-Identifier: Apache-2.0
"""Images, training and reports for the examples that learn from images."""
