# SPDX-License-Identifier: Apache-2.0
"""`python -m jax_cudnn`: the command line; see cli/."""

import sys

from jax_cudnn.cli import main

if __name__ == "__main__":
    sys.exit(main())
