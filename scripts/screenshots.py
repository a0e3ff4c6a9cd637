# SPDX-License-Identifier: Apache-2.0
"""Takes pictures of the documentation site, and of what the package prints.

    make docs && python scripts/screenshots.py
    python scripts/screenshots.py --only terminal

The site is shown by a browser at the width of a desktop and of a phone, there also with
the dark scheme, for docs/pictures/site; this needs Chromium and pillow. What is printed
is shown as a terminal of 80 columns has it, for docs/pictures/terminal; this needs the
gpuless extra.
"""

import argparse
import io
import os
import pty
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.text import Text

_ROOT = Path(__file__).resolve().parent.parent
_PICTURES = _ROOT / "docs" / "pictures"

# --- the site -------------------------------------------------------------------------

_PAGES = {
    "landing": "index",
    "reference": "api/norms",
    "gallery": "gallery",
    "benchmarks": "benchmarks/index",
}
# Width, height, and Chromium's number of the scheme: 0 is dark, 1 light.
_VIEWS = {
    "desktop": (1280, 900, 1),
    "phone": (390, 844, 1),
    "phone_dark": (390, 844, 0),
}
# Text and plots need no more, and the files stay small.
_COLOURS = 64


def _browser() -> str:
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if (found := shutil.which(name)) is not None:
            return found
    raise SystemExit("screenshots.py: no Chromium here; install the package chromium.")


def _take(page: Path, view: tuple[int, int, int], file: Path) -> None:
    from PIL import Image  # which pictures of terminals do without

    with tempfile.TemporaryDirectory() as folder:
        raw = Path(folder) / "page.png"
        width, height, scheme = view
        subprocess.run(
            [
                _browser(), "--headless=new", "--no-sandbox", "--disable-gpu",
                "--hide-scrollbars", f"--window-size={width},{height}",
                f"--blink-settings=preferredColorScheme={scheme}",
                f"--screenshot={raw}", page.as_uri(),
            ],
            check=True, capture_output=True, timeout=120,
        )  # fmt: skip
        picture = Image.open(raw).convert("RGB").quantize(_COLOURS)
        picture.save(file, optimize=True)


def _site(site: Path, folder: Path) -> None:
    for name, page in _PAGES.items():
        path = (site / f"{page}.html").resolve()
        if not path.exists():
            raise SystemExit(f"screenshots.py: {path} is not there; run `make docs`.")
        for device, view in _VIEWS.items():
            _take(path, view, folder / f"{name}_{device}.png")


# --- a terminal -----------------------------------------------------------------------

_COLUMNS = 80
_COMMANDS = {
    "doctor": "doctor",
    "explain": "explain jax_cudnn:sdpa --device A100 --gradient "
    '--args "f32[4,128,8,64]" "f32[4,128,8,64]" "f32[4,128,8,64]"',
}
# What is typed after Python's prompt, for all pictures: the last line prints.
_PYTHON = {
    "inspect": """\
import jax, jax.numpy as jnp, jax_cudnn
from jax_cudnn import plans
def loss(q, k, v):
    y = jax_cudnn.sdpa(q, k, v, is_causal=True)
    return y.astype(jnp.float32).sum()

q = jax.ShapeDtypeStruct((4, 2048, 16, 128), jnp.bfloat16)
with plans.using(device="H200"):
    report = plans.inspect(jax.grad(loss, (0, 1, 2)), q, q, q)

print(report)""",
    # Without a GPU nothing can be tuned: the times are those that were measured for
    # the choices that come with the package, and the picture says so.
    "autotune": """\
# Not tuned for this picture. These times come with jax_cudnn, in
# jax_cudnn/data/h200-cudnn-9.19.json. What that file says of them:
import json
from pathlib import Path
from jax_cudnn import choices
from jax_cudnn.plans.tuning import Tuning
file = Path(choices.__file__).parent / "data" / "h200-cudnn-9.19.json"
print(json.loads(file.read_text())["made"])
first = dict(list(choices.read(file).items())[:5])
print(Tuning(device="NVIDIA H200", choices=first))""",
}


def _printed(*command: str) -> str:
    """Return what a program writes to a terminal of so many columns."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        command,
        stdout=theirs,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "COLUMNS": str(_COLUMNS)},
    )
    os.close(theirs)
    read = b""
    while True:
        try:
            part = os.read(ours, 65536)
        except OSError:  # Linux's way to say that all of them have closed it
            break
        if not part:
            break
        read += part
    os.close(ours)
    # 1 is an answer of explain and doctor.
    if process.wait() not in (0, 1) or not read:
        raise SystemExit(f"screenshots.py: {' '.join(command)!r} failed.")
    text = read.decode().replace("\r\n", "\n")
    for folder, name in ((sys.prefix, "~/venv"), (str(_ROOT), "~/jax_cudnn")):
        text = text.replace(folder, name)
    return text


def _sessions() -> Iterator[tuple[str, str]]:
    """Yield the name of each picture, and what was typed and printed."""
    for name, arguments in _COMMANDS.items():
        typed = f"$ jax-cudnn {arguments}".replace(" --args", " \\\n    --args")
        shell = ("sh", "-c", f"exec {sys.executable} -P -m jax_cudnn {arguments}")
        yield name, f"{typed}\n{_printed(*shell)}"
    for name, program in _PYTHON.items():
        typed = "\n".join(
            f"{'...' if line.startswith(' ') or not line else '>>>'} {line}".rstrip()
            for line in program.splitlines()
        )
        yield name, f"{typed}\n{_printed(sys.executable, '-P', '-c', program)}"


def _terminal(folder: Path) -> None:
    for name, text in _sessions():
        console = Console(width=_COLUMNS, record=True, file=io.StringIO())
        console.print(Text(text.rstrip("\n")))
        svg = console.export_svg(title=f"jax_cudnn: {name}", unique_id=name)
        # A picture on a page loads no fonts from elsewhere.
        svg = re.sub(r"\s*@font-face \{.*?\}", "", svg, flags=re.DOTALL)
        svg = "\n".join(line.rstrip() for line in svg.splitlines())
        (folder / f"{name}.svg").write_text(f"{svg}\n", encoding="utf-8")


def main() -> None:
    """Take the pictures of the site, of the terminal, or of both."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--site", type=Path, default=_ROOT / "build/docs/html")
    parser.add_argument("--out", type=Path, default=_PICTURES)
    parser.add_argument("--only", choices=("site", "terminal"))
    arguments = parser.parse_args()
    folders = {name: arguments.out / name for name in ("site", "terminal")}
    for name in (arguments.only,) if arguments.only else folders:
        folders[name].mkdir(parents=True, exist_ok=True)
    if arguments.only != "terminal":
        _site(arguments.site, folders["site"])
    if arguments.only != "site":
        _terminal(folders["terminal"])


if __name__ == "__main__":
    main()
