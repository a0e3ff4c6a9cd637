#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Prints the extra of jax_cudnn that fits this machine's NVIDIA driver: cuda13, cuda12,
# or nothing where there is no GPU.
set -euo pipefail

if smi=$(nvidia-smi 2>/dev/null); then
  case $smi in
    *"CUDA Version: 12."*) echo cuda12 ;;
    *) echo cuda13 ;;
  esac
elif [ -e /dev/nvidia0 ]; then
  # A container may have the device without the tool; the newer one is the likelier.
  echo cuda13
fi
