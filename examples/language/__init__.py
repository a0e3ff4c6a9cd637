# SPDX-License-Identifier: Apache-2.0
"""What examples/train_gpt.py and examples/train_llama.py share."""
