# SPDX-License-Identifier: Apache-2.0
"""Runs snippets in one namespace, in a folder, and says of each what came of it."""

import contextlib
import io
import json
import os
import sys
import traceback

if __name__ == "__main__":
    folder, page = sys.argv[1:]
    os.chdir(folder)
    names, told = {"__name__": "__main__"}, []
    for line, code in json.load(sys.stdin):
        output, error, kind = io.StringIO(), "", ""
        try:
            with contextlib.redirect_stdout(output):
                # Its lines are those of the page.
                exec(compile("\n" * line + code, page, "exec"), names)
        except Exception as raised:
            error, kind = traceback.format_exc(), type(raised).__name__
        told.append({"output": output.getvalue(), "error": error, "kind": kind})
    print(json.dumps(told))
