# SPDX-License-Identifier: Apache-2.0
"""Tests that cuDNN's own log arrives whole, and stops when it is told to."""

import ast

from tests.native.processes import run_python


def test_cudnns_calls_and_errors_arrive_with_all_their_lines() -> None:
    printed = run_python(
        """
        import ctypes
        import logging
        from jax_cudnn import native

        lines = []
        native.set_log_sink(
            lambda *line: lines.append(line), logging.DEBUG, cudnn=True
        )
        create = ctypes.CDLL(native.cudnn_version().path).cudnnBackendCreateDescriptor
        descriptor = ctypes.c_void_p()
        assert create(12345, ctypes.byref(descriptor)) != 0
        native.set_log_sink(lambda *line: lines.append(line), logging.DEBUG)
        assert create(12345, ctypes.byref(descriptor)) != 0
        print(lines)
        """
    )
    # Taking the callback away is a call as well.
    lines = [line for line in ast.literal_eval(printed) if "SetCallback" not in line[1]]
    assert {source for _, _, source in lines} == {"cudnn"}
    assert {level for level, _, _ in lines} == {10, 40}
    for _, text, _ in lines:
        first, *others = text.splitlines()
        assert "function cudnnBackendCreateDescriptor() called:" in first
        assert others[-1].startswith("Process=")
    call, *_ = (text for level, text, _ in lines if level == 10)
    assert "descriptorType" in call
    (error,) = (text for level, text, _ in lines if level == 40)
    assert "Reason: " in error
