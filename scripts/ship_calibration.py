# SPDX-License-Identifier: Apache-2.0
"""Makes a table of the package from calibrations.

    jax-cudnn calibrate --thorough --seconds 1200
    jax-cudnn calibrate --export h100.json
    python -m scripts.ship_calibration h100.json...

writes jax_cudnn/data/policy/sm90-cudnn9.28.json, for the architecture and the version
of cuDNN of the files, which have to be the same in all. What was measured on several
GPUs of an architecture counts together; of what was measured twice on one, the first
file's. Rows and orders that the table has are kept.
The measured times stay in docs/internals/measured, in the file of the same name. What
it has of kernels that the files have not measured on that GPU is kept, too.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from jax_cudnn.calibration.choosing import name_of
from jax_cudnn.calibration.storing import table_of, to_text
from jax_cudnn.graph import Target
from jax_cudnn.policy import own

_ROOT = Path(__file__).resolve().parent.parent
_FOLDER = _ROOT / "jax_cudnn" / "data" / "policy"
_TIMES = _ROOT / "docs" / "internals" / "measured"
# What a table of the package does not have.
_AND = " and "
_LEFT_OUT = ("schema", "gpu", "measured")


def shipped(
    files: list[own.File], times: Path = _TIMES
) -> tuple[str, dict[str, Any], list[Any]]:
    """Return the name of a table, the table, and the rows that it is made from.

    Raises:
      ValueError: the files are of several architectures or versions of cuDNN.
    """
    kinds = {(file.data["sm_version"], file.data["cudnn"]) for file in files}
    if len(kinds) != 1:
        raise ValueError(f"files of one architecture and cuDNN are wanted: {kinds}")
    ((sm_version, cudnn),) = kinds
    name = f"sm{sm_version}-cudnn{cudnn // 100}.{cudnn % 100}.json"
    environments = [file.data["environment"] for file in files]
    every = [
        {"GPU": file.data["gpu"], **row}
        for file in files
        for row in file.data["measured"]
    ]
    earlier = times / f"calibration_{name}"
    if earlier.exists():
        data = json.loads(earlier.read_text())
        environments.append(data["environment"])
        every += data["rows"]
    found: dict[Any, dict[str, Any]] = {}
    for row in every:
        found.setdefault((row["GPU"], name_of(row)), row)
    rows = list(found.values())
    environment = {
        each: _AND.join(
            dict.fromkeys(one for x in environments for one in x[each].split(_AND))
        )
        for each in environments[0]
    }
    target = Target(
        name="", sm_version=sm_version, sm_count=0, cudnn_version=cudnn * 100
    )
    table = table_of(rows, target, environment)
    data = {name: value for name, value in table.items() if name not in _LEFT_OUT}
    return name, data, rows


def main() -> None:
    """Write the table and the times."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", type=Path, nargs="+")
    name, data, rows = shipped([own.read(x) for x in parser.parse_args().files])
    path = _FOLDER / name
    if path.exists():
        old = json.loads(path.read_text())
        data |= {each: old[each] for each in ("rows", "orders")}
    path.write_text(to_text(data))
    times = {"environment": data["environment"], "rows": rows}
    (_TIMES / f"calibration_{name}").write_text(to_text(times))
    print(f"{name}: {len(data['kernels'])} kernels")


if __name__ == "__main__":
    main()
