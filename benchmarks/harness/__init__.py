# SPDX-License-Identifier: Apache-2.0
"""What all benchmarks share: contenders, timing, records and pages."""
