# SPDX-License-Identifier: Apache-2.0
"""Tests of what people bring along: calls of other libraries, and models of theirs."""
