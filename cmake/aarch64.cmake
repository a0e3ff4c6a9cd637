# SPDX-License-Identifier: Apache-2.0
# Compiles for Linux on aarch64 on another machine: `CROSS=aarch64 build_wheel.sh`.
#
# The headers of Python are the other machine's. Both have integers and pointers of the
# same sizes, so that they serve for the stable ABI, from Python 3.12 on.

set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)
