# SPDX-License-Identifier: Apache-2.0
"""What operations of all families share: arguments, activations, epilogues."""
